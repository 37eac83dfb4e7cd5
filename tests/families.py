"""Tiny models of every family, with the family's special options switched on: the cases of test_families.py.

A new family needs one or more lines in CASES. The tests derive everything else from the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from core_models import VOCABULARY, write_tokenizer
from family_reference import FamilyReference
from plain_deepseek import PlainDeepseek
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    DistilBertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.models.deepseek_moe import DeepseekConfig
from attncache_core.native import products

SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
HEADS = SIZES["num_attention_heads"]


@dataclass(frozen=True)
class Case:
    """One configuration of a family."""

    config: type[PreTrainedConfig]
    changes: dict[str, Any] = field(default_factory=dict)  # added to SIZES
    experts: bool = False  # whether some layers have experts
    saved_as: Any = AutoModel  # class of the saved model: an encoder without a head, or a decoder with one
    reference: Any = FamilyReference  # the reference model, made from the checkpoint's folder

    def made(self) -> PreTrainedConfig:
        """Make the configuration."""
        return self.config(**SIZES | self.changes)

    def written(self, folder: Path, labels: Sequence[str] = (), **changes: Any) -> Path:
        """Write the model and its tokenizer to `folder`, with other entries in its configuration."""
        case = replace(self, changes=self.changes | changes)
        return write_family(folder, case.made(), labels, saved_as=self.saved_as)

    @property
    def compiled(self) -> bool:
        """Whether the compiled stack has all layers of the model."""
        config = self.made()
        latent = hasattr(config, "kv_lora_rank")
        caps = config.model_type == "gemma2" and config.attn_logit_softcapping is not None
        routed = self.experts or config.model_type == "deepseek"
        return not (routed or latent or caps) and products.library() is not None


@dataclass
class Family:
    """The checkpoint of one case, and its reference."""

    case: Case
    folder: Path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return read_checkpoint(self.case.written(self.folder))

    @cached_property
    def reference(self) -> Any:
        return self.case.reference(self.checkpoint.folder)


def write_family(
    folder: Path, config: PreTrainedConfig, labels: Sequence[str] = (), *, saved_as: Any = AutoModel
) -> Path:
    """Write a model with random weights and its tokenizer to `folder`: a classifier if `labels` are given.

    saved_as: the transformers class of a model without labels. Weights are large, as in
    core_models.write_model. Norms and biases are close to their initial values.
    """
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(0)
    model = (AutoModelForSequenceClassification if labels else saved_as).from_config(config)
    with torch.no_grad():
        for values in (*model.parameters(), *saved_buffers(model)):
            if values.dim() > 1:
                torch.nn.init.normal_(values, std=0.25)
            else:
                values += torch.randn_like(values) * 0.1
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def saved_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the floating-point buffers that a checkpoint holds beside the parameters."""
    saved = model.state_dict()
    return [values for name, values in model.named_buffers() if name in saved and values.is_floating_point()]


def decoder(
    config: type[PreTrainedConfig], changes: dict[str, Any] | None = None, experts: bool = False
) -> Case:
    """Make the case of a decoder, saved with its language head, as decoders are published."""
    return Case(config, changes or {}, experts=experts, saved_as=AutoModelForCausalLM)


def plain_deepseek(changes: dict[str, Any]) -> Case:
    """Make the case of a DeepSeek-MoE decoder, which transformers does not include."""
    return replace(decoder(DeepseekConfig, ROUTED | changes, experts=True), reference=PlainDeepseek)


GROUPED = {"num_key_value_heads": 2, "pad_token_id": None}
ONE_KEY = {"num_key_value_heads": 1, "pad_token_id": None}
# hidden_activation is the activation of Gemma 2 and 3. The first Gemma has hidden_act instead.
GEMMA = {"head_dim": 8, "pad_token_id": None, "hidden_activation": "gelu_pytorch_tanh"}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}
# With 8 rotary dimensions per head, some frequencies are scaled, some are not, and some are in between.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TWO_ROTARIES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
}
GEMMA3 = (
    GEMMA
    | {"num_key_value_heads": 2, "sliding_window": 4, "query_pre_attn_scalar": 12}
    | {"layer_types": WINDOWS, "rope_parameters": TWO_ROTARIES}
)

# The first layer has no experts.
ROUTED = {"num_key_value_heads": 4, "pad_token_id": None, "n_routed_experts": 8, "n_shared_experts": 2} | {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
# Latents and parts of heads all have different sizes.
LATENT = (
    ROUTED
    | {"num_experts_per_tok": 2, "kv_lora_rank": 20, "q_lora_rank": None}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 12}
)
QUERY_LATENT = {"q_lora_rank": 14, "attention_bias": True}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN_BY_MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}

