"""Control the memory of the process: keep freed memory, release mapped weights, count what tensors hold."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
from pathlib import Path

import torch

from attncache_core.runtime.control_groups import allowed_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Freed blocks up to this size are kept. The largest activations of a batch of 1024 tokens are smaller.
_KEPT_BYTES = 256 * 2**20
_MADV_PAGEOUT = 21  # since Linux 5.4; older kernels refuse it


def keep_freed_memory() -> None:
    """Keep freed memory for the next batch instead of returning it to the system.

    By default the GNU C library returns the memory of large tensors to the system. The system must then clear
    and map new pages for the next batch, which takes up to a third of the time of a forward pass.
    Does nothing with another C library, and if the operator has set MALLOC_TRIM_THRESHOLD_ or
    MALLOC_MMAP_THRESHOLD_.
    """
    set_by_operator = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    library = ctypes.CDLL(None)
    if set_by_operator or not hasattr(library, "mallopt"):
        return
    # Older libraries refuse an mmap threshold above 32 MiB. The trim threshold is set only after the mmap
    # threshold: on its own, it would fix the mmap threshold at 128 KiB.
    if any(library.mallopt(_M_MMAP_THRESHOLD, size) for size in (_KEPT_BYTES, 32 * 2**20)):
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Return to the system what is free now, such as what loading a model has used.

    Only the GNU C library can do this.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def release_mapped_weights() -> None:
    """Release the memory of mapped weight files. A page that is needed again is read from its file.

    A model's weights are mapped from their file and packed layer by layer. Without this call, file and packed
    weights would both count as memory of the process until the last layer is packed.
    Does nothing on systems other than Linux.
    """
    try:
        mappings = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    library = ctypes.CDLL(None)
    for mapping in mappings:
        if mapping.endswith(".safetensors"):
            first, last = (int(address, 16) for address in mapping.split()[0].split("-"))
            # Unlike MADV_DONTNEED, MADV_PAGEOUT keeps changes if a page has been written to.
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_PAGEOUT)


def tensor_bytes() -> int:
    """Return the size of all tensors of this process in bytes, on every device. Takes part of a second."""
    gc.collect()
    # isinstance would ask objects of other libraries for their class, and some of them answer by a warning.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    storages = [item.untyped_storage() for item in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def available_memory() -> int:
    """Return the bytes that the process can still use: of the machine, its control groups and its ulimit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            available = min(available, max(0, most - pages * resource.getpagesize()))
    return int(min(available, allowed_bytes()))
