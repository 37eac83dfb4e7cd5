"""Encoders like BERT: bidirectional attention, learned positions, a norm after each half of a layer.

BERT, RoBERTa, DistilBERT, MPNet and DeBERTa differ in four points: the names of their modules, the number of
the first position, the terms added to the scores, and the classification head. A family file supplies only
these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import reduce
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import nn
from transformers.activations import ACT2FN

from attncache_core.heads.pooling import Pooler
from attncache_core.models.attention import AttentionMask
from attncache_core.models.blocks import (
    AttentionNorms,
    BaseAttentionLayer,
    Scores,
    build_layers,
    output_linear,
)
from attncache_core.models.compiled import NotCompiled, compiled_norm, native_norm, packed_matrix
from attncache_core.models.layer import Dropped, FeedForward, LayerHeads, Outputs, PackedModel
from attncache_core.models.linear import Norm, packed
from attncache_core.models.projections import LinearWeights, Projections, head_rows
from attncache_core.models.refitted import LastProducts, like_linear, plain_weights
from attncache_core.native.stack_data import CompiledEmbedding, CompiledPooling, ForwardHalf
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


class EncoderLayer(BaseAttentionLayer):
    """One encoder layer: attention, residual and norm, then the feed-forward half."""

    def __init__(
        self, parts: EncoderParts, heads: LayerHeads, feed_forward: FeedForward, scores: Scores | None
    ) -> None:
        query, key, value = (
            LinearWeights.from_module(part) for part in (parts.query, parts.key, parts.value)
        )
        super().__init__(
            Projections(query, key, value, heads),
            AttentionMask((len(query.weight) // len(heads.order)) ** -0.5),
            heads,
            feed_forward,
            scores,
        )
        self._order = heads.order
        self._output = output_linear(parts.output, heads)
        self._norm = Norm(parts.attention_norm)

    def _norms(self) -> AttentionNorms:
        return AttentionNorms(output=self._norm)

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden` itself, since the norms come after attention."""
        return hidden

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self._norm(self.attention_sum(hidden, context))

    def attention_sum(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See RefittableLayer."""
        return self._output(context.flatten(1), hidden)

    def last_products(self) -> LastProducts | None:
        """See RefittableLayer."""
        forward = self.feed_forward
        if not isinstance(forward, EncoderForward):
            return None
        output, down = (plain_weights(product) for product in (self._output, forward.down))
        if output is None or down is None:
            return None
        columns = head_rows(self._order, output.weight.shape[1] // self.heads)
        return LastProducts(LinearWeights(output.weight[:, columns.argsort()], output.bias), down)

    def with_last_products(self, products: LastProducts) -> Self:
        """See RefittableLayer."""
        assert isinstance(self.feed_forward, EncoderForward)
        columns = head_rows(self._order, products.output.weight.shape[1] // self.heads)
        output = LinearWeights(products.output.weight[:, columns], products.output.bias)
        layer = copy(self)
        layer._output = like_linear(self._output, output)
        layer.feed_forward = self.feed_forward.with_down(products.down)
        return layer

    def with_heads(self, heads: LayerHeads) -> Self:
        """See BaseAttentionLayer."""
        layer = super().with_heads(heads)
        layer._order = range(self.heads) if self._scores is not None else heads.order
        return layer


class EncoderForward:
    """The second half of a layer: up projection, activation, down projection, residual, norm."""

    def __init__(self, parts: EncoderParts, activation: str) -> None:
        self._activation = activation
        self._up = packed(parts.up, activation, ACT2FN[activation])
        self.down = packed(parts.down)
        self.norm = Norm(parts.norm)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.norm(self.down(self.inner(hidden), hidden))

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        """See RefittableForward."""
        return self._up(hidden)

    def with_down(self, down: LinearWeights) -> EncoderForward:
        """Return the same half with another down projection."""
        half = copy(self)
        half.down = like_linear(self.down, down)
        return half

    def compiled_halves(self) -> list[ForwardHalf]:
        """See compiled.CompiledForward."""
        return [
            ForwardHalf(
                packed_matrix(self._up),
                packed_matrix(self.down),
                self._activation,
                output_norm=compiled_norm(self.norm),
            )
        ]


class _Embeddings:
    """The sum of word, position and token type embeddings, normalised.

    A checkpoint may lack the positions or the types. A token without a type has the first type.
    """

    def __init__(self, module: Any) -> None:
        self._words: torch.Tensor = module.word_embeddings.weight
        positions = getattr(module, "position_embeddings", None)
        types = getattr(module, "token_type_embeddings", None)
        added = [] if positions is None else [positions.weight.float()[:, None]]
        added += [] if types is None else [types.weight.float()[None]]
        # [positions * types, hidden], position after position; without a part, it counts one row.
        self._added = reduce(torch.add, added).flatten(0, 1).to(self._words.dtype) if added else None
        self._has_positions = positions is not None
        self._types = 1 if types is None else len(types.weight)
        self._padding: int | None = getattr(module, "padding_idx", None)
        self._projection: nn.Module | None = getattr(module, "embed_proj", None)
        self._norm = Norm(module.LayerNorm)

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        """Return the first layer's input, [tokens, hidden]."""
        embedded = torch.embedding(self._words, batch.ids)
        if self._added is not None:
            rows = self._rows(batch)
            embedded.add_(self._added[:1] if rows is None else torch.embedding(self._added, rows))
        return self._norm(embedded if self._projection is None else self._projection(embedded))

    def compiled(self) -> CompiledEmbedding:
        """See compiled.CompiledEmbed."""
        if self._projection is not None:
            raise NotCompiled
        return CompiledEmbedding(
            self._words,
            self._added,
            compiled_norm(self._norm),
            self._types,
            self._has_positions,
            self._padding if self._has_positions else None,
        )

    def _rows(self, batch: TokenBatch) -> torch.Tensor | None:
        """Return the row of each token in the table that is added, int64 [tokens]; None: row 0."""
        types = None if self._types == 1 else batch.types
        if not self._has_positions:
            return types
        rows = self._position_rows(batch) * self._types
        return rows if types is None else rows + types

    def _position_rows(self, batch: TokenBatch) -> torch.Tensor:
        """Return each token's row in the table of positions, int64 [tokens]."""
        return batch.positions if self._padding is None else _counted_positions(batch, self._padding)


def _counted_positions(batch: TokenBatch, padding: int) -> torch.Tensor:
    """Return positions as RoBERTa and MPNet count them, int64 [tokens].

    padding: the id of the padding token. Positions count from padding + 1 and skip padding tokens. A text may
    contain the padding token by name; such a token has position `padding`.
    """
    counts = (batch.ids != padding).long()
    total = counts.cumsum(0)
    first = torch.arange(len(counts), device=counts.device) - batch.positions  # of each token's sequence
    return (total - (total - counts)[first]) * counts + padding


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


class EncoderOutputs:
    """The outputs of an encoder: pooled embeddings, or the logits of its classification head."""

    def __init__(self, pool: Pooler, head: Head | None, norm: Norm | None = None) -> None:
        """norm: of each token, before pooling."""
        self._pool = pool if head is None else head.pool
        self._head = head
        self._norm = norm
        self._native = None if norm is None else native_norm(norm, norm.weight.device)
        self.finishes = head is not None or pool.head is not None

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> Outputs:
        """See PackedModel."""
        return self._finished(self._pool(self.states(hidden), batch))

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what pooling reads from the last layer's output, [tokens, hidden]."""
        if self._norm is None:
            return hidden
        return self._native(hidden) if self._native else self._norm(hidden.to(self._norm.weight.dtype))

    def compiled(self) -> CompiledPooling:
        """See compiled.CompiledOutputs."""
        return CompiledPooling(self._pool.modes, compiled_norm(self._norm))

    def skipped(self, lengths: np.ndarray, prompt_tokens: np.ndarray | None) -> np.ndarray | None:
        """See compiled.CompiledOutputs."""
        return self._pool.skipped(lengths, prompt_tokens)

    def of_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """See compiled.CompiledOutputs."""
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
    scores: Callable[[Any, LayerHeads], Scores] | None = None,
) -> PackedModel:
    """Pack the encoder `base`, for pooled embeddings or with its head.

    parts: returns the modules of one of `layers`. activation: the name of the feed-forward activation.
    scores: makes a layer's score function from the layer and its heads, for scores with more terms than
    scale Q Kᵀ.
    """

    def build(module: Any, _: int, own: LayerHeads, feed_forward: FeedForward) -> EncoderLayer:
        return EncoderLayer(parts(module), own, feed_forward, scores and scores(module, own))

    embed, built = build_layers(
        _Embeddings(base.embeddings),
        layers,
        heads,
        lambda module: EncoderForward(parts(module), activation),
        build,
    )
    return PackedModel(
        hidden_size=base.config.hidden_size, embed=embed, layers=built, outputs=EncoderOutputs(pool, head)
    )
