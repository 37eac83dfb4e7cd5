"""An engine gives correct answers while its files are truncated, overwritten, replaced or deleted.

The faults are real: files are changed on disk, some of them in the middle of a batch. The tests run recorded
sequences, so every answer must be the full model's answer to 16-bit precision, with or without a hit.
"""

import mmap
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from core_models import READERS, attention_by, prefill
from core_reference import SIXTEEN_BITS
from forked import fresh
from running import Clock
from serving_from_failing_storage import serve_by_all

from attncache_core import native
from attncache_core.engine import forward
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.native.guard import guard
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.plan import Outcome
from attncache_core.reuse.storage import mapping
from attncache_core.reuse.storage.segment import RecordsChanged, Scrubbed, Segment

mapped_records = pytest.mark.skipif(
    guard() is None, reason="without the guard, records are read instead of mapped"
)
RECORDS_START = 2 * 4096  # a page of header, a page of table
LENGTHS = range(5, 11)


@pytest.fixture
def folder(tiny_database, tmp_path) -> Path:
    """A copy of the tiny database that a test may damage: six lengths with 40 records, each of one page."""
    return Path(shutil.copytree(tiny_database, tmp_path / "tiny.db"))


@pytest.fixture(scope="module")
def recorded(tiny_engine, tiny_corpus) -> list[list[int]]:
    """Six recorded sequences of each length."""
    sequences = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])
    return [ids for length in LENGTHS for ids in [each for each in sequences if len(each) == length][:6]]


@pytest.fixture(scope="module")
def expected(recorded, tiny_reference) -> np.ndarray:
    """The full model's outputs for the recorded sequences."""
    return tiny_reference.means(recorded)


def engine_on(checkpoint, folder: Path) -> PrefillEngine:
    database = AttentionDatabase.open(folder, threshold=1.0)
    return PrefillEngine.load(checkpoint, database=database, dtype="float32")


def path_of(folder: Path, length: int) -> Path:
    return folder / "maps" / f"{length:05d}.maps"


def cut(path: Path) -> None:
    os.truncate(path, RECORDS_START)


