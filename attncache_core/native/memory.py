"""Memory that compiled code reads: its addresses, and large pages for what stays."""

from __future__ import annotations

import mmap
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np
import torch

_ALIGNMENT = 64
# MAP_NORESERVE of Linux, which Python names from 3.13 on.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
# Packed weights share mappings of this size. A weight that is larger has a mapping of its own.
_SHARED_BYTES = 32 * 2**20
_LARGE_PAGE_BYTES = 2 * 2**20


def address(array: np.ndarray) -> int:
    """Return the address of an array's numbers, one after another. (`array.ctypes.data` is slower.)"""
    assert array.flags.c_contiguous
    found: int = array.__array_interface__["data"][0]
    return found


def large_pages(size: int) -> mmap.mmap:
    """Return memory of `size` bytes that are 0, in pages of 2 MiB where the system has them.

    A page gets memory when it is first written, several times as fast as small pages do. Processors find
    numbers faster in large pages: they remember the places of some thousand pages.
    """
    # Systems give no large pages to shared memory by default. Private memory would be reserved again for each
    # process that is forked, and Linux refuses that for more than the machine has.
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if large_page_bytes() == _LARGE_PAGE_BYTES:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


@cache
def large_page_bytes() -> int:
    """Return the size of the system's large pages; 0 without them.

    Where small pages have 64 KiB, large pages have 512 MiB: too much to clear when one block is written.
    """
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


class _SharedPages:
    """Large pages that tensors share. A mapping lives as long as one of its tensors. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        self._used = 0  # bytes of the mapping

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Return a mapping, and the offset of `size` bytes in it that nothing else has."""
        if size > _SHARED_BYTES:
            return large_pages(size), 0
        with self._lock:
            if self._mapping is None or self._used + size > _SHARED_BYTES:
                self._mapping, self._used = large_pages(_SHARED_BYTES), 0
            first = self._used
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
            return self._mapping, first


_pages = _SharedPages()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of `x` in large pages, at an address that is a multiple of 64 bytes."""
    mapping, first = _pages.take(x.numel() * x.element_size())
    copy = torch.frombuffer(mapping, dtype=x.dtype, count=x.numel(), offset=first).view(x.shape)
    return copy.copy_(x)
