"""Encoders of BERT's kind: bidirectional attention, learned positions, norm after each half of a layer.

BERT, RoBERTa, DistilBERT, MPNet and DeBERTa differ in the names of their modules, in where positions begin to
count, in what is added to scores, and in the head of a classifier. A family says these and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN

from attncache_core.models.attention import Pattern
from attncache_core.models.blocks import PlainAttention, Scores, build_layers, output_linear
from attncache_core.models.layer import Dropped, FeedForward, LayerHeads, Outputs, PackedModel, Pool
from attncache_core.models.linear import Norm, packed
from attncache_core.models.projections import Projections, Rows
from attncache_core.tokens import TokenBatch


class EncoderParts(NamedTuple):
    """The modules of a layer, whatever a family calls them."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    norm: nn.LayerNorm


class EncoderLayer(PlainAttention):
    """One encoder layer: attention, its norm, the feed-forward half, its norm."""

    def __init__(
        self, parts: EncoderParts, heads: LayerHeads, feed_forward: FeedForward, scores: Scores | None
    ) -> None:
        query, key, value = (Rows.of(part) for part in (parts.query, parts.key, parts.value))
        super().__init__(
            Projections(query, key, value, heads),
            Pattern((len(query.weight) // len(heads.order)) ** -0.5),
            heads,
            feed_forward,
            scores,
        )
        self._output = output_linear(parts.output, heads)
        self._norm = Norm(parts.attention_norm)

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` itself: the norms come after attention."""
        return hidden

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self._norm(self._output(context.flatten(1), hidden))


class _FeedForward:
    """The second half of a layer: up, the activation, down, the residual, its norm."""

    def __init__(self, parts: EncoderParts, activation: str) -> None:
        self._up = packed(parts.up, activation, ACT2FN[activation])
        self._down = packed(parts.down)
        self._norm = Norm(parts.norm)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._norm(self._down(self._up(hidden), hidden))


class _Embeddings:
    """Words, positions and token types, as far as a checkpoint has them, summed and normalised.

    Every token is of the first type. In some families positions count from the padding token's number + 1
    and leave out padding tokens, which a text may name: each of them stands at the padding token's number.
    """

    def __init__(self, module: Any) -> None:
        self._words: torch.Tensor = module.word_embeddings.weight
        positions = getattr(module, "position_embeddings", None)
        types = getattr(module, "token_type_embeddings", None)
        added = [] if positions is None else [positions.weight.float()]
        added += [] if types is None else [types.weight[:1].float()]
        # A row of each position; a single one if only the type is added.
        self._added = reduce(torch.add, added).to(self._words.dtype) if added else None
        self._padding: int | None = getattr(module, "padding_idx", None)
        self._projection: nn.Module | None = getattr(module, "embed_proj", None)
        self._norm = Norm(module.LayerNorm)

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        """The first layer's input, [tokens, hidden]."""
        embedded = torch.embedding(self._words, batch.ids)
        if self._added is not None:
            one_for_all = len(self._added) == 1
            embedded.add_(self._added if one_for_all else torch.embedding(self._added, self._places(batch)))
        return self._norm(embedded if self._projection is None else self._projection(embedded))

    def _places(self, batch: TokenBatch) -> torch.Tensor:
        """The row of each token's position, int64 [tokens]."""
        return batch.positions if self._padding is None else _counted_positions(batch, self._padding)


def _counted_positions(batch: TokenBatch, padding: int) -> torch.Tensor:
    """int64 [tokens]: tokens other than `padding` counted from padding + 1; those stand at `padding`."""
    counts = (batch.ids != padding).long()
    total = counts.cumsum(0)
    first = torch.arange(len(counts), device=counts.device) - batch.positions  # token of the same sequence
    return (total - (total - counts)[first]) * counts + padding


def first_tokens(hidden: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Of hidden [tokens, hidden] those of each sequence's first token, [sequences, hidden]."""
    return hidden[torch.from_numpy(batch.offsets[:-1])]


class Head(NamedTuple):
    """A sequence-classification head."""

    read: Callable[[torch.Tensor], torch.Tensor]  # pooled tokens [n, hidden] -> what the classifier reads
    score: nn.Module  # -> logits [n, classes]
    pool: Pool = first_tokens


def pooled_head(pooler: Any, classifier: nn.Module | None) -> Head | None:
    """A head that reads what a pooler makes of the first token; None without a classifier."""
    return None if classifier is None else Head(lambda first: pooler(first[:, None]), classifier)


def dense_head(classifier: Any | None) -> Head | None:
    """A head that holds the layer before its last one, as RoBERTa's; None without a classifier."""
    if classifier is None:
        return None
    return Head(lambda first: torch.tanh(classifier.dense(first)), classifier.out_proj)


class EncoderOutputs:
    """Pooled embeddings, or what the sequence-classification head says."""

    def __init__(self, pool: Pool, head: Head | None) -> None:
        self._pool = pool
        self._head = head

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> Outputs:
        """See PackedModel."""
        if self._head is None:
            return Outputs(self._pool(hidden, batch), None)
        read = self._head.read(self._head.pool(hidden, batch))
        return Outputs(read.float(), self._head.score(read).float())


def encoder(
    base: Any,
    layers: nn.ModuleList,
    heads: Sequence[LayerHeads | Dropped],
    pool: Pool,
    head: Head | None,
    parts: Callable[[Any], EncoderParts],
    *,
    activation: str,
    scores: Callable[[Any, LayerHeads], Scores] | None = None,
) -> PackedModel:
    """The encoder `base`, for embeddings (pooled) or with its head.

    parts(layer) names the modules of one of `layers`, `activation` what its feed-forward half has;
    scores(layer, heads) makes scores that are more than scale Q Kᵀ.
    """

    def build(module: Any, _: int, own: LayerHeads, half: FeedForward) -> EncoderLayer:
        return EncoderLayer(parts(module), own, half, scores and scores(module, own))

    embed, built = build_layers(
        _Embeddings(base.embeddings),
        layers,
        heads,
        lambda module: _FeedForward(parts(module), activation),
        build,
    )
    return PackedModel(
        hidden_size=base.config.hidden_size, embed=embed, layers=built, outputs=EncoderOutputs(pool, head)
    )
