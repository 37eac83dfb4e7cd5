"""Read the records of a batch as the AttnCache papers do: mapped side by side into one range of addresses.

    range of addresses   | record 4 | record 0 | record 2 |     mmap with MAP_FIXED, a call for each record
    file                 | 0 | 1 | 2 | 3 | 4 | 5 |

The server reads each record where it lies, which is faster (docs/benchmarks.md). `MapsSideBySide` is a reuse
strategy with segments of its own: asked for the addresses of records, such a segment gives addresses in the
range. The mappings are dropped when the batch is done. torch's operators ask for no addresses, so they read
records in place.
"""

from __future__ import annotations

import mmap

import numpy as np

from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.plan import ReusePlan
from attncache_core.reuse.storage.mapping import MappedRange
from attncache_core.reuse.storage.segment import Segment
from attncache_core.text.token_batch import TokenBatch


class MapsSideBySide(MapReuse):
    """Reuse of a database whose records are mapped side by side for each batch. One batch runs at a time."""

    def __init__(self, database: AttentionDatabase) -> None:
        """Open the segments of the database again. Raises CorruptDatabase."""
        super().__init__(database)
        store = database.search.store
        self._segments = {
            length: SideBySideSegment(segment.path, length, store.layout, store.seal)
            for length, segment in store.segments.items()
        }
        store.segments = dict(self._segments)

    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> ReusePlan:
        """See ReuseStrategy.plan. Drops the mappings of a batch that failed."""
        self._unmap()
        return super().plan(batch, allowed)

    def commit(self, plan: ReusePlan, batch: TokenBatch) -> None:
        """See ReuseStrategy.commit. Drops the mappings of the batch."""
        super().commit(plan, batch)
        self._unmap()

    def _unmap(self) -> None:
        for segment in self._segments.values():
            segment.unmap()


class SideBySideSegment(Segment):
    """The records of one length; those of a batch are mapped side by side."""

    _ranges: tuple[MappedRange, ...] = ()

    def addresses(self, records: np.ndarray) -> np.ndarray:
        """Map these records (int64 [n]) side by side, and return their addresses, int64 [n].

        The mappings last until `unmap`. Raises OSError if the system allows no more mappings, or if its pages
        are larger than the pages of records.
        """
        size = self.layout.record_bytes(self.length)
        side_by_side = MappedRange(size * len(records), self.path)
        self._ranges += (side_by_side,)
        for index, record in enumerate(records.tolist()):
            offset = self.records_start + record * size
            side_by_side.map(
                index * size, self.file.descriptor, offset, size, mmap.PROT_READ, mmap.MAP_SHARED
            )
        return side_by_side.address + size * np.arange(len(records))

    def unmap(self) -> None:
        """Drop the mappings of all batches."""
        for side_by_side in self._ranges:
            side_by_side.release()
        self._ranges = ()
