"""ModernBERT: norms before each half, rotary positions, and layers with global or local attention.

The first layer has no norm before attention, because the embeddings are already normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from attncache_core.heads.pooling import Pooler
from attncache_core.models.attention import AttentionMask
from attncache_core.models.blocks import (
    AttentionNorms,
    BaseAttentionLayer,
    QueryKeyValue,
    WordEmbedding,
    build_layers,
    output_linear,
)
from attncache_core.models.compiled import compiled_norm
from attncache_core.models.encoder import EncoderOutputs, Head
from attncache_core.models.experts import GatedNetwork
from attncache_core.models.layer import Dropped, FeedForward, LayerHeads, PackedModel
from attncache_core.models.linear import Norm, activated_linear, packed, packed_linear
from attncache_core.models.projections import LinearWeights, Projections
from attncache_core.models.rotary import LayerRotary
from attncache_core.native.stack_data import ForwardHalf


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

    def _norms(self) -> AttentionNorms:
        return AttentionNorms(self._input_norm)

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
        gate, up = LinearWeights.from_module(module.mlp.Wi).split(2)
        opened = activated_linear(*gate, activation, ACT2FN[activation])
        self._network = GatedNetwork(opened, packed_linear(*up), packed(module.mlp.Wo), activation)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._network(self._norm(hidden), hidden)

    def compiled_halves(self) -> list[ForwardHalf]:
        """See compiled.CompiledForward."""
        return [replace(self._network.compiled(), input_norm=compiled_norm(self._norm))]


def modernbert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
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

    embed, layers = build_layers(
        WordEmbedding(base.embeddings.tok_embeddings, Norm(base.embeddings.norm)),
        base.layers,
        heads,
        lambda module: _FeedForward(module, config.hidden_activation),
        build,
    )
    outputs = EncoderOutputs(pool, _head(model), Norm(base.final_norm))

    return PackedModel(
        hidden_size=config.hidden_size,
        embed=embed,
        layers=layers,
        outputs=outputs,
        token_states=lambda hidden: outputs.states(hidden).float(),
    )


def _head(model: Any) -> Head | None:
    if not hasattr(model, "classifier"):
        return None
    mode = "mean" if model.config.classifier_pooling == "mean" else "cls"
    return Head(model.head, model.classifier, Pooler((mode,)))
