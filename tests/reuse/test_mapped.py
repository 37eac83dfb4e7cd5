"""Records are mapped side by side until the batch ends, and nothing stays mapped after a failure."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from core_models import COMPUTING, SEAL, attention_by, random_sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core import native
from attncache_core.reuse.execution import mapped
from attncache_core.reuse.execution.fetch import Fetch, HitRecords, RecordGroup
from attncache_core.reuse.execution.mapped import map_side_by_side
from attncache_core.reuse.storage import mapping
from attncache_core.reuse.storage.layout import RecordKind, RecordLayout
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.segment_writer import SegmentWriter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")

LAYOUT = RecordLayout((2, 1), torch.bfloat16)
# Lengths with records of one page, and of two pages with padding.
LENGTHS, RECORDS = (7, 40), 6


def random_maps(length):
    """Return random maps, [records, heads of all layers, L, L]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(RECORDS, 3, length, length, generator=generator).softmax(-1).bfloat16()


def written(path, length):
    with SegmentWriter(path, length, RECORDS, LAYOUT, SEAL) as writer:
        for ids, maps in zip(random_sequences([length] * RECORDS), random_maps(length), strict=True):
            writer.append([maps[:2], maps[2:]], ids, RecordKind.STORED)
    return Segment(path, length, LAYOUT, SEAL)


@pytest.fixture(scope="module")
def segments(tmp_path_factory):
    """Length -> a segment that no test changes."""
    folder = tmp_path_factory.mktemp("segments")
    return {length: written(folder / f"{length}.maps", length) for length in LENGTHS}


@pytest.fixture
def own_segment(tmp_path):
    """A segment that a test may change."""
    return written(tmp_path / "own.maps", 40)


def records_of(*numbers):
    return np.array(numbers, dtype=np.int64)


def side_by_side_mappings(path):
    """Return (address, bytes, offset in the file) of the shared mappings of a file.

    The mapping that the segment itself uses is private.
    """
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, offset, _, _, *name = line.split(maxsplit=5)
        first, end = (int(number, 16) for number in span.split("-"))
        if name == [str(path)] and access.endswith("s"):
            assert access == "r--s"
            found.append((first, end - first, int(offset, 16)))
    return found


