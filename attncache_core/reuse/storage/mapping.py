"""Map files into memory so that changes are noticed and a truncated file does not crash the process.

    RecordFile     an open file with one part in memory: mapped under the guard, or read if there is no guard
    MappedRange    a range of addresses to which parts of files are mapped, under the guard

native/guard.py is the guard. Files stay open, so that a file that replaces another file is never read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attncache_core.native.guard import WatchedRange, guard

_MAP_FIXED = 0x10
# From a byte of mincore(2) to whether the page is absent: its lowest bit says that the page is in memory.
_ABSENT = bytes(1 - byte % 2 for byte in range(256))
_FAILED = ctypes.c_void_p(-1).value


class FileState(NamedTuple):
    """The attributes of a file that change when the file is written to."""

    size: int  # bytes
    modified: int  # time of the last change of the content, ns
    changed: int  # time of the last change of the content or of metadata such as the name, ns


class RecordFile:
    """An open file with one part in memory.

    If the guard was not compiled, the part is read instead of mapped. Later changes of the file then have no
    effect.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        # Not at exit, because other threads may still read then.
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.opened = _state(self.descriptor)
        self._range: MappedRange | None = None
        self._first = 0  # offset of the range in the file, in bytes

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset`, or fewer at the end of the file. Raises OSError."""
        return os.pread(self.descriptor, size, offset)

    def numbers(self, offset: int, size: int) -> np.ndarray:
        """Map or read `size` bytes at `offset`, and return them as int16 [size / 2].

        Call this method once. Do not write to the array. Raises OSError.
        """
        if guard() is None:
            return self._content(offset, size)
        # The offset of a mapping must be a multiple of the allocation granularity.
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        self._range, self._first = MappedRange(skipped + size, self.path), offset - skipped
        # torch has no read-only tensors, so the mapping is copy-on-write. Nothing ever writes to it.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._range.map(0, self.descriptor, offset - skipped, skipped + size, access, mmap.MAP_PRIVATE)
        return np.asarray(self._range)[skipped // 2 :]

    def _content(self, offset: int, size: int) -> np.ndarray:
        """Read a part of the file, int16 [size / 2]. Raises OSError."""
        numbers = np.empty(size // 2, dtype=np.int16)
        rest = numbers.data.cast("B")
        while rest:
            # One call reads at most 2 GB.
            count = os.preadv(self.descriptor, [rest], offset)
            if not count:
                raise OSError(f"{self.path} ends before its records do")
            rest, offset = rest[count:], offset + count
        return numbers

    @property
    def state(self) -> FileState | None:
        """The current state of the file, or None if the system cannot tell.

        If the part was read instead of mapped, the state when the file was opened.
        """
        if self._range is None:
            return self.opened
        try:
            return _state(self.descriptor)
        except OSError:
            return None

    @property
    def has_faulted(self) -> bool:
        """Whether a read of the mapped part has failed. A failed read gives zeros."""
        return self._range is not None and self._range.has_faulted

    def missing_bytes(self, offset: int, size: int) -> int:
        """Return how many of `size` bytes at `offset` are not in memory, in whole pages of the system.

        0 if the part is not mapped, if the system cannot tell, or if it does not tell this user.
        """
        return 0 if self._range is None else self._range.missing_bytes(offset - self._first, size)

    def will_need(self, offset: int, size: int) -> None:
        """Ask the system to read `size` bytes at `offset` ahead, if the part is mapped and the system can."""
        if self._range is not None and hasattr(os, "posix_fadvise"):  # macOS has no such call
            os.posix_fadvise(self.descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def _state(descriptor: int) -> FileState:
    state = os.fstat(descriptor)
    return FileState(state.st_size, state.st_mtime_ns, state.st_ctime_ns)


class MappedRange:
    """A range of addresses to which parts of files are mapped, under the guard.

    NumPy sees the range as an int16 array. The range is unmapped by `release`, or when neither the range nor
    an array of it is referenced any more.
    """

    def __init__(self, size: int, path: Path) -> None:
        """Reserve `size` bytes of addresses; path: the file, for errors. Raises OSError."""
        self.path, self.size = path, size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address: int = _libc().mmap(None, size, 0, flags, -1, 0)
        if self.address == _FAILED:
            raise OSError(ctypes.get_errno(), "no range of addresses can be reserved", str(path))
        watching = guard()
        assert watching is not None  # without a guard, nothing is mapped
        self._watched = watching.watch(self.address, size)
        self.release = weakref.finalize(self, _unmap, self.address, size, self._watched)
        self.release.atexit = False

    def map(self, at: int, descriptor: int, offset: int, size: int, access: int, flags: int) -> None:
        """Map `size` bytes of a file at `offset` to byte `at` of the range.

        access, flags: the protection and flags of mmap(2). Raises OSError.
        """
        address = _libc().mmap(self.address + at, size, access, flags | _MAP_FIXED, descriptor, offset)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), "a record cannot be mapped", str(self.path))

    def missing_bytes(self, at: int, size: int) -> int:
        """Return how many of `size` bytes from byte `at` of the range are not in memory, in whole pages.

        0 if the system cannot tell.
        """
        first = at - at % mmap.PAGESIZE
        pages = -(-(at + size - first) // mmap.PAGESIZE)
        resident = ctypes.create_string_buffer(pages)  # a byte for each page
        if _libc().mincore(self.address + first, pages * mmap.PAGESIZE, resident):
            return 0
        return resident.raw.translate(_ABSENT).count(1) * mmap.PAGESIZE

    @property
    def has_faulted(self) -> bool:
        """Whether a read of the range has failed. Undefined once the range is released."""
        return self._watched.has_faulted

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "<i2", "shape": (self.size // 2,), "data": (self.address, False)}


def _unmap(address: int, size: int, watched: WatchedRange) -> None:
    # The system may reuse the addresses as soon as they are unmapped, so the guard forgets them first.
    watched.forget()
    _libc().munmap(address, size)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int64),
    )
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
