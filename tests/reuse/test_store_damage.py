"""A truncated, changed or unfinished segment is refused. A changed record makes only itself unusable."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from core_models import SEAL, flip

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.storage.layout import MapForm, RecordKind, RecordLayout
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.segment_file import SegmentWriter, is_finished

PAGE = 4096
HEADER_BYTES, TABLE_ROW_BYTES = 100, 24
LAYOUT = RecordLayout((2, 0, 3), torch.bfloat16)
LENGTH, COUNT = 7, 4
CONTENT_BYTES = 5 * LENGTH**2 * 2  # a record fits on one page
FILE_BYTES = (2 + COUNT) * PAGE


def append(writer: SegmentWriter, number: int) -> None:
    random = np.random.default_rng(number)
    maps = [torch.from_numpy(random.random((heads, LENGTH, LENGTH))).bfloat16() for heads in (2, 0, 3)]
    writer.append(maps, [number] * LENGTH, RecordKind.STORED)


@pytest.fixture
def segment_file(tmp_path):
    path = tmp_path / "00007.maps"
    with SegmentWriter(path, LENGTH, COUNT, LAYOUT, SEAL) as writer:
        for number in range(COUNT):
            append(writer, number)
    assert path.stat().st_size == FILE_BYTES
    return path


# A change of the high bytes of the number of records (bytes 16 to 23) would need terabytes of memory.
def test_any_changed_byte_of_header_and_record_table_is_refused(segment_file):
    for offset in (*range(HEADER_BYTES), *range(PAGE, PAGE + COUNT * TABLE_ROW_BYTES, 5)):
        flip(segment_file, offset)
        assert_refused(segment_file)
        flip(segment_file, offset)
    assert is_finished(segment_file, LENGTH, COUNT, LAYOUT, SEAL)


@pytest.mark.parametrize(
    "size",
    [
        *(0, 10, HEADER_BYTES - 1, HEADER_BYTES, PAGE, PAGE + 30, 2 * PAGE),
        *(FILE_BYTES - PAGE, FILE_BYTES - 1, FILE_BYTES + PAGE),
    ],
)
def test_file_of_another_size_is_refused(segment_file, size):
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


def test_segment_is_not_finished_if_writing_failed(tmp_path):
    path = tmp_path / "a.maps"

    def write() -> None:
        with SegmentWriter(path, LENGTH, COUNT, LAYOUT, SEAL) as writer:
            for number in range(COUNT):
                append(writer, number)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert_refused(path)


def test_segment_is_finished_with_all_its_records_and_not_before_its_writer_exits(tmp_path):
    path, seen = tmp_path / "a.maps", tmp_path / "as a kill would leave it.maps"
    with SegmentWriter(path, LENGTH, COUNT, LAYOUT, SEAL) as writer:
        for number in range(COUNT):
            append(writer, number)
        shutil.copyfile(path, seen)
    assert_refused(seen)
    assert is_finished(path, LENGTH, COUNT, LAYOUT, SEAL)
    assert not is_finished(path, LENGTH, COUNT + 1, LAYOUT, SEAL)


def test_segment_with_too_few_records_is_an_error_and_not_finished(tmp_path):
    path = tmp_path / "a.maps"
    with (
        pytest.raises(ValueError, match="1 of 4"),
        SegmentWriter(path, LENGTH, COUNT, LAYOUT, SEAL) as writer,
    ):
        append(writer, 0)
    assert_refused(path)


def assert_refused(path: Path) -> None:
    with pytest.raises(CorruptDatabase, match=path.name):
        Segment(path, LENGTH, LAYOUT, SEAL)
    assert not is_finished(path, LENGTH, COUNT, LAYOUT, SEAL)
