"""ModernBERT: norms before each half, rotary positions, and layers with global or local attention.

The first layer has no norm before attention, because the embeddings are already normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.heads.pooling import pool as pooled
from attncache_core.models.attention import AttentionMask
from attncache_core.models.blocks import BaseAttentionLayer, QueryKeyValue, build_layers, output_linear
from attncache_core.models.encoder import EncoderOutputs, Head, first_tokens
from attncache_core.models.layer import Dropped, FeedForward, LayerHeads, PackedModel, Pool
from attncache_core.models.linear import Norm, packed
from attncache_core.models.projections import LinearWeights, Projections
from attncache_core.models.rotary import LayerRotary
from attncache_core.text.token_batch import TokenBatch


class ModernBertLayer(BaseAttentionLayer):
    """One layer: norm, attention, residual, then the feed-forward half."""

    def __init__(
        self,
        module: Any,
        projections: QueryKeyValue,
        attention_mask: AttentionMask,
        heads: LayerHeads,
        feed_forward: FeedForward,
    ) -> None:
        super().__init__(projections, attention_mask, heads, feed_forward)
        self._input_norm: nn.Module = module.attn_norm
        self._output = output_linear(module.attn.Wo, heads)

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self._input_norm(hidden)

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self._output(context.flatten(1), hidden)


class _FeedForward:
    """The second half of a layer: norm, gated network, residual."""

    def __init__(self, module: Any, activation: str) -> None:
        self._norm = Norm(module.mlp_norm)
        self._up, self._down = packed(module.mlp.Wi), packed(module.mlp.Wo)
        self._activation = ACT2FN[activation]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        opened, gate = self._up(self._norm(hidden)).chunk(2, dim=1)
        return self._down(self._activation(opened).mul_(gate), hidden)


def modernbert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pool) -> PackedModel:
    """Pack a ModernBERT checkpoint, for pooled embeddings or with its sequence-classification head."""
    base, config = model.base_model, model.config
    rotary = LayerRotary(base.rotary_emb, config)

    def build(module: Any, number: int, own: LayerHeads, second_half: FeedForward) -> ModernBertLayer:
        is_local = config.layer_types[number] == "sliding_attention"
        reach = config.sliding_window if is_local else None
        attention_mask = AttentionMask(module.attn.head_dim**-0.5, before=reach, after=reach)
        rotate = rotary.transform(number)
        query, key, value = LinearWeights.from_module(module.attn.Wqkv).split(3)
        projections = Projections(query, key, value, own, transform_query=rotate, transform_key=rotate)
        return ModernBertLayer(module, projections, attention_mask, own, second_half)

    words, embedding_norm = base.embeddings.tok_embeddings, Norm(base.embeddings.norm)
    embed, layers = build_layers(
        lambda batch: embedding_norm(words(batch.ids)),
        base.layers,
        heads,
        lambda module: _FeedForward(module, config.hidden_activation),
        build,
    )
    final_norm, outputs = Norm(base.final_norm), EncoderOutputs(pool, _head(model))
    return PackedModel(
        hidden_size=config.hidden_size,
        embed=embed,
        layers=layers,
        outputs=lambda hidden, batch: outputs(final_norm(hidden), batch),
    )


def _head(model: Any) -> Head | None:
    if not hasattr(model, "classifier"):
        return None
    by_mean = model.config.classifier_pooling == "mean"
    return Head(model.head, model.classifier, _means if by_mean else first_tokens)


def _means(hidden: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the mean of each sequence's tokens, [sequences, hidden], in the dtype of [tokens, hidden]."""
    return pooled(hidden, batch, Pooling(("mean",))).to(hidden.dtype)
