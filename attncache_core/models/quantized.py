"""Linear layers with quantised weights.

    int8              weights and activations in 8 bits, multiplied as integers: less time and memory
    int8-weight-only  weights in 8 bits, unpacked to the compute dtype before the product: less memory
    int4              weights in 4 bits, unpacked to the compute dtype before the product: least memory

Every output (row of a weight) and every token (row of x) has its own scale. So rows of weights can be
selected and joined before or after quantisation, and the result of a token does not depend on the rest of the
batch.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from attncache_core import native
from attncache_core.errors import UnsupportedModel
from attncache_core.models.prepacked import PackedLinear
from attncache_core.native import compiled_off, products
from attncache_core.native.products import MIN_SCALE, MatrixKind, PackedMatrix, quantize_rows

# Number of inputs that share a step size in 4 bits.
_GROUP = 32


class Int8Linear(PackedLinear):
    """Weights and rows of x rounded to 8 bits, multiplied as integers by the products of native/products.h.

    Raises UnsupportedModel on another device than the CPU, and without compiled code.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        smoothing: torch.Tensor | None = None,
    ) -> None:
        """smoothing: float32 [inputs], factors of x before rounding, by which the weight is divided.

        None: x is rounded as it is. weight, bias, activation: see PackedLinear.
        """
        self.smoothing = smoothing
        super().__init__(weight, bias, activation)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
        library = products.library() if weight.device.type == "cpu" else None
        if library is None:
            why = compiled_off() if weight.device.type == "cpu" else f"the device is {weight.device.type}"
            raise UnsupportedModel(
                f"int8 needs the compiled code for the processor: {why}; or quantize to int8-weight-only",
                field="quantize",
            )
        return PackedMatrix(library, MatrixKind.LEVELS, weight, bias, self.smoothing)


class Int8WeightOnlyLinear(PackedLinear):
    """Weights rounded to 8 bits, unpacked to the compute dtype for each product."""

    def _pack(self, weight: torch.Tensor, _: torch.Tensor | None) -> None:
        # Compiled code reads rows one after another, and the weight may be a transposed view.
        self._levels, self._scales = quantize_rows(weight.float().contiguous())

    @property
    def weight(self) -> torch.Tensor:
        """See PackedLinear."""
        if library := _library(self._levels):
            return products.unpack_8_bits(library, self._levels, self._scales, self._dtype)
        return (self._levels * self._scales[:, None]).to(self._dtype)


class Int4Linear(PackedLinear):
    """Weights rounded to 16 levels between the minimum and the maximum of each group of 32 inputs.

    Unpacked to the compute dtype for each product.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        columns: torch.Tensor | None = None,
    ) -> None:
        """columns: see packed_linear. Groups are those of the columns in the checkpoint's order, because
        other groups would be other weights. weight, bias, activation: see PackedLinear.
        """
        self._columns = None if columns is None else columns.to(weight.device)
        if columns is not None and _are_whole_groups(columns):
            weight, self._columns = weight[:, columns], None
        super().__init__(weight, bias, activation)

    def _pack(self, weight: torch.Tensor, _: torch.Tensor | None) -> None:
        groups = functional.pad(weight.float(), (0, -self.inputs % _GROUP)).view(self.outputs, -1, _GROUP)
        least, greatest = (bound.bfloat16().float() for bound in groups.aminmax(dim=2))  # [outputs, groups]
        steps = ((greatest - least) / 15).clamp_(min=MIN_SCALE).bfloat16()
        levels = ((groups - least[..., None]) / steps.float()[..., None]).round_().clamp_(0, 15)
        lower, upper = levels.to(torch.uint8).chunk(2, dim=2)
        # [outputs, groups, 16]: input i of a group in the low four bits, input i + 16 in the high four bits.
        self._levels = (lower | upper << 4).contiguous()
        self._steps = torch.stack([steps, least.bfloat16()], dim=2)  # [outputs, groups, 2]

    @property
    def weight(self) -> torch.Tensor:
        """See PackedLinear."""
        if library := _library(self._levels):
            unpacked = products.unpack_4_bits(library, self._levels, self._steps, self.inputs, self._dtype)
        else:
            levels = torch.cat([self._levels & 15, self._levels >> 4], dim=2)
            steps, least = self._steps.float()[..., None].unbind(dim=2)
            unpacked = (levels * steps + least).flatten(1)[:, : self.inputs].to(self._dtype).contiguous()
        return unpacked if self._columns is None else unpacked.index_select(1, self._columns)


def _are_whole_groups(columns: torch.Tensor) -> bool:
    """Return whether columns in this order have the groups of the checkpoint's order, one after another."""
    places = torch.arange(len(columns), device=columns.device)
    firsts = columns - places % _GROUP  # of the group, if all of its columns are there in order
    return bool((firsts % _GROUP == 0).all() and torch.equal(firsts, firsts[places - places % _GROUP]))


def _library(levels: torch.Tensor) -> ctypes.CDLL | None:
    kernel = native.kernel() if levels.device.type == "cpu" else None
    return kernel.library if kernel else None
