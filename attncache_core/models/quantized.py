"""Linear layers with quantised weights.

    int8              weights and activations in 8 bits, multiplied as integers: less time and memory
    int8-weight-only  weights in 8 bits, unpacked to the compute dtype before the product: less memory
    int4              weights in 4 bits, unpacked to the compute dtype before the product: least memory

Every output (row of a weight) and every token (row of x) has its own scale. So rows of weights can be
selected and joined before or after quantisation, and the result of a token does not depend on the rest of the
batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch.nn import functional

from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.errors import UnsupportedModel
from attncache_core.models.prepacked import ACTIVATIONS, fused_linear, with_round_rows
from attncache_core.native import products, rows
from attncache_core.native.products import MAX_LEVEL, MIN_SCALE, MatrixKind, PackedMatrix, quantize_rows

# oneDNN's fast products need unsigned rows of x, so levels are stored with an offset of 128.
_ZERO = 128
# Number of inputs that share a step size in 4 bits.
_GROUP = 32


class QuantizedLinear(ABC):
    """A linear layer like PackedLinear, with its weight stored in fewer bits."""

    smoothing: torch.Tensor | None = None  # see Int8Linear

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        """weight: [outputs, inputs], bias: [outputs] or None, both of the compute dtype."""
        self.outputs, self.inputs = weight.shape
        self._dtype = weight.dtype
        self.bias = None if bias is None else bias.detach().contiguous()
        self._activation = activation

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """The rounded weight in the compute dtype, [outputs, inputs]."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, inputs], residual: [rows, outputs] -> a new tensor [rows, outputs]."""


class Int8Linear(QuantizedLinear):
    """Weights and rows of x rounded to 8 bits, multiplied as integers.

    `packed` holds the weights if the products of native/products.h compute with them; otherwise oneDNN does.
    Raises UnsupportedModel if the processor, or torch on this processor, does not multiply them exactly.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        smoothing: torch.Tensor | None = None,
    ) -> None:
        """smoothing: float32 [inputs], factors of x before rounding, by which the weight is divided.

        None: x is rounded as it is. weight, bias, activation: see QuantizedLinear.
        """
        super().__init__(weight, bias, activation)
        self.smoothing = smoothing
        library = products.library() if weight.device.type == "cpu" else None
        self.packed = PackedMatrix(library, MatrixKind.LEVELS, weight, bias, smoothing) if library else None
        if self.packed:
            return
        if weight.device.type != "cpu" or not int8_products_are_exact():
            where = "this processor" if weight.device.type == "cpu" else f"the device {weight.device}"
            raise UnsupportedModel(
                f"8-bit integers are not multiplied exactly by {where}; quantize to int8-weight-only",
                field="quantize",
            )
        weight = weight.detach().float()
        levels, self._scales = quantize_rows(weight if smoothing is None else weight / smoothing)
        # Contiguous, because oneDNN ignores strides, and the weight of a packed layer is a transposed tensor.
        self._weight = torch.ops.onednn.qlinear_prepack(levels.contiguous(), None)
        self._zeros = torch.zeros(self.outputs, dtype=torch.int32)
        self._offset = None if bias is None else bias.detach().float().contiguous()
        self._kernel = rows.kernel()

    @property
    def weight(self) -> torch.Tensor:
        """See QuantizedLinear."""
        if self.packed:
            return self.packed.weight.to(self._dtype)
        weight = self._weight.to_dense().T * self._scales[:, None]
        return (weight if self.smoothing is None else weight * self.smoothing).to(self._dtype)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See QuantizedLinear."""
        if self.packed:
            return self.packed.multiply(x, self._activation, residual)
        if self.smoothing is not None:
            x = x * self.smoothing  # float32, so that x is rounded once
        if self._kernel:
            levels, scales = self._kernel.quantize(x)
            product = _int8_product(levels, self._weight, self._scales, self._zeros)
            return self._kernel.finish(product, scales, self._offset, self._activation, residual, self._dtype)
        signed, scales = quantize_rows(x.float())
        # Adding 128 to a signed level equals flipping its top bit, which avoids a wider integer type.
        levels = signed.view(torch.uint8).bitwise_xor_(_ZERO)
        product = _int8_product(levels, self._weight, self._scales, self._zeros).mul_(scales[:, None])
        product = product if self._offset is None else product.add_(self._offset)
        product = ACTIVATIONS[self._activation](product) if self._activation else product
        return (product if residual is None else product.add_(residual)).to(self._dtype)


