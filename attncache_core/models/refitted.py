"""Weights that only hits take: the last products of both halves of each layer, refitted to reused maps.

    original layer   output projection and second feed-forward matrix   misses and recorded texts
    refitted layer   the same layer with both replaced                  hits on records of other texts

build/refitting.py fits the weights, and reuse/maps/refitted.py keeps them in a database. Q, K, V and the
first feed-forward matrix are those of the original layer, so refitted weights cost memory and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch

from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.models.layer import AttentionLayer, PackedModel
from attncache_core.models.linear import ActivatedLinear, Linear, packed_linear, quantizing
from attncache_core.models.projections import LinearWeights


class LastProducts(NamedTuple):
    """The last products of both halves of a layer, with biases. Heads have the checkpoint's order."""

    output: LinearWeights  # context -> hidden
    down: LinearWeights  # states inside the feed-forward half -> hidden


class RefittableForward(Protocol):
    """A feed-forward half of the form norm(hidden + down(inner(hidden)))."""

    down: Linear
    norm: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        ...

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the down projection, [tokens, inner]."""
        ...


@runtime_checkable
class RefittableLayer(Protocol):
    """A layer whose last products can be replaced for hits. Encoders like BERT have such layers."""

    feed_forward: RefittableForward

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        ...

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        ...

    def attention_sum(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return the output projection plus the layer's input, before the norm: [tokens, hidden]."""
        ...

    def last_products(self) -> LastProducts | None:
        """Return the layer's own products; None if they cannot be replaced."""
        ...

    def with_last_products(self, products: LastProducts) -> Self:
        """Return the same layer with other products. Everything else is shared with this layer."""
        ...


def refittable_layers(model: PackedModel) -> list[RefittableLayer] | None:
    """Return the layers of a model, or None if the products of some layer cannot be replaced."""
    layers: list[RefittableLayer] = []
    for layer in model.layers:
        if not isinstance(layer, RefittableLayer) or layer.last_products() is None:
            return None
        layers.append(layer)
    return layers


def with_refitted(
    model: PackedModel, products: Sequence[LastProducts], quantization: Quantization | None
) -> PackedModel:
    """Return a model whose hits take these products, one for each layer.

    quantization: of the model's weights; the products are packed in the same way. Raises ValueError if the
    products do not fit the model.
    """
    with quantizing(quantization):
        return replace(model, refitted=_refitted_layers(model, products))


def refitted_alone(
    model: PackedModel, products: Sequence[LastProducts], quantization: Quantization | None
) -> PackedModel:
    """Return a model with these products in the place of its own. Raises ValueError as with_refitted does."""
    with quantizing(quantization):
        return replace(model, layers=_refitted_layers(model, products))


def _refitted_layers(model: PackedModel, products: Sequence[LastProducts]) -> list[AttentionLayer]:
    layers = refittable_layers(model)
    if layers is None or len(layers) != len(products):
        raise ValueError("the refitted weights are of another model")
    for layer, own in zip(layers, products, strict=True):
        held = layer.last_products()
        assert held is not None
        if any(new.weight.shape != old.weight.shape for new, old in zip(own, held, strict=True)):
            raise ValueError("the refitted weights have other shapes than the model's")
    return [layer.with_last_products(own) for layer, own in zip(layers, products, strict=True)]  # type: ignore[misc]


def plain_weights(linear: Linear) -> LinearWeights | None:
    """Return weight and bias of a linear layer; None if it is a module that cannot be packed."""
    if isinstance(linear, ActivatedLinear) or linear.bias is None:
        return None
    return LinearWeights(linear.weight, linear.bias)


def like_linear(linear: Linear, weights: LinearWeights) -> Linear:
    """Pack other weights for the same inputs as those of `linear`: same dtype and smoothing."""
    assert not isinstance(linear, ActivatedLinear)
    assert weights.bias is not None
    held = linear.weight
    return packed_linear(weights.weight.to(held), weights.bias.to(held), linear.smoothing)
