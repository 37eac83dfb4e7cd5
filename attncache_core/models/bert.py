"""BERT and MiniLM: bidirectional attention, learned positions, norm after each half of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from attncache_core.models import attention
from attncache_core.models.layer import Outputs, Pool, Projection
from attncache_core.models.linear import Norm, PackedLinear, packed
from attncache_core.tokens import TokenBatch


class BertLayer:
    """One encoder layer, its Q, K, V and output weights permuted to `head_order` and packed in two blocks."""

    def __init__(self, module: Any, head_order: Sequence[int], reused_heads: int) -> None:
        attend, output = module.attention.self, module.attention.output
        self.heads: int = attend.num_attention_heads
        self.head_dim: int = attend.attention_head_size
        self.reused_heads = reused_heads
        self._scale = self.head_dim**-0.5
        rows = _head_rows(head_order, self.head_dim)
        reused, computed = rows[: reused_heads * self.head_dim], rows[reused_heads * self.head_dim :]
        # Block one: what every sequence needs. Block two: what only a miss needs.
        self._always = _joined((attend.value, rows), (attend.query, computed), (attend.key, computed))
        self._misses = _joined((attend.query, reused), (attend.key, reused)) if reused_heads else None
        self._output = PackedLinear(output.dense.weight[:, rows], output.dense.bias)
        self._attention_norm = Norm(output.LayerNorm)
        activation, name = module.intermediate.intermediate_act_fn, attend.config.hidden_act
        self._up = packed(module.intermediate.dense, name, activation)
        self._down = packed(module.output.dense)
        self._norm = Norm(module.output.LayerNorm)

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` itself: BERT normalises after attention."""
        return hidden

    def project(self, x: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        parts = self._always(x).view(len(x), -1, self.head_dim)
        computed = self.heads - self.reused_heads
        value, query, key = parts.split([self.heads, computed, computed], dim=1)
        return Projection(value, query, key)

    def project_reused(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        assert self._misses is not None
        query, key = self._misses(x).view(len(x), 2, self.reused_heads, self.head_dim).unbind(dim=1)
        return query, key

    def attention_maps(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return attention.attention_maps(query, key, self._scale)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: np.ndarray,
        context: torch.Tensor,
    ) -> None:
        """See AttentionLayer."""
        attention.attend(query, key, value, offsets, self._scale, context)

    def finish(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        hidden = self._attention_norm(self._output(context.flatten(1), hidden))
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


class BertEncoder:
    """A BERT checkpoint, for embeddings (pooled) or with its sequence-classification head."""

    def __init__(
        self, model: Any, head_order: Sequence[Sequence[int]], reused_heads: Sequence[int], pool: Pool
    ) -> None:
        bert = getattr(model, "bert", model)
        self.hidden_size: int = bert.config.hidden_size
        self.layers = [
            BertLayer(module, order, reused)
            for module, order, reused in zip(bert.encoder.layer, head_order, reused_heads, strict=True)
        ]
        self._embeddings = _Embeddings(bert.embeddings)
        self._pool = pool
        self._pooler: nn.Module | None = bert.pooler
        self._classifier: nn.Module | None = getattr(model, "classifier", None)

    def embed(self, batch: TokenBatch) -> torch.Tensor:
        """See PackedModel."""
        return self._embeddings(batch)

    def outputs(self, hidden: torch.Tensor, batch: TokenBatch) -> Outputs:
        """See PackedModel."""
        if self._classifier is None:
            return Outputs(self._pool(hidden, batch), None)
        assert self._pooler is not None
        first_tokens = hidden[torch.from_numpy(batch.offsets[:-1])]
        pooled = self._pooler(first_tokens[:, None])
        return Outputs(pooled.float(), self._classifier(pooled).float())


def _head_rows(head_order: Sequence[int], head_dim: int) -> torch.Tensor:
    """The weight rows of the heads in this order: int64 [heads * head_dim]."""
    return (torch.tensor(head_order)[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _joined(*parts: tuple[nn.Linear, torch.Tensor]) -> PackedLinear:
    """Chosen rows of several linear layers as one packed layer."""
    weight = torch.cat([linear.weight[rows] for linear, rows in parts])
    return PackedLinear(weight, torch.cat([linear.bias[rows] for linear, rows in parts]))
