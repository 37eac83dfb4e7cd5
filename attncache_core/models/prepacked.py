"""Linear layers with prepacked weights, for inference on a CPU.

When a model is loaded, the weights are packed for the products of native/products.h, or for oneDNN on
processors with AMX, whose tiles only oneDNN uses. Both fuse the activation or the residual add into the
product. Without either, torch's own operators compute the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from attncache_core.native.products import packed_products

# Activation -> oneDNN's name and algorithm. relu is not included, because oneDNN's relu turns NaN into 0.
_FUSED = {
    "gelu": ("gelu", "none"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
# The overloads are named, because torch's overload resolution inspects tensors element by element.
_UNARY = torch.ops.mkldnn._linear_pointwise.default
_BINARY = torch.ops.mkldnn._linear_pointwise.binary
# oneDNN packs for a given number of rows. The layout is as fast for other numbers of rows (measured: no
# difference from 16 to 1024 rows).
_PACKED_ROWS = 512


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
        self.packed = packed_products(weight, bias)
        if self.packed:
            return
        self._bias = None if bias is None else bias.detach().contiguous()
        weight = weight.detach().contiguous()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
            if runs_on_onednn(weight)
            else weight
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight before it was packed, [outputs, inputs]."""
        if self.packed:
            return self.packed.weight.to(self._dtype)
        return self._weight.to_dense() if self._weight.is_mkldnn else self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, [outputs]."""
        if self.packed:
            return None if self.packed.bias is None else self.packed.bias.to(self._dtype)
        return self._bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, inputs], residual: [rows, outputs] -> a new tensor [rows, outputs]."""
        if self.packed:
            return self.packed.multiply(x, self._activation, residual)
        return fused_linear(x, self._weight, self._bias, self._activation, residual)


def runs_on_onednn(x: torch.Tensor) -> bool:
    """Return whether oneDNN multiplies tensors of this dtype on this device."""
    if x.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return x.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Compute what PackedLinear computes; the weight [outputs, inputs] may be packed or plain."""
    if not runs_on_onednn(x):
        product = functional.linear(x, weight, bias)
        product = ACTIVATIONS[activation](product) if activation else product
        return product if residual is None else product + residual
    rows = len(x)
    x = with_round_rows(x)
    if residual is not None:
        summed: torch.Tensor = _BINARY(x, with_round_rows(residual), weight, bias, "add")
        return summed[:rows]
    name, algorithm = _FUSED.get(activation or "", ("none", ""))
    product = _UNARY(x, weight, bias, name, [], algorithm)[:rows]
    return product.relu_() if activation == "relu" else product


def with_round_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, n] with rows of zeros behind it, up to a round number of rows.

    oneDNN builds one kernel per number of rows, and building a kernel takes as long as the product itself, so
    the number of different sizes must be small. Round numbers are the multiples of 8 up to 512, and 32
    equally spaced numbers between each larger power of two and the next one.
    """
    step = 1 << max(3, len(x).bit_length() - 6)
    return functional.pad(x, (0, 0, 0, -len(x) % step))
