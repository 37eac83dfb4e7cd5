"""Reads settings: options before environment variables before the file before defaults. Writes such a file.

    options of the command line  ─┐
    variables ATTNCACHE_*        ─┼─>  one mapping, field -> value  ─>  Settings, or InvalidSettings
    --config FILE (TOML)         ─┘

Only Settings checks values. A name that no field has is refused here, because it would be ignored silently.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from attncache_core.runtime.files import write_whole
from service.errors import InvalidSettings
from service.settings.names import CONFIG_VARIABLE, ENVIRONMENT_PREFIX, all_names, environment_name
from service.settings.settings import Settings

# Former field -> what to use instead. The option, its variable and its key are refused.
REMOVED_FIELDS = {
    "policy": "use --threshold 0.995 (conservative), 0.99 (moderate) or 0.95 (aggressive)",
    "fetch": "maps are always read in place, which was the fastest of the four ways",
    "heads": "give --heads to build, which then calibrates thresholds for these heads",
    "search_always": "use --min-gain 0 to reuse wherever the quality budget holds",
    "kv_eviction": "what no waiting request will use leaves first",
    "max_batch_sequences": "a batch holds one text for every 16 tokens of --max-batch-tokens, at least 64",
    "session_keep_ratio": "a conversation fills half of the window after it was cut",
    "max_queue_tokens": "at most 1,048,576 tokens wait; set --max-queue-seconds or --max-inflight-bytes",
}
_SECRETS = frozenset({"api_key", "database", "shared"})
_MIN_SIMILARITY = 0.6  # of two names, from 0 to 1
# pydantic's error type -> what is accepted.
_SENTENCES = {
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "string_type": "it must be a string",
    "string_too_short": "it must not be empty",
    "finite_number": "it must be a finite number",
    "greater_than": "it must be greater than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
}


def gather_settings(options: Mapping[str, object], config: Path | None = None) -> Settings:
    """Return the settings from options by field name, the environment and a TOML file.

    options: only those that were given. Raises InvalidSettings, which names the option, variable or key.
    """
    refuse_unknown_variables(os.environ)
    in_file = _read_file(config) if config else {}
    variables = {field: os.environ.get(environment_name(field)) for field in Settings.model_fields}
    # An empty variable counts as absent, as Compose files leave them.
    given = {**{field: value for field, value in variables.items() if value}, **options}

    def names(field: str) -> str:
        is_of_file = field in in_file and field not in given
        return f"--config {config}: {field}" if is_of_file else all_names(field)

    settings = read_settings({**in_file, **given}, names)
    # The variable may stand: the image sets it.
    if settings.unix_socket and "host" in {**in_file, **options}:
        raise InvalidSettings("--host has no effect with --unix-socket; leave one of them out", field="host")
    return settings


def read_settings(values: Mapping[str, object], names: Callable[[str], str] = all_names) -> Settings:
    """Return the settings from values by field name. names: says where a field was set, for errors.

    Raises InvalidSettings, which names the option, the variable and the key of the file.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise InvalidSettings(first["msg"]) from error
        field = str(first["loc"][0])
        accepted = _SENTENCES.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
        # Nothing shows a key, whatever is wrong with it.
        value = "this value" if field in _SECRETS else repr(first["input"])
        message = f"{names(field)} cannot be {value}: {accepted}"
        raise InvalidSettings(message, field=field) from error


def refuse_unknown_variables(environment: Iterable[str]) -> None:
    """Raise InvalidSettings for an unknown variable with the prefix of this program.

    Without this check, a misspelt variable would be ignored silently.
    """
    known = {CONFIG_VARIABLE, *map(environment_name, Settings.model_fields)}
    removed = {environment_name(field): remedy for field, remedy in REMOVED_FIELDS.items()}
    for name in sorted(environment):
        if name.upper().startswith(ENVIRONMENT_PREFIX):
            _refuse_unknown("environment variable", name, known, removed)


def _read_file(path: Path) -> dict[str, object]:
    """Return the values of a TOML file by field name. Raises InvalidSettings, and OSError."""
    try:
        values = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except RecursionError as error:
        raise InvalidSettings(f"--config {path} is nested too deeply", field="config") from error
    except ValueError as error:
        raise InvalidSettings(f"--config {path} is not a TOML file: {error}", field="config") from error
    for key, value in values.items():
        if isinstance(value, dict):
            raise InvalidSettings(
                f"--config {path} has a table [{key}]; write every setting as a key without a table",
                field="config",
            )
        _refuse_unknown(f"--config {path}: key", key, set(Settings.model_fields), REMOVED_FIELDS)
    return values


def _refuse_unknown(kind: str, name: str, known: set[str], removed: Mapping[str, str]) -> None:
    if name in removed:
        raise InvalidSettings(f"{kind} {name} was removed; {removed[name]}")
    if name not in known:
        # Without the beginning that all variables share, and that would make all of them similar.
        similar = {other.removeprefix(ENVIRONMENT_PREFIX): other for other in sorted(known)}
        closest = difflib.get_close_matches(
            name.removeprefix(ENVIRONMENT_PREFIX), similar, n=1, cutoff=_MIN_SIMILARITY
        )
        guess = f"; did you mean {similar[closest[0]]}?" if closest else "; attncache serve --help lists all"
        raise InvalidSettings(f"{kind} {name} is not known{guess}")


def write_settings(path: Path, values: Mapping[str, object], comment: Sequence[str]) -> Settings:
    """Write settings by field name, below the lines of a comment, and return them as `serve` reads them.

    values: texts, numbers, truth values and paths. A relative path of a file is relative to the folder in
    which `serve` runs. Raises InvalidSettings if `serve` would refuse a value, and OSError.
    """
    settings = read_settings(values)
    lines = [f"# {_printable(line)}".rstrip() for line in comment]
    lines += [f"{name} = {_toml(values[name])}" for name in Settings.model_fields if name in values]
    write_whole(path, ("\n".join(lines) + "\n").encode())
    return settings


def _printable(line: str) -> str:
    """Return a line without control characters, such as line breaks."""
    return "".join(character if character.isprintable() else " " for character in line)


def _toml(value: object) -> str:
    """Return a value in TOML, whose numbers, truth values and texts look like those of JSON."""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    # JSON leaves the character DEL as it is, and TOML does not allow it.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
