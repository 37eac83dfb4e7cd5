"""A database is opened if its files are intact and fit the model; otherwise it is refused with a reason."""

import ast
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from core_models import flip, write_sentence_transformer

import attncache_core
import service
from attncache_core import PrefillEngine
from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.errors import CorruptDatabase, DatabaseRefused, InvalidInput
from attncache_core.native import MAPS_VERSION
from attncache_core.reuse.maps.database import AttentionDatabase, verify_generations
from attncache_core.reuse.maps.manifest import Manifest


@pytest.fixture
def folder(tiny_database, tmp_path):
    """A copy of the tiny database that a test may damage."""
    return Path(shutil.copytree(tiny_database, tmp_path / "tiny.db"))


def change_manifest(folder: Path, **changes) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


QUALITY = {
    "measured": 30,
    "hit_rate": 0.5,
    "prototype_hit_rate": 0.25,
    "mean": 0.9,
    "mean_cosine": 0.9,
    "cosine_5th_percentile": 0.8,
}


BUDGET = {"measure": "cosine", "least": 0.9}
KIND = {"threshold": 0.5, "similarities": [], "damages": []}


def policy_of(
    *kinds: str,
    longest: tuple[object, ...] = (9,),
    budget: dict[str, object] = BUDGET,
    tightened: int = 0,
    **changes: object,
) -> dict[str, object]:
    """Return a policy as in a manifest: a length group for each of `longest`, with these kinds of record."""
    kind = {name: value for name, value in (KIND | changes).items() if value is not None}
    groups = [
        {"longest": tokens, "kinds": dict.fromkeys(kinds or ("0", "1", "2"), kind), "tightened": tightened}
        for tokens in longest
    ]
    return {"policy": {"budget": budget, "groups": groups}}


def thresholds(database: AttentionDatabase) -> set[float]:
    """Return all values of θ in the policy of an open database."""
    return {kind.threshold for group in database.search.policy.groups for kind in group.kinds.values()}


def test_info_of_an_opened_database_has_the_values_of_the_manifest(folder):
    database = AttentionDatabase.open(folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    info = asdict(database.info())
    assert info["records"] == sum(manifest["records"].values()) == 240
    assert info["bytes"] == sum(path.stat().st_size for path in (folder / "maps").iterdir())
    assert info["lengths"] == [5, 10]
    assert info["prototypes"] == 0
    assert info["policy"] == {
        "budget": {"measure": "cosine", "least": 0.0, "floor": 0.0},  # with a given θ there is no budget
        "strangeness": None,
        "groups": [
            {
                "lengths": "1-",
                "searched": True,
                "threshold": {"stored": 0.0, "prototype": 0.0, "mean": 0.0},
                "tightened": 0,
                "reuses": True,
            }
        ],
    }
    assert info["reused_heads"] == manifest["reused_heads"] == [4, 4, 4]
    assert info["heads"] == 12
    assert info["quality"] == manifest["quality"]
    assert database.verify() == []


def test_reading_and_writing_a_manifest_gives_the_same_file(folder, tmp_path):
    manifest = Manifest.read(folder)
    (tmp_path / "copy").mkdir()
    manifest.write(tmp_path / "copy")
    assert Manifest.read(tmp_path / "copy") == manifest
    assert (tmp_path / "copy" / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()


def test_threshold_and_heads_can_be_overridden(folder):
    database = AttentionDatabase.open(folder, threshold=0.0, heads="layers:1")
    assert thresholds(database) == {0.0}
    assert database.mask.reused == (0, 4, 0)
    assert thresholds(AttentionDatabase.open(folder, threshold=0.97)) == {0.97}
    rank = np.array(database.manifest.rank)
    assert set(rank[AttentionDatabase.open(folder, heads="3").mask.as_array()]) == {0, 1, 2}


def test_override_beyond_the_stored_heads_is_refused(tiny_engine, tiny_corpus, tmp_path):
    options = BuildOptions(heads="layers:0-1", training_steps=5)
    build_database(tiny_engine, tiny_corpus[:30], tmp_path / "a.db", options)
    assert AttentionDatabase.open(tmp_path / "a.db", heads="layers:1").mask.reused == (0, 4, 0)
    with pytest.raises(InvalidInput, match="build the database again") as refused:
        AttentionDatabase.open(tmp_path / "a.db", heads="all")
    assert refused.value.field == "heads"


def test_database_of_another_model_is_refused_with_both_names(folder, tiny_checkpoint, tmp_path):
    other = read_checkpoint(write_sentence_transformer(tmp_path / "other-model", seed=1))
    database = AttentionDatabase.open(folder)
    with pytest.raises(DatabaseRefused, match=r"tiny-bert.*other-model") as refused:
        PrefillEngine.load(other, database=database, dtype="float32")
    for checkpoint in (tiny_checkpoint, other):
        assert checkpoint.fingerprint()[:12] in str(refused.value)
    assert refused.value.field == "database"


@pytest.mark.parametrize(
    ("entry", "reads"), [("format_version", "3 and 4"), ("maps_version", str(MAPS_VERSION))]
)
@pytest.mark.parametrize("version", [0, 2, 5, "3", None])
def test_other_version_is_refused_with_both_numbers_and_the_command_that_builds_the_database_again(
    folder, entry, reads, version
):
    change_manifest(folder, **{entry: version})
    told = f"{entry.replace('_', ' ')} {version}, and this program reads {reads}"
    with pytest.raises(DatabaseRefused, match=told) as refused:
        AttentionDatabase.open(folder)
    command = f"attncache build --corpus FILE --database {folder}"
    assert f"remove it and build it anew: {command}, with the options" in str(refused.value)
    assert refused.value.field == "database"
    assert len(str(refused.value).splitlines()) == 1
    assert [verified.faults for verified in verify_generations(folder)] == [[str(refused.value)]]


def test_folder_without_a_manifest_is_refused(folder):
    (folder / "manifest.json").unlink()
    for path in (folder, folder / "absent", folder / "key"):
        with pytest.raises(DatabaseRefused, match="there is no database in"):
            AttentionDatabase.open(path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe"),
        *(b'{"format_version": 3}', b'{"format_version": 3, "maps_version": 1}'),
    ],
    ids=repr,
)
def test_manifest_that_cannot_be_read_is_corrupt(folder, content):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptDatabase, match=r"manifest\.json cannot be read"):
        AttentionDatabase.open(folder)


