"""BERT, MiniLM and DistilBERT; RoBERTa and XLM-RoBERTa, which have the same layers; NomicBERT and GTE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attncache_core.errors import UnsupportedModel
from attncache_core.heads.pooling import Pooler
from attncache_core.models.encoder import EncoderNames, dense_head, encoder
from attncache_core.models.layer import Dropped
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LayerHeads
from attncache_core.models.rotary import LayerRotary

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

_ROTARY = EncoderNames(
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.up_proj",
    "mlp.down_proj",
    "post_mlp_layernorm",
    "mlp.act_fn",
    "layers",
    gate="mlp.gate_proj",
)
# What transformers computes NomicBERT and GTE with. It ignores these names, which publishers' files have.
_EXPECTED = {
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "position_embedding_type": "rope",
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}


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


def rotary_bert(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a NomicBERT or GTE checkpoint, for pooled embeddings or with its classification head.

    Raises UnsupportedModel if the publisher's config.json says what transformers does not compute.
    """
    base, config = model.base_model, model.config
    read = {
        "n_head": config.num_attention_heads,
        "layer_norm_epsilon": config.layer_norm_eps,
        "rotary_emb_base": config.rope_parameters["rope_theta"],
    }
    for name, value in (_EXPECTED | read).items():
        if (found := getattr(config, name, value)) != value:
            raise UnsupportedModel(
                f"{name} in config.json is {found!r}; models of the family {config.model_type} are served "
                f"with {value!r} only",
                field="model",
            )
    head = dense_head(base.pooler.dense, model.classifier) if hasattr(model, "classifier") else None
    rotary = LayerRotary(base.rotary_emb, config, base.layers[0].self_attn.head_dim)
    return encoder(base, _ROTARY, heads, pool, head, activation=config.hidden_act, rotary=rotary)
