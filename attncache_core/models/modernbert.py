"""ModernBERT: norms before each half, rotary positions, and layers with global or local attention.

The first layer has no norm before attention, because the embeddings are already normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attncache_core.errors import UnsupportedModel
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
from attncache_core.models.linear import Norm, activated_linear, packed, packed_linear
from attncache_core.models.model import Head, Outputs, PackedModel
from attncache_core.models.projections import LayerHeads, LinearWeights, Projections
from attncache_core.models.rotary import LayerRotary


def modernbert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a ModernBERT checkpoint, for pooled embeddings or with its sequence-classification head.

    Raises UnsupportedModel if the local window is negative.
    """
    base, config = model.base_model, model.config
    if config.local_attention < 0:
        raise UnsupportedModel(
            f"local_attention in config.json is {config.local_attention}, and must be at least 0",
            field="model",
        )
    rotary = LayerRotary(base.rotary_emb, config, base.layers[0].attn.head_dim)

    def attention(module: Any, number: int, heads: LayerHeads) -> AttentionLayer:
        is_local = config.layer_types[number] == "sliding_attention"
        reach = config.sliding_window if is_local else None
        query, key, value = LinearWeights.from_module(module.attn.Wqkv).split(3)
        return AttentionLayer(
            heads.order,
            heads.reused,
            Projections(query, key, value, heads, rotary=rotary[number]),
            output_projection(LinearWeights.from_module(module.attn.Wo), heads),
            Norms(input=module.attn_norm),
            AttentionMask(module.attn.head_dim**-0.5, before=reach, after=reach),
        )

    def feed_forward(module: Any) -> FeedForward:
        gate, up = LinearWeights.from_module(module.mlp.Wi).split(2)
        name = config.hidden_activation
        opened = activated_linear(*gate, name, module.mlp.act)
        network = Network(packed_linear(*up), packed(module.mlp.Wo), name, opened)
        return FeedForward(network, Norms(input=Norm(module.mlp_norm)))

    words = Embedding(base.embeddings.tok_embeddings, Norm(base.embeddings.norm))
    embed, layers = build_layers(words, base.layers, heads, attention, feed_forward)
    return PackedModel(
        hidden_size=config.hidden_size,
        embed=embed,
        layers=layers,
        outputs=Outputs(pool, _head(model), Norm(base.final_norm)),
    )


def _head(model: Any) -> Head | None:
    if not hasattr(model, "classifier"):
        return None
    mode = "mean" if model.config.classifier_pooling == "mean" else "cls"
    return Head(model.head, model.classifier, Pooler((mode,)))
