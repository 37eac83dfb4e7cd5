"""Read the records of one sequence length from a segment file, and check records before use.

    Segment(path, ...)      opens the file and checks its head (segment_file.py)
    refresh -> may_serve    notices that the file was written to
    are_cold                says which records take longer to read than their use saves
    are_sound, is_sound     check the maps of records against their checksums, once per record
    layer_maps, ...         give the maps of a layer as tensors
    is_as_checked           confirms after use that the file has not changed meanwhile
    scrub                   checks records again in the background

layout.py describes the file.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.storage.layout import MapForm, RecordKind, RecordLayout, records_start, triangle
from attncache_core.reuse.storage.mapping import FileState, RecordFile
from attncache_core.reuse.storage.seal import Seal
from attncache_core.reuse.storage.segment_file import read_head

# Measured on a cold file: reading ahead halves the waiting time for records of 38 MB, saves a third for
# records of 2.4 MB, and doubles the time for records of 0.15 MB, which the system reads ahead by itself.
_READ_AHEAD_FROM_BYTES = 2**20
_RECORDS_AHEAD = 16

# The modification time of a file has a resolution of milliseconds and is set when a write begins, so a write
# in progress may be invisible. Records are used again once their file has not changed for this long.
_SETTLED_AFTER_SECONDS = 2.0


# A record that was in memory is not looked for again for this long, because the look takes microseconds.
_WARM_FOR_SECONDS = 1.0
# So many records of a segment that are not in memory are read at once, which tells the speed of the disk.
_TIMED_READS = 3


class Scrubbed(NamedTuple):
    """The result of one step of checking records again."""

    bytes: int  # bytes read
    changed: int  # records that have changed since their first check


class RecordsChanged(CorruptDatabase):
    """Segment files were written to, or could not be read, while their records were used.

    Discard all results that were computed from these records. Records of other lengths are not affected.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        """segments: the segments of these files."""
        names = ", ".join(str(segment.path) for segment in segments)
        super().__init__(f"{names}: changed or unreadable while in use", field="database")
        self.lengths = {segment.length for segment in segments}


