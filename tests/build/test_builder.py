"""The result of a build: a complete database with its report, or an error of one line."""

import json
import os
import shutil
import stat
import threading
import time
from collections import Counter, namedtuple
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from core_models import prefill
from full_disk import largest_file

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.corpus import CorpusSentence
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import BuildFailed, InvalidInput
from attncache_core.heads.comparator import Measure
from attncache_core.native import MAPS_VERSION
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.policy import Budget
from attncache_core.version import __version__

PAGE = 4096
pytestmark = pytest.mark.usefixtures("fixed_costs")


def build(engine, corpus, folder, progress=lambda *_: None, *, keep_existing=False, **options):
    options = BuildOptions(**{"training_steps": 10, "prototypes": 4, "min_text_cosine": 0.0, **options})
    build_database(engine, corpus, folder, options, progress, keep_existing=keep_existing)
    return AttentionDatabase.open(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def measured(tiny_engine, tiny_corpus, tmp_path_factory, fixed_costs):  # noqa: ARG001 - sets the measured costs
    """A database with a measured mask and policy."""
    return build(tiny_engine, tiny_corpus, tmp_path_factory.mktemp("measured") / "a.db")


@pytest.fixture(scope="module")
def few_texts(tiny_corpus):
    return tiny_corpus[:15]


def test_built_database_is_whole_and_nothing_else_is_left_but_its_lock(measured):
    lengths = sorted(measured.manifest.records)
    assert measured.verify() == []
    test, *others = names(measured.folder)
    assert test.startswith("familiarity-")
    assert others == [
        *("index", "key", "manifest.json", "maps"),
        *("projector.safetensors", "prototypes.safetensors"),
    ]
    assert names(measured.folder / "index") == [f"{length:05d}.faiss" for length in lengths]
    assert names(measured.folder / "maps") == [f"{length:05d}.maps" for length in lengths]
    assert names(measured.folder.parent) == [".a.db.lock", "a.db"]


def test_records_are_the_distinct_token_sequences_of_allowed_length(tiny_engine, tiny_corpus, tmp_path):
    twice = [CorpusSentence(sentence.text.upper(), "again") for sentence in tiny_corpus[:50]]
    database = build(tiny_engine, [*tiny_corpus, *twice], tmp_path / "a.db", max_length=8)
    sequences = {tuple(ids) for ids in tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])}
    expected = Counter(len(ids) for ids in sequences if len(ids) <= 8)
    assert database.manifest.records == dict(expected)
    for length, segment in database.search.store.segments.items():
        held = {ids for ids in sequences for row in range(len(segment)) if segment.holds_tokens(row, ids)}
        assert held == {ids for ids in sequences if len(ids) == length}
        stored, prototypes = database.manifest.records[length], database.manifest.prototypes[length]
        assert segment.kinds.tolist() == [0] * stored + [2] + [1] * (prototypes - 1)


def test_every_recorded_text_hits_itself_through_an_engine(tiny_checkpoint, tiny_corpus, measured):
    engine = PrefillEngine.load(tiny_checkpoint, database=measured, dtype="float32")
    result = prefill(engine, engine.tokenize([sentence.text for sentence in tiny_corpus]))
    assert set(result.outcomes) == {"hit"}
    assert set(result.similarities.tolist()) == {1.0}


