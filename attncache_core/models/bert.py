"""BERT, MiniLM and DistilBERT, and RoBERTa and XLM-RoBERTa, which have the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attncache_core.heads.pooling import Pooler
from attncache_core.models.encoder import EncoderParts, Head, dense_head, encoder, pooled_head
from attncache_core.models.layer import Dropped
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LayerHeads


def bert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a BERT checkpoint, for pooled embeddings or with its sequence-classification head."""
    base = model.base_model
    return _of_bert_layers(base, heads, pool, pooled_head(base.pooler, getattr(model, "classifier", None)))


def roberta(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a RoBERTa or XLM-RoBERTa checkpoint, for pooled embeddings or with its classification head."""
    return _of_bert_layers(model.base_model, heads, pool, dense_head(getattr(model, "classifier", None)))


def _of_bert_layers(
    base: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler, head: Head | None
) -> PackedModel:
    return encoder(base, base.encoder.layer, heads, pool, head, _parts, activation=base.config.hidden_act)


def _parts(layer: Any) -> EncoderParts:
    attend, output = layer.attention.self, layer.attention.output
    return EncoderParts(
        attend.query,
        attend.key,
        attend.value,
        output.dense,
        output.LayerNorm,
        layer.intermediate.dense,
        layer.output.dense,
        layer.output.LayerNorm,
        layer.intermediate.intermediate_act_fn,
    )


def distilbert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a DistilBERT checkpoint, for pooled embeddings or with its sequence-classification head."""
    base = model.base_model
    return encoder(
        base,
        base.transformer.layer,
        heads,
        pool,
        _distilbert_head(model),
        _distilbert_parts,
        activation=base.config.activation,
    )


def _distilbert_head(model: Any) -> Head | None:
    if not hasattr(model, "classifier"):
        return None
    dense = model.pre_classifier
    return Head(lambda first: dense(first).relu(), model.classifier)


def _distilbert_parts(layer: Any) -> EncoderParts:
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
        feed_forward.activation,
    )