RANK = [[0, 1, 2, 3], [4, 5, 6, 7]]
NAN = float("nan")
# The values of each entry of a manifest that are refused.
WRONG = {
    "dtype": ["float99", "float32"],
    "threshold": [0.9],
    "colour": ["blue"],
    "reused_heads": [[4, 4], [4, 4, 5]],
    "stored_heads": [[4, 4, 3]],
    "files": [[], {}],
    "records": [{"5": 39, "6": 40, "7": 40, "8": 40, "9": 40, "10": 40}, {"five": 40}, {}],
    "build": [{"variant": "int8"}],
    "prototypes": [{"5": 1}, {"30": 1}],
    "rank": [[], [*RANK, [8, 9, 10, 10]], [*RANK, [8, 9, 10, 12]], [*RANK, [8, 9, 10]]],
    "damage": [[], [[0.1, 0.2, 0.3, NAN]] * 3],
    "fingerprint": ["none", "ab", "f" * 64],
    "id": ["f" * 32, ""],
    "quality": [
        *({}, {"measured": 30}, {"measured": "many"}),
        *(QUALITY | {"hit_rate": None}, QUALITY | {"mean_cosine": "0.9"}, QUALITY | {"mean": NAN}),
        *({"measured": 0, "map_distance": distance} for distance in ({"nearest": "0.1"}, [0.1])),
        *({"measured": 0, "groups": groups} for groups in ([{}], [{"hit_rate": None}], 5)),
        *({"measured": 0, "lengths": lengths} for lengths in ({"x": 1}, {"7": "many"}, 5)),
        *({"measured": 0, "unfamiliar": unfamiliar} for unfamiliar in (5, {"left_out": {"kinds": 1}})),
    ],
    "policy": [policy_of()["policy"] | {"colour": "blue"}],
}
WRONG_POLICIES = [
    *(policy_of(threshold=wrong) for wrong in ("0.9", None, NAN, float("inf"))),
    *(policy_of("0"), policy_of("0", "1"), policy_of("0", "1", "2", "3")),
    *(policy_of(longest=wrong) for wrong in ((), (9, 9), (9, 5), (9.5,))),
    *(policy_of(budget=BUDGET | {"least": wrong}) for wrong in ("0.9", -0.01, 1.5, NAN)),
    policy_of(budget=BUDGET | {"measure": "length"}),
    policy_of(budget=BUDGET | {"most": 1}),
    policy_of(colour="blue"),
    policy_of(tightened=-1),
    policy_of(similarities=[0.5, 0.4], damages=[0.2, 0.1]),
    policy_of(similarities=[0.5], damages=[]),
    policy_of(similarities=[], damages=[0.5]),
    policy_of(similarities=[0.4, 0.5], damages=[0.1, 0.2]),
    policy_of(similarities=[0.4, 0.5], damages=[0.1, NAN]),
    policy_of(similarities=[0.4, NAN], damages=[0.2, 0.1]),
    policy_of(similarities=[float("-inf")], damages=[0.5]),
    policy_of(similarities=[0.5], damages=[float("inf")]),
]


