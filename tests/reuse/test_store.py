"""Segments on disk: records come back bit by bit, the file has its documented form, and damage is noticed.

These tests read the file with struct and NumPy, according to its documented form, and not with the store.
"""

import os
import shutil
import struct
import tempfile
import zlib
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from core_models import SEAL, flip
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.errors import CorruptDatabase
from attncache_core.native.guard import guard
from attncache_core.reuse.storage import mapping
from attncache_core.reuse.storage.layout import MapForm, RecordKind, RecordLayout, segment_path
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.segment_file import SegmentWriter, is_finished
from attncache_core.reuse.storage.store import AttentionMapStore

PAGE = 4096
HEADER = struct.Struct("<8sIIQQ16sI16s32s")
TABLE_ROW = struct.Struct("<II16s")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Record(NamedTuple):
    ids: list[int]
    maps: list[torch.Tensor]  # layer -> [stored heads, L, L]
    kind: RecordKind


def made_records(layout: RecordLayout, length: int, count: int, seed: int = 0) -> list[Record]:
    """Return records of random 16-bit patterns. The store must also accept patterns that are not numbers."""
    random = np.random.default_rng(seed)
    form = np.tril if layout.form is MapForm.PACKED else np.asarray
    return [
        Record(
            [number, *random.integers(0, 30_000, length - 1).tolist()],
            [
                torch.from_numpy(
                    form(random.integers(-(2**15), 2**15, (heads, length, length), dtype=np.int16))
                ).view(layout.dtype)
                for heads in layout.stored_heads
            ],
            RecordKind(int(random.integers(2))),
        )
        for number in range(count)
    ]


def append(writer: SegmentWriter, records: list[Record]) -> None:
    for record in records:
        writer.append(record.maps, record.ids, record.kind)


def write_segment(path: Path, length: int, layout: RecordLayout, records: list[Record]) -> Path:
    with SegmentWriter(path, length, len(records), layout, SEAL) as writer:
        append(writer, records)
    return path


def bits(maps: torch.Tensor) -> bytes:
    return maps.contiguous().view(torch.int16).numpy().tobytes()


def pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


LAYOUT = RecordLayout((2, 0, 3), torch.bfloat16)
LENGTH, COUNT = 7, 4
CONTENT_BYTES = 5 * LENGTH**2 * 2  # a record fits on one page
FILE_BYTES = (2 + COUNT) * PAGE


@pytest.fixture
def records():
    return made_records(LAYOUT, LENGTH, COUNT)


@pytest.fixture
def segment_file(tmp_path, records):
    return write_segment(tmp_path / "00007.maps", LENGTH, LAYOUT, records)


layouts = st.builds(
    RecordLayout,
    st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any).map(tuple),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from(MapForm),
)


@settings(max_examples=40, deadline=None)
@given(layout=layouts, length=st.integers(1, 40), count=st.integers(1, 6), seed=st.integers(0, 99))
def test_every_record_comes_back_to_the_bit_in_any_layout(layout, length, count, seed):
    records = made_records(layout, length, count, seed)
    with tempfile.TemporaryDirectory() as folder:
        segment = Segment(
            write_segment(Path(folder) / "a.maps", length, layout, records), length, layout, SEAL
        )
        assert len(segment) == count
        assert segment.kinds.tolist() == [record.kind for record in records]
        for number, record in enumerate(records):
            assert segment.are_sound(np.array([number])).all()
            for layer, maps in enumerate(record.maps):
                for heads in range(len(maps) + 1):
                    view = segment.layer_maps(number, layer, heads)
                    assert view.dtype == layout.dtype
                    assert view.shape == (heads, length, length)
                    assert bits(view) == bits(maps[:heads])


