"""Keep the process alive when a mapped file is cut short or cannot be read: sigbus.c.

    guard()  ->  watch(address, size)  ->  WatchedRange: has it faulted?

A range that faults reads as zeros, from the place of the fault to its end. The reader must ask afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


class WatchedRange:
    """A range of addresses under the guard. Call `forget` before the range is unmapped."""

    def __init__(self, library: ctypes.CDLL, place: int) -> None:
        self._library, self._place = library, place
        self._faulted = ctypes.c_int.from_address(place)

    @property
    def has_faulted(self) -> bool:
        """Whether a read of the range has failed. Undefined once the range is forgotten."""
        return bool(self._faulted.value)

    def forget(self) -> None:
        """Stop guarding the range."""
        self._library.forget_range(self._place)


class Guard:
    """The handler of SIGBUS for the whole process."""

    def __init__(self, library: Path) -> None:
        """Load the library and install its handler. Raises OSError."""
        self._library = loaded = ctypes.CDLL(str(library), use_errno=True)
        loaded.watch_range.argtypes, loaded.watch_range.restype = [ctypes.c_size_t] * 2, ctypes.c_void_p
        loaded.forget_range.argtypes, loaded.forget_range.restype = [ctypes.c_void_p], None
        if loaded.install_guard():
            raise OSError(ctypes.get_errno(), "no handler of SIGBUS can be installed")

    def watch(self, address: int, size: int) -> WatchedRange:
        """Guard a range of `size` bytes; called before the range is read. Raises MemoryError."""
        place = self._library.watch_range(address, size)
        if not place:
            raise MemoryError("no memory to guard a mapped file")
        return WatchedRange(self._library, place)


@cache
def guard() -> Guard | None:
    """The guard of this process. None if it was not compiled; files must not be mapped then."""
    library = Path(__file__).with_name(f"sigbus{EXTENSION_SUFFIXES[0]}")
    # As with the kernel: a library that cannot be loaded is as good as none.
    with contextlib.suppress(OSError):
        return Guard(library)
    return None
