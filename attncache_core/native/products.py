"""Python binding of products.h and rows.h: packed weights, their products, and unpacked weights of few bits.

PackedMatrix(weight, bias)  ->  multiply(x, ...)     activation(x @ weight.T + bias) + residual
levels of 8 or 4 bits       ->  unpack_8_bits, unpack_4_bits
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache

import torch
from torch.nn import functional

from attncache_core import native
from attncache_core.native.memory import aligned

# The activations and their numbers in rows.h.
ACTIVATION_NUMBERS = {None: 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3, "silu": 4}
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_UNPACK_8_BITS, _UNPACK_4_BITS = range(2)
# The signed 8-bit levels in use are -127 to 127.
MAX_LEVEL = 127
# The smallest scale. A row of zeros has this scale, because scales are divisors.
MIN_SCALE = 1e-30
# s + 128 t is below this number if t has 16 bits.
_SUMS_END = 2**22


class MatrixKind(IntEnum):
    """The numbers that a product multiplies; see operands.h."""

    WHOLE = 0  # float32
    PAIRS = 1  # bfloat16
    LEVELS = 2  # weights and rows of x rounded to 8 bits


class Matrix(ctypes.Structure):
    """The structure `matrix` of operands.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "bias", "scales", "sums", "smoothing")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs", "kind")),
    )


class _Packing(ctypes.Structure):
    """The structure `packing` of products.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("panel", "levels_of_step", "steps_together", "has_pairs")
    )


class _Product(ctypes.Structure):
    """The structure `product_job` of products.h, with the fields of `finish` in it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "x", "out", "residual")),
        *((name, ctypes.c_size_t) for name in ("out_row", "residual_row")),
        *((name, ctypes.c_int32) for name in ("out_type", "activation", "multiply", "padding")),
        *((name, ctypes.c_int64) for name in ("x_row", "rows")),
        *((name, ctypes.c_int32) for name in ("type", "threads", "row_parts", "panel_parts", "next")),
    )


class _Normalizers(ctypes.Structure):
    """The structure `normalizer_job` of normalizers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "x", "largest", "sums")),
        *((name, ctypes.c_int64) for name in ("x_row", "rows")),
        *((name, ctypes.c_int32) for name in ("type", "threads")),
    )


class _Rows(ctypes.Structure):
    """The structure `rows_job` of rows.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("levels", "scales", "steps", "result")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_int32) for name in ("pass_", "type", "threads", "chunk", "next")),
    )


@cache
def _packing(library: ctypes.CDLL) -> _Packing:
    form = _Packing()
    library.describe_packing(ctypes.byref(form))
    return form


@cache
def library() -> ctypes.CDLL | None:
    """Return the library for this processor, or None if it was not built."""
    kernel = native.kernel()
    return kernel.library if kernel else None


def has_pairs(of_library: ctypes.CDLL) -> bool:
    """Return whether a library multiplies pairs of bfloat16."""
    return bool(_packing(of_library).has_pairs)


