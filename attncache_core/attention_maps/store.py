"""Records of attention maps in memory-mapped segment files.

A segment holds the records of one sequence length:

    [header, one page | record table, whole pages | record 0 | record 1 | ...]

A record is all stored maps of one sequence, layer after layer, in each layer the stored heads in the order
of damage, each an L x L matrix of 16-bit floats, or of a causal model only its lower triangle, row by row;
it begins on a page and is padded to whole pages. The record table says of each record its kind, the CRC-32 of
its maps and a digest of its token ids. The header is written last: a segment without one was never finished.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attncache_core.errors import CorruptDatabase

PAGE_BYTES = 4096
_MAGIC = b"ATTNMAPS"
_VERSION = 1
# magic, version, length, records, bytes of a record's maps, dtype name, CRC-32 of the record table
_HEADER = struct.Struct("<8sIIQQ16sI")
_TABLE_ROW = np.dtype([("kind", "<u4"), ("checksum", "<u4"), ("tokens", "V16")])
# Measured on a cold file: asking for records ahead halves the wait for those of 38 MB, takes a third off 2.4
# MB, and doubles it for those of 0.15 MB, which the system reads ahead by itself.
_READ_AHEAD_FROM = 2**20
_RECORDS_AHEAD = 16
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class RecordKind(IntEnum):
    """What a record's maps are."""

    STORED = 0  # the maps of one sentence
    PROTOTYPE = 1  # synthetic: the mean of many alike
    MEAN = 2  # synthetic: the mean of all of its length


class MapForm(StrEnum):
    """How a map lies in its record."""

    SQUARE = "square"  # L x L numbers
    PACKED = "packed"  # the lower triangle, row by row: all that a causal map has


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where a layer's maps stand in a record, and in which form."""

    stored_heads: tuple[int, ...]  # layer -> heads held
    dtype: torch.dtype  # torch.bfloat16 or torch.float16
    form: MapForm = MapForm.SQUARE

    def cells(self, length: int | np.ndarray) -> Any:
        """Numbers of one map of `length` tokens, or of each length of an array."""
        return length * (length + 1) // 2 if self.form is MapForm.PACKED else length * length

    def elements(self, length: int) -> int:
        """Numbers in a record of sequences of `length` tokens."""
        return sum(self.stored_heads) * self.cells(length)

    def record_bytes(self, length: int) -> int:
        """Bytes of a record in its file, padding included."""
        return _whole_pages(self.elements(length) * 2)

    def heads_before(self, layer: int) -> int:
        """Maps of a record that stand before those of a layer."""
        return sum(self.stored_heads[:layer])


def token_digest(ids: Sequence[int] | np.ndarray) -> bytes:
    """16 bytes that identify a token sequence."""
    return blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=16).digest()


def segment_path(folder: Path, length: int) -> Path:
    """The segment file of sequences of `length` tokens in the database `folder`."""
    return folder / "maps" / f"{length:05d}.maps"


class SegmentWriter:
    """Writes one segment. A context manager: left normally, the segment is whole and on disk."""

    def __init__(self, path: Path, length: int, records: int, layout: RecordLayout) -> None:
        self._path, self._length, self._layout = path, length, layout
        self._table = np.zeros(records, dtype=_TABLE_ROW)
        self._written = 0

    def __enter__(self) -> SegmentWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        self._file.seek(_records_start(len(self._table)))
        return self

    def append(self, maps: Sequence[torch.Tensor], ids: Sequence[int], kind: RecordKind) -> None:
        """One record: for each layer its maps [stored heads, L, L], of the layout's dtype."""
        if self._layout.form is MapForm.PACKED:
            maps = [layer.flatten(1)[:, _triangle(self._length)] for layer in maps]
        flat = torch.cat([layer.reshape(-1) for layer in maps])
        if flat.dtype != self._layout.dtype or len(flat) != self._layout.elements(self._length):
            raise ValueError(f"a record of {len(flat)} {flat.dtype} does not fit this segment")
        content = flat.view(torch.int16).numpy().tobytes()
        self._table[self._written] = (kind, zlib.crc32(content), token_digest(ids))
        self._file.write(content.ljust(self._layout.record_bytes(self._length), b"\0"))
        self._written += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is not None:
                return
            if self._written != len(self._table):
                raise ValueError(f"{self._written} of {len(self._table)} records were written")
            table = self._table.tobytes()
            self._file.seek(PAGE_BYTES)
            self._file.write(table)
            # Records and table reach the disk before the header that vouches for them.
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.seek(0)
            self._file.write(self._header(zlib.crc32(table)))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _header(self, table_checksum: int) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self._length,
            len(self._table),
            self._layout.elements(self._length) * 2,
            _dtype_name(self._layout.dtype),
            table_checksum,
        )


