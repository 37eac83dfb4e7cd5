"""Encoders like BERT: bidirectional attention, and a norm after each half of a layer.

BERT, RoBERTa, DistilBERT, MPNet, DeBERTa, NomicBERT and GTE differ in five points: the names of their
modules, their positions, the terms added to the scores, the gate of the network, and the classification head.
A family file supplies only these. The modules are those of transformers, or those of bare.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from attncache_core.heads.pooling import Pooler
from attncache_core.models.attention import AttentionMask
from attncache_core.models.embedding import Embedding
from attncache_core.models.layer import (
    AttentionLayer,
    Dropped,
    FeedForward,
    Network,
    Norms,
    build_layers,
    output_projection,
)
from attncache_core.models.linear import Norm, packed
from attncache_core.models.model import Head, Outputs, PackedModel
from attncache_core.models.projections import LayerHeads, LinearWeights, Projections
from attncache_core.models.rotary import LayerRotary
from attncache_core.models.scores import ScoreTerms


class EncoderNames(NamedTuple):
    """The names of an encoder's modules: of its layers, and in a layer."""

    query: str
    key: str
    value: str
    output: str
    attention_norm: str
    up: str
    down: str
    norm: str
    activation: str  # the function behind the gate, or between `up` and `down`, which may have weights
    layers: str = "encoder.layer"
    gate: str | None = None  # a linear layer before the activation, whose output multiplies that of `up`

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """The names of a layer's linear layers."""
        return self.query, self.key, self.value, self.output, self.up, self.down


def dense_head(
    dense: nn.Module, score: nn.Module, activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
) -> Head:
    """Return a head that applies a linear layer and its activation to the first token, and then `score`."""
    return Head(lambda first: activation(dense(first)), score)


def encoder(
    base: Any,
    names: EncoderNames,
    heads: Sequence[LayerHeads | Dropped],
    pool: Pooler,
    head: Head | None,
    *,
    activation: str,
    padding: int | None = None,
    scale: float | None = None,
    score_terms: Callable[[Any, LayerHeads], ScoreTerms] | None = None,
    rotary: LayerRotary | None = None,
) -> PackedModel:
    """Pack the encoder `base`, for pooled embeddings or with its head.

    activation: the name of the feed-forward activation. padding: see Embedding. scale: of Q Kᵀ; None: one
    over the root of a head's width. score_terms: makes the further terms of a layer's scores, if any, from
    the layer and its heads. rotary: positions that rotate Q and K; None: the embeddings have the positions.
    """

    def attention(module: Any, number: int, heads: LayerHeads) -> AttentionLayer:
        projected = map(LinearWeights.from_module, attrgetter(names.query, names.key, names.value)(module))
        query, key, value = projected
        return AttentionLayer(
            heads.order,
            heads.reused,
            Projections(query, key, value, heads, rotary=None if rotary is None else rotary[number]),
            output_projection(LinearWeights.from_module(attrgetter(names.output)(module)), heads),
            Norms(output=Norm(attrgetter(names.attention_norm)(module))),
            AttentionMask((len(query.weight) // len(heads.order)) ** -0.5 if scale is None else scale),
            score_terms and score_terms(module, heads),
        )

    def feed_forward(module: Any) -> FeedForward:
        up, down, norm = attrgetter(names.up, names.down, names.norm)(module)
        opened = attrgetter(names.gate or names.up)(module)
        opened = packed(opened, activation, attrgetter(names.activation)(module))
        up, gate = (packed(up), opened) if names.gate else (opened, None)
        return FeedForward(Network(up, packed(down), activation, gate), Norms(output=Norm(norm)))

    layers = attrgetter(names.layers)(base)
    embed, built = build_layers(
        embedding_of(base.embeddings, padding), layers, heads, attention, feed_forward
    )
    return PackedModel(
        hidden_size=base.config.hidden_size, embed=embed, layers=built, outputs=Outputs(pool, head)
    )


def embedding_of(module: Any, padding: int | None) -> Embedding:
    """Return the sum of word, position and token type embeddings; positions and types may be missing.

    padding: see Embedding.
    """
    positions = getattr(module, "position_embeddings", None)
    types = getattr(module, "token_type_embeddings", None)
    added = [] if positions is None else [positions.weight.float()[:, None]]
    added += [] if types is None else [types.weight.float()[None]]
    dtype = module.word_embeddings.weight.dtype
    return Embedding(
        module.word_embeddings,
        norm=Norm(module.LayerNorm),
        added=reduce(torch.add, added).flatten(0, 1).to(dtype) if added else None,
        has_positions=positions is not None,
        types=1 if types is None else len(types.weight),
        padding=padding,
        projection=getattr(module, "embed_proj", None),
    )
