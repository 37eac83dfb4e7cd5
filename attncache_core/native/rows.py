"""Python binding of rows.h: weights of few bits are unpacked.

The passes are compiled into the attention kernel's library.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from attncache_core import native

_UNPACK_8_BITS, _UNPACK_4_BITS = range(2)
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Job(ctypes.Structure):
    """The structure `rows_job` of rows.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("levels", "scales", "steps", "result")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_int32) for name in ("pass_", "type", "threads", "chunk", "next")),
    )


class RowKernel:
    """The passes at one level of the kernel. Tensors must be float32 or bfloat16 and on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.run_rows
        self._run.argtypes = [ctypes.c_void_p]
        self._run.restype = None

    def unpack_8_bits(self, levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return levels * scales, [rows, n] of `dtype`; levels: int8 [rows, n], scales: float32 [rows]."""
        result = torch.empty(levels.shape, dtype=dtype)
        job = _job(_UNPACK_8_BITS, result)
        job.levels, job.scales, job.result = levels.data_ptr(), scales.data_ptr(), result.data_ptr()
        self._run(ctypes.addressof(job))
        return result

    def unpack_4_bits(
        self, levels: torch.Tensor, steps: torch.Tensor, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return level * step + minimum for each element, [rows, width] of `dtype`.

        levels: uint8 [rows, groups, 16], for groups of 32 elements: element i in the low four bits, element
        i + 16 in the high four bits. steps: bfloat16 [rows, groups, 2], the step and minimum of each group.
        The last group may extend beyond the row.
        """
        result = torch.empty((len(levels), width), dtype=dtype)
        job = _job(_UNPACK_4_BITS, result)
        job.levels, job.steps, job.result = levels.data_ptr(), steps.data_ptr(), result.data_ptr()
        self._run(ctypes.addressof(job))
        return result


def _job(pass_number: int, like: torch.Tensor) -> _Job:
    job = _Job()
    job.pass_ = pass_number
    job.rows, job.width = like.shape
    job.type, job.threads = _TYPES[like.dtype], torch.get_num_threads()
    return job


@cache
def kernel() -> RowKernel | None:
    """Return the passes for this processor, or None if the kernel was not built."""
    attention = native.kernel()
    return RowKernel(attention.library) if attention else None