def overwrite(path: Path) -> None:
    """Replace the maps of every record in place."""
    size = path.stat().st_size - RECORDS_START
    with path.open("r+b") as file:
        file.seek(RECORDS_START)
        file.write(np.random.default_rng(0).random(size // 2).astype(np.float16).tobytes())


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def delete(path: Path) -> None:
    shutil.rmtree(path.parent.parent)


FAULTS: list[Callable[[Path], None]] = [cut, overwrite, replace, delete]


@contextmanager
def in_the_middle(
    engine: PrefillEngine, act: Callable[[], None], after_layer: int = 0, by: str = "kernel"
) -> Iterator[None]:
    """Call `act` once, in the first batch of this context, after the attention of layer `after_layer`.

    by: how layers run, as for attention_by; all at once have no middle.
    """
    layers, _ = engine.model.layers, engine.model.stack  # compiled before a layer is replaced
    layer = layers[after_layer]

    def with_act(hidden):
        layers[after_layer] = layer
        act()
        return layer.feed_forward(hidden)

    layers[after_layer] = replaced(layer, halves=(with_act,))
    with attention_by(by):
        yield
    assert layers[after_layer] is layer, "the batch had no middle"


def outcomes_by_length(result, sequences) -> dict[int, set[Outcome]]:
    found: dict[int, set[Outcome]] = {length: set() for length in LENGTHS}
    for ids, outcome in zip(sequences, result.outcomes, strict=True):
        found[len(ids)].add(outcome)
    return found


@pytest.mark.parametrize("computing", READERS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("in_a_batch", [True, False], ids=["in a batch", "between two batches"])
def test_fault_changes_no_answer(tiny_checkpoint, folder, recorded, expected, computing, fault, in_a_batch):
    engine = engine_on(tiny_checkpoint, folder)
    act = partial(fault, path_of(folder, 7))
    with attention_by(computing):
        assert set(prefill(engine, recorded).outcomes) == {Outcome.HIT}
    if not in_a_batch:
        act()
    with in_the_middle(engine, act, by=computing) if in_a_batch else attention_by(computing):
        for _ in range(3):
            result = prefill(engine, recorded)
            np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)
            outcomes = outcomes_by_length(result, recorded)
            assert all(outcomes[length] == {Outcome.HIT} for length in LENGTHS if length != 7)


@mapped_records
@pytest.mark.parametrize("computing", READERS)
def test_fault_that_leaves_no_trace_in_the_file_is_noticed(
    tiny_checkpoint, folder, recorded, expected, computing
):
    """Like a read error of the disk: the file is unchanged, but the maps were not read from it."""
    engine = engine_on(tiny_checkpoint, folder)
    path = path_of(folder, 7)
    before, content = path.stat(), path.read_bytes()

    def restore() -> None:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    with attention_by(computing):
        prefill(engine, recorded)
    with (
        in_the_middle(engine, lambda: cut(path), by=computing),
        in_the_middle(engine, restore, after_layer=1, by=computing),
    ):
        result = prefill(engine, recorded)
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)
    assert result.report.lost_lengths == (7,)


@mapped_records
@pytest.mark.parametrize("in_a_batch", [True, False])
def test_truncated_segment_is_reported_once_and_no_longer_used(tiny_checkpoint, folder, recorded, in_a_batch):
    engine = engine_on(tiny_checkpoint, folder)
    prefill(engine, recorded)
    cutting = partial(cut, path_of(folder, 7))
    if not in_a_batch:
        cutting()
    with in_the_middle(engine, cutting) if in_a_batch else nullcontext():
        results = [prefill(engine, recorded) for _ in range(3)]
    assert [result.report.lost_lengths for result in results] == [(7,), (), ()]
    assert [result.report.corrupt_records for result in results] == [0, 0, 0]
    for result in results:
        assert outcomes_by_length(result, recorded)[7] == {Outcome.NOT_SEARCHED}
    assert engine.info().database.lost_lengths == [7]


@mapped_records
def test_all_segments_can_be_lost_in_one_batch(tiny_checkpoint, folder, recorded, expected):
    engine = engine_on(tiny_checkpoint, folder)
    with in_the_middle(engine, lambda: [cut(path_of(folder, length)) for length in LENGTHS]):
        result = prefill(engine, recorded)
    assert set(result.report.lost_lengths) == set(LENGTHS)
    assert len(result.report.lost_lengths) == len(LENGTHS)
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)
    assert prefill(engine, recorded).outcomes == (Outcome.NOT_SEARCHED,) * len(recorded)


@pytest.mark.parametrize("fault", [replace, delete])
def test_records_of_a_replaced_or_deleted_file_are_still_used(tiny_checkpoint, folder, recorded, fault):
    engine = engine_on(tiny_checkpoint, folder)
    fault(path_of(folder, 7))
    for _ in range(2):
        result = prefill(engine, recorded)
        assert set(result.outcomes) == {Outcome.HIT}
        assert (result.report.lost_lengths, result.report.corrupt_records) == ((), 0)


SETTLED = 2.5  # seconds after which a changed file is used again


@pytest.fixture
def clock(monkeypatch):
    """The clock of all segments, so that no file settles while a test is slow."""
    clock = Clock()
    times = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)
    monkeypatch.setattr("attncache_core.reuse.storage.segment.time", times)
    return clock


@mapped_records
def test_overwritten_record_is_a_miss_until_its_content_is_restored(tiny_checkpoint, folder, recorded, clock):
    engine = engine_on(tiny_checkpoint, folder)
    prefill(engine, recorded)
    path = path_of(folder, 7)
    content = path.read_bytes()
    overwrite(path)
    result = prefill(engine, recorded)
    # The write may still be in progress, so the segment is not used at first.
    assert outcomes_by_length(result, recorded)[7] == {Outcome.NOT_SEARCHED}
    assert (result.report.corrupt_records, result.report.lost_lengths) == (0, ())
    clock.seconds += SETTLED
    result = prefill(engine, recorded)
    assert outcomes_by_length(result, recorded)[7] == {Outcome.MISS}
    assert (result.report.corrupt_records, result.report.lost_lengths) == (6, ())
    with path.open("r+b") as file:
        file.write(content)
    assert outcomes_by_length(prefill(engine, recorded), recorded)[7] == {Outcome.NOT_SEARCHED}
    clock.seconds += SETTLED
    assert set(prefill(engine, recorded).outcomes) == {Outcome.HIT}


