"""Linear layers with prepacked weights, for inference on a CPU.

When a model is loaded, oneDNN reorders the weights for the processor's matrix kernels. At run time oneDNN
fuses the activation or the residual add into the product. Without oneDNN, torch's own operators compute the
same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

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

    weight: [outputs, inputs], bias: [outputs] or None, both of the compute dtype.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        self.outputs, self.inputs = weight.shape
        self._bias = None if bias is None else bias.detach().contiguous()
        self._activation = activation
        weight = weight.detach().contiguous()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
            if runs_on_onednn(weight)
            else weight
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight before it was packed, [outputs, inputs]."""
        return self._weight.to_dense() if self._weight.is_mkldnn else self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, [outputs]."""
        return self._bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, inputs], residual: [rows, outputs] -> a new tensor [rows, outputs]."""
        return fused_linear(x, self._weight, self._bias, self._activation, residual)


def runs_on_onednn(x: torch.Tensor) -> bool:
    """Return whether oneDNN multiplies tensors on this device."""
    return x.device.type == "cpu" and torch._C._has_mkldnn


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
    if residual is not None:
        summed: torch.Tensor = _BINARY(x, residual, weight, bias, "add")
        return summed
    name, algorithm = _FUSED.get(activation or "", ("none", ""))
    product = _UNARY(x, weight, bias, name, [], algorithm)
    return product.relu_() if activation == "relu" else product
