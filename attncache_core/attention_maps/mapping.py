"""Files in memory: their changes are noticed, and a file that is cut short does not end the process.

    RecordFile     a file that stays open, with a part of it in memory: mapped under the guard, else read
    MappedRange    addresses that parts of files are mapped to, under the guard

A file stays open, so that another file that replaces it is never read.
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
_FAILED = ctypes.c_void_p(-1).value


class FileState(NamedTuple):
    """What the system says of a file that changes when the file is written to."""

    size: int  # bytes
    modified: int  # ns; of the content
    changed: int  # ns; of the content or of anything else about the file, its name included


class RecordFile:
    """An open file of which one part is held in memory.

    Where no guard was compiled, the part is read instead of mapped. Later changes of the file do not matter
    then.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        # Not at exit: other threads may still read.
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.opened = _state(self.descriptor)
        self._range: MappedRange | None = None

    def read(self, size: int, offset: int) -> bytes:
        """`size` bytes from `offset` on, fewer at the end of the file. Raises OSError."""
        return os.pread(self.descriptor, size, offset)

    def numbers(self, offset: int, size: int) -> np.ndarray:
        """Return the part of the file that is held in memory: int16 [size / 2], from byte `offset` on.

        Called once. The numbers must not be written to: they are a view on the file, or were read from it.
        Raises OSError.
        """
        if guard() is None:
            return self._content(offset, size)
        # The system maps from a whole number of its steps on.
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        self._range = MappedRange(skipped + size, self.path)
        # Copy-on-write, since torch has no read-only tensors; nothing ever writes.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._range.map(0, self.descriptor, offset - skipped, skipped + size, access, mmap.MAP_PRIVATE)
        return np.asarray(self._range)[skipped // 2 :]

    def _content(self, offset: int, size: int) -> np.ndarray:
        numbers = np.empty(size // 2, dtype=np.int16)
        rest = numbers.data.cast("B")
        while rest:
            # The system reads no more than 2 GB at once.
            count = os.preadv(self.descriptor, [rest], offset)
            if not count:
                raise OSError(f"{self.path} ends before its records do")
            rest, offset = rest[count:], offset + count
        return numbers

    @property
    def state(self) -> FileState | None:
        """How the file is now; None if it cannot be asked. If it was read, as it was when it was opened."""
        if self._range is None:
            return self.opened
        try:
            return _state(self.descriptor)
        except OSError:
            return None

    @property
    def has_faulted(self) -> bool:
        """Whether a read of the part in memory has failed and given zeros."""
        return self._range is not None and self._range.has_faulted

    def will_need(self, offset: int, size: int) -> None:
        """Ask the system to read ahead some of the mapped part."""
        if self._range is not None:
            os.posix_fadvise(self.descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def _state(descriptor: int) -> FileState:
    state = os.fstat(descriptor)
    return FileState(state.st_size, state.st_mtime_ns, state.st_ctime_ns)


class MappedRange:
    """A range of addresses that parts of files are mapped to, under the guard; for NumPy int16 numbers.

    It is unmapped by `release`, or when neither it nor an array of it is held any more.
    """

    def __init__(self, size: int, path: Path) -> None:
        """Reserve `size` bytes, for parts of the file at `path`. Raises OSError."""
        self.path, self.size = path, size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address: int = _libc().mmap(None, size, 0, flags, -1, 0)
        if self.address == _FAILED:
            raise OSError(ctypes.get_errno(), "no range of addresses can be reserved", str(path))
        watching = guard()
        assert watching is not None  # without one nothing is mapped
        self._watched = watching.watch(self.address, size)
        self.release = weakref.finalize(self, _unmap, self.address, size, self._watched)
        self.release.atexit = False

    def map(self, at: int, descriptor: int, offset: int, size: int, access: int, flags: int) -> None:
        """Map `size` bytes of a file from `offset` on to the addresses from byte `at` of the range on.

        access, flags: as mmap(2) takes them. Raises OSError.
        """
        address = _libc().mmap(self.address + at, size, access, flags | _MAP_FIXED, descriptor, offset)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), "a record cannot be mapped", str(self.path))

    @property
    def has_faulted(self) -> bool:
        """Whether a read of the range has failed; asked before the range is released."""
        return self._watched.has_faulted

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "<i2", "shape": (self.size // 2,), "data": (self.address, False)}


def _unmap(address: int, size: int, watched: WatchedRange) -> None:
    # In this order, since the addresses may be given to somebody else as soon as they are unmapped.
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
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