@mapped_records
def test_write_that_does_not_change_the_modification_time_is_noticed_later(
    tiny_checkpoint, folder, recorded, clock
):
    """Like the second of two writes within one tick of the file system's clock."""
    engine = engine_on(tiny_checkpoint, folder)
    path = path_of(folder, 7)
    os.utime(path)
    prefill(engine, recorded)
    time_of_both = path.stat().st_mtime_ns
    with (
        in_the_middle(engine, lambda: overwrite(path)),
        in_the_middle(engine, lambda: os.utime(path, ns=(time_of_both, time_of_both)), after_layer=1),
    ):
        prefill(engine, recorded)
    clock.seconds += SETTLED
    assert outcomes_by_length(prefill(engine, recorded), recorded)[7] == {Outcome.MISS}


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


def restrict(path: Path) -> None:
    path.chmod(0o400)


@pytest.mark.parametrize(("change", "seconds"), [(touch, SETTLED), (extend, SETTLED), (restrict, 0)])
def test_records_are_still_used_after_a_change_outside_the_records(
    tiny_checkpoint, folder, recorded, expected, change, seconds, clock
):
    engine = engine_on(tiny_checkpoint, folder)
    prefill(engine, recorded)
    with in_the_middle(engine, lambda: change(path_of(folder, 7))):
        np.testing.assert_allclose(prefill(engine, recorded).outputs, expected, atol=SIXTEEN_BITS)
    clock.seconds += seconds
    result = prefill(engine, recorded)
    assert set(result.outcomes) == {Outcome.HIT}
    assert result.report.corrupt_records == 0


@mapped_records
def test_gathering_maps_of_a_truncated_file_is_an_error(folder):
    segment = AttentionDatabase.open(folder).search.store.segments[7]
    cut(segment.path)
    with pytest.raises(RecordsChanged, match=r"00007\.maps: changed or unreadable"):
        segment.gather_layer_maps(torch.tensor([1]), 0, 4)


# Without the compiled guard.


@pytest.fixture
def unguarded(monkeypatch):
    monkeypatch.setattr(mapping, "guard", lambda: None)


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_guard_records_are_read_at_start_and_faults_have_no_effect(
    tiny_checkpoint, folder, recorded, expected, fault
):
    engine = engine_on(tiny_checkpoint, folder)
    fault(path_of(folder, 7))
    for _ in range(2):
        result = prefill(engine, recorded)
        assert set(result.outcomes) == {Outcome.HIT}
        np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)


@pytest.mark.usefixtures("unguarded")
def test_record_that_is_damaged_before_it_is_read_is_not_used(tiny_checkpoint, folder, recorded):
    overwrite(path_of(folder, 7))
    result = prefill(engine_on(tiny_checkpoint, folder), recorded)
    assert outcomes_by_length(result, recorded)[7] == {Outcome.MISS}
    assert result.report.corrupt_records == 6


# The background check.


STEP = 512  # bytes, less than a record


def changed_by_scrub(engine: PrefillEngine) -> int:
    return sum(step.changed for step in engine.map_reuse.database.search.store.scrub(STEP))


def change_through_a_mapping(segment: Segment, record: int) -> None:
    """Change a record like another process that has mapped the file: without a system call."""
    with segment.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[RECORDS_START + record * 4096] ^= 1


def change_in_memory(segment: Segment, record: int) -> None:
    """Change a record like defective memory: the file keeps its content."""
    segment.layer_maps(record, 0, 4)[3, 0, 0] += 0.5


