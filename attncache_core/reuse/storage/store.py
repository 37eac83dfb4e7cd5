"""Hold all segments of a database: one memory-mapped file of records per sequence length.

    AttentionMapStore -> Segment (segment.py) -> RecordFile (mapping.py)

layout.py describes the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attncache_core.reuse.storage.layout import RecordLayout, segment_path
from attncache_core.reuse.storage.seal import Seal
from attncache_core.reuse.storage.segment import Scrubbed, Segment


class AttentionMapStore:
    """The segments of a database, by sequence length."""

    def __init__(self, folder: Path, lengths: Sequence[int], layout: RecordLayout, seal: Seal) -> None:
        self.layout, self.seal = layout, seal
        self.segments = {
            length: Segment(segment_path(folder, length), length, layout, seal) for length in sorted(lengths)
        }

    @property
    def records(self) -> int:
        """The number of records of all lengths."""
        return sum(map(len, tuple(self.segments.values())))

    @property
    def file_bytes(self) -> int:
        """The size of all segment files in bytes."""
        return sum(segment.file_bytes for segment in tuple(self.segments.values()))

    def may_serve(self, length: int) -> bool:
        """Return whether records of this length exist and may be used; see Segment.refresh."""
        return length in self.segments and self.segments[length].may_serve

    def drop_lost(self, lengths: Iterable[int]) -> tuple[int, ...]:
        """Refresh the segments of these lengths, drop lost segments, and return the lengths dropped.

        See Segment.refresh. Call this method before records are used, on the thread that uses the records.
        """
        held = {length: self.segments[length] for length in lengths if length in self.segments}
        for segment in held.values():
            segment.refresh()
        lost = tuple(length for length, segment in held.items() if segment.is_lost)
        if lost:
            # Plans of batches that run at present keep the old dictionary.
            self.segments = {
                length: segment for length, segment in self.segments.items() if length not in lost
            }
        return lost

    def scrub(self, step_bytes: int) -> Iterator[Scrubbed]:
        """Check all records again that were found sound, and report after about every `step_bytes` bytes.

        A record that has changed is not used any more. This method may run on another thread than the one
        that uses the records.
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
        """Return the index of the record of these token ids in its segment; None if there is none."""
        return self.segments[len(ids)].record_of(ids) if len(ids) in self.segments else None
