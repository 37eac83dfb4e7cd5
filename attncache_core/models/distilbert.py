"""DistilBERT: BERT's layers under other module names, without token types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attncache_core.heads.pooling import Pooler
from attncache_core.models.encoder import EncoderParts, Head, encoder
from attncache_core.models.layer import Dropped, LayerHeads, PackedModel


def distilbert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a DistilBERT checkpoint, for pooled embeddings or with its sequence-classification head."""
    base = model.base_model
    return encoder(
        base, base.transformer.layer, heads, pool, _head(model), _parts, activation=base.config.activation
    )


def _head(model: Any) -> Head | None:
    if not hasattr(model, "classifier"):
        return None
    dense = model.pre_classifier
    return Head(lambda first: dense(first).relu(), model.classifier)


def _parts(layer: Any) -> EncoderParts:
    attend, feed_forward = layer.attention, layer.ffn
    return EncoderParts(
        attend.q_lin,
        attend.k_lin,
        attend.v_lin,
        attend.out_lin,
        layer.sa_layer_norm,
        feed_forward.lin1,
        feed_forward.lin2,
        layer.output_layer_norm,
    )