@settings(max_examples=40, deadline=None)
@given(layout=layouts, length=st.integers(1, 40), count=st.integers(1, 6), seed=st.integers(0, 99))
def test_file_is_header_table_and_page_aligned_records_with_layers_in_a_row(layout, length, count, seed):
    records = made_records(layout, length, count, seed)
    with tempfile.TemporaryDirectory() as folder:
        content = write_segment(Path(folder) / "a.maps", length, layout, records).read_bytes()
    packed = layout.form is MapForm.PACKED
    size = sum(layout.stored_heads) * (length * (length + 1) // 2 if packed else length**2) * 2
    table = content[PAGE : PAGE + count * TABLE_ROW.size]
    magic, version, held, number, record_bytes, dtype, checksum, database, model = HEADER.unpack_from(content)
    assert (magic, version, held, number, record_bytes) == (b"ATTNMAPS", 2, length, count, size)
    assert (database.hex(), model.hex()) == (SEAL.id, SEAL.fingerprint)
    assert DTYPES[dtype.rstrip(b"\0").decode()] is layout.dtype
    assert checksum == zlib.crc32(table)
    first = PAGE + pages(len(table))
    assert len(content) == first + count * pages(size)
    for row, (index, record) in zip(TABLE_ROW.iter_unpack(table), enumerate(records), strict=True):
        start = first + index * pages(size)
        rows = [row for layer in record.maps for head in layer for row in enumerate(head, 1)]
        maps = b"".join(bits(row[:number] if packed else row) for number, row in rows)
        assert start % PAGE == 0
        assert content[start : start + size] == maps
        assert not any(content[start + size : start + pages(size)])
        ids = struct.pack(f"<{len(record.ids)}q", *record.ids)
        digest = blake2b(ids, digest_size=16, key=SEAL.key).digest()
        assert row == (record.kind, zlib.crc32(maps), digest)


def test_records_follow_a_table_of_more_than_a_page(tmp_path):
    layout = RecordLayout((1,), torch.float16)
    records = made_records(layout, 2, 400)
    path = write_segment(tmp_path / "a.maps", 2, layout, records)
    on_disk = np.fromfile(path, dtype=np.int16, offset=PAGE + pages(400 * TABLE_ROW.size))
    assert on_disk.reshape(400, -1)[399, :4].tobytes() == bits(records[399].maps[0])
    assert bits(Segment(path, 2, layout, SEAL).layer_maps(399, 0, 1)) == bits(records[399].maps[0])


def test_record_knows_its_own_tokens_and_no_others(segment_file, records):
    segment = Segment(segment_file, LENGTH, LAYOUT, SEAL)
    known = [[segment.holds_tokens(index, record.ids) for record in records] for index in range(COUNT)]
    assert known == np.eye(COUNT, dtype=bool).tolist()
    assert not segment.holds_tokens(0, records[0].ids[::-1])


@settings(deadline=None)
@given(left=st.lists(st.integers(0, 2**31), max_size=8), right=st.lists(st.integers(0, 2**31), max_size=8))
def test_digests_differ_exactly_if_the_tokens_differ(left, right):
    assert (SEAL.token_digest(left) == SEAL.token_digest(right)) == (left == right)


@settings(max_examples=25, deadline=None)
@given(
    chosen=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=9),
    layer_heads=st.sampled_from([(0, 1), (0, 2), (1, 0), (2, 1), (2, 3)]),
)
def test_gather_equals_the_stacked_views(chosen, layer_heads):
    layer, heads = layer_heads
    with tempfile.TemporaryDirectory() as folder:
        path = write_segment(Path(folder) / "a.maps", LENGTH, LAYOUT, made_records(LAYOUT, LENGTH, COUNT))
        segment = Segment(path, LENGTH, LAYOUT, SEAL)
        gathered = segment.gather_layer_maps(torch.tensor(chosen), layer, heads)
        stacked = torch.stack([segment.layer_maps(record, layer, heads) for record in chosen])
    assert gathered.shape == stacked.shape
    assert bits(gathered) == bits(stacked)


