"""Memory of the process: what is kept for the next batch, and what is given back."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Above the largest activations of a batch of 1024 tokens; what lies below is kept.
_KEPT_BYTES = 256 * 2**20
_MADV_PAGEOUT = 21  # since Linux 5.4; an older one refuses it


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


def release_mapped_weights() -> None:
    """Give back the pages of weight files that were read through mappings; they are read again if asked for.

    A model's weights are mapped from their file and packed layer by layer: without this, file and packed
    weights would both count as the process' memory until the last layer is done. Linux only, elsewhere
    nothing happens.
    """
    try:
        mappings = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    library = ctypes.CDLL(None)
    for mapping in mappings:
        if mapping.endswith(".safetensors"):
            first, last = (int(address, 16) for address in mapping.split()[0].split("-"))
            # Unlike MADV_DONTNEED it loses nothing, should a page have been written to.
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_PAGEOUT)