@mapped_records
@pytest.mark.parametrize("change", [change_through_a_mapping, change_in_memory])
def test_scrub_excludes_records_that_changed_and_reports_each_once(tiny_checkpoint, folder, recorded, change):
    engine = engine_on(tiny_checkpoint, folder)
    prefill(engine, recorded)
    assert changed_by_scrub(engine) == 0
    segment = engine.map_reuse.database.search.store.segments[7]
    records = [segment.record_of(ids) for ids in recorded if len(ids) == 7]
    change(segment, records[2])
    change(segment, records[4])
    assert changed_by_scrub(engine) == 2
    assert changed_by_scrub(engine) == 0
    segment.refresh()
    kept = [segment.is_sound(record) for record in records]
    assert kept == [True, True, False, True, False, True]


def test_scrub_reads_exactly_the_checked_records_in_steps(tiny_checkpoint, folder, recorded):
    engine = engine_on(tiny_checkpoint, folder)
    store = engine.map_reuse.database.search.store
    assert list(store.scrub(STEP)) == [Scrubbed(0, 0)]
    prefill(engine, recorded)
    used = 2 * 12 * sum(len(ids) ** 2 for ids in recorded)  # bytes: twelve maps of 16-bit numbers per record
    for step_bytes in (STEP, 4096, 10**9):
        steps = list(store.scrub(step_bytes))
        assert sum(step.bytes for step in steps) == used
        assert all(step_bytes <= step.bytes < 2 * step_bytes for step in steps[:-1])


@mapped_records
def test_scrub_of_a_truncated_file_loses_the_segment_and_reports_no_record(
    tiny_checkpoint, folder, recorded, expected
):
    engine = engine_on(tiny_checkpoint, folder)
    prefill(engine, recorded)
    cut(path_of(folder, 7))
    assert changed_by_scrub(engine) == 0
    result = prefill(engine, recorded)
    assert result.report.lost_lengths == (7,)
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)


# An engine under load in a separate process.


@pytest.mark.skipif(native.kernel() is None, reason="no kernel was built for this processor")
def test_engine_under_load_survives_every_fault_and_gives_no_wrong_answer(
    tiny_checkpoint, tiny_database, recorded, tmp_path
):
    folders = {by: shutil.copytree(tiny_database, tmp_path / by) for by in READERS}
    receiving, sending = multiprocessing.Pipe(duplex=False)
    log = tmp_path / "log"
    serving = fresh(serve_by_all, tiny_checkpoint.folder, folders, recorded, sending, log)
    serving.join(180)
    assert (serving.exitcode, log.read_text(encoding="utf-8")) == (0, "")
    assert [receiving.recv() for _ in READERS] == [[6, 8] if guard() else []] * len(READERS)


@mapped_records
@pytest.mark.parametrize("fault", [cut, overwrite])
@pytest.mark.parametrize("place", ["before the search", "before the layers"])
def test_another_batch_that_notices_the_change_first_does_not_hide_it(
    folder, tiny_checkpoint, recorded, expected, monkeypatch, fault, place
):
    engine = engine_on(tiny_checkpoint, folder)
    prefill(engine, recorded)  # checks the records

    def once(call):
        def changed(*arguments, **options):
            monkeypatch.undo()
            fault(path_of(folder, 7))
            with ThreadPoolExecutor(1) as other:
                answer = other.submit(prefill, engine, recorded).result(timeout=240)
            np.testing.assert_allclose(answer.outputs, expected, atol=SIXTEEN_BITS)
            return call(*arguments, **options)

        return changed

    if place == "before the search":
        monkeypatch.setattr(forward, "first_input", once(forward.first_input))
    else:
        monkeypatch.setattr(forward, "reused_by", once(forward.reused_by))
    result = prefill(engine, recorded)
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)
    hits = [len(ids) for ids, outcome in zip(recorded, result.outcomes, strict=True) if outcome.is_hit]
    assert set(hits) == set(LENGTHS) - {7}
