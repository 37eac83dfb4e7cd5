"""Linear layers with quantised weights, for inference on a CPU.

    int8              weights and rows of x in 8 bits, multiplied as integers: less time and memory
    int8-weight-only  weights in 8 bits, multiplied in the compute dtype: less memory, nearly exact
    int4              weights in 4 bits, multiplied in bfloat16: least memory

Every output (row of a weight) has scales of its own, and so has every token (row of x): rows of weights may
be chosen and joined before or after, and what comes of a token does not depend on its company.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch.nn import functional

from attncache_core.checkpoint import Quantization
from attncache_core.errors import UnsupportedModel
from attncache_core.models.prepacked import ACTIVATIONS, PackedLinear
from attncache_core.native import rows

# Signed 8-bit levels in use: from -127 to 127.
_LEVELS = 127
# oneDNN's fast products take rows of x unsigned: levels are stored 128 higher.
_ZERO = 128
# Scales are divided by: a row of zeros gets one that is not 0.
_LEAST = 1e-30
# Up to so many rows torch's kernel for 8-bit weights is faster than unpacking them (measured: 32 to 64).
_FEW_ROWS = 64
# Inputs that share a scale, and the multiple of outputs that torch's kernel for 4-bit weights asks for.
_GROUP, _BLOCK = 32, 16


class QuantizedLinear(ABC):
    """What PackedLinear computes, from a weight that is kept in fewer bits."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        """weight: [outputs, inputs], bias: [outputs] or None, both of the compute dtype."""
        self.outputs, self.inputs = weight.shape
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.detach().contiguous()
        self._activation = activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, inputs], residual: [rows, outputs] -> [rows, outputs], newly made."""
        result = self._product(x)
        if self._activation:
            result = ACTIVATIONS[self._activation](result)
        return result if residual is None else result.add_(residual)

    @abstractmethod
    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias, newly made."""


class Int8Linear(QuantizedLinear):
    """Weights and rows of x rounded to 8 bits, multiplied as integers.

    Raises UnsupportedModel where the processor, or torch for it, does not multiply them exactly.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        super().__init__(weight, bias, activation)
        _require_cpu(weight, Quantization.INT8)
        if not multiplies_integers():
            raise UnsupportedModel(
                "this processor does not multiply 8-bit integers exactly; quantize to int8-weight-only",
                field="quantize",
            )
        levels, self._scales = quantize_rows(weight.detach().float())
        self._weight = torch.ops.onednn.qlinear_prepack(levels, None)
        self._zeros = torch.zeros(self.outputs, dtype=torch.int32)
        self._offset = None if bias is None else bias.detach().float().contiguous()
        self._kernel = rows.kernel()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See QuantizedLinear."""
        if self._kernel is None:
            return super().__call__(x, residual)
        levels, scales = self._kernel.quantize(x)
        product = _multiplied(levels, self._weight, self._scales, self._zeros)
        return self._kernel.finish(product, scales, self._offset, self._activation, residual, self._dtype)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        levels, scales = quantize_rows(x.float())
        # A level and 128 is the level with its first bit turned: no pass through wider numbers.
        unsigned = levels.view(torch.uint8).bitwise_xor_(_ZERO)
        product = _multiplied(unsigned, self._weight, self._scales, self._zeros)
        product.mul_(scales[:, None])
        return (product if self._offset is None else product.add_(self._offset)).to(self._dtype)


class Int8WeightOnlyLinear(QuantizedLinear):
    """Weights rounded to 8 bits, unpacked where they meet many rows of x."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        super().__init__(weight, bias, activation)
        self._weight, scales = quantize_rows(weight.detach().float())
        self._scales = scales.to(self._dtype)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See QuantizedLinear."""
        # Of float32 the kernel makes a product number by number.
        if len(x) <= _FEW_ROWS and x.device.type == "cpu" and self._dtype == torch.bfloat16:
            return super().__call__(x, residual)
        weight = self._weight.to(self._dtype).mul_(self._scales[:, None])
        return PackedLinear(weight, self._bias, self._activation)(x, residual)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scales)
        return product if self._bias is None else product.add_(self._bias)


class Int4Linear(QuantizedLinear):
    """Weights rounded to 4 bits between the least and the greatest of each 32 that one output reads."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        super().__init__(weight, bias, activation)
        _require_cpu(weight, Quantization.INT4)
        padded = functional.pad(
            weight.detach().float(), (0, -self.inputs % _GROUP, 0, -self.outputs % _BLOCK)
        )
        groups = padded.view(len(padded), -1, _GROUP)
        least, greatest = groups.aminmax(dim=2)  # each [outputs, groups]
        # The kernel reads a level as (level - 8) * scale + zero, scale and zero in bfloat16.
        scale = ((greatest - least) / 15).clamp_(min=_LEAST).bfloat16()
        zero = (least + 8 * scale.float()).bfloat16()
        levels = ((groups - zero.float()[..., None]) / scale.float()[..., None] + 8).round_().clamp_(0, 15)
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            levels.view_as(padded).to(torch.int32), 1
        )
        self._scales_and_zeros = torch.stack([scale.T, zero.T], dim=2).contiguous()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(x.bfloat16(), (0, -self.inputs % _GROUP)).contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            padded, self._weight, _GROUP, self._scales_and_zeros
        )
        product = product[:, : self.outputs].to(self._dtype).contiguous()
        return product if self._bias is None else product.add_(self._bias)


QUANTIZED: dict[Quantization, type[QuantizedLinear]] = {
    Quantization.INT8: Int8Linear,
    Quantization.INT8_WEIGHT_ONLY: Int8WeightOnlyLinear,
    Quantization.INT4: Int4Linear,
}


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels int8 [rows, n] and scales float32 [rows] with x ~ levels * scales; x: float32 [rows, n].

    The largest number of a row, by size, becomes 127 or -127.
    """
    largest = x.abs().amax(dim=1, keepdim=True).clamp_(min=_LEAST)
    levels = (x * (_LEVELS / largest)).round_().to(torch.int8)
    return levels, largest[:, 0] / _LEVELS


def _require_cpu(weight: torch.Tensor, quantization: Quantization) -> None:
    """Raise UnsupportedModel for weights that lie elsewhere."""
    if weight.device.type != "cpu":
        raise UnsupportedModel(
            f"{quantization} runs on a CPU only, and the model is on {weight.device}; "
            f"quantize to {Quantization.INT8_WEIGHT_ONLY}",
            field="quantize",
        )


@cache
def multiplies_integers() -> bool:
    """Whether products of 8-bit numbers come out exact here.

    Processors without VNNI's instructions, or another that adds up in 32 bits, let sums of two products
    overflow; a torch without oneDNN has no such products.
    """
    x = torch.full((64, 256), 255, dtype=torch.uint8)
    try:
        weight = torch.ops.onednn.qlinear_prepack(torch.full((64, 256), _LEVELS, dtype=torch.int8), None)
        product = _multiplied(x, weight, torch.ones(64), torch.zeros(64, dtype=torch.int32))
    except (AttributeError, RuntimeError):
        return False
    return bool((product == 256 * _LEVELS * (255 - _ZERO)).all())


def _multiplied(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """(x - 128) @ weight.T * scales as float32 [rows, outputs], for x uint8 and a prepacked weight."""
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, _ZERO, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product
