"""A family's linear layers, made of Hugging Face's modules: packed, quantised, or called as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from attncache_core.checkpoint import Quantization
from attncache_core.models.prepacked import ACTIVATIONS, PackedLinear
from attncache_core.models.quantized import QUANTIZED, QuantizedLinear

# Of the model that is being built. It is told around the build and not through the layers of every family: so
# none of their weights can be forgotten.
_quantization: ContextVar[Quantization | None] = ContextVar("quantization", default=None)


class Norm:
    """The layer norm of a module, its weights at hand: the module's own call costs as much as its work."""

    def __init__(self, module: nn.LayerNorm) -> None:
        self._arguments = (list(module.normalized_shape), module.weight, module.bias, module.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, hidden] -> [rows, hidden]."""
        return torch.layer_norm(x, *self._arguments)


class ActivatedLinear:
    """A linear layer and an activation that is not fused with it, or a module that cannot be packed."""

    def __init__(
        self,
        linear: Callable[[torch.Tensor], torch.Tensor],
        activation: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self._linear = linear
        self._activation = activation

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As PackedLinear's call."""
        product = self._linear(x)
        product = self._activation(product) if self._activation else product
        return product if residual is None else product + residual


Linear = PackedLinear | QuantizedLinear | ActivatedLinear


@contextmanager
def quantizing(quantization: Quantization | None) -> Iterator[None]:
    """Inside, weights are packed in this quantisation; None: as they are."""
    token = _quantization.set(quantization)
    try:
        yield
    finally:
        _quantization.reset(token)


def packed_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> Linear:
    """A linear layer of plain weights, with the activation called so (one of ACTIVATIONS).

    Raises UnsupportedModel if it is to be quantised in a way that this processor does not compute.
    """
    quantization = _quantization.get()
    return (QUANTIZED[quantization] if quantization else PackedLinear)(weight, bias, activation)


def packed(
    module: nn.Module,
    name: str | None = None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Linear:
    """`module` packed if it is a plain linear layer, with the activation `name` if it is one of ACTIVATIONS.

    `activation` is the model's own function of that name, called where the two are not packed together.
    """
    # A subclass may compute something else: only the very class is taken apart.
    if type(module) is not nn.Linear:
        return ActivatedLinear(module, activation)
    if activation is None or name in ACTIVATIONS:
        return packed_linear(module.weight, module.bias, name)
    return ActivatedLinear(packed_linear(module.weight, module.bias), activation)
