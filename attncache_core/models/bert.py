"""BERT and MiniLM: bidirectional attention, learned positions, norm after each half of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attncache_core.models.attention import Pattern
from attncache_core.models.blocks import PlainAttention, build_layers, output_linear
from attncache_core.models.layer import Dropped, FeedForward, LayerHeads, Outputs, PackedModel, Pool
from attncache_core.models.linear import Norm, packed
from attncache_core.models.projections import Projections, Rows
from attncache_core.tokens import TokenBatch


class BertLayer(PlainAttention):
    """One encoder layer: attention, its norm, the feed-forward half, its norm."""

    def __init__(self, module: Any, heads: LayerHeads, feed_forward: FeedForward) -> None:
        attend, output = module.attention.self, module.attention.output
        query, key, value = (Rows.of(part) for part in (attend.query, attend.key, attend.value))
        super().__init__(
            Projections(query, key, value, heads),
            Pattern(attend.attention_head_size**-0.5),
            heads,
            feed_forward,
        )
        self._output = output_linear(output.dense, heads)
        self._norm = Norm(output.LayerNorm)

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` itself: BERT normalises after attention."""
        return hidden

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self._norm(self._output(context.flatten(1), hidden))


class _FeedForward:
    """The second half of a layer: up, the activation, down, the residual, its norm."""

    def __init__(self, module: Any, name: str) -> None:
        """name: of the activation."""
        self._up = packed(module.intermediate.dense, name, module.intermediate.intermediate_act_fn)
        self._down = packed(module.output.dense)
        self._norm = Norm(module.output.LayerNorm)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._norm(self._down(self._up(hidden), hidden))


class _Embeddings:
    """Words and positions, summed and normalised. Every token is of the first type."""

    def __init__(self, module: Any) -> None:
        self._words: torch.Tensor = module.word_embeddings.weight
        types = module.token_type_embeddings.weight
        positions = module.position_embeddings.weight.float() + types[0].float()
        self._positions = positions.to(self._words.dtype)
        self._norm = Norm(module.LayerNorm)

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        """The first layer's input, [tokens, hidden]."""
        embedded = torch.embedding(self._words, batch.ids)
        return self._norm(embedded.add_(torch.embedding(self._positions, batch.positions)))


class _Outputs:
    """Pooled embeddings, or what the sequence-classification head says of the first token."""

    def __init__(self, model: Any, pooler: nn.Module | None, pool: Pool) -> None:
        self._pool = pool
        self._pooler = pooler
        self._classifier: nn.Module | None = getattr(model, "classifier", None)

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> Outputs:
        if self._classifier is None:
            return Outputs(self._pool(hidden, batch), None)
        assert self._pooler is not None
        first_tokens = hidden[torch.from_numpy(batch.offsets[:-1])]
        pooled = self._pooler(first_tokens[:, None])
        return Outputs(pooled.float(), self._classifier(pooled).float())


def bert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pool) -> PackedModel:
    """A BERT checkpoint, for embeddings (pooled) or with its sequence-classification head."""
    base = getattr(model, "bert", model)
    embed, layers = build_layers(
        _Embeddings(base.embeddings),
        base.encoder.layer,
        heads,
        lambda module: _FeedForward(module, base.config.hidden_act),
        lambda module, _, own, half: BertLayer(module, own, half),
    )
    return PackedModel(
        hidden_size=base.config.hidden_size,
        embed=embed,
        layers=layers,
        outputs=_Outputs(model, base.pooler, pool),
    )
