"""Linear layers with their weights packed once, for inference on a CPU.

oneDNN lays plain weights out for the processor's matrix kernels when a model is loaded, and fuses the
activation or the residual add into the product. Where oneDNN is absent, the same arithmetic runs on
torch's own operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

# Our name of an activation -> oneDNN's name and algorithm. Its relu is not among them: it makes 0 of a NaN.
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
# Named by overload: left to choose, torch tries each in turn and takes tensors apart element by element.
_UNARY = torch.ops.mkldnn._linear_pointwise.default
_BINARY = torch.ops.mkldnn._linear_pointwise.binary
# oneDNN asks for a number of rows to pack for; the layout chosen serves every other number as well
# (measured: no difference from 16 to 1024 rows).
_PACKED_ROWS = 512


class PackedLinear:
    """x @ weight.T + bias, then an activation or the addition of a residual, as one operator.

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

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, inputs], residual: [rows, outputs] -> [rows, outputs], newly made."""
        return fused_linear(x, self._weight, self._bias, self._activation, residual)


def runs_on_onednn(x: torch.Tensor) -> bool:
    """Whether oneDNN multiplies tensors like this one."""
    return x.device.type == "cpu" and torch._C._has_mkldnn


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """PackedLinear's call; the weight [outputs, inputs] may be packed or plain."""
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
