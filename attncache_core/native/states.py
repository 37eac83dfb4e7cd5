"""Python binding of states.h: the states of every pooling over the sequences of a tree."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from attncache_core.native import products

_ARRAYS = ("hidden", "offsets", "parents", "starts", "skipped", "before", "chosen", "ends", "found")


class _Job(ctypes.Structure):
    """The structure `states_job` of states.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_int64) for name in ("runs", "width")),
    )


def run_states(**arrays: np.ndarray) -> bool:
    """Fill `ends` and `found`; see states_job in states.h. Returns False if nothing was compiled.

    All arrays are contiguous: hidden, before, ends and found float32, the others int64.
    """
    function = _function()
    if function is None:
        return False
    pointers = {name: arrays[name].__array_interface__["data"][0] for name in _ARRAYS}
    job = _Job(**pointers, runs=len(arrays["parents"]), width=arrays["hidden"].shape[1])
    function(ctypes.addressof(job))
    return True


@cache
def _function() -> Callable[[int], None] | None:
    library = products.library()
    if library is None:
        return None
    library.run_states.argtypes, library.run_states.restype = [ctypes.c_void_p], None
    function: Callable[[int], None] = library.run_states
    return function