class WeightOnlyLinear(QuantizedLinear):
    """A weight in few bits, unpacked to the compute dtype for each product."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        super().__init__(weight, bias, activation)
        self._kernel = rows.kernel() if weight.device.type == "cpu" else None
        self._pack(weight.detach().float())

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See QuantizedLinear."""
        return fused_linear(x, self.weight, self.bias, self._activation, residual)

    @abstractmethod
    def _pack(self, weight: torch.Tensor) -> None:
        """Quantise and store the float32 weight."""


class Int8WeightOnlyLinear(WeightOnlyLinear):
    """Weights rounded to 8 bits."""

    def _pack(self, weight: torch.Tensor) -> None:
        self._levels, self._scales = quantize_rows(weight)

    @property
    def weight(self) -> torch.Tensor:
        """See QuantizedLinear."""
        if self._kernel:
            return self._kernel.unpack_8_bits(self._levels, self._scales, self._dtype)
        return (self._levels * self._scales[:, None]).to(self._dtype)


class Int4Linear(WeightOnlyLinear):
    """Weights rounded to 16 levels between the minimum and the maximum of each group of 32 inputs."""

    def _pack(self, weight: torch.Tensor) -> None:
        groups = functional.pad(weight, (0, -self.inputs % _GROUP)).view(self.outputs, -1, _GROUP)
        least, greatest = (bound.bfloat16().float() for bound in groups.aminmax(dim=2))  # [outputs, groups]
        steps = ((greatest - least) / 15).clamp_(min=MIN_SCALE).bfloat16()
        levels = ((groups - least[..., None]) / steps.float()[..., None]).round_().clamp_(0, 15)
        lower, upper = levels.to(torch.uint8).chunk(2, dim=2)
        # [outputs, groups, 16]: input i of a group in the low four bits, input i + 16 in the high four bits.
        self._levels = (lower | upper << 4).contiguous()
        self._steps = torch.stack([steps, least.bfloat16()], dim=2)  # [outputs, groups, 2]

    @property
    def weight(self) -> torch.Tensor:
        """See QuantizedLinear."""
        if self._kernel:
            return self._kernel.unpack_4_bits(self._levels, self._steps, self.inputs, self._dtype)
        levels = torch.cat([self._levels & 15, self._levels >> 4], dim=2)
        steps, least = self._steps.float()[..., None].unbind(dim=2)
        return (levels * steps + least).flatten(1)[:, : self.inputs].to(self._dtype).contiguous()


QUANTIZED: dict[Quantization, type[QuantizedLinear]] = {
    Quantization.INT8: Int8Linear,
    Quantization.INT8_WEIGHT_ONLY: Int8WeightOnlyLinear,
    Quantization.INT4: Int4Linear,
}


@cache
def int8_products_are_exact() -> bool:
    """Return whether products of 8-bit integers are exact on this processor.

    On a processor without VNNI, or a similar instruction that sums in 32 bits, sums of two products overflow.
    A torch without oneDNN has no 8-bit products.
    """
    x = torch.full((64, 256), 255, dtype=torch.uint8)
    try:
        weight = torch.ops.onednn.qlinear_prepack(torch.full((64, 256), MAX_LEVEL, dtype=torch.int8), None)
        product = _int8_product(x, weight, torch.ones(64), torch.zeros(64, dtype=torch.int32))
    except (AttributeError, RuntimeError):
        return False
    return bool((product == 256 * MAX_LEVEL * (255 - _ZERO)).all())


def _int8_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """Return (x - 128) @ weight.T * scales, float32 [rows, outputs], for x uint8 and a prepacked weight."""
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
        with_round_rows(x), 1.0, _ZERO, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product[: len(x)]
