"""Every error code is in the table of docs/api.md with its status, and the product raises every class.

The tests of each room provoke its errors, and look at code and status.
"""

import re
from pathlib import Path

import attncache_core.errors
import service.errors
from attncache_core import AttnCacheError

ROOT = Path(__file__).parents[2]
API_PAGE = ROOT / "docs" / "api.md"
# These end the start of a server, or a command, and one is only in the metrics: none is a response.
NO_RESPONSES = {
    "address_unavailable",
    "build_failed",
    "client_gone",
    "corrupt_database",
    "database_refused",
    "invalid_settings",
    "machine_busy",
    "model_not_found",
    "unsupported_model",
}


def kinds_below(base):
    """Yield the classes of errors, without those of the benchmarks."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith(("attncache_core.", "service.")):
            yield kind
            yield from kinds_below(kind)


KINDS = sorted(
    {kind for kind in kinds_below(AttnCacheError) if "code" in vars(kind)}, key=lambda kind: kind.code
)


def documented():
    """Return the status of each code in the table of the page; "" for errors that are no response."""
    section = API_PAGE.read_text(encoding="utf-8").split("\n## Errors\n", 1)[1].split("\n## ", 1)[0]
    found = {}
    for row in re.findall(r"^\| ([\d, ]*) ?\| (`.*?`) \| ", section, re.MULTILINE):
        codes = re.findall(r"`(\w+)`", row[1])
        statuses = row[0].strip().split(", ")
        for code, status in zip(codes, statuses if len(statuses) > 1 else statuses * len(codes), strict=True):
            assert code not in found, f"{code} is in the table twice"
            found[code] = status
    return found


def test_table_has_every_code_with_its_status_and_no_other():
    expected = {kind.code: "" if kind.code in NO_RESPONSES else str(kind.status) for kind in KINDS}
    assert documented() == expected


def test_every_class_has_a_code_of_its_own_and_stands_in_the_two_modules_of_errors():
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    assert {kind.__module__ for kind in KINDS} == {attncache_core.errors.__name__, service.errors.__name__}


def test_every_class_is_made_outside_the_modules_of_errors():
    source = "".join(
        path.read_text(encoding="utf-8")
        for room in ("attncache_core", "service")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "errors.py"
    )
    made = set(re.findall(r"\b([A-Z]\w+)(?:\.of)?\(", source))
    assert [kind.__name__ for kind in KINDS if kind.__name__ not in made] == []


def test_errors_that_a_repetition_cannot_mend_say_so():
    section = API_PAGE.read_text(encoding="utf-8").split("`X-Should-Retry: false` with ", 1)[1]
    named = set(re.findall(r"`(\w+)`", section.split(" tells", 1)[0]))
    with_others = (service.errors.TryLater, service.errors.Unauthorized)  # with headers of their own
    kinds = [kind for kind in KINDS if not issubclass(kind, with_others)]
    final = {kind.code for kind in kinds if "X-Should-Retry" in service.errors.headers_of(kind.__new__(kind))}
    assert final == named
