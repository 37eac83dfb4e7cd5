"""Weights that only hits take: the last products of both halves of each layer, refitted to reused maps.

    original layer   output projection and second feed-forward matrix   misses and recorded texts
    refitted layer   the same layer with both replaced                  hits on records of other texts

build/refitting.py fits the weights, and a database keeps them in a file. Q, K, V and the first feed-forward
matrix are those of the original layer, so refitted weights cost memory and no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.errors import CorruptDatabase
from attncache_core.models.layer import AttentionLayer, Network
from attncache_core.models.linear import ActivatedLinear, Linear, packed_linear, quantizing
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LinearWeights, head_rows
from attncache_core.runtime.files import write_whole

REFITTED = "refitted.safetensors"  # in the folder of a database


class LastProducts(NamedTuple):
    """The last products of both halves of a layer, with biases. Heads have the checkpoint's order."""

    output: LinearWeights  # context -> hidden
    down: LinearWeights  # states inside the feed-forward half -> hidden


def last_products(layer: AttentionLayer) -> LastProducts | None:
    """Return the products of a layer that hits replace; None if they cannot be replaced.

    They can in layers like BERT's: both have biases, and the feed-forward half is one network without a gate.
    """
    networks = [half.network for half in layer.halves]
    if len(networks) != 1 or not isinstance(networks[0], Network) or networks[0].gate is not None:
        return None
    output, down = _plain_weights(layer.output), _plain_weights(networks[0].down)
    if output is None or down is None:
        return None
    columns = head_rows(layer.order, output.weight.shape[1] // layer.heads)
    return LastProducts(LinearWeights(output.weight[:, columns.argsort()], output.bias), down)


def with_last_products(layer: AttentionLayer, products: LastProducts) -> AttentionLayer:
    """Return the same layer with other products. Everything else is shared with `layer`."""
    (half,) = layer.halves
    network = half.network
    assert isinstance(network, Network)
    columns = head_rows(layer.order, products.output.weight.shape[1] // layer.heads)
    output = _like_linear(layer.output, products.output, columns)
    down = _like_linear(network.down, products.down)
    refitted = replace(half, network=Network(network.up, down, network.activation))
    return replace(layer, output=output, halves=(refitted,))


def refitted_layers(
    model: PackedModel, products: Sequence[LastProducts], quantization: Quantization | None
) -> list[AttentionLayer]:
    """Return the layers of a model with these products, one for each layer, in the place of their own.

    quantization: of the model's weights; the products are packed in the same way. Raises ValueError if the
    products do not fit the model.
    """
    held = [own for layer in model.layers if (own := last_products(layer))]
    if not len(held) == len(model.layers) == len(products):
        raise ValueError("the refitted weights are of another model")
    if list(map(_shapes, held)) != list(map(_shapes, products)):
        raise ValueError("the refitted weights have other shapes than the model's")
    with quantizing(quantization):
        return list(map(with_last_products, model.layers, products))


def write_refitted(folder: Path, products: Sequence[LastProducts] | None) -> None:
    """Write the weights of all layers to the database `folder`; None: remove weights. Raises OSError."""
    path = folder / REFITTED
    if products is None:
        path.unlink(missing_ok=True)
        return
    tensors = {}
    for name in LastProducts._fields:
        layers: list[LinearWeights] = [getattr(layer, name) for layer in products]
        tensors[f"{name}.weight"] = torch.stack([layer.weight for layer in layers])
        tensors[f"{name}.bias"] = torch.stack([layer.bias for layer in layers if layer.bias is not None])
    write_whole(path, save(tensors))


def read_refitted(path: Path) -> list[LastProducts]:
    """Read the weights of all layers from a file. Raises CorruptDatabase."""
    try:
        tensors = load_file(path)
        parts = [
            [
                LinearWeights(*weights)
                for weights in zip(tensors[f"{name}.weight"], tensors[f"{name}.bias"], strict=True)
            ]
            for name in LastProducts._fields
        ]
        return [LastProducts(*products) for products in zip(*parts, strict=True)]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CorruptDatabase(f"{path} cannot be read", field="database") from error


def _shapes(products: LastProducts) -> list[torch.Size]:
    return [part.shape for weights in products for part in weights if part is not None]


def _plain_weights(linear: Linear) -> LinearWeights | None:
    """Return weight and bias of a linear layer; None if it is a module that cannot be packed."""
    if isinstance(linear, ActivatedLinear) or linear.bias is None:
        return None
    return LinearWeights(linear.weight, linear.bias)


def _like_linear(linear: Linear, weights: LinearWeights, columns: torch.Tensor | None = None) -> Linear:
    """Pack other weights for the same inputs as those of `linear`: same dtype and smoothing.

    columns: the order of the columns of `weights` in `linear`; None: as they are.
    """
    assert not isinstance(linear, ActivatedLinear)
    assert weights.bias is not None
    held = linear.weight
    smoothing = linear.smoothing
    if smoothing is not None and columns is not None:
        smoothing = smoothing[columns.argsort()]
    return packed_linear(weights.weight.to(held), weights.bias.to(held), smoothing, columns=columns)
