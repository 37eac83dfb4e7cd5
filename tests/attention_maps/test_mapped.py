"""Records mapped side by side: what is mapped, until when, and where it cannot be."""

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
from attncache_core.attention_maps import mapped, mapping
from attncache_core.attention_maps.fetch import Fetch, HitRecords, RecordGroup
from attncache_core.attention_maps.mapped import map_side_by_side
from attncache_core.attention_maps.segment_writer import SegmentWriter
from attncache_core.attention_maps.store import RecordKind, RecordLayout, Segment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")

LAYOUT = RecordLayout((2, 1), torch.bfloat16)
# Records of one page, and of two with filling at their end.
LENGTHS, RECORDS = (7, 40), 6


def random_maps(length):
    """[records, heads of all layers, L, L]."""
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
    """(address, bytes, byte of the file) of the shared mappings of a file; its segment's own is private."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, offset, _, _, *name = line.split(maxsplit=5)
        first, end = (int(number, 16) for number in span.split("-"))
        if name == [str(path)] and access.endswith("s"):
            assert access == "r--s"
            found.append((first, end - first, int(offset, 16)))
    return found


def reserved_ranges():
    """The ranges of addresses that nothing may be done with."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if line.split()[1] == "---p"}


@settings(max_examples=40)
@given(length=st.sampled_from(LENGTHS), chosen=st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=12))
def test_scattered_and_repeated_records_stand_side_by_side_in_the_order_asked_for(segments, length, chosen):
    with map_side_by_side(segments[length], records_of(*chosen)) as tensor:
        numbers = 3 * length**2
        assert tensor.shape == (len(chosen), LAYOUT.record_bytes(length) // 2)
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor[:, :numbers], random_maps(length)[chosen].flatten(1))
        assert not tensor[:, numbers:].any()


def test_each_record_is_its_pages_of_the_file_mapped_in_a_row_and_nothing_stays(segments):
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
        assert reserved_ranges() == before  # all that was reserved is taken
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
    size, place = LAYOUT.record_bytes(40), 17  # the 17th number of a record
    with map_side_by_side(own_segment, records_of(4, 2, 2)) as tensor:
        before = tensor.clone()
        with own_segment.path.open("r+b") as file:
            file.seek(own_segment.records_start + 2 * size + 2 * place)
            file.write(b"\x80\x3f")  # 1 in bfloat16
        assert tensor[1:, place].tolist() == [1.0, 1.0]
        changed = before.clone()
        changed[1:, place] = 1.0
        assert torch.equal(tensor, changed)
        assert not torch.equal(before, changed)


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_records_are_those_of_the_file_that_was_opened_whatever_its_name_means_now(own_segment, change):
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


def test_each_scattered_record_takes_one_of_the_mappings_that_are_left(segments):
    before = mapped._mappings_left()
    with map_side_by_side(segments[7], records_of(0, 2, 4, 2, 0)) as tensor:
        assert before - mapped._mappings_left() == len(tensor) == 5
    assert mapped._mappings_left() == before


def test_what_is_left_is_the_systems_limit_less_what_is_used_and_a_share_for_others():
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    used = len(Path("/proc/self/maps").read_text().splitlines())
    # The file itself is read into memory that may be mapped for it.
    assert abs(mapped._mappings_left() - (limit - used - 4096)) <= 4


def test_without_proc_linux_own_default_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(mapped, "Path", lambda _: tmp_path / "absent")
    assert mapped._mappings_left() == 65530 - 4096


def test_a_system_with_larger_pages_than_records_have_maps_nothing(segments, monkeypatch):
    monkeypatch.setattr(mapped.mmap, "PAGESIZE", 65536)
    with map_side_by_side(segments[7], records_of(0)) as tensor:
        assert tensor is None


class FailingLibrary:
    """The C library, in which the call of mmap with this number fails."""

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
def test_a_mapping_that_fails_is_an_error_and_leaves_nothing_behind(segments, monkeypatch, call, message):
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
    """Scattered and repeated records of both lengths: sequences, records and V."""
    groups = [RecordGroup(segments[7], records_of(1, 1, 5)), RecordGroup(segments[40], records_of(0, 3))]
    generator = torch.Generator().manual_seed(0)
    return groups, torch.randn(3 * 7 + 2 * 40, 2, 8, generator=generator).bfloat16()


def context_of(groups, value, way):
    context = torch.zeros_like(value)
    with HitRecords(groups, way) as records:
        records.apply(0, value, context)
    return context


def test_a_batchs_records_are_mapped_until_it_ends(segments):
    groups, value = hit_groups(segments)
    with HitRecords(groups, Fetch.MAPPED) as records:
        assert [len(side_by_side_mappings(segments[length].path)) for length in LENGTHS] == [3, 2]
        records.apply(0, value, torch.zeros_like(value))
    assert [side_by_side_mappings(segments[length].path) for length in LENGTHS] == [[], []]


def test_a_batchs_records_are_unmapped_when_it_fails(segments):
    groups, _ = hit_groups(segments)
    with pytest.raises(KeyError), HitRecords(groups, Fetch.MAPPED):
        raise KeyError
    assert [side_by_side_mappings(segments[length].path) for length in LENGTHS] == [[], []]


class SpiedKernel:
    """A kernel that notes the addresses of the maps it is given, and what is mapped at the time."""

    def __init__(self, path):
        self._path = path

    def takes(self, _):
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
    # The two heads of the first layer stand before the second layer's.
    assert [address - 2 * 2 * 40**2 for address in kernel.maps[1:]] == [place for place, *_ in kernel.mapped]
    size = LAYOUT.record_bytes(40)
    assert [offset for *_, offset in kernel.mapped] == (segment.records_start + records * size).tolist()


@pytest.mark.parametrize("way", [way for way in Fetch if way is not Fetch.MAPPED])
def test_no_other_way_maps_records(segments, monkeypatch, way):
    monkeypatch.setattr(mapping, "_libc", lambda: pytest.fail("a record was mapped"))
    context_of(*hit_groups(segments), way)


def test_a_batch_whose_second_length_cannot_be_mapped_leaves_nothing_behind(segments, monkeypatch):
    groups = [RecordGroup(segments[7], records_of(1, 4)), RecordGroup(segments[40], records_of(0))]
    before = reserved_ranges()
    # A range and two records of the first length, a range and this record of the second.
    library = FailingLibrary(5)
    monkeypatch.setattr(mapping, "_libc", lambda: library)
    # Whoever holds the exception holds its frames: what is mapped must not wait until they are collected.
    with pytest.raises(OSError, match="cannot be mapped") as caught, HitRecords(groups, Fetch.MAPPED):
        pass
    assert caught.value.filename == str(segments[40].path)
    assert side_by_side_mappings(segments[7].path) == []
    assert reserved_ranges() == before


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("left", [0, 2])
def test_where_not_all_can_be_mapped_the_rest_is_fetched_in_another_way(
    segments, monkeypatch, left, computing
):
    # With two left, the records of the second length are mapped and those of the first are not.
    groups, value = hit_groups(segments)
    expected = context_of(groups, value, Fetch.GATHER)
    monkeypatch.setattr(mapped, "_mappings_left", lambda: left)
    found = torch.zeros_like(value)
    with attention_by(computing), HitRecords(groups, Fetch.MAPPED) as records:
        records.apply(0, value, found)
        assert [len(side_by_side_mappings(segments[length].path)) for length in LENGTHS] == [0, left]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    assert expected.abs().max() > 0.2
