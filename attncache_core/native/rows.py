"""Python binding of rows.h: weights of few bits are unpacked.

The passes are compiled into the attention kernel's library.
"""

from __future__ import annotations

import ctypes

import torch

_UNPACK_8_BITS, _UNPACK_4_BITS = range(2)
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Job(ctypes.Structure):
    """The structure `rows_job` of rows.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("levels", "scales", "steps", "result")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_int32) for name in ("pass_", "type", "threads", "chunk", "next")),
    )


def unpack_8_bits(
    library: ctypes.CDLL, levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return levels * scales, [rows, n] of `dtype`; levels: int8 [rows, n], scales: float32 [rows]."""
    result = torch.empty(levels.shape, dtype=dtype)
    _run(library, result, pass_=_UNPACK_8_BITS, levels=levels.data_ptr(), scales=scales.data_ptr())
    return result


def unpack_4_bits(
    library: ctypes.CDLL, levels: torch.Tensor, steps: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return level * step + minimum for each element, [rows, width] of `dtype`.

    levels: uint8 [rows, groups, 16], for groups of 32 elements: element i in the low four bits, element
    i + 16 in the high four bits. steps: bfloat16 [rows, groups, 2], the step and minimum of each group.
    The last group may extend beyond the row.
    """
    result = torch.empty((len(levels), width), dtype=dtype)
    _run(library, result, pass_=_UNPACK_4_BITS, levels=levels.data_ptr(), steps=steps.data_ptr())
    return result


def _run(library: ctypes.CDLL, result: torch.Tensor, **inputs: int) -> None:
    """Run one pass. result: float32 or bfloat16 [rows, width], on the CPU like all tensors."""
    job = _Job(**inputs, result=result.data_ptr(), threads=torch.get_num_threads())
    job.type, (job.rows, job.width) = _TYPES[result.dtype], result.shape
    run = library.run_rows
    run.argtypes, run.restype = [ctypes.c_void_p], None
    run(ctypes.addressof(job))
