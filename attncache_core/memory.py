"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Above the largest activations of a batch of 1024 tokens; what lies below is kept.
_KEPT_BYTES = 256 * 2**20


def keep_freed_memory() -> None:
    """Keep freed memory for the next batch instead of giving it back to the system.

    By default the GNU C library returns a batch's large tensors to the system, and the next batch has its
    pages cleared and mapped anew: up to a third of the time of a forward pass. Nothing happens under
    another C library, or where an operator has set MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_.
    """
    set_by_operator = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    library = ctypes.CDLL(None)
    if set_by_operator or not hasattr(library, "mallopt"):
        return
    # Older libraries refuse more than 32 MiB. The second setting alone would freeze the first at 128 KiB.
    if any(library.mallopt(_M_MMAP_THRESHOLD, size) for size in (_KEPT_BYTES, 32 * 2**20)):
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
