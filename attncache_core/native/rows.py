"""Python binding of rows.h: passes over rows before and after products with quantised weights.

The passes are compiled into the attention kernel's library.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from attncache_core import native
from attncache_core.native.products import ACTIVATION_NUMBERS

_QUANTIZE, _FINISH, _UNPACK_8_BITS, _UNPACK_4_BITS = range(4)
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Job(ctypes.Structure):
    """The structure `rows_job` of rows.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "levels", "scales", "steps", "product", "bias")),
        *((name, ctypes.c_void_p) for name in ("residual", "result")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "x_row", "residual_row")),
        *((name, ctypes.c_int32) for name in ("pass_", "type", "activation", "threads", "chunk", "next")),
    )


class RowKernel:
    """The passes at one level of the kernel. Tensors must be float32 or bfloat16 and on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.run_rows
        self._run.argtypes = [ctypes.c_void_p]
        self._run.restype = None

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise x [rows, n] to levels, uint8 [rows, n] with an offset of 128, and scales, float32 [rows].

        x ~ (levels - 128) * scales. The element of a row with the largest absolute value becomes 127 or -127.
        The scale of a row with NaN or infinity is NaN.
        """
        levels = torch.empty(x.shape, dtype=torch.uint8)
        scales = torch.empty(len(x))
        job = _job(_QUANTIZE, x)
        job.scales = scales.data_ptr()
        x = _with_contiguous_rows(x)
        job.x, job.x_row, job.levels = x.data_ptr(), x.stride(0), levels.data_ptr()
        self._run(ctypes.addressof(job))
        return levels, scales

    def finish(
        self,
        product: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        residual: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return activation(product * scales + bias) + residual, [rows, n] of `dtype`.

        product: float32 [rows, n], contiguous; overwritten with the result if `dtype` is float32. scales:
        float32 [rows]. bias: float32 [n]. residual: [rows, n] of `dtype`.
        """
        result = product if dtype == torch.float32 else torch.empty(product.shape, dtype=dtype)
        job = _job(_FINISH, result)
        job.scales = scales.data_ptr()
        job.product, job.result = product.data_ptr(), result.data_ptr()
        job.activation = ACTIVATION_NUMBERS[activation]
        if bias is not None:
            job.bias = bias.data_ptr()
        if residual is not None:
            residual = _with_contiguous_rows(residual)
            job.residual, job.residual_row = residual.data_ptr(), residual.stride(0)
        self._run(ctypes.addressof(job))
        return result

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


def _with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@cache
def kernel() -> RowKernel | None:
    """Return the passes for this processor, or None if the kernel was not built."""
    attention = native.kernel()
    return RowKernel(attention.library) if attention else None
