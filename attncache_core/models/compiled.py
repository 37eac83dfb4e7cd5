"""Describe a model's layers to the compiled stack (native/stack.h).

A layer describes its two halves as data. A layer with a part that the stack does not have (experts, latent
attention, capped scores) describes nothing, and the model then runs on the plain executor, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from attncache_core.models.linear import Linear, Norm
from attncache_core.native import products
from attncache_core.native.pooling import NativeNorm
from attncache_core.native.products import PackedMatrix
from attncache_core.native.stack import CompiledStack
from attncache_core.native.stack_data import (
    AttentionHalf,
    CompiledEmbedding,
    CompiledNorm,
    CompiledPooling,
    ForwardHalf,
)
from attncache_core.runtime.devices import CPU

Halves = tuple[AttentionHalf, list[ForwardHalf]]  # of one layer


class NotCompiled(Exception):
    """A part of a layer that the compiled stack does not have."""


@runtime_checkable
class CompiledForward(Protocol):
    """A feed-forward half that the compiled stack can run."""

    def compiled_halves(self) -> list[ForwardHalf]:
        """Return the halves, usually one. Raises NotCompiled."""
        ...


@runtime_checkable
class CompiledLayer(Protocol):
    """A layer whose attention half the compiled stack can run."""

    feed_forward: Callable[[torch.Tensor], torch.Tensor]

    def compiled_attention(self) -> AttentionHalf:
        """Return the attention half. Raises NotCompiled."""
        ...


@runtime_checkable
class CompiledEmbed(Protocol):
    """An embedding that the compiled stack can compute."""

    def compiled(self) -> CompiledEmbedding:
        """Return the embedding as data. Raises NotCompiled."""
        ...


@runtime_checkable
class CompiledOutputs(Protocol):
    """Outputs that the compiled stack can make, up to the vectors of sequences."""

    finishes: bool  # whether `of_vectors` changes the vectors

    def compiled(self) -> CompiledPooling:
        """Return the pooling as data. Raises NotCompiled."""
        ...

    def skipped(self, lengths: np.ndarray, prompt_tokens: np.ndarray | None) -> np.ndarray | None:
        """See Pooler.skipped."""
        ...

    def of_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the rows that a caller receives, float32 [n, d], from pooled vectors, float32 [n, width]."""
        ...


def compiled_stack(
    embed: object,
    layers: Sequence[object],
    outputs: object,
    width: int,
    dtype: torch.dtype,
    refitted: Sequence[object] | None = None,
) -> CompiledStack | None:
    """Return the compiled stack of a model's layers, or None if it cannot run all of them.

    embed: makes the input of the first layer; outputs: pools the output of the last one. The stack includes
    each of them if it can. width: of the hidden states. dtype: of Q, K, V and maps. refitted: the layers with
    the weights that hits take, if hits have their own.
    """
    library = products.library()
    if library is None:
        return None
    try:
        halves = [_halves(layer) for layer in layers]
        if refitted:
            halves = list(map(_with_refitted, halves, map(_halves, refitted)))
    except NotCompiled:
        return None
    return CompiledStack(
        library, halves, width, _compiled_embedding(embed), _compiled_pooling(outputs), dtype
    )


def _compiled_embedding(embed: object) -> CompiledEmbedding | None:
    try:
        return embed.compiled() if isinstance(embed, CompiledEmbed) else None
    except NotCompiled:
        return None


def _compiled_pooling(outputs: object) -> CompiledPooling | None:
    try:
        return outputs.compiled() if isinstance(outputs, CompiledOutputs) else None
    except NotCompiled:
        return None


def _halves(layer: object) -> Halves:
    if not isinstance(layer, CompiledLayer):
        raise NotCompiled
    return layer.compiled_attention(), compiled_halves(layer.feed_forward)


def _with_refitted(own: Halves, refitted: Halves) -> Halves:
    """Return the halves of a layer with the last weights of each half of `refitted` beside their own."""
    forward = map(_with_refitted_down, own[1], refitted[1])
    return replace(own[0], refitted_output=refitted[0].output), list(forward)


def _with_refitted_down(own: ForwardHalf, refitted: ForwardHalf) -> ForwardHalf:
    return replace(own, refitted_down=refitted.down)


def compiled_halves(feed_forward: object) -> list[ForwardHalf]:
    """Return the description of a feed-forward half. Raises NotCompiled."""
    if not isinstance(feed_forward, CompiledForward):
        raise NotCompiled
    return feed_forward.compiled_halves()


def packed_matrix(linear: Linear) -> PackedMatrix:
    """Return the packed weights of a linear layer. Raises NotCompiled if it is packed in another way."""
    packed = getattr(linear, "packed", None)
    if not isinstance(packed, PackedMatrix):
        raise NotCompiled
    return packed


def native_norm(module: nn.Module | Norm, device: torch.device) -> NativeNorm | None:
    """Return a norm by compiled code, in float32; None if it cannot compute the norm on this device."""
    library = products.library()
    if library is None or device != CPU:
        return None
    try:
        norm = compiled_norm(module)
    except NotCompiled:
        return None
    return None if norm is None else NativeNorm(library, norm)


def compiled_norm(module: nn.Module | Norm | None) -> CompiledNorm | None:
    """Return the description of a norm; None for no norm. Raises NotCompiled for another function.

    Families have modules of their own for root mean square norms, so a norm is recognised by its results.
    """
    if module is None or isinstance(module, nn.Identity):
        return None
    if isinstance(module, Norm):
        return CompiledNorm(module.weight, module.bias, module.epsilon, subtracts_mean=True)
    if isinstance(module, nn.LayerNorm):
        return compiled_norm(Norm(module))
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(epsilon, float):
        raise NotCompiled
    probe = torch.linspace(-2, 3, weight.numel()).sin()[None]
    found = deepcopy(module).float()(probe)
    plain = probe * (probe.square().mean() + epsilon).rsqrt()
    for factors in (weight.float(), 1 + weight.float()):  # Gemma stores the weight minus one
        if torch.allclose(found, plain * factors, rtol=1e-5, atol=1e-6):
            return CompiledNorm(factors, None, epsilon, subtracts_mean=False)
    raise NotCompiled
