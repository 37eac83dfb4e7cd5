"""Map scattered records side by side in memory, so that they form one tensor without a copy.

The AttnCache papers read the records of a batch in this way: a range of addresses is reserved, and the pages
of each record are mapped onto a part of the range (mmap with MAP_FIXED).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from attncache_core.native.guard import guard
from attncache_core.reuse.storage.layout import PAGE_BYTES
from attncache_core.reuse.storage.mapping import MappedRange
from attncache_core.reuse.storage.segment import Segment

# The rest of the process maps memory too, so this number of mappings is left unused.
_MAPPINGS_FOR_OTHERS = 4096
_FEWEST_MAPPINGS = 65530  # the default of vm.max_map_count in Linux


@contextmanager
def map_side_by_side(segment: Segment, records: np.ndarray) -> Iterator[torch.Tensor | None]:
    """Map these records (int64 [n]) as one tensor [n, numbers] until the context is left.

    The tensor is a view on the file and must not be written to. Numbers that cannot be read are zero, and the
    segment is then marked as lost. Yields None if the system allows no more mappings (vm.max_map_count), if
    the system's pages are larger than the pages of records, or if the guard was not compiled.
    """
    if guard() is None or mmap.PAGESIZE != PAGE_BYTES or len(records) > _mappings_left():
        yield None
        return
    size = segment.layout.record_bytes(segment.length)
    side_by_side = MappedRange(size * len(records), segment.path)
    try:
        for index, record in enumerate(records.tolist()):
            offset = segment.records_start + record * size
            side_by_side.map(
                index * size, segment.file.descriptor, offset, size, mmap.PROT_READ, mmap.MAP_SHARED
            )
        numbers = torch.from_numpy(np.asarray(side_by_side))
        yield numbers.view(segment.layout.dtype).view(len(records), -1)
    finally:
        if side_by_side.has_faulted:
            segment.lose()
        side_by_side.release()


def _mappings_left() -> int:
    """Return how many more mappings may be made."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
        with Path("/proc/self/maps").open("rb") as lines:
            used = sum(1 for _ in lines)
    except OSError:
        allowed, used = _FEWEST_MAPPINGS, 0
    return allowed - used - _MAPPINGS_FOR_OTHERS
