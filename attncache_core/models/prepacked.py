"""Linear layers with prepacked weights, for inference on a CPU.

When a model is loaded, the weights are packed for the products of native/products.h, which fuse the
activation or the residual add. Without compiled code, and on another device, torch's operators compute the
same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from attncache_core.native.products import PackedMatrix, packed_products

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class PackedLinear:
    """x @ weight.T + bias, with an activation or a residual add fused into one operator.

    weight: [outputs, inputs], bias: [outputs] or None, both of the compute dtype. `packed` holds the weights
    if the products of native/products.h compute with them, else None.
    """

    smoothing: torch.Tensor | None = None  # only 8-bit products have factors; see quantized.Int8Linear

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        self.outputs, self.inputs = weight.shape
        self._dtype, self._activation = weight.dtype, activation
        self.packed = self._pack(weight.detach(), bias)
        # A copy, because the tensors of a checkpoint may be mapped from their file.
        self._bias = None if self.packed or bias is None else bias.detach().clone()

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix | None:
        """Pack the weight and bias; None: the weight is kept."""
        packed = packed_products(weight, bias)
        if packed is None:
            self._weight = weight.clone(memory_format=torch.contiguous_format)
        return packed

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it is multiplied, in the compute dtype, [outputs, inputs]."""
        return self.packed.weight.to(self._dtype) if self.packed else self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, [outputs]."""
        bias = self.packed.bias if self.packed else self._bias
        return None if bias is None else bias.to(self._dtype)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, inputs], residual: [rows, outputs] -> a new tensor [rows, outputs]."""
        if self.packed:
            return self.packed.multiply(x, self._activation, residual)
        return plain_linear(x, self.weight, self._bias, self._activation, residual)


def plain_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Compute by torch's operators what PackedLinear computes."""
    rounds = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    product = functional.linear(with_round_rows(x) if rounds else x, weight, bias)[: len(x)]
    product = ACTIVATIONS[activation](product) if activation else product
    return product if residual is None else product + residual


def with_round_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, n] with rows of zeros behind it, up to a round number of rows.

    torch's 16-bit products are oneDNN's, which builds one kernel per number of rows. Building a kernel takes
    as long as the product itself, so the number of different sizes must be small. Round numbers are the
    multiples of 8 up to 512, and 32 equally spaced numbers between each larger power of two and the next one.
    """
    step = 1 << max(3, len(x).bit_length() - 6)
    return functional.pad(x, (0, 0, 0, -len(x) % step))