DECODERS = {
    "llama": decoder(LlamaConfig),
    "llama-grouped-biased": decoder(LlamaConfig, GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama-one-key-tied-wide-heads": decoder(
        LlamaConfig, ONE_KEY | {"tie_word_embeddings": True, "head_dim": 16, "hidden_act": "gelu"}
    ),
    "llama-linear": decoder(LlamaConfig, {"rope_parameters": LINEAR}),
    "llama-llama3": decoder(LlamaConfig, GROUPED | {"rope_parameters": LLAMA3}),
    "llama-yarn": decoder(LlamaConfig, GROUPED | {"rope_parameters": YARN}),
    # Options that only other families read.
    "llama-leftovers": decoder(LlamaConfig, GROUPED | {"sliding_window": 4, "final_logit_softcapping": 2.0}),
    "llama-both-ways": decoder(LlamaConfig, GROUPED | {"is_causal": False}),
    "mistral": decoder(MistralConfig, GROUPED | {"sliding_window": None}),
    "mistral-window-narrow-heads": decoder(MistralConfig, GROUPED | {"sliding_window": 4, "head_dim": 6}),
    "mistral-window-both-ways-more-heads-than-numbers": decoder(
        MistralConfig, GROUPED | {"sliding_window": 3, "is_causal": False, "hidden_size": 3, "head_dim": 8}
    ),
    "qwen2": decoder(Qwen2Config, GROUPED),
    "qwen2-tied-windows-from-layer-1": decoder(
        Qwen2Config,
        GROUPED
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        | {"tie_word_embeddings": True},
    ),
    "qwen2-windows-by-layer": decoder(
        Qwen2Config, ONE_KEY | {"use_sliding_window": True, "sliding_window": 3, "layer_types": WINDOWS}
    ),
    "qwen3": decoder(Qwen3Config, GROUPED | {"head_dim": 16}),
    "qwen3-biased-windows-yarn": decoder(
        Qwen3Config,
        GROUPED
        | {"head_dim": 8, "attention_bias": True, "rope_parameters": YARN}
        | {"use_sliding_window": True, "sliding_window": 4, "layer_types": WINDOWS},
    ),
    # The first Gemma reads hidden_act, which defaults to gelu_pytorch_tanh, and ignores hidden_activation.
    "gemma": decoder(
        GemmaConfig, GEMMA | {"num_key_value_heads": 1, "head_dim": 16, "hidden_activation": "relu"}
    ),
    "gemma2": decoder(
        Gemma2Config,
        GEMMA
        | {"num_key_value_heads": 2, "sliding_window": 4, "query_pre_attn_scalar": 5, "layer_types": WINDOWS}
        | {"attn_logit_softcapping": 2.0, "hidden_act": "relu"},
    ),
    "gemma2-without-caps": decoder(
        Gemma2Config, GEMMA | {"num_key_value_heads": 4, "attn_logit_softcapping": None}
    ),
    "gemma3": decoder(Gemma3TextConfig, GEMMA3),
    "gemma3-both-ways": decoder(Gemma3TextConfig, GEMMA3 | {"use_bidirectional_attention": True}),
    "gemma3-not-causal": decoder(
        Gemma3TextConfig, GEMMA3 | {"use_bidirectional_attention": True, "is_causal": False}
    ),
    "mixtral": decoder(
        MixtralConfig, GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True
    ),
    "mixtral-window": decoder(
        MixtralConfig,
        GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 4},
        experts=True,
    ),
    "qwen2-moe-dense-layer": decoder(
        Qwen2MoeConfig,
        GROUPED | EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        experts=True,
    ),
    "qwen2-moe-windows": decoder(
        Qwen2MoeConfig,
        GROUPED
        | EXPERTS
        | {"norm_topk_prob": True, "shared_expert_intermediate_size": 16}
        | {"use_sliding_window": True, "sliding_window": 4},
        experts=True,
    ),
    "qwen3-moe-sparse-steps": decoder(
        Qwen3MoeConfig,
        GROUPED | EXPERTS | {"head_dim": 16, "decoder_sparse_step": 2, "norm_topk_prob": True},
        experts=True,
    ),
    "deepseek-v2": decoder(DeepseekV2Config, LATENT | {"routed_scaling_factor": 1.5}, experts=True),
    "deepseek-v2-query-latent-groups-yarn": decoder(
        DeepseekV2Config,
        LATENT
        | QUERY_LATENT
        | GROUPS
        | {"topk_method": "group_limited_greedy", "rope_parameters": YARN_BY_MSCALE, "mlp_bias": True},
        experts=True,
    ),
    "deepseek-v3": decoder(
        DeepseekV3Config, LATENT | GROUPS | {"rope_interleave": None, "norm_topk_prob": False}, experts=True
    ),
    "deepseek-v3-query-latent-interleaved-yarn": decoder(
        DeepseekV3Config,
        LATENT | QUERY_LATENT | GROUPS | {"rope_parameters": YARN_BY_MSCALE, "first_k_dense_replace": 2},
        experts=True,
    ),
    "deepseek": plain_deepseek({}),
    "deepseek-grouped-biased-tied-normalised": plain_deepseek(
        GROUPED | {"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": True}
    ),
    "deepseek-sparse-steps-one-expert-none-shared-linear": plain_deepseek(
        {"moe_layer_freq": 2, "n_shared_experts": None, "rope_parameters": LINEAR}
        | {"num_experts_per_tok": 1, "norm_topk_prob": True}
    ),
    "deepseek-two-dense-layers-one-key": plain_deepseek(ONE_KEY | {"first_k_dense_replace": 2}),
}
MODERN = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
DEBERTA = {"relative_attention": True, "max_position_embeddings": 100}
ENCODERS = {
    "bert": Case(BertConfig),
    "roberta": Case(RobertaConfig, {"max_position_embeddings": 130, "hidden_size": 48}),
    "xlm-roberta-padding-in-texts": Case(
        XLMRobertaConfig, {"pad_token_id": 7, "type_vocab_size": 1, "hidden_act": "relu"}
    ),
    "distilbert-relu": Case(
        DistilBertConfig, {"dim": 24, "hidden_dim": 40, "n_heads": 4, "n_layers": 3, "activation": "relu"}
    ),
    "mpnet": Case(MPNetConfig, {"hidden_size": 48}),
    "mpnet-wide-tables": Case(
        MPNetConfig, {"relative_attention_num_buckets": 40, "max_position_embeddings": 100}
    ),
    "deberta-shared-buckets": Case(
        DebertaV2Config,
        DEBERTA
        | {"pos_att_type": "p2c|c2p", "share_att_key": True, "position_buckets": 8}
        | {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "max_relative_positions": -1}
        | {"type_vocab_size": 2},
    ),
    "deberta-few-positions-narrow-embeddings": Case(
        DebertaV2Config,
        DEBERTA
        | {"pos_att_type": ["c2p"], "max_relative_positions": 6, "embedding_size": 20, "type_vocab_size": 2}
        | {"hidden_size": 64},
    ),
    "deberta-positions-to-content": Case(
        DebertaV2Config,
        DEBERTA | {"pos_att_type": ["p2c"], "position_buckets": 6, "hidden_size": 48, "hidden_act": "silu"},
    ),
    "deberta-both-unshared": Case(DebertaV2Config, DEBERTA | {"pos_att_type": ["p2c", "c2p"]}),
    "deberta-without-kinds": Case(DebertaV2Config, DEBERTA),
    "deberta-absolute": Case(
        DebertaV2Config, DEBERTA | {"relative_attention": False, "pos_att_type": ["c2p", "p2c"]}
    ),
    "modernbert-local-global": Case(ModernBertConfig, MODERN | {"local_attention": 9}),
    "modernbert-biased-mean": Case(
        ModernBertConfig,
        MODERN
        | {"hidden_size": 48, "attention_bias": True, "mlp_bias": True, "norm_bias": True}
        | {"classifier_pooling": "mean", "classifier_bias": True, "hidden_activation": "silu"}
        | {"layer_types": WINDOWS, "local_attention": 2, "rope_parameters": TWO_ROTARIES},
    ),
    "camembert": Case(CamembertConfig, {"pad_token_id": 1}),
    "nomic-bert": Case(NomicBertConfig),
    "gte-without-types": Case(
        GteConfig, {"hidden_size": 48, "type_vocab_size": 0, "pad_token_id": 0, "rope_parameters": LINEAR}
    ),
}
CASES = ENCODERS | DECODERS

# Together they have every kind of layer, and all tests of families run with each. Of the other cases, only
# exactness is tested: in full, and behind stored keys and values.
FULL = (
    *("bert", "modernbert-biased-mean", "deberta-positions-to-content", "llama-one-key-tied-wide-heads"),
    *("qwen3-biased-windows-yarn", "gemma2", "mixtral-window", "deepseek-v3-query-latent-interleaved-yarn"),
)
# One case of each family.
FAMILIES = tuple({case.config: name for name, case in CASES.items()}.values())
