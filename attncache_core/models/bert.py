"""BERT, MiniLM and DistilBERT, and RoBERTa and XLM-RoBERTa, which have the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attncache_core.heads.pooling import Pooler
from attncache_core.models.encoder import EncoderNames, dense_head, encoder
from attncache_core.models.layer import Dropped
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LayerHeads

BERT = EncoderNames(
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
    "intermediate.intermediate_act_fn",
)

DISTILBERT = EncoderNames(
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
    "ffn.activation",
    "transformer.layer",
)


def bert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a BERT checkpoint, for pooled embeddings or with its sequence-classification head."""
    base = model.base_model
    head = dense_head(base.pooler.dense, model.classifier) if hasattr(model, "classifier") else None
    return encoder(base, BERT, heads, pool, head, activation=base.config.hidden_act)


def roberta(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a RoBERTa or XLM-RoBERTa checkpoint, for pooled embeddings or with its classification head."""
    base, config = model.base_model, model.config
    score = getattr(model, "classifier", None)
    head = score and dense_head(score.dense, score.out_proj)
    return encoder(base, BERT, heads, pool, head, activation=config.hidden_act, padding=config.pad_token_id)


def distilbert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a DistilBERT checkpoint, for pooled embeddings or with its sequence-classification head."""
    score = getattr(model, "classifier", None)
    head = score and dense_head(model.pre_classifier, score, torch.relu)
    return encoder(model.base_model, DISTILBERT, heads, pool, head, activation=model.config.activation)