def test_manifest_describes_the_model_and_the_build(measured, tiny_checkpoint, tiny_corpus):
    manifest = json.loads((measured.folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["fingerprint"] == tiny_checkpoint.fingerprint()
    assert manifest["dtype"] == "float16"
    assert manifest["format_version"] == 4
    assert manifest["maps_version"] == MAPS_VERSION
    assert manifest["build"]["program"] == __version__
    assert manifest["build"]["texts"] == len(tiny_corpus)
    assert manifest["build"]["held_out"] == 24
    assert manifest["build"]["training_steps"] == 10
    assert manifest["prototypes"] == dict.fromkeys(map(str, range(5, 11)), 5)
    rank, damage = np.array(manifest["rank"]), np.array(manifest["damage"])
    assert sorted(rank.flat) == list(range(12))
    # The first head of the rank is the mildest head. The ranks of other heads depend on the heads before.
    assert rank.flat[damage.argmin()] == 0


def thresholds(database: AttentionDatabase) -> set[float]:
    """Return every θ of a database's policy."""
    return {kind.threshold for group in database.search.policy.groups for kind in group.kinds.values()}


def test_report_keeps_the_budget_and_has_the_measured_figures(measured):
    quality = measured.manifest.quality
    assert quality["measured"] == 24
    assert measured.manifest.policy.budget == Budget(Measure.COSINE, 0.985)
    assert quality["mean"] >= quality["lower_bound"] >= 0.985
    assert quality["mean"] == pytest.approx(quality["mean_cosine"], abs=1e-6)
    assert quality["heads"] == measured.mask.total
    assert measured.search.policy == measured.manifest.policy
    assert quality["hit_rate"] > 0
    saved = [row["saved_microseconds"] for row in quality["candidates"]]
    assert max(saved) >= quality["saved_microseconds"] > 0
    for row in quality["candidates"]:
        assert row["mean_cosine"] is None or row["mean_cosine"] >= 0.985
    distances = quality["map_distance"]
    means = {"chosen", "best", "nearest_by_input", "random", "predicted"}
    assert set(distances) == means | {f"{name}_near" for name in means}
    for near in ("", "_near"):
        others = [distances[f"{name}{near}"] for name in ("chosen", "nearest_by_input", "random")]
        assert distances[f"best{near}"] <= min(others)


def test_looser_budget_reuses_more_and_is_kept(tiny_engine, tiny_corpus, measured, tmp_path):
    loose = build(tiny_engine, tiny_corpus, tmp_path / "a.db", min_cosine=0.95)
    assert loose.manifest.policy.budget == Budget(Measure.COSINE, 0.95)
    loose, strict = loose.manifest.quality, measured.manifest.quality
    assert 0.95 <= loose["lower_bound"] < strict["lower_bound"]
    assert loose["hit_rate"] * loose["heads"] > strict["hit_rate"] * strict["heads"]


def test_impossible_budget_leaves_hits_to_recorded_texts(tiny_engine, tiny_corpus, tmp_path):
    database = build(tiny_engine, tiny_corpus, tmp_path / "a.db", min_cosine=1.0, heads="all")
    assert min(thresholds(database)) == 1.0
    assert database.manifest.quality["hit_rate"] == 0
    assert database.manifest.quality["mean_cosine"] is None


@pytest.mark.parametrize(
    ("heads", "reused", "stored"),
    [("all", (4, 4, 4), (4, 4, 4)), ("layers:0,2", (4, 0, 4), (4, 0, 4)), ("5", None, (4, 4, 4))],
)
def test_operators_heads_and_threshold_are_stored(tiny_engine, few_texts, tmp_path, heads, reused, stored):
    database = build(tiny_engine, few_texts, f"{tmp_path}/a.db", heads=heads, threshold=0.875)
    assert database.manifest.stored_heads == stored
    assert database.mask.total == (5 if reused is None else sum(reused))
    assert reused in (None, database.mask.reused)
    assert thresholds(database) == {0.875}
    held = {segment.layout.stored_heads for segment in database.search.store.segments.values()}
    assert held == {stored}


def test_seed_decides_what_is_held_out(tiny_engine, tiny_corpus, measured, tmp_path):
    other = build(tiny_engine, tiny_corpus, tmp_path / "a.db", heads="6", seed=1)
    assert other.manifest.build["seed"] == 1
    assert other.manifest.damage != measured.manifest.damage
    assert other.manifest.records == measured.manifest.records


def test_existing_folder_is_refused_or_left_alone(tiny_engine, few_texts, tmp_path):
    (tmp_path / "a.db").mkdir()
    (tmp_path / "a.db" / "mine").touch()
    with pytest.raises(BuildFailed, match="exists already"):
        build(tiny_engine, few_texts, tmp_path / "a.db")
    build_database(tiny_engine, few_texts, tmp_path / "a.db", keep_existing=True)
    assert names(tmp_path / "a.db") == ["mine"]
    assert names(tmp_path) == ["a.db"]


@pytest.mark.parametrize("keep_existing", [False, True])
def test_of_two_builds_at_once_one_builds_and_the_other_waits_for_it(
    tiny_engine, few_texts, tmp_path, keep_existing
):
    folder, outcome = tmp_path / "a.db", []

    def second():
        def progress(stage, *_):
            if stage != "waiting for another build":
                outcome.append("built")

        try:
            build(tiny_engine, few_texts, folder, progress, keep_existing=keep_existing)
            outcome.append("returned")
        except BuildFailed as error:
            outcome.append(str(error))

    rival = threading.Thread(target=second)

    def while_the_first_builds(*_):
        if not rival.ident:
            rival.start()
            wait_for_a_waiter_on(tmp_path / ".a.db.lock")
            assert outcome == []

    build(tiny_engine, few_texts, folder, while_the_first_builds)
    made = (folder / "manifest.json").stat()
    rival.join(timeout=240)
    if keep_existing:
        assert outcome == ["returned"]
    else:
        assert len(outcome) == 1
        assert "another process has built" in outcome[0]
    assert (folder / "manifest.json").stat() == made
    assert names(tmp_path) == [".a.db.lock", "a.db"]


def wait_for_a_waiter_on(path: Path) -> None:
    """Wait until the kernel lists a process or thread that waits for the lock on `path`."""
    inode = f":{path.stat().st_ino} "
    deadline = time.monotonic() + 240
    while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
        assert time.monotonic() < deadline, "nobody waits for the lock"
        time.sleep(0.005)


def test_disk_that_is_too_small_is_refused_with_both_sizes_before_the_build_computes(
    tiny_engine, tiny_corpus, tmp_path, monkeypatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 123_456, 123_456))
    lengths = Counter(map(len, tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])))
    records = {length: count + 5 for length, count in lengths.items()}  # four prototypes, and the mean
    needed = sum(count * -(-12 * length**2 * 2 // PAGE) * PAGE for length, count in records.items())
    seen = []
    with pytest.raises(BuildFailed, match=f"need {needed:,} bytes .* has 123,456 left"):
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", lambda *step: seen.append(step))
    assert seen == []


def test_folder_that_cannot_be_created_is_an_error_of_one_line(tiny_engine, few_texts, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BuildFailed, match=r"file/a\.db cannot be written: \w") as failed:
        build(tiny_engine, few_texts, tmp_path / "file" / "a.db")
    assert len(str(failed.value).splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_read_only_folder_is_an_error_of_one_line(tiny_engine, few_texts, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BuildFailed, match="Permission denied"):
        build(tiny_engine, few_texts, tmp_path / "a.db")


@contextmanager
def full_disk_from(stage: str):
    """Yield a progress callback. After `stage`, writing a file beyond 6 KB fails in the operating system."""
    with ExitStack() as full:

        def progress(name: str, done: int, total: int) -> None:
            if name == stage and done == total:
                full.enter_context(largest_file(6000))

        yield progress


def test_disk_without_room_for_the_key_is_an_error_of_one_line_and_the_build_resumes(
    tiny_engine, tiny_corpus, tmp_path
):
    with full_disk_from("measuring heads") as progress, pytest.raises(BuildFailed):
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", progress, heads="6")
    (tmp_path / ".a.db.partial" / "key").unlink()
    with largest_file(31), pytest.raises(BuildFailed, match="cannot be written: File too large"):
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", heads="6")
    assert not {"key", ".key"} & {name[:4] for name in names(tmp_path / ".a.db.partial")}
    assert build(tiny_engine, tiny_corpus, tmp_path / "a.db", heads="6").verify() == []


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_the_owner_can_read_the_database_and_its_folder(tiny_engine, few_texts, tmp_path, umask):
    tmp_path.chmod(0o755)
    folder, while_built = tmp_path / "databases" / "a.db", set()
    before = os.umask(umask)
    try:
        build(
            tiny_engine, few_texts, folder, lambda *_: while_built.add(mode(folder.parent / ".a.db.partial"))
        )
    finally:
        os.umask(before)
    assert while_built == {0o700}
    assert mode(folder) == mode(folder.parent) == 0o700
    assert mode(folder / "key") == 0o600
    assert mode(tmp_path) == 0o755


@pytest.mark.parametrize("stage", ["measuring heads", "training the projector", "measuring masks"])
def test_disk_that_fills_up_is_an_error_of_one_line_and_the_build_resumes(
    tiny_engine, tiny_corpus, tmp_path, stage
):
    with full_disk_from(stage) as progress, pytest.raises(BuildFailed, match="cannot be written") as failed:
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", progress, heads="6")
    assert len(str(failed.value).splitlines()) == 1
    assert "a.db" not in names(tmp_path)
    assert build(tiny_engine, tiny_corpus, tmp_path / "a.db", heads="6").verify() == []


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "has 0 distinct texts of at most 64 tokens"),
        (["one card"], "has 1 distinct texts of at most 64 tokens"),
        (["one card"] * 5, "has 1 distinct texts of at most 64 tokens"),
        (["one card", "card " * 63], "has 1 distinct texts of at most 64 tokens"),
        (["card", "card card", "card card card"], "no two texts of the corpus have the same"),
    ],
    ids=["none", "one", "one-again", "one-short-enough", "no-two-of-one-length"],
)
def test_corpus_without_two_texts_of_one_length_is_refused(tiny_engine, tmp_path, texts, words):
    with pytest.raises(BuildFailed, match=words):
        build(tiny_engine, [CorpusSentence(text, text) for text in texts], tmp_path / "new" / "a.db")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("heads", heads) for heads in ("layers:9", "some", "0", "13")),
        *(("threshold", float(name)) for name in ("nan", "inf", "-inf")),
        *(("seed", -1), ("seed", 2**63)),
    ],
)
def test_option_that_no_build_can_use_is_refused_before_the_build_computes(
    tiny_engine, few_texts, tmp_path, field, value
):
    seen = []
    with pytest.raises(InvalidInput) as refused:
        build(tiny_engine, few_texts, tmp_path / "a.db", lambda *step: seen.append(step), **{field: value})
    assert refused.value.field == field
    assert seen == []
    assert names(tmp_path) == []


def test_engine_with_a_database_cannot_build(tiny_checkpoint, measured, few_texts, tmp_path):
    engine = PrefillEngine.load(tiny_checkpoint, database=measured, dtype="float32")
    with pytest.raises(ValueError, match="an engine that has none"):
        build(engine, few_texts, tmp_path / "a.db")
    assert names(tmp_path) == []