@pytest.mark.parametrize(
    "changes",
    [*({entry: value} for entry, values in WRONG.items() for value in values), *WRONG_POLICIES],
    ids=str,
)
def test_manifest_with_a_wrong_entry_is_corrupt(folder, changes):
    change_manifest(folder, **changes)
    with pytest.raises(CorruptDatabase):
        AttentionDatabase.open(folder)


@pytest.mark.parametrize(
    "name", ["key", "projector.safetensors", "prototypes.safetensors", "index/00007.faiss", "maps/00007.maps"]
)
def test_missing_file_is_refused_by_name(folder, name):
    (folder / name).unlink()
    with pytest.raises(CorruptDatabase, match=f"{Path(name).name} is missing"):
        AttentionDatabase.open(folder)


def test_verify_names_the_length_and_the_first_damaged_record(folder):
    path = folder / "maps" / "00007.maps"
    first = 2 * 4096  # records follow a page of header and a page of table; a record of 7 tokens is one page
    for record in (12, 31):
        flip(path, first + record * 4096)
    assert AttentionDatabase.open(folder).verify() == ["length 7: 2 damaged records, the first is 12"]


def test_policy_on_which_wrong_entries_are_based_is_accepted(folder):
    change_manifest(folder, **policy_of(longest=(5, 9), similarities=[0.4, 0.5], damages=[0.2, 0.1]))
    assert thresholds(AttentionDatabase.open(folder)) == {0.5}
    # The budget was calibrated for the heads of the manifest.
    budgets = [AttentionDatabase.open(folder, heads=heads).search.policy.budget for heads in (None, "3")]
    assert [budget.binds for budget in budgets] == [True, False]


@pytest.mark.parametrize(
    "quality",
    [
        QUALITY | {"groups": [{"hit_rate": 1}], "lengths": {"7": 2}, "unfamiliar": {"texts": 0}},
        QUALITY | {"mean": None, "mean_cosine": None},
        {"measured": 0},
    ],
)
def test_quality_on_which_wrong_entries_are_based_is_accepted(folder, quality):
    change_manifest(folder, quality=quality)
    assert AttentionDatabase.open(folder).info().quality == quality


def sources():
    for package in (attncache_core, service):
        yield from sorted(Path(package.__file__).parent.rglob("*.py"))


def pickle_readers(tree: ast.AST):
    """Yield the imports, calls and arguments in a source that can read a pickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.split(".")[0] for alias in node.names}
            names.add((getattr(node, "module", None) or "").split(".")[0])
            yield from names & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in ("torch.load", "np.load", "numpy.load", "pandas.read_pickle"):
                yield called
            if "allow_pickle" in keywords:
                yield "allow_pickle"
            if called.endswith("loader.from_pretrained") and keywords.get("use_safetensors") != "True":
                yield "from_pretrained may read a pickled checkpoint"


def test_no_source_reads_a_pickle():
    found = {path: [*pickle_readers(ast.parse(path.read_text(encoding="utf-8")))] for path in sources()}
    assert len(found) > 100
    assert {path: readers for path, readers in found.items() if readers} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "np.load(path)",
        "read(path, allow_pickle=True)",
        "loader.from_pretrained(folder)",
    ],
)
def test_pickle_readers_are_found(source):
    assert list(pickle_readers(ast.parse(source)))
