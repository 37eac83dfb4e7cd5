"""Encoders like BERT: bidirectional attention, learned positions, a norm after each half of a layer.

BERT, RoBERTa, DistilBERT, MPNet and DeBERTa differ in four points: the names of their modules, the number of
the first position, the terms added to the scores, and the classification head. A family file supplies only
these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn

from attncache_core.heads.pooling import Pooler
from attncache_core.models.attention import AttentionMask
from attncache_core.models.compiled import CompiledOutputs
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
from attncache_core.models.model import Outputs, PackedModel
from attncache_core.models.projections import LayerHeads, LinearWeights, Projections
from attncache_core.models.scores import ScoreTerms
from attncache_core.text.token_batch import TokenBatch


class EncoderParts(NamedTuple):
    """The modules of one layer, under the same names for every family."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    norm: nn.LayerNorm
    activation: Callable[[torch.Tensor], torch.Tensor]  # between `up` and `down`; may have weights


class Head(NamedTuple):
    """A sequence-classification head."""

    read: Callable[[torch.Tensor], torch.Tensor]  # pooled vectors [n, hidden] -> input of `score`
    score: nn.Module  # -> logits [n, classes]
    pool: Pooler = Pooler(("cls",))


def pooled_head(pooler: Any, classifier: nn.Module | None) -> Head | None:
    """Return a head that applies a pooler to the first token; None without a classifier."""
    return None if classifier is None else Head(lambda first: pooler(first[:, None]), classifier)


def dense_head(classifier: Any | None) -> Head | None:
    """Return a head of two layers (dense, out_proj), as RoBERTa has; None without a classifier."""
    if classifier is None:
        return None
    return Head(lambda first: torch.tanh(classifier.dense(first)), classifier.out_proj)


class EncoderOutputs(CompiledOutputs):
    """The outputs of an encoder: pooled embeddings, or the logits of its classification head."""

    def __init__(self, pool: Pooler, head: Head | None, norm: Norm | None = None) -> None:
        """norm: of each token, before pooling."""
        finishes = head is not None or pool.head is not None
        super().__init__(pool if head is None else head.pool, norm, finishes=finishes)
        self._head = head

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> Outputs:
        """See PackedModel."""
        return self._finished(self._pool(self.states(hidden), batch))

    def of_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """See CompiledOutputs."""
        return self._finished(self._pool.finish(vectors)).rows

    def _finished(self, vectors: torch.Tensor) -> Outputs:
        if self._head is None:
            return Outputs(vectors, None)
        read = self._head.read(vectors.to(next(self._head.score.parameters()).dtype))
        return Outputs(read.float(), self._head.score(read).float())


def encoder(
    base: Any,
    layers: nn.ModuleList,
    heads: Sequence[LayerHeads | Dropped],
    pool: Pooler,
    head: Head | None,
    parts: Callable[[Any], EncoderParts],
    *,
    activation: str,
    scale: float | None = None,
    score_terms: Callable[[Any, LayerHeads], ScoreTerms] | None = None,
) -> PackedModel:
    """Pack the encoder `base`, for pooled embeddings or with its head.

    parts: returns the modules of one of `layers`. activation: the name of the feed-forward activation. scale:
    of Q Kᵀ; None: one over the root of a head's width. score_terms: makes the further terms of a layer's
    scores, if any, from the layer and its heads.
    """

    def attention(module: Any, _: int, heads: LayerHeads) -> AttentionLayer:
        made = parts(module)
        query, key, value = (LinearWeights.from_module(part) for part in (made.query, made.key, made.value))
        width = len(query.weight) // len(heads.order)
        return AttentionLayer(
            heads.order,
            heads.reused,
            Projections(query, key, value, heads),
            output_projection(LinearWeights.from_module(made.output), heads),
            Norms(output=Norm(made.attention_norm)),
            AttentionMask(width**-0.5 if scale is None else scale),
            score_terms and score_terms(module, heads),
        )

    def feed_forward(module: Any) -> FeedForward:
        made = parts(module)
        up = packed(made.up, activation, made.activation)
        return FeedForward(Network(up, packed(made.down), activation), Norms(output=Norm(made.norm)))

    embed, built = build_layers(_embedding(base.embeddings), layers, heads, attention, feed_forward)
    return PackedModel(
        hidden_size=base.config.hidden_size, embed=embed, layers=built, outputs=EncoderOutputs(pool, head)
    )


def _embedding(module: Any) -> Embedding:
    """Return the sum of word, position and token type embeddings; positions and types may be missing."""
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
        padding=None if positions is None else getattr(module, "padding_idx", None),
        projection=getattr(module, "embed_proj", None),
    )
