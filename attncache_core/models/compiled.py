"""Hand the description of a model (layer.py, embedding.py) to the compiled stack (native/stack.h).

A layer with a part that the stack does not have (experts, latent attention, capped scores) is not compiled,
and the model then runs on the plain executor, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from attncache_core.models.embedding import Embedding
from attncache_core.models.layer import AttentionLayer, FeedForward, Network
from attncache_core.models.linear import Linear, Norm
from attncache_core.models.projections import Projections, SharedHeads
from attncache_core.models.scores import ScoreTerms
from attncache_core.native import products
from attncache_core.native.pooling import CompiledNorm, CompiledPooling, NativeNorm
from attncache_core.native.products import PackedMatrix
from attncache_core.native.stack import CompiledStack
from attncache_core.native.stack_layers import AttentionHalf, CompiledEmbedding, ForwardHalf, QueryKeyHeads
from attncache_core.runtime.devices import CPU

Halves = tuple[AttentionHalf, list[ForwardHalf]]  # of one layer


class NotCompiled(Exception):
    """A part of a model that the compiled stack does not have."""


def compiled_stack(
    embed: object,
    layers: Sequence[object],
    modes: Sequence[str],
    last_norm: nn.Module | Norm | None,
    width: int,
    dtype: torch.dtype,
    refitted: Sequence[object] | None = None,
) -> CompiledStack | None:
    """Return the compiled stack of a model's layers, or None if it cannot run all of them.

    embed: makes the input of the first layer. modes, last_norm: of the pooling behind the last layer. The
    stack includes each of them if it can. width: of the hidden states. dtype: of Q, K, V and maps. refitted:
    the layers with the weights that hits take, if hits have their own.
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
    pooling = _compiled_pooling(modes, last_norm)
    return CompiledStack(library, halves, width, _compiled_embedding(embed), pooling, dtype)


def _compiled_embedding(embed: object) -> CompiledEmbedding | None:
    if not isinstance(embed, Embedding) or not isinstance(embed.words, nn.Embedding) or embed.projection:
        return None
    scale = _scale_of_rows(embed.words)
    if scale is None:
        return None
    return CompiledEmbedding(
        embed.words.weight,
        embed.added,
        compiled_norm(embed.norm),
        embed.types,
        embed.has_positions,
        embed.padding,
        scale=scale,
    )


def _scale_of_rows(table: nn.Embedding) -> float | None:
    """Return what the module multiplies its rows by (Gemma); None if it computes anything else."""
    rows = torch.arange(min(8, table.num_embeddings))
    scale = torch.as_tensor(getattr(table, "embed_scale", 1.0), dtype=table.weight.dtype)
    same = torch.allclose(table(rows), table.weight[rows] * scale, rtol=0, atol=0, equal_nan=True)
    return float(scale) if same else None


def _compiled_pooling(modes: Sequence[str], norm: nn.Module | Norm | None) -> CompiledPooling | None:
    try:
        return CompiledPooling(tuple(modes), compiled_norm(norm))
    except NotCompiled:
        return None


def _halves(layer: object) -> Halves:
    if not isinstance(layer, AttentionLayer):
        raise NotCompiled
    return attention_half(layer), [forward_half(half) for half in layer.halves]


def _with_refitted(halves: Halves, refitted: Halves) -> Halves:
    """Return the halves of a layer with the last weights of each half of `refitted` beside their own."""
    forward = [
        replace(half, refitted_down=other.down) for half, other in zip(halves[1], refitted[1], strict=True)
    ]
    return replace(halves[0], refitted_output=refitted[0].output), forward


def attention_half(layer: AttentionLayer) -> AttentionHalf:
    """Return the attention half of a layer for the stack. Raises NotCompiled."""
    made, mask, norms = layer.projections, layer.attention_mask, layer.norms
    terms = layer.score_terms or ScoreTerms()
    if not isinstance(made, Projections) or terms.cap is not None:
        raise NotCompiled
    return AttentionHalf(
        always=_query_key_heads(made.always, made.computed),
        misses=None if made.misses is None else _query_key_heads(made.misses, made.reused),
        output=packed_matrix(layer.output),
        value_heads=made.values.used,
        values=len(made.values.chosen),
        width=made.width,
        value_width=made.value_width,
        scale=mask.scale,
        before=mask.before,
        after=mask.after,
        input_norm=compiled_norm(norms.input),
        branch_norm=compiled_norm(norms.branch),
        output_norm=compiled_norm(norms.output),
        query_norm=compiled_norm(made.query_norm),
        key_norm=compiled_norm(made.key_norm),
        angles=made.rotary.tables if made.rotary else None,
        half=made.rotary.half if made.rotary else 0,
        bias=terms.bias,
        query_term=terms.query_term,
        key_term=terms.key_term,
    )


def _query_key_heads(product: Linear, keys: SharedHeads) -> QueryKeyHeads:
    return QueryKeyHeads(packed_matrix(product), keys.used, len(keys.chosen))


def forward_half(half: FeedForward) -> ForwardHalf:
    """Return a feed-forward half for the stack. Raises NotCompiled."""
    network, norms = half.network, half.norms
    if not isinstance(network, Network):
        raise NotCompiled
    return ForwardHalf(
        up=packed_matrix(network.up),
        down=packed_matrix(network.down),
        activation=network.activation,
        gate=None if network.gate is None else packed_matrix(network.gate),
        input_norm=compiled_norm(norms.input),
        branch_norm=compiled_norm(norms.branch),
        output_norm=compiled_norm(norms.output),
    )


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
    probe = torch.linspace(-2, 3, weight.numel(), dtype=torch.float32).sin()[None]
    found = deepcopy(module).float()(probe)
    plain = probe * (probe.square().mean() + epsilon).rsqrt()
    for factors in (weight.float(), 1 + weight.float()):  # Gemma stores the weight minus one
        if torch.allclose(found, plain * factors, rtol=1e-5, atol=1e-6):
            return CompiledNorm(factors, None, epsilon, subtracts_mean=False)
    raise NotCompiled
