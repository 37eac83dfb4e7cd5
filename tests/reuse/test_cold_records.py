"""A hit whose record takes longer to read from the disk than the hit saves is computed in full."""

import ctypes
import errno
import os
from dataclasses import replace

import numpy as np
import pytest
from core_models import prefill, random_sequences

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.native.guard import guard
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.gain import Gain, MeasuredGain
from attncache_core.reuse.storage import segment as segment_module
from attncache_core.reuse.storage.mapping import RecordFile
from attncache_core.reuse.storage.segment import Segment

pytestmark = pytest.mark.skipif(guard() is None, reason="records are not mapped")
MADV_DONTNEED = 4


@pytest.fixture
def segment(tiny_database) -> Segment:
    return AttentionDatabase.open(tiny_database).search.store.segments[7]


class Disk:
    """Stands in for the system: which parts of files are in memory, and which are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.absent: set[int] | None = set()  # offsets of the parts that are not in memory; None: all
        self.looks: list[int] = []
        self.asked: list[int] = []
        monkeypatch.setattr(RecordFile, "missing_bytes", self._missing_bytes)
        monkeypatch.setattr(RecordFile, "will_need", self._will_need)

    def _will_need(self, offset: int, _: int) -> None:
        self.asked.append(offset)

    def _missing_bytes(self, offset: int, size: int) -> int:
        self.looks.append(offset)
        return size if self.absent is None or offset in self.absent else 0


@pytest.fixture
def disk(monkeypatch) -> Disk:
    # A segment knows the speed of its disk, a byte a second, without reading.
    monkeypatch.setattr(segment_module, "_TIMED_READS", 0)
    monkeypatch.setattr(segment_module.statistics, "median", lambda _: 1.0)
    return Disk(monkeypatch)


def let_hits_save(engine: PrefillEngine, seconds_per_token: float) -> None:
    groups = range(len(engine.map_reuse.policy.groups))
    gain = Gain(0.1, 0.1, 0.1, 0.1, seconds_per_token)
    measured = MeasuredGain({}, 0.05, dict.fromkeys(groups, gain), tuple(groups), gain, 0.05)
    engine.map_reuse.reuse_in(measured.paying, measured)


def offset(segment: Segment, record: int) -> int:
    return segment.records_start + record * segment.layout.record_bytes(segment.length)


def test_pages_that_were_dropped_are_missing_until_they_are_read(segment):
    size = segment.layout.record_bytes(7)
    whole, libc = len(segment) * size, ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    segment.are_sound(np.arange(len(segment)))
    assert segment.file.missing_bytes(segment.records_start, whole) == 0
    os.fsync(segment.file.descriptor)
    libc.madvise(int(segment.addresses(np.zeros(1, np.int64))[0]), whole, MADV_DONTNEED)
    os.posix_fadvise(segment.file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    missing = segment.file.missing_bytes(segment.records_start, whole)
    if not missing:
        pytest.skip("the file system does not drop pages")
    assert segment.are_cold(np.arange(3), 0.0).tolist() == [False] * 3  # read at once, to measure the disk
    assert segment.file.missing_bytes(offset(segment, 0), 3 * size) == 0
    assert missing <= whole


def test_record_is_cold_if_reading_takes_longer_than_a_hit_saves(segment, disk):
    disk.absent = {offset(segment, 1), offset(segment, 2)}
    size = segment.layout.record_bytes(7)
    assert segment.are_cold(np.array([0, 1, 2, 1]), size - 1).tolist() == [False, True, True, True]
    assert segment.are_cold(np.array([0, 1, 2, 1]), size).tolist() == [False] * 4


def test_record_that_is_cold_for_the_second_time_is_asked_for(segment, disk):
    disk.absent = None
    segment.are_cold(np.array([3, 4]), 0.0)
    assert disk.asked == []
    segment.are_cold(np.array([4, 5]), 0.0)
    assert disk.asked == [offset(segment, 4)]


def test_record_in_memory_is_not_looked_for_again_within_a_second(segment, disk, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(segment_module.time, "monotonic", lambda: now[0])
    segment.are_cold(np.array([3, 4, 3]), 0.0)
    assert sorted(disk.looks) == [offset(segment, 3), offset(segment, 4)]
    now[0] += 0.9
    segment.are_cold(np.array([3, 4, 3]), 0.0)
    assert len(disk.looks) == 2
    now[0] += 0.2
    segment.are_cold(np.array([3]), 0.0)
    assert len(disk.looks) == 3


def test_first_records_that_are_not_in_memory_are_read_to_learn_the_speed(segment, monkeypatch):
    disk = Disk(monkeypatch)
    disk.absent = None
    cold = [bool(segment.are_cold(np.array([record]), 0.0)[0]) for record in range(5)]
    assert cold == [False, False, False, True, True]


def test_segment_that_cannot_be_read_to_learn_the_speed_is_lost(segment, monkeypatch):
    Disk(monkeypatch).absent = None

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(RecordFile, "read", fail)
    assert segment.are_cold(np.array([0, 1]), 1.0).all()
    assert segment.is_lost


@pytest.mark.parametrize("prototypes", [False, True])
def test_cold_hits_are_computed_in_full_and_counted_if_the_gain_is_known(
    tiny_checkpoint, tiny_database, tiny_prototypes_database, disk, prototypes
):
    folder = tiny_prototypes_database if prototypes else tiny_database
    engine = PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(folder), dtype="float32")
    sequences = random_sequences([5, 7, 7, 9], seed=3)
    disk.absent = None
    assert not {"cold"} & set(prefill(engine, sequences).outcomes)
    assert not disk.looks
    let_hits_save(engine, 1e-9)
    cold = prefill(engine, sequences)
    assert set(cold.outcomes) == {"cold"}
    assert engine.map_reuse.info().cold_hits == 4
    np.testing.assert_array_equal(cold.outputs, prefill(engine, sequences, reuse=False).outputs)
    disk.absent = set()
    assert not {"cold"} & set(prefill(engine, sequences).outcomes)
    assert engine.map_reuse.info().cold_hits == 4


def test_mean_serves_a_recorded_text_whose_record_is_cold(
    tiny_checkpoint, tiny_engine, tiny_corpus, tiny_prototypes_database, disk
):
    database = AttentionDatabase.open(tiny_prototypes_database)
    policy = database.search.policy
    groups = tuple(replace(group, searched=False) for group in policy.groups)
    search = replace(database.search, policy=replace(policy, groups=groups))
    engine = PrefillEngine.load(tiny_checkpoint, database=replace(database, search=search), dtype="float32")
    let_hits_save(engine, 1e-9)
    (ids,) = tiny_engine.tokenize([tiny_corpus[0].text])
    segment = search.store.segments[len(ids)]
    record, mean = segment.record_of(ids), search.prototypes.means[len(ids)]
    assert prefill(engine, [ids]).outcomes == ("hit",)
    segment._warm_until[:] = 0
    disk.absent = {offset(segment, record)}
    assert prefill(engine, [ids]).outcomes == ("prototype_hit",)
    segment._warm_until[:] = 0
    disk.absent = {offset(segment, record), offset(segment, mean)}
    assert prefill(engine, [ids]).outcomes == ("cold",)


def test_measured_gain_says_what_a_hit_saves(tiny_checkpoint, tiny_database, disk):
    engine = PrefillEngine.load(
        tiny_checkpoint, database=AttentionDatabase.open(tiny_database), dtype="float32"
    )
    disk.absent = None
    sequences = random_sequences([7], seed=4)
    size = engine.map_reuse.search.store.segments[7].layout.record_bytes(7)
    for saved, outcome in ((size / 8, "cold"), (size / 7, "hit")):
        let_hits_save(engine, saved)
        assert prefill(engine, sequences).outcomes == (outcome,)
