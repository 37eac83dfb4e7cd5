"""Records of attention maps in memory-mapped segment files.

A segment holds the records of one sequence length:

    [header, one page | record table, whole pages | record 0 | record 1 | ...]

A record is all stored maps of one sequence, layer after layer, in each layer the stored heads in the order
of damage, each an L x L matrix of 16-bit floats, or of a causal model only its lower triangle, row by row;
it begins on a page and is padded to whole pages. The record table says of each record its kind, the CRC-32 of
its maps and a digest of its token ids, keyed with the database's key (seal.py). The header names the database
and the model that the segment belongs to. It is written last: a segment without one was never finished.
"""

from __future__ import annotations

import hashlib
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from attncache_core.attention_maps.mapping import FileState, RecordFile
from attncache_core.attention_maps.seal import Seal
from attncache_core.errors import CorruptDatabase

PAGE_BYTES = 4096
_MAGIC = b"ATTNMAPS"
_VERSION = 2
# magic, version, length, records, bytes of a record's maps, dtype name, CRC-32 of the record table, id of the
# database, fingerprint of the model
_HEADER = struct.Struct("<8sIIQQ16sI16s32s")
TABLE_ROW = np.dtype([("kind", "<u4"), ("checksum", "<u4"), ("tokens", "V16")])
# Measured on a cold file: asking for records ahead halves the wait for those of 38 MB, takes a third off 2.4
# MB, and doubles it for those of 0.15 MB, which the system reads ahead by itself.
_READ_AHEAD_FROM = 2**20
_RECORDS_AHEAD = 16
# A file's modification time moves in steps of milliseconds and is set when a write begins, so a write that is
# still going on need not show. Records are not used until their file was left alone for so long.
_SETTLED_AFTER_SECONDS = 2.0
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


def segment_path(folder: Path, length: int) -> Path:
    """The segment file of sequences of `length` tokens in the database `folder`."""
    return folder / "maps" / f"{length:05d}.maps"


class Scrubbed(NamedTuple):
    """What was checked again."""

    bytes: int
    changed: int  # records that are no longer what they were when they were checked first