def mapped_offset(address: int, path: Path) -> int:
    """Return the offset in the file `path` that is mapped to an address of this process, from /proc."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        first, end = (int(number, 16) for number in span.split("-"))
        if first <= address < end and name == [str(path)]:
            return address - first + int(offset, 16)
    raise AssertionError(f"{address:x} is in no mapping of {path}")


@pytest.mark.skipif(guard() is None, reason="without the guard, records are read instead of mapped")
def test_layer_maps_are_the_file_itself_mapped_into_memory(segment_file):
    segment = Segment(segment_file, LENGTH, LAYOUT, SEAL)
    first = 2 * PAGE  # one page of header and one page of table precede the records
    for record in range(COUNT):
        for layer, heads_before in ((0, 0), (2, 2)):
            view = segment.layer_maps(record, layer, 2)
            expected = first + record * pages(CONTENT_BYTES) + heads_before * LENGTH**2 * 2
            assert mapped_offset(view.data_ptr(), segment_file) == expected


def test_records_that_take_several_reads_are_whole(segment_file, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(mapping, "guard", lambda: None)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:1000]], at))
    assert Segment(segment_file, LENGTH, LAYOUT, SEAL).are_sound(np.arange(COUNT)).all()


def test_writing_to_a_view_never_reaches_the_file(segment_file):
    before = segment_file.read_bytes()
    segment = Segment(segment_file, LENGTH, LAYOUT, SEAL)
    segment.layer_maps(1, 0, 2).zero_()
    del segment
    assert segment_file.read_bytes() == before


def test_sizes_of_the_store_are_the_sizes_of_its_files(tmp_path):
    for length in (3, 5):
        write_segment(segment_path(tmp_path, length), length, LAYOUT, made_records(LAYOUT, length, length))
    store = AttentionMapStore(tmp_path, [5, 3], LAYOUT, SEAL)
    assert list(store.segments) == [3, 5]
    assert store.records == 8
    assert store.file_bytes == sum(path.stat().st_size for path in (tmp_path / "maps").iterdir())


@pytest.mark.parametrize(
    "maps",
    [
        [torch.zeros(2, LENGTH, LENGTH, dtype=torch.bfloat16)],
        [torch.zeros(5, LENGTH, LENGTH, dtype=torch.float16)],
        [torch.zeros(5, LENGTH, LENGTH, dtype=torch.float32)],
    ],
    ids=["too few heads", "the other 16 bits", "32 bits"],
)
def test_maps_that_do_not_fit_the_layout_are_not_written(tmp_path, maps):
    with (
        pytest.raises(ValueError, match="does not fit"),
        SegmentWriter(tmp_path / "a.maps", LENGTH, 1, LAYOUT, SEAL) as writer,
    ):
        writer.append(maps, [1] * LENGTH, RecordKind.STORED)


# A truncated, changed or unfinished segment is refused. A changed record makes only itself unusable.


# A change of the high bytes of the number of records (bytes 16 to 23) would need terabytes of memory.
def test_any_changed_byte_of_header_and_record_table_is_refused(segment_file):
    for offset in (*range(HEADER.size), *range(PAGE, PAGE + COUNT * TABLE_ROW.size, 5)):
        flip(segment_file, offset)
        assert_refused(segment_file)
        flip(segment_file, offset)
    assert is_finished(segment_file, LENGTH, COUNT, LAYOUT, SEAL)


@pytest.mark.parametrize(
    "size",
    [
        *(0, 10, HEADER.size - 1, HEADER.size, PAGE, PAGE + 30, 2 * PAGE),
        *(FILE_BYTES - PAGE, FILE_BYTES - 1, FILE_BYTES + PAGE),
    ],
)
def test_file_of_another_size_is_refused(segment_file, size):
    assert segment_file.stat().st_size == FILE_BYTES
    os.truncate(segment_file, size)
    assert_refused(segment_file)


def test_missing_file_is_refused(tmp_path):
    assert_refused(tmp_path / "absent.maps")


@pytest.mark.parametrize(
    ("length", "layout"),
    [
        (LENGTH + 1, LAYOUT),
        (LENGTH, RecordLayout((2, 0, 2), torch.bfloat16)),
        (LENGTH, RecordLayout((2, 0, 3), torch.float16)),
        (LENGTH, RecordLayout((2, 0, 3), torch.bfloat16, MapForm.PACKED)),
    ],
    ids=["another length", "fewer heads", "another dtype", "another form"],
)
def test_segment_of_another_kind_is_refused(segment_file, length, layout):
    with pytest.raises(CorruptDatabase, match=r"00007\.maps"):
        Segment(segment_file, length, layout, SEAL)
    assert not is_finished(segment_file, length, COUNT, layout, SEAL)


@pytest.mark.parametrize("damaged", range(COUNT))
def test_changed_byte_in_a_record_makes_only_that_record_unsound(segment_file, damaged):
    for byte in (0, CONTENT_BYTES // 2, CONTENT_BYTES - 1):
        flip(segment_file, 2 * PAGE + damaged * PAGE + byte)
        segment = Segment(segment_file, LENGTH, LAYOUT, SEAL)
        for _ in range(2):  # the second answer comes from memory
            sound = segment.are_sound(np.arange(COUNT))
            assert sound.tolist() == [record != damaged for record in range(COUNT)]
        flip(segment_file, 2 * PAGE + damaged * PAGE + byte)


def test_record_counts_as_checked_only_once_its_check_has_ended(segment_file, monkeypatch):
    """Other threads use records meanwhile."""
    segment, read, seen = Segment(segment_file, LENGTH, LAYOUT, SEAL), Segment._bytes_of, []

    def watched(self, record):
        seen.append(bool(self._checked[record]))
        return read(self, record)

    monkeypatch.setattr(Segment, "_bytes_of", watched)
    segment.are_sound(np.arange(COUNT))
    assert seen == [False] * COUNT


def test_segment_is_not_finished_if_writing_failed(tmp_path, records):
    path = tmp_path / "a.maps"

    def write() -> None:
        with SegmentWriter(path, LENGTH, COUNT, LAYOUT, SEAL) as writer:
            append(writer, records)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert_refused(path)


def test_segment_is_finished_with_all_its_records_and_not_before_its_writer_exits(tmp_path, records):
    path, seen = tmp_path / "a.maps", tmp_path / "as a kill would leave it.maps"
    with SegmentWriter(path, LENGTH, COUNT, LAYOUT, SEAL) as writer:
        append(writer, records)
        shutil.copyfile(path, seen)
    assert_refused(seen)
    assert is_finished(path, LENGTH, COUNT, LAYOUT, SEAL)
    assert not is_finished(path, LENGTH, COUNT + 1, LAYOUT, SEAL)


def test_header_is_written_once_the_rest_is_on_the_disk(tmp_path, records, monkeypatch):
    path, flushed = tmp_path / "a.maps", []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append(path.read_bytes()))
    with SegmentWriter(path, LENGTH, COUNT, LAYOUT, SEAL) as writer:
        append(writer, records)
    assert [content[:8] for content in flushed] == [bytes(8), b"ATTNMAPS"]
    assert flushed[0][PAGE:] == flushed[1][PAGE:]
    assert flushed[1] == path.read_bytes()


def test_segment_with_too_few_records_is_an_error_and_not_finished(tmp_path, records):
    path = tmp_path / "a.maps"
    with (
        pytest.raises(ValueError, match="1 of 4"),
        SegmentWriter(path, LENGTH, COUNT, LAYOUT, SEAL) as writer,
    ):
        append(writer, records[:1])
    assert_refused(path)


def assert_refused(path: Path) -> None:
    with pytest.raises(CorruptDatabase, match=path.name):
        Segment(path, LENGTH, LAYOUT, SEAL)
    assert not is_finished(path, LENGTH, COUNT, LAYOUT, SEAL)