def reserved_ranges():
    """Return the ranges of addresses without any access rights."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if line.split()[1] == "---p"}


@settings(max_examples=40)
@given(length=st.sampled_from(LENGTHS), chosen=st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=12))
def test_scattered_and_repeated_records_are_mapped_in_the_given_order(segments, length, chosen):
    with map_side_by_side(segments[length], records_of(*chosen)) as tensor:
        numbers = 3 * length**2
        assert tensor.shape == (len(chosen), LAYOUT.record_bytes(length) // 2)
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor[:, :numbers], random_maps(length)[chosen].flatten(1))
        assert not tensor[:, numbers:].any()


def test_pages_of_each_record_are_mapped_and_then_unmapped(segments):
    segment, size = segments[40], LAYOUT.record_bytes(40)
    before = reserved_ranges()
    assert side_by_side_mappings(segment.path) == []
    with map_side_by_side(segment, records_of(5, 0, 3, 0)) as tensor:
        first, start = tensor.data_ptr(), segment.records_start
        assert side_by_side_mappings(segment.path) == [
            (first, size, start + 5 * size),
            (first + size, size, start),
            (first + 2 * size, size, start + 3 * size),
            (first + 3 * size, size, start),
        ]
        assert reserved_ranges() == before  # the reserved range is fully used
        del tensor
    assert side_by_side_mappings(segment.path) == []
    assert reserved_ranges() == before


def test_nothing_stays_mapped_after_an_exception(segments):
    segment, before = segments[40], reserved_ranges()

    def fail(_):
        assert len(side_by_side_mappings(segment.path)) == 2
        raise KeyError

    with pytest.raises(KeyError), map_side_by_side(segment, records_of(1, 4)) as tensor:
        fail(tensor)
    assert side_by_side_mappings(segment.path) == []
    assert reserved_ranges() == before


def test_a_byte_changed_in_the_file_changes_the_tensor(own_segment):
    size, index = LAYOUT.record_bytes(40), 17  # index of a number in a record
    with map_side_by_side(own_segment, records_of(4, 2, 2)) as tensor:
        before = tensor.clone()
        with own_segment.path.open("r+b") as file:
            file.seek(own_segment.records_start + 2 * size + 2 * index)
            file.write(b"\x80\x3f")  # 1 in bfloat16
        assert tensor[1:, index].tolist() == [1.0, 1.0]
        changed = before.clone()
        changed[1:, index] = 1.0
        assert torch.equal(tensor, changed)
        assert not torch.equal(before, changed)


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_records_are_read_from_the_opened_file_after_it_was_replaced_or_deleted(own_segment, change):
    if change == "replaced":
        other = written(own_segment.path.with_name("other.maps"), 40).path
        other.write_bytes(bytes(other.stat().st_size))
        other.replace(own_segment.path)
    else:
        own_segment.path.unlink()
    with map_side_by_side(own_segment, records_of(3, 1)) as tensor:
        assert torch.equal(tensor[:, : 3 * 40**2], random_maps(40)[[3, 1]].flatten(1))


@pytest.mark.parametrize(("left", "maps"), [(4, True), (3, False), (0, False), (-9, False)])
def test_no_more_is_mapped_than_the_system_allows(segments, monkeypatch, left, maps):
    monkeypatch.setattr(mapped, "_mappings_left", lambda: left)
    with map_side_by_side(segments[7], records_of(0, 2, 4, 2)) as tensor:
        assert (tensor is not None) is maps
        assert bool(side_by_side_mappings(segments[7].path)) is maps


def test_each_scattered_record_needs_one_mapping(segments):
    before = mapped._mappings_left()
    with map_side_by_side(segments[7], records_of(0, 2, 4, 2, 0)) as tensor:
        assert before - mapped._mappings_left() == len(tensor) == 5
    assert mapped._mappings_left() == before


def test_mappings_left_are_the_limit_less_used_and_reserved_mappings():
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    used = len(Path("/proc/self/maps").read_text().splitlines())
    # Reading this file may create mappings itself.
    assert abs(mapped._mappings_left() - (limit - used - 4096)) <= 4


def test_without_proc_the_default_limit_of_linux_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(mapped, "Path", lambda _: tmp_path / "absent")
    assert mapped._mappings_left() == 65530 - 4096


def test_nothing_is_mapped_if_pages_of_the_system_are_larger(segments, monkeypatch):
    monkeypatch.setattr(mapped.mmap, "PAGESIZE", 65536)
    with map_side_by_side(segments[7], records_of(0)) as tensor:
        assert tensor is None


class FailingLibrary:
    """The C library, with a failure of mmap at the call with this number, counted from 1."""

    def __init__(self, failing_call):
        self.calls, self._failing_call, self._libc = 0, failing_call, system_library()

    def mmap(self, *arguments):
        self.calls += 1
        if self.calls == self._failing_call:
            ctypes.set_errno(12)
            return ctypes.c_void_p(-1).value
        return self._libc.mmap(*arguments)

    def munmap(self, *arguments):
        return self._libc.munmap(*arguments)


system_library = mapping._libc


@pytest.mark.parametrize(
    ("call", "message"), [(1, "no range of addresses"), (2, "cannot be mapped"), (4, "cannot be mapped")]
)
def test_failed_mapping_is_an_error_and_nothing_stays_mapped(segments, monkeypatch, call, message):
    segment, before = segments[40], reserved_ranges()
    library = FailingLibrary(call)
    monkeypatch.setattr(mapping, "_libc", lambda: library)
    with (
        pytest.raises(OSError, match=message) as caught,
        map_side_by_side(segment, records_of(0, 2, 4)),
    ):
        pass
    assert caught.value.errno == 12
    assert caught.value.filename == str(segment.path)
    assert side_by_side_mappings(segment.path) == []
    assert reserved_ranges() == before


def hit_groups(segments):
    """Return groups of scattered and repeated records of both lengths, and V."""
    groups = [RecordGroup(segments[7], records_of(1, 1, 5)), RecordGroup(segments[40], records_of(0, 3))]
    generator = torch.Generator().manual_seed(0)
    return groups, torch.randn(3 * 7 + 2 * 40, 2, 8, generator=generator).bfloat16()


def context_of(groups, value, way):
    context = torch.zeros_like(value)
    with HitRecords(groups, way) as records:
        records.apply(0, value, context)
    return context


def test_records_of_a_batch_are_mapped_until_the_batch_ends(segments):
    groups, value = hit_groups(segments)
    with HitRecords(groups, Fetch.MAPPED) as records:
        assert [len(side_by_side_mappings(segments[length].path)) for length in LENGTHS] == [3, 2]
        records.apply(0, value, torch.zeros_like(value))
    assert [side_by_side_mappings(segments[length].path) for length in LENGTHS] == [[], []]


def test_records_of_a_batch_are_unmapped_if_the_batch_fails(segments):
    groups, _ = hit_groups(segments)
    with pytest.raises(KeyError), HitRecords(groups, Fetch.MAPPED):
        raise KeyError
    assert [side_by_side_mappings(segments[length].path) for length in LENGTHS] == [[], []]


class SpiedKernel:
    """A kernel that stores the addresses of its maps, and the mappings at the time of the call."""

    def __init__(self, path):
        self._path = path

    def supports(self, _):
        return True

    def apply_maps(self, maps, *_, **__):
        self.maps = maps.tolist()
        self.mapped = side_by_side_mappings(self._path)


def test_the_kernel_reads_each_record_where_it_was_mapped(segments, monkeypatch):
    segment, records = segments[40], records_of(4, 4, 0, 2)
    kernel = SpiedKernel(segment.path)
    monkeypatch.setattr(native, "kernel", lambda: kernel)
    groups = [RecordGroup(segments[7], records_of(5)), RecordGroup(segment, records)]
    with HitRecords(groups, Fetch.MAPPED) as hits:
        hits.apply(1, torch.zeros(7 + 4 * 40, 1, 8), torch.zeros(7 + 4 * 40, 1, 8))
    # The two heads of the first layer precede the heads of the second layer.
    assert [address - 2 * 2 * 40**2 for address in kernel.maps[1:]] == [
        address for address, *_ in kernel.mapped
    ]
    size = LAYOUT.record_bytes(40)
    assert [offset for *_, offset in kernel.mapped] == (segment.records_start + records * size).tolist()


@pytest.mark.parametrize("way", [way for way in Fetch if way is not Fetch.MAPPED])
def test_no_other_way_maps_records(segments, monkeypatch, way):
    monkeypatch.setattr(mapping, "_libc", lambda: pytest.fail("a record was mapped"))
    context_of(*hit_groups(segments), way)


def test_nothing_stays_mapped_if_the_second_length_cannot_be_mapped(segments, monkeypatch):
    groups = [RecordGroup(segments[7], records_of(1, 4)), RecordGroup(segments[40], records_of(0))]
    before = reserved_ranges()
    # Calls of mmap: a range and two records of the first length, a range and one record of the second.
    library = FailingLibrary(5)
    monkeypatch.setattr(mapping, "_libc", lambda: library)
    # `caught` keeps the frames of the exception alive, so unmapping must not depend on garbage collection.
    with pytest.raises(OSError, match="cannot be mapped") as caught, HitRecords(groups, Fetch.MAPPED):
        pass
    assert caught.value.filename == str(segments[40].path)
    assert side_by_side_mappings(segments[7].path) == []
    assert reserved_ranges() == before


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("left", [0, 2])
def test_records_that_cannot_be_mapped_are_fetched_in_another_way(segments, monkeypatch, left, computing):
    # With two mappings left, only the records of the second length are mapped.
    groups, value = hit_groups(segments)
    expected = context_of(groups, value, Fetch.GATHER)
    monkeypatch.setattr(mapped, "_mappings_left", lambda: left)
    found = torch.zeros_like(value)
    with attention_by(computing), HitRecords(groups, Fetch.MAPPED) as records:
        records.apply(0, value, found)
        assert [len(side_by_side_mappings(segments[length].path)) for length in LENGTHS] == [0, left]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    assert expected.abs().max() > 0.2
