"""Python binding of sigbus.c, which keeps the process alive if a mapped file is truncated or unreadable.

    guard()  ->  watch(address, size)  ->  WatchedRange.has_faulted

After a fault, the range reads as zeros from the page of the fault to its end. The reader must check
`has_faulted` after each read.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from pathlib import Path


class WatchedRange:
    """A range of addresses under the guard. Call `forget` before the range is unmapped."""

    def __init__(self, library: ctypes.CDLL, entry: int) -> None:
        """entry: the address of the range's entry in the table of sigbus.c."""
        self._library, self._entry = library, entry
        self._faulted = ctypes.c_int.from_address(entry)

    @property
    def has_faulted(self) -> bool:
        """Whether a read of the range has failed. Undefined once the range is forgotten."""
        return bool(self._faulted.value)

    def forget(self) -> None:
        """Stop guarding the range."""
        self._library.forget_range(self._entry)


class Guard:
    """The SIGBUS handler of the whole process."""

    def __init__(self, library: Path) -> None:
        """Load the library and install its handler. Raises OSError if either fails."""
        self._library = loaded = ctypes.CDLL(str(library), use_errno=True)
        loaded.watch_range.argtypes, loaded.watch_range.restype = [ctypes.c_size_t] * 2, ctypes.c_void_p
        loaded.forget_range.argtypes, loaded.forget_range.restype = [ctypes.c_void_p], None
        if loaded.install_guard():
            raise OSError(ctypes.get_errno(), "cannot install a SIGBUS handler")

    def watch(self, address: int, size: int) -> WatchedRange:
        """Guard `size` bytes; call before they are read. Raises MemoryError if memory is short."""
        entry = self._library.watch_range(address, size)
        if not entry:
            raise MemoryError("no memory to guard a mapped file")
        return WatchedRange(self._library, entry)


@cache
def guard() -> Guard | None:
    """Return the guard of this process. Returns None if it was not compiled; then do not map files."""
    library = Path(__file__).with_name("sigbus.so")
    # A library that cannot be loaded counts as missing, as for the attention kernel.
    with contextlib.suppress(OSError):
        return Guard(library)
    return None