class Segment:
    """The records of one length, mapped read-only from their file.

    The tensors it gives are views on the mapping: valid as long as the segment is open, never to be
    written to. Opening checks the header and the table; a record is checked when it is first used.
    """

    def __init__(self, path: Path, length: int, layout: RecordLayout) -> None:
        self.path, self.length, self.layout = path, length, layout
        self._table = _read_table(path, length, layout)
        self._checked = np.zeros(len(self._table), dtype=bool)
        self._sound = np.ones(len(self._table), dtype=bool)
        # Copy-on-write, since torch has no read-only tensors; nothing ever writes.
        mapped: Any = np.memmap(path, dtype=np.int16, mode="c", offset=self.records_start)
        self._file: mmap.mmap = mapped.base
        # NumPy maps from a whole number of allocation steps on; records are whole pages from there.
        self._first_byte = self.records_start % mmap.ALLOCATIONGRANULARITY
        self._maps = torch.from_numpy(mapped).view(layout.dtype).view(len(self._table), -1)

    def __len__(self) -> int:
        """Records in the segment."""
        return len(self._table)

    @property
    def kinds(self) -> np.ndarray:
        """RecordKind of each record, uint32 [records]."""
        return self._table["kind"]

    @property
    def file_bytes(self) -> int:
        """Bytes of the segment's file."""
        return _records_start(len(self._table)) + len(self._table) * self.layout.record_bytes(self.length)

    @property
    def records_start(self) -> int:
        """Byte of the file at which the first record begins."""
        return _records_start(len(self._table))

    def holds_tokens(self, record: int, ids: Sequence[int]) -> bool:
        """Whether the record was made from exactly these token ids."""
        return bool(self._table["tokens"][record].tobytes() == token_digest(ids))

    @cached_property
    def _record_of(self) -> dict[bytes, int]:
        return {row.tobytes(): record for record, row in enumerate(self._table["tokens"])}

    def record_of(self, ids: Sequence[int] | np.ndarray) -> int | None:
        """The record that was made from exactly these token ids, if there is one."""
        return self._record_of.get(token_digest(ids))

    def are_sound(self, records: np.ndarray) -> np.ndarray:
        """Whether the maps of these records (int64 [n]) are those that were written: bool [n].

        The file is read when a record is first asked for; large ones ahead, while the first is checked.
        """
        unchecked = np.unique(records[~self._checked[records]]).tolist()
        for place, record in enumerate(unchecked):
            if place % _RECORDS_AHEAD == 0:
                self._read_ahead(unchecked[place + 1 : place + 1 + _RECORDS_AHEAD])
            content = self._maps[record, : self.layout.elements(self.length)].view(torch.int16).numpy()
            self._sound[record] = zlib.crc32(content.data) == self._table["checksum"][record]
            self._checked[record] = True
        return self._sound[records]

    def is_sound(self, record: int) -> bool:
        """Whether the maps of this record are those that were written; see are_sound."""
        if not self._checked[record]:
            self.are_sound(np.array([record]))
        return bool(self._sound[record])

    def _read_ahead(self, records: Sequence[int]) -> None:
        """Ask the system for large records that will be read soon."""
        size = self.layout.record_bytes(self.length)
        # It takes whole pages of its own size only.
        if size >= _READ_AHEAD_FROM and mmap.PAGESIZE == PAGE_BYTES:
            for record in records:
                self._file.madvise(mmap.MADV_WILLNEED, self._first_byte + record * size, size)

    def addresses(self, records: np.ndarray) -> np.ndarray:
        """Where these records (int64 [n]) begin in the process' memory, int64 [n]."""
        return self._maps.data_ptr() + records * self.layout.record_bytes(self.length)

    def layer_maps(self, record: int, layer: int, heads: int) -> torch.Tensor:
        """The first `heads` stored maps of a layer of one record, [heads, L, L].

        A view on the file, if maps are held as squares.
        """
        return self.squares(self._maps[record, None], layer, heads)[0]

    def gather_layer_maps(self, records: torch.Tensor, layer: int, heads: int) -> torch.Tensor:
        """Those of several records (int64 [n]) as one tensor [n, heads, L, L]: one copy out of the file."""
        maps = self._part(self._maps, layer, heads).flatten(1).index_select(0, records)
        return self._squares(maps.unflatten(1, (heads, self.layout.cells(self.length))))

    def squares(self, records: torch.Tensor, layer: int, heads: int) -> torch.Tensor:
        """The first `heads` maps of a layer in whole records [n, numbers]: [n, heads, L, L].

        A view on the records, if maps are held as squares.
        """
        return self._squares(self._part(records, layer, heads))

    def _part(self, records: torch.Tensor, layer: int, heads: int) -> torch.Tensor:
        """The first `heads` maps of a layer in whole records [n, numbers]: a view [n, heads, cells]."""
        cells = self.layout.cells(self.length)
        start = self.layout.heads_before(layer) * cells
        return records[:, start : start + heads * cells].unflatten(1, (heads, cells))

    def _squares(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps [n, heads, cells] as they lie in records, as [n, heads, L, L]."""
        if self.layout.form is MapForm.PACKED:
            squares = maps.new_zeros(*maps.shape[:2], self.length**2)
            maps = squares.index_copy_(2, _triangle(self.length), maps)
        return maps.unflatten(2, (self.length, self.length))


class AttentionMapStore:
    """All segments of a database."""

    def __init__(self, folder: Path, lengths: Sequence[int], layout: RecordLayout) -> None:
        self.layout = layout
        self.segments = {
            length: Segment(segment_path(folder, length), length, layout) for length in sorted(lengths)
        }

    @property
    def records(self) -> int:
        """Records of all lengths."""
        return sum(map(len, self.segments.values()))

    @property
    def file_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(segment.file_bytes for segment in self.segments.values())

    def record_of(self, ids: Sequence[int]) -> int | None:
        """The number, in the segment of its length, of the record of exactly these token ids, if any."""
        return self.segments[len(ids)].record_of(ids) if len(ids) in self.segments else None


@cache
def _triangle(length: int) -> torch.Tensor:
    """Where each number of a packed map stands in the square of [L * L] numbers: int64 [cells]."""
    rows, columns = torch.tril_indices(length, length)
    return rows * length + columns


def is_finished(path: Path, length: int, records: int, layout: RecordLayout) -> bool:
    """Whether `path` is a whole segment of this many records: what an interrupted build left usable."""
    try:
        return len(_read_table(path, length, layout)) == records
    except CorruptDatabase:
        return False


def _read_table(path: Path, length: int, layout: RecordLayout) -> np.ndarray:
    """The record table, once the header, the file's size and the table's checksum have been found right."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            magic, version, held, records, content, dtype, checksum = _HEADER.unpack(header)
            expected = (_MAGIC, _VERSION, length, layout.elements(length) * 2, _dtype_name(layout.dtype))
            if (magic, version, held, content, dtype.rstrip(b"\0")) != expected:
                raise CorruptDatabase(f"{path} is not a segment of length {length} of this database")
            size = os.fstat(file.fileno()).st_size
            # Before the table is read: a damaged count may ask for more than there is memory.
            if size != _records_start(records) + records * layout.record_bytes(length):
                raise CorruptDatabase(f"{path} has {size} bytes, which is not its {records} records")
            file.seek(PAGE_BYTES)
            table = file.read(records * _TABLE_ROW.itemsize)
    except (OSError, struct.error) as error:
        raise CorruptDatabase(f"{path} is missing or cut short") from error
    if zlib.crc32(table) != checksum:
        raise CorruptDatabase(f"the record table of {path} was changed since it was written")
    return np.frombuffer(table, dtype=_TABLE_ROW)


def _records_start(records: int) -> int:
    return PAGE_BYTES + _whole_pages(records * _TABLE_ROW.itemsize)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _dtype_name(dtype: torch.dtype) -> bytes:
    return next(name for name, known in _DTYPES.items() if known is dtype).encode()