class RecordsChanged(CorruptDatabase):
    """Files of records were written to, or could not be read, while the records were used.

    Discard what was computed from these records. Records of other lengths are not affected.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        """`segments`: those whose files these are."""
        names = ", ".join(str(segment.path) for segment in segments)
        super().__init__(f"{names}: changed or unreadable while in use", field="database")
        self.lengths = {segment.length for segment in segments}


class Segment:
    """The records of one length, mapped read-only from their file, which stays open.

    The tensors it gives are views on the mapping: valid as long as the segment is open, never to be
    written to. Opening checks the header and the table. A record is checked when it is first used, and again
    when `refresh` has noticed that the file was written to. Where no guard was compiled (native/guard.py),
    the records are read into memory instead.
    """

    def __init__(self, path: Path, length: int, layout: RecordLayout, seal: Seal) -> None:
        self.path, self.length, self.layout, self._seal = path, length, layout, seal
        try:
            self.file = RecordFile(path)
        except OSError as error:
            raise CorruptDatabase(f"{path} is missing or cannot be read") from error
        self._seen = self.file.opened  # as the file was before the records were checked that count as checked
        self._settled_at = 0.0  # seconds, time.monotonic
        self.may_serve = True  # as `refresh` has found it
        self._lost = False
        self._table, self.head_digest = _read_head(self.file, length, layout, seal)
        self._checked = np.zeros(len(self._table), dtype=bool)
        self._sound = np.ones(len(self._table), dtype=bool)
        try:
            numbers = self.file.numbers(self.records_start, self.file_bytes - self.records_start)
        except OSError as error:
            raise CorruptDatabase(f"the records of {path} cannot be read: {error.strerror}") from error
        self._maps = torch.from_numpy(numbers).view(layout.dtype).view(len(self._table), -1)

    def __len__(self) -> int:
        """Records in the segment."""
        return len(self._table)

    @property
    def kinds(self) -> np.ndarray:
        """RecordKind of each record, uint32 [records]."""
        return self._table["kind"]

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of the segment's file."""
        return records_start(len(self._table)) + len(self._table) * self.layout.record_bytes(self.length)

    @property
    def records_start(self) -> int:
        """Byte of the file at which the first record begins."""
        return records_start(len(self._table))

    def holds_tokens(self, record: int, ids: Sequence[int]) -> bool:
        """Whether the record was made from exactly these token ids."""
        return bool(self._table["tokens"][record].tobytes() == self._seal.token_digest(ids))

    @property
    def distinct_texts(self) -> int:
        """Number of different token sequences that records were made from."""
        return len(self._record_of.keys() - {self._seal.token_digest([])})

    @cached_property
    def _record_of(self) -> dict[bytes, int]:
        return {row.tobytes(): record for record, row in enumerate(self._table["tokens"])}

    def record_of(self, ids: Sequence[int] | np.ndarray) -> int | None:
        """The record that was made from exactly these token ids, if there is one."""
        return self._record_of.get(self._seal.token_digest(ids))

    @property
    def is_lost(self) -> bool:
        """Whether the file was cut short or could not be read: no record may serve any more."""
        return self._lost or self.file.has_faulted

    def lose(self) -> None:
        """Let no record serve any more."""
        self._lost = True

    def refresh(self) -> None:
        """Look at the file again, before records of a batch are chosen, and set `may_serve`.

        If the file was written to since its records were checked, they count as unchecked, and none may serve
        for two seconds. If it was cut short or could not be read, the segment is lost for good.
        """
        state = self.file.state
        if state is None or state.size < self.file_bytes:
            self.lose()
        elif state != self._seen:
            if _content(state) != _content(self._seen):
                self._settled_at = time.monotonic() + _SETTLED_AFTER_SECONDS
            self._seen = state
            self._checked[:] = False
        self.may_serve = not self.is_lost and time.monotonic() >= self._settled_at

    def is_as_checked(self) -> bool:
        """Whether the file was not written to since `refresh`, and all that was read of it could be read."""
        state = self.file.state
        return state is not None and _content(state) == _content(self._seen) and not self.is_lost

    def are_sound(self, records: np.ndarray) -> np.ndarray:
        """Whether the maps of these records (int64 [n]) are those that were written: bool [n].

        The file is read when a record is first asked for; large ones ahead, while the first is checked.
        """
        unchecked = np.unique(records[~self._checked[records]]).tolist()
        for place, record in enumerate(unchecked):
            if place % _RECORDS_AHEAD == 0:
                self._read_ahead(unchecked[place + 1 : place + 1 + _RECORDS_AHEAD])
            self._sound[record] = zlib.crc32(self._bytes_of(record)) == self._table["checksum"][record]
            self._checked[record] = True
        return self._sound[records]

    def is_sound(self, record: int) -> bool:
        """Whether the maps of this record are those that were written; see are_sound."""
        if not self._checked[record]:
            self.are_sound(np.array([record]))
        return bool(self._sound[record])

    def scrub(self, step_bytes: int) -> Iterator[Scrubbed]:
        """Check again, one after another, the records that were found sound; see AttentionMapStore.scrub."""
        for record in np.flatnonzero(self._checked & self._sound).tolist():
            content, checksum = self._bytes_of(record), 0
            for start in range(0, len(content), step_bytes):
                piece = content[start : start + step_bytes]
                checksum = zlib.crc32(piece, checksum)
                yield Scrubbed(len(piece), 0)
            if self.is_lost:
                return
            if checksum != self._table["checksum"][record]:
                self._sound[record] = False
                yield Scrubbed(0, 1)

    def _bytes_of(self, record: int) -> memoryview:
        """The bytes of a record's maps, where they lie in memory."""
        maps = self._maps[record, : self.layout.elements(self.length)]
        return maps.view(torch.int16).numpy().data.cast("B")

    def _read_ahead(self, records: Sequence[int]) -> None:
        """Ask the system for large records that will be read soon."""
        size = self.layout.record_bytes(self.length)
        if size >= _READ_AHEAD_FROM:
            for record in records:
                self.file.will_need(self.records_start + record * size, size)

    def addresses(self, records: np.ndarray) -> np.ndarray:
        """Where these records (int64 [n]) begin in the process' memory, int64 [n]."""
        return self._maps.data_ptr() + records * self.layout.record_bytes(self.length)

    def layer_maps(self, record: int, layer: int, heads: int) -> torch.Tensor:
        """The first `heads` stored maps of a layer of one record, [heads, L, L].

        A view on the file, if maps are held as squares.
        """
        return self.squares(self._maps[record, None], layer, heads)[0]

    def gather_layer_maps(self, records: torch.Tensor, layer: int, heads: int) -> torch.Tensor:
        """Those of several records (int64 [n]) as one tensor [n, heads, L, L]: one copy out of the file.

        Raises RecordsChanged if the file cannot be read.
        """
        maps = self._part(self._maps, layer, heads).flatten(1).index_select(0, records)
        if self.is_lost:
            raise RecordsChanged([self])
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
            maps = squares.index_copy_(2, triangle(self.length), maps)
        return maps.unflatten(2, (self.length, self.length))