class Segment:
    """The records of one sequence length, mapped read-only from a file that stays open.

    Tensors of a segment are views on the mapping. They are valid as long as the segment exists, and must not
    be written to. Opening checks the header and the record table. A record is checked at its first use, and
    again after `refresh` has noticed that the file was written to. If the guard was not compiled
    (native/guard.py), the records are read into memory instead of mapped.
    """

    def __init__(self, path: Path, length: int, layout: RecordLayout, seal: Seal) -> None:
        """Open a segment. Raises CorruptDatabase if the file is not a finished segment of this kind."""
        self.path, self.length, self.layout, self._seal = path, length, layout, seal
        try:
            self.file = RecordFile(path)
        except OSError as error:
            raise CorruptDatabase(f"{path} is missing or cannot be read") from error
        self._seen = self.file.opened  # state of the file before the records marked as checked were checked
        self.changes = 0  # number of times that `refresh` noticed a change of the content
        self._settled_at = 0.0  # seconds, time.monotonic
        self.may_serve = True  # whether records may be used; set by `refresh`
        self._lost = False
        self._table, self.head_digest = read_head(self.file, length, layout, seal)
        self.records_start = records_start(len(self._table))  # offset of the first record in the file, bytes
        self._record_bytes = layout.record_bytes(length)
        self.file_bytes = self.records_start + len(self._table) * self._record_bytes
        self._checked = np.zeros(len(self._table), dtype=bool)
        self._sound = np.ones(len(self._table), dtype=bool)
        self._warm_until = np.zeros(len(self._table))  # seconds, time.monotonic
        self._was_cold = np.zeros(len(self._table), dtype=bool)
        self._seconds_per_byte: list[float] = []  # of the timed reads
        try:
            numbers = self.file.numbers(self.records_start, self.file_bytes - self.records_start)
        except OSError as error:
            raise CorruptDatabase(f"the records of {path} cannot be read: {error.strerror}") from error
        self._maps = torch.from_numpy(numbers).view(layout.dtype).view(len(self._table), -1)
        self._first_address = self._maps.data_ptr()

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._table)

    @property
    def kinds(self) -> np.ndarray:
        """The RecordKind of each record, uint32 [records]."""
        return self._table["kind"]

    def holds_tokens(self, record: int, ids: Sequence[int]) -> bool:
        """Return whether the record was made from exactly these token ids."""
        return bool(self._table["tokens"][record].tobytes() == self._seal.token_digest(ids))

    @property
    def distinct_texts(self) -> int:
        """The number of different token sequences from which records were made."""
        return len(self._record_of)

    @cached_property
    def _record_of(self) -> dict[bytes, int]:
        stored = np.flatnonzero(self.kinds == RecordKind.STORED).tolist()
        return {self._table["tokens"][record].tobytes(): record for record in stored}

    def record_of(self, ids: Sequence[int] | np.ndarray) -> int | None:
        """Return the index of the record that was made from exactly these token ids; None if absent."""
        return self._record_of.get(self._seal.token_digest(ids)) if self._record_of else None

    @property
    def is_lost(self) -> bool:
        """Whether the file was truncated or could not be read, so that no record may be used any more."""
        return self._lost or self.file.has_faulted

    def lose(self) -> None:
        """Mark the segment as lost: no record may be used any more."""
        self._lost = True

    def refresh(self) -> None:
        """Look at the state of the file, and set `may_serve`. Call this method before records are chosen.

        If the file was written to since its records were checked, all records must be checked again, and no
        record may be used for two seconds. If the file was truncated or could not be read, the segment is
        lost for good.
        """
        state = self.file.state
        if state is None or state.size < self.file_bytes:
            self.lose()
        elif state != self._seen:
            if _content(state) != _content(self._seen):
                self.changes += 1
                self._settled_at = time.monotonic() + _SETTLED_AFTER_SECONDS
            self._seen = state
            self._checked[:] = False
        self.may_serve = not self.is_lost and time.monotonic() >= self._settled_at

    def is_as_checked(self, changes: int) -> bool:
        """Return whether the file is as it was when `changes` was read, and no read of it has failed.

        changes: `Segment.changes` when records were chosen. Another batch may have called `refresh` since.
        """
        state = self.file.state
        unchanged = state is not None and _content(state) == _content(self._seen)
        return unchanged and changes == self.changes and not self.is_lost

    def are_cold(self, records: np.ndarray, seconds: float) -> np.ndarray:
        """Return which records (int64 [n]) would take longer than `seconds` to read from the disk, bool [n].

        A record in memory is not cold. The system is told to read a cold record when the record is cold for
        the second time, so that it is in memory soon: reading takes processor time too, which a record that
        is needed once does not give back. The first records of the segment that are not in memory are read at
        once, to learn how fast the disk reads records of this size. If the disk fails, the segment is lost.
        """
        now = time.monotonic()
        unknown = self._warm_until[records] < now
        if not unknown.any():
            return unknown
        cold = {record: self._is_cold(record, seconds) for record in set(records[unknown].tolist())}
        self._warm_until[[record for record, is_cold in cold.items() if not is_cold]] = (
            now + _WARM_FOR_SECONDS
        )
        return np.array([cold.get(record, False) for record in records.tolist()])

    def _is_cold(self, record: int, seconds: float) -> bool:
        size, offset = self._record_bytes, self.records_start + record * self._record_bytes
        missing = self.file.missing_bytes(offset, size)
        if not missing:
            return False
        if len(self._seconds_per_byte) < _TIMED_READS:
            started = time.perf_counter()
            try:
                self.file.read(size, offset)
            except OSError:
                self.lose()
                return True
            self._seconds_per_byte.append((time.perf_counter() - started) / missing)
            return False
        if missing * statistics.median(self._seconds_per_byte) <= seconds:
            return False
        if self._was_cold[record]:
            self.file.will_need(offset, size)
        self._was_cold[record] = not self._was_cold[record]
        return True

    def are_sound(self, records: np.ndarray) -> np.ndarray:
        """Return whether the maps of these records (int64 [n]) match their checksums, bool [n].

        A record is read from the file and checked at its first use. Large records are read ahead.
        """
        found = records[~self._checked[records]]
        unchecked = np.unique(found).tolist() if len(found) else ()
        for index, record in enumerate(unchecked):
            if index % _RECORDS_AHEAD == 0:
                self._read_ahead(unchecked[index + 1 : index + 1 + _RECORDS_AHEAD])
            self._sound[record] = zlib.crc32(self._bytes_of(record)) == self._table["checksum"][record]
            self._checked[record] = True
        return self._sound[records]

    def is_sound(self, record: int) -> bool:
        """Return whether the maps of this record match their checksum; see are_sound."""
        if not self._checked[record]:
            self.are_sound(np.array([record]))
        return bool(self._sound[record])

    def scrub(self, step_bytes: int) -> Iterator[Scrubbed]:
        """Check all records again that were found sound, one by one; see AttentionMapStore.scrub."""
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
        """Return the bytes of a record's maps, as a view on the mapping."""
        maps = self._maps[record, : self.layout.elements(self.length)]
        return maps.view(torch.int16).numpy().data.cast("B")

    def _read_ahead(self, records: Sequence[int]) -> None:
        """Ask the system to read records ahead, if they are large."""
        if self._record_bytes >= _READ_AHEAD_FROM_BYTES:
            for record in records:
                self.file.will_need(self.records_start + record * self._record_bytes, self._record_bytes)

    def addresses(self, records: np.ndarray) -> np.ndarray:
        """Return the memory addresses of these records (int64 [n]), int64 [n]."""
        return self._first_address + records * self._record_bytes

    def layer_maps(self, record: int, layer: int, heads: int) -> torch.Tensor:
        """Return the first `heads` stored maps of a layer of one record, [heads, L, L].

        The tensor is a view on the file if maps are stored as squares, otherwise a copy.
        """
        return self._squares(self._part(self._maps[record, None], layer, heads))[0]

    def gather_layer_maps(self, records: torch.Tensor, layer: int, heads: int) -> torch.Tensor:
        """Copy the first `heads` stored maps of a layer of several records (int64 [n]): [n, heads, L, L].

        Raises RecordsChanged if the file cannot be read.
        """
        maps = self._part(self._maps, layer, heads).flatten(1).index_select(0, records)
        if self.is_lost:
            raise RecordsChanged([self])
        return self._squares(maps.unflatten(1, (heads, self.layout.cells(self.length))))

    def _part(self, records: torch.Tensor, layer: int, heads: int) -> torch.Tensor:
        """Return a view [n, heads, cells] of the first `heads` maps of a layer in records [n, numbers]."""
        cells = self.layout.cells(self.length)
        start = self.layout.heads_before[layer] * cells
        return records[:, start : start + heads * cells].unflatten(1, (heads, cells))

    def _squares(self, maps: torch.Tensor) -> torch.Tensor:
        """Turn maps [n, heads, cells] in the form of the records into [n, heads, L, L]."""
        if self.layout.form is MapForm.PACKED:
            squares = maps.new_zeros(*maps.shape[:2], self.length**2)
            maps = squares.index_copy_(2, triangle(self.length), maps)
        return maps.unflatten(2, (self.length, self.length))


def _content(state: FileState) -> tuple[int, int]:
    """Return the part of a state that only a change of the content changes, not a renaming or deletion."""
    return state.size, state.modified
