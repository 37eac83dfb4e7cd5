"""Linear layers and norms made from Hugging Face modules: packed, quantised, or the module itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.models.prepacked import ACTIVATIONS, PackedLinear
from attncache_core.models.quantized import Int4Linear, Int8Linear, Int8WeightOnlyLinear
from attncache_core.models.smoothing import smoothing_of

# The quantisation of the model that is being built. A context variable and not a parameter of every layer, so
# that no family can leave a weight unquantised by mistake.
_quantization: ContextVar[Quantization | None] = ContextVar("quantization", default=None)


class Norm:
    """A layer norm without the call overhead of its module, which costs as much as the norm itself."""

    def __init__(self, module: nn.LayerNorm) -> None:
        self.weight, self.bias, self.epsilon = module.weight, module.bias, module.eps
        self._arguments = (list(module.normalized_shape), module.weight, module.bias, module.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, hidden] -> [rows, hidden]."""
        return torch.layer_norm(x, *self._arguments)


class ActivatedLinear:
    """A linear layer followed by an activation that cannot be fused, or a module that cannot be packed."""

    def __init__(
        self,
        linear: Callable[[torch.Tensor], torch.Tensor],
        activation: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self._linear = linear
        self._activation = activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See PackedLinear."""
        product = self._linear(x)
        product = self._activation(product) if self._activation else product
        return product if residual is None else product + residual


Linear = PackedLinear | ActivatedLinear


@contextmanager
def quantizing(quantization: Quantization | None) -> Iterator[None]:
    """Quantise the weights that are packed inside the `with` block; None packs them unquantised."""
    token = _quantization.set(quantization)
    try:
        yield
    finally:
        _quantization.reset(token)


def packed_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    smoothing: torch.Tensor | None = None,
    activation: str | None = None,
    columns: torch.Tensor | None = None,
) -> Linear:
    """Pack a linear layer from its weights, in the quantisation set by `quantizing`.

    smoothing: see Int8Linear; other quantisations ignore it. activation: one of ACTIVATIONS, or None.
    columns: int64 [inputs], the order of the columns of weight and smoothing in the layer; None: as they are.
    Raises UnsupportedModel if this processor cannot compute with the quantisation.
    """
    quantization = _quantization.get()
    if quantization is Quantization.INT4:
        return Int4Linear(weight, bias, activation, columns)
    if columns is not None:
        weight, smoothing = weight[:, columns], None if smoothing is None else smoothing[columns]
    match quantization:
        case Quantization.INT8:
            return Int8Linear(weight, bias, activation, smoothing)
        case Quantization.INT8_WEIGHT_ONLY:
            return Int8WeightOnlyLinear(weight, bias, activation)
    return PackedLinear(weight, bias, activation)


def packed(
    module: nn.Module,
    name: str | None = None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Linear:
    """Pack `module` if it is a plain linear layer, fused with its activation if `name` is in ACTIVATIONS.

    activation: the model's own function of that name, called if the activation is not fused.
    """
    # A subclass of nn.Linear may compute something else, so only nn.Linear itself is packed.
    if type(module) is not nn.Linear:
        return ActivatedLinear(module, activation)
    return activated_linear(module.weight, module.bias, smoothing_of(module), name, activation)


def activated_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    smoothing: torch.Tensor | None,
    name: str | None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Linear:
    """Pack a linear layer from its weights and fuse it with its activation if `name` is in ACTIVATIONS.

    smoothing: see packed_linear. activation: the model's own function of that name, called if the activation
    is not fused.
    """
    if activation is None or name in ACTIVATIONS:
        return packed_linear(weight, bias, smoothing, name)
    return ActivatedLinear(packed_linear(weight, bias, smoothing), activation)