class AttentionMapStore:
    """All segments of a database."""

    def __init__(self, folder: Path, lengths: Sequence[int], layout: RecordLayout, seal: Seal) -> None:
        self.layout, self.seal = layout, seal
        self.segments = {
            length: Segment(segment_path(folder, length), length, layout, seal) for length in sorted(lengths)
        }

    @property
    def records(self) -> int:
        """Records of all lengths."""
        return sum(map(len, tuple(self.segments.values())))

    @property
    def file_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(segment.file_bytes for segment in tuple(self.segments.values()))

    def may_serve(self, length: int) -> bool:
        """Whether there are records of this length, and their file is not in doubt; see Segment.refresh."""
        return length in self.segments and self.segments[length].may_serve

    def drop_lost(self, lengths: Iterable[int]) -> tuple[int, ...]:
        """Look at the files of these lengths again, before their records serve; see Segment.refresh.

        Segments that are lost are dropped; returns their lengths. For the thread that uses the records.
        """
        held = {length: self.segments[length] for length in lengths if length in self.segments}
        for segment in held.values():
            segment.refresh()
        lost = tuple(length for length, segment in held.items() if segment.is_lost)
        for length in lost:
            del self.segments[length]
        return lost

    def scrub(self, step_bytes: int) -> Iterator[Scrubbed]:
        """Check again, once, all records that were found sound, and tell after about every `step_bytes`.

        A record that has changed serves nobody from then on. For a thread beside the one that uses records.
        """
        read = changed = 0
        for segment in tuple(self.segments.values()):
            for step in segment.scrub(step_bytes):
                read, changed = read + step.bytes, changed + step.changed
                if read >= step_bytes:
                    yield Scrubbed(read, changed)
                    read = changed = 0
        yield Scrubbed(read, changed)

    def record_of(self, ids: Sequence[int]) -> int | None:
        """The number, in the segment of its length, of the record of exactly these token ids, if any."""
        return self.segments[len(ids)].record_of(ids) if len(ids) in self.segments else None


def _content(state: FileState) -> tuple[int, int]:
    """The part that changes with the content alone: a file in use may be renamed or deleted."""
    return state.size, state.modified


@cache
def triangle(length: int) -> torch.Tensor:
    """Where each number of a packed map stands in the square of [L * L] numbers: int64 [cells]."""
    rows, columns = torch.tril_indices(length, length)
    return rows * length + columns


def is_finished(path: Path, length: int, records: int, layout: RecordLayout, seal: Seal) -> bool:
    """Whether `path` is a whole segment of this many records: what an interrupted build left usable."""
    try:
        return len(_read_head(RecordFile(path), length, layout, seal)[0]) == records
    except (OSError, CorruptDatabase):
        return False


def pack_header(length: int, records: int, layout: RecordLayout, seal: Seal, table_checksum: int) -> bytes:
    """The header of a whole segment, as `_read_head` reads it."""
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        length,
        records,
        layout.elements(length) * 2,
        _dtype_name(layout.dtype),
        table_checksum,
        bytes.fromhex(seal.id),
        bytes.fromhex(seal.fingerprint),
    )


def _read_head(file: RecordFile, length: int, layout: RecordLayout, seal: Seal) -> tuple[np.ndarray, str]:
    """The record table, and the SHA-256 of all that stands before the records.

    Raises CorruptDatabase unless header, table and size are those of a whole segment with this seal.
    """
    path = file.path
    try:
        header = _HEADER.unpack(file.read(_HEADER.size, 0))
        *kind, records, content, dtype, checksum, database, fingerprint = header
        expected = ([_MAGIC, _VERSION, length], layout.elements(length) * 2, _dtype_name(layout.dtype))
        if (kind, content, dtype.rstrip(b"\0")) != expected:
            raise CorruptDatabase(f"{path} is not a segment of length {length} of this database")
        if database.hex() != seal.id:
            raise CorruptDatabase(f"{path} belongs to another database")
        if fingerprint.hex() != seal.fingerprint:
            raise CorruptDatabase(f"{path} holds maps of another model")
        size = file.opened.size
        # Before the table is read: a damaged count may ask for more than there is memory.
        if size != records_start(records) + records * layout.record_bytes(length):
            raise CorruptDatabase(f"{path} has {size} bytes, which is not its {records} records")
        head = file.read(records_start(records), 0)
    except (OSError, struct.error) as error:
        raise CorruptDatabase(f"{path} is cut short or cannot be read") from error
    table = head[PAGE_BYTES : PAGE_BYTES + records * TABLE_ROW.itemsize]
    if zlib.crc32(table) != checksum:
        raise CorruptDatabase(f"the record table of {path} was changed since it was written")
    return np.frombuffer(table, dtype=TABLE_ROW), hashlib.sha256(head).hexdigest()


def records_start(records: int) -> int:
    """Byte of the file at which the first of so many records begins."""
    return PAGE_BYTES + _whole_pages(records * TABLE_ROW.itemsize)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _dtype_name(dtype: torch.dtype) -> bytes:
    return next(name for name, known in _DTYPES.items() if known is dtype).encode()
