"""Scattered records as one tensor without a copy: their pages mapped side by side.

AttnCache (the papers) reads the records of a batch like this: a range of addresses is reserved, and each
record's pages of the file are mapped onto its part of the range (mmap with MAP_FIXED).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from attncache_core.attention_maps.mapping import MappedRange
from attncache_core.attention_maps.store import PAGE_BYTES, Segment
from attncache_core.native.guard import guard

# The rest of the process maps memory too: this many mappings are left to it.
_MAPPINGS_FOR_OTHERS = 4096
_FEWEST_MAPPINGS = 65530  # Linux' own default of vm.max_map_count


@contextmanager
def map_side_by_side(segment: Segment, records: np.ndarray) -> Iterator[torch.Tensor | None]:
    """The numbers of these records (int64 [n]) as a tensor [n, numbers], a view on the file, never to be
    written to; unmapped when the context is left. What cannot be read is zeros, and the segment is lost then.

    None where the system allows no more mappings (vm.max_map_count), where it has larger pages than records
    have, and where no guard was compiled.
    """
    if guard() is None or mmap.PAGESIZE != PAGE_BYTES or len(records) > _mappings_left():
        yield None
        return
    size = segment.layout.record_bytes(segment.length)
    side_by_side = MappedRange(size * len(records), segment.path)
    try:
        for place, record in enumerate(records.tolist()):
            offset = segment.records_start + record * size
            side_by_side.map(
                place * size, segment.file.descriptor, offset, size, mmap.PROT_READ, mmap.MAP_SHARED
            )
        numbers = torch.from_numpy(np.asarray(side_by_side))
        yield numbers.view(segment.layout.dtype).view(len(records), -1)
    finally:
        if side_by_side.has_faulted:
            segment.lose()
        side_by_side.release()


def _mappings_left() -> int:
    """Mappings that may still be made."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
        with Path("/proc/self/maps").open("rb") as lines:
            used = sum(1 for _ in lines)
    except OSError:
        allowed, used = _FEWEST_MAPPINGS, 0
    return allowed - used - _MAPPINGS_FOR_OTHERS