class PackedMatrix:
    """A weight [outputs, inputs] and a bias [outputs], packed for this processor's products."""

    def __init__(
        self,
        library: ctypes.CDLL,
        kind: MatrixKind,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        smoothing: torch.Tensor | None = None,
    ) -> None:
        """weight, bias: any float dtype. smoothing: factors of the inputs [inputs], of LEVELS only.

        Raises ValueError if the processor has no products of this kind, or if the levels of an output sum to
        2**22 or more, which takes more than 33,000 inputs.
        """
        form = _packing(library)
        if kind is MatrixKind.PAIRS and not form.has_pairs:
            raise ValueError("this processor has no products of bfloat16 pairs")
        self.kind, self._panel = kind, form.panel
        self.outputs, self.inputs = weight.shape
        self._steps_together = 1 if kind is MatrixKind.WHOLE else form.steps_together
        self._step = {MatrixKind.WHOLE: 1, MatrixKind.PAIRS: 2, MatrixKind.LEVELS: form.levels_of_step}[kind]
        assert bias is None or bias.shape == (self.outputs,)
        self._bias = None if bias is None else self._padded(bias.detach().float())
        self._smoothing = None if smoothing is None else smoothing.float().contiguous()
        self._scales = self._sums = None
        weight = weight.detach()
        if kind is MatrixKind.LEVELS:
            weight = weight.float()
            weight = weight if self._smoothing is None else weight / self._smoothing
            levels, scales = quantize_rows(weight)
            sums = levels.sum(1, dtype=torch.int32)
            if (sums.abs() >= _SUMS_END).any():
                raise ValueError("the levels of an output have a sum that two halves of a word cannot hold")
            self._scales, self._sums = self._padded(scales), self._padded(_halves(-sums))
            weight = levels
        dtype = {MatrixKind.WHOLE: torch.float32, MatrixKind.PAIRS: torch.bfloat16}.get(kind, torch.int8)
        self._weights = self._packed(weight.to(dtype))
        self.library = library
        self.matrix = Matrix(
            self._weights.data_ptr(),
            *(None if part is None else part.data_ptr() for part in (self._bias, self._scales, self._sums)),
            None if self._smoothing is None else self._smoothing.data_ptr(),
            self.inputs,
            self.outputs,
            kind,
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it is multiplied, float32 or bfloat16 [outputs, inputs]."""
        panels = self._weights.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)[: self.outputs, : self.inputs]
        if self._scales is None:
            return panels
        weight = panels.float() * self._scales[: self.outputs, None]
        return weight if self._smoothing is None else weight * self._smoothing

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, float32 [outputs]."""
        return None if self._bias is None else self._bias[: self.outputs]

    def multiply(
        self, x: torch.Tensor, activation: str | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return activation(x @ weight.T + bias) + residual, a new tensor [rows, outputs] of x's dtype.

        x: [rows, inputs], float32 or bfloat16, on the CPU. residual: [rows, outputs].
        """
        assert x.shape[1] == self.inputs
        out = torch.empty((len(x), self.outputs), dtype=x.dtype)
        x = x if x.stride(1) == 1 else x.contiguous()
        job = _Product()
        job.weights, job.x, job.out = ctypes.addressof(self.matrix), x.data_ptr(), out.data_ptr()
        job.x_row, job.rows, job.out_row = x.stride(0), len(x), self.outputs
        job.type = job.out_type = _TYPES[x.dtype]
        job.activation, job.threads = ACTIVATION_NUMBERS[activation], torch.get_num_threads()
        if residual is not None:
            assert residual.shape == out.shape
            residual = residual.float()
            residual = residual if residual.stride(1) == 1 else residual.contiguous()
            job.residual, job.residual_row = residual.data_ptr(), residual.stride(0)
        self.library.run_product(ctypes.addressof(job))
        return out

    def log_normalizers(self, x: torch.Tensor, threads: int) -> torch.Tensor:
        """Return log(sum over outputs of e^(x @ weight.T + bias)) of each row of x, float32 [rows].

        x: [rows, inputs], float32 or bfloat16, on the CPU. The outputs are never in memory together.
        """
        x = x if x.stride(1) == 1 else x.contiguous()
        largest, sums = torch.empty(2, len(x), dtype=torch.float32)
        job = _Normalizers(
            weights=ctypes.addressof(self.matrix),
            x=x.data_ptr(),
            largest=largest.data_ptr(),
            sums=sums.data_ptr(),
            x_row=x.stride(0),
            rows=len(x),
            type=_TYPES[x.dtype],
            threads=threads,
        )
        self.library.run_normalizers(ctypes.addressof(job))
        return largest + sums.log()

    def _padded(self, row: torch.Tensor) -> torch.Tensor:
        """Return a row [outputs] with zeros up to whole panels, aligned."""
        return aligned(functional.pad(row, (0, -self.outputs % self._panel)))

    def _packed(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weight [outputs, inputs] as [panels, steps, panel, numbers of a step], aligned."""
        padding = (0, -self.inputs % (self._step * self._steps_together), 0, -self.outputs % self._panel)
        steps = functional.pad(weight, padding).unflatten(1, (-1, self._step))
        return aligned(steps.unflatten(0, (-1, self._panel)).transpose(1, 2))


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Return int32 x = s + 128 t as words with s (0 to 127) in the low half and t in the high half."""
    return (x & 127) | (x >> 7 << 16)


def packed_products(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix | None:
    """Return a weight [outputs, inputs] packed in its dtype; None without products for it here."""
    found = library() if weight.device.type == "cpu" else None
    if found is None:
        return None
    pairs = weight.dtype == torch.bfloat16 and has_pairs(found)
    return PackedMatrix(found, MatrixKind.PAIRS if pairs else MatrixKind.WHOLE, weight, bias)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels int8 [rows, n] and scales float32 [rows] with x ~ levels * scales; x: float32 [rows, n].

    The element of a row with the largest absolute value becomes 127 or -127. Levels cannot represent NaN or
    infinity, so the scale of a row with such an element is NaN, and every product with the row is NaN.
    """
    largest = x.abs().amax(dim=1, keepdim=True).clamp_(min=MIN_SCALE)
    levels = (x * (MAX_LEVEL / largest)).round_().to(torch.int8)
    largest += largest - largest  # 0, or NaN
    return levels, largest[:, 0] / MAX_LEVEL


def unpack_8_bits(
    library: ctypes.CDLL, levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return levels * scales, [rows, n] of `dtype`; levels: int8 [rows, n], scales: float32 [rows]."""
    result = torch.empty(levels.shape, dtype=dtype)
    _run_rows(library, result, pass_=_UNPACK_8_BITS, levels=levels.data_ptr(), scales=scales.data_ptr())
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
    _run_rows(library, result, pass_=_UNPACK_4_BITS, levels=levels.data_ptr(), steps=steps.data_ptr())
    return result


def _run_rows(library: ctypes.CDLL, result: torch.Tensor, **inputs: int) -> None:
    """Run one pass. result: float32 or bfloat16 [rows, width], on the CPU like all tensors."""
    job = _Rows(**inputs, result=result.data_ptr(), threads=torch.get_num_threads())
    job.type, (job.rows, job.width) = _TYPES[result.dtype], result.shape
    library.run_rows(ctypes.addressof(job))
