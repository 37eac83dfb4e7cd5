"""Scattered records as one tensor without a copy: their pages mapped side by side.

AttnCache (the papers) reads the records of a batch like this: a range of addresses is reserved, and each
record's pages of the file are mapped onto its part of the range (mmap with MAP_FIXED).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from attncache_core.attention_maps.store import PAGE_BYTES, Segment

_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
# The rest of the process maps memory too: this many mappings are left to it.
_MAPPINGS_FOR_OTHERS = 4096
_FEWEST_MAPPINGS = 65530  # Linux' own default of vm.max_map_count


@contextmanager
def map_side_by_side(segment: Segment, records: np.ndarray) -> Iterator[torch.Tensor | None]:
    """The numbers of these records (int64 [n]) as a tensor [n, numbers], a view on the file, never to be
    written to; unmapped when the context is left.

    None where the system allows no more mappings (vm.max_map_count) or has larger pages than records have.
    """
    if mmap.PAGESIZE != PAGE_BYTES or len(records) > _mappings_left():
        yield None
        return
    size = segment.layout.record_bytes(segment.length)
    total = size * len(records)
    libc = _libc()
    reserved = libc.mmap(None, total, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        raise OSError(ctypes.get_errno(), "no range of addresses can be reserved", str(segment.path))
    try:
        with segment.path.open("rb") as file:
            for place, record in enumerate(records.tolist()):
                at = libc.mmap(
                    reserved + place * size,
                    size,
                    mmap.PROT_READ,
                    mmap.MAP_SHARED | _MAP_FIXED,
                    file.fileno(),
                    segment.records_start + record * size,
                )
                if at == _FAILED:
                    raise OSError(ctypes.get_errno(), "a record cannot be mapped", str(segment.path))
        numbers = np.ctypeslib.as_array((ctypes.c_int16 * (total // 2)).from_address(reserved))
        yield torch.from_numpy(numbers).view(segment.layout.dtype).view(len(records), -1)
    finally:
        libc.munmap(reserved, total)


def _mappings_left() -> int:
    """Mappings that may still be made."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
        with Path("/proc/self/maps").open("rb") as lines:
            used = sum(1 for _ in lines)
    except OSError:
        allowed, used = _FEWEST_MAPPINGS, 0
    return allowed - used - _MAPPINGS_FOR_OTHERS


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int64),
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
