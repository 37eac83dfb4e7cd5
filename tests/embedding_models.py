"""Embedding models as they are published, at reduced size and with random weights.

The JSON files have the keys and values of the published repositories, except for sizes, and the weights have
the published names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from core_models import VOCABULARY, list_modules, write_json, write_tokenizer
from published_tokenizers import (
    write_gemma_tokenizer,
    write_modernbert_tokenizer,
    write_qwen_tokenizer,
    write_xlm_roberta_tokenizer,
)
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

QWEN_QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_GEMMA_TASKS = {
    "search result": ("query", "BitextMining", "Reranking", "Retrieval", "Retrieval-query"),
    "clustering": ("Clustering",),
    "classification": ("Classification", "MultilabelClassification"),
    "code retrieval": ("InstructionRetrieval",),
    "sentence similarity": ("PairClassification", "STS"),
    "summarization": ("Summarization",),
}
GEMMA_PROMPTS = dict.fromkeys(("document", "Retrieval-document"), "title: none | text: ") | {
    name: f"task: {task} | query: " for task, names in _GEMMA_TASKS.items() for name in names
}
_VERSIONS = {"sentence_transformers": "5.1.0", "transformers": "4.57.0.dev0", "pytorch": "2.8.0+cu128"}


def qwen3(vocabulary: int) -> dict[str, Any]:
    """Return the configuration of a Qwen3 with a vocabulary of this size."""
    return (
        {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0}
        | {"bos_token_id": 0, "eos_token_id": 0, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64}
        | {"initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 32768}
        | {"max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 8, "num_hidden_layers": 3}
        | {"num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000}
        | {"sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
        | {"transformers_version": "4.51.3", "use_cache": True, "use_sliding_window": False}
        | {"vocab_size": vocabulary}
    )


def write_qwen3_embedding(folder: Path) -> Path:
    """Write a model like Qwen/Qwen3-Embedding-0.6B: instruction prompts, last token, causal."""
    write_weights(folder, qwen3(write_qwen_tokenizer(folder)))
    _write_modules(folder, "lasttoken", 64)
    _write_prompts(folder, prompts={"query": QWEN_QUERY, "document": ""})
    return folder


def write_embedding_gemma(folder: Path) -> Path:
    """Write a model like google/embeddinggemma-300m: bidirectional Gemma 3 with two Dense modules."""
    config = (
        {"_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": False}
        | {"attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "dtype": "float32"}
        | {"eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 32}
        | {"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 48, "initializer_range": 0.02}
        | {"intermediate_size": 72, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
        | {"max_position_embeddings": 2048, "model_type": "gemma3_text", "num_attention_heads": 3}
        | {"num_hidden_layers": 6, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 32}
        | {"rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None}
        | {"rope_theta": 1000000.0, "sliding_window": 16, "transformers_version": "4.57.0.dev0"}
        | {"use_bidirectional_attention": True, "use_cache": True}
        | {"vocab_size": write_gemma_tokenizer(folder)}
    )
    write_weights(folder, config)
    _write_modules(folder, "mean", 48, dense=[(48, 192), (192, 48)], longest=2048)
    _write_prompts(folder, model_type="SentenceTransformer", __version__=_VERSIONS, prompts=GEMMA_PROMPTS)
    return folder


def xlm_roberta(folder: Path, architecture: str, name: str, version: str) -> dict[str, Any]:
    """Return the configuration of an XLM-RoBERTa, and write its tokenizer.

    name: `_name_or_path`. version: of transformers.
    """
    return (
        {"_name_or_path": name, "architectures": [architecture], "attention_probs_dropout_prob": 0.1}
        | {"bos_token_id": 0, "classifier_dropout": None, "eos_token_id": 2, "hidden_act": "gelu"}
        | {"hidden_dropout_prob": 0.1, "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 128}
        | {"layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "xlm-roberta"}
        | {"num_attention_heads": 4, "num_hidden_layers": 3, "output_past": True, "pad_token_id": 1}
        | {"position_embedding_type": "absolute", "torch_dtype": "float32", "transformers_version": version}
        | {"type_vocab_size": 1, "use_cache": True, "vocab_size": write_xlm_roberta_tokenizer(folder, 512)}
    )


def write_bge_m3(folder: Path) -> Path:
    """Write a model like BAAI/bge-m3: XLM-RoBERTa, first token."""
    write_weights(folder, xlm_roberta(folder, "XLMRobertaModel", "", "4.33.0"))
    _write_modules(folder, "cls", 64, longest=512)
    versions = {"sentence_transformers": "2.2.2", "transformers": "4.33.0", "pytorch": "2.1.2+cu121"}
    write_json(folder / "config_sentence_transformers.json", {"__version__": versions})
    return folder


def write_multilingual_e5_base(folder: Path) -> Path:
    """Write a model like intfloat/multilingual-e5-base: XLM-RoBERTa, mean."""
    write_weights(folder, xlm_roberta(folder, "XLMRobertaModel", "xlm-roberta-base", "4.29.0"))
    _write_modules(folder, "mean", 64, longest=512)
    return folder


def bert(architecture: str, vocabulary: int) -> dict[str, Any]:
    """Return the configuration of a BERT with a vocabulary of this size."""
    return (
        {"architectures": [architecture], "attention_probs_dropout_prob": 0.1, "classifier_dropout": None}
        | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 48, "initializer_range": 0.02}
        | {"intermediate_size": 96, "layer_norm_eps": 1e-12, "max_position_embeddings": 512}
        | {"model_type": "bert", "num_attention_heads": 4, "num_hidden_layers": 3, "pad_token_id": 0}
        | {"position_embedding_type": "absolute", "torch_dtype": "float32", "type_vocab_size": 2}
        | {"use_cache": True, "vocab_size": vocabulary}
    )


def write_multilingual_e5_small(folder: Path) -> Path:
    """Write a model like intfloat/multilingual-e5-small: BERT with XLM-RoBERTa's tokenizer, mean."""
    published = {
        "_name_or_path": "intfloat/multilingual-e5-small",
        "tokenizer_class": "XLMRobertaTokenizer",
        "transformers_version": "4.29.0.dev0",
    }
    write_weights(folder, bert("BertModel", write_xlm_roberta_tokenizer(folder, 512)) | published)
    _write_modules(folder, "mean", 48, longest=512)
    return folder


def modernbert(folder: Path, architecture: str) -> dict[str, Any]:
    """Return the configuration of a ModernBERT, and write its tokenizer."""
    size = write_modernbert_tokenizer(folder)
    first, last, padding = range(size - 4, size - 1)
    return (
        {"architectures": [architecture], "attention_bias": False, "attention_dropout": 0.0}
        | {"bos_token_id": first, "classifier_activation": "gelu", "classifier_bias": False}
        | {"classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": first}
        | {"decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0}
        | {"eos_token_id": last, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0}
        | {"gradient_checkpointing": False, "hidden_activation": "gelu", "hidden_size": 64}
        | {"initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 96}
        | {"layer_norm_eps": 1e-05, "local_attention": 16, "local_rope_theta": 10000.0}
        | {"max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert"}
        | {"norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 4, "num_hidden_layers": 4}
        | {"pad_token_id": padding, "position_embedding_type": "absolute", "reference_compile": False}
        | {"repad_logits_with_grad": False, "sep_token_id": last, "sparse_pred_ignore_index": -100}
        | {"sparse_prediction": False, "torch_dtype": "float16", "transformers_version": "4.48.0"}
        | {"vocab_size": size}
    )


def write_gte_modernbert(folder: Path) -> Path:
    """Write a model like Alibaba-NLP/gte-modernbert-base: ModernBERT, first token."""
    config = modernbert(folder, "ModernBertModel")
    write_weights(folder, config | {"unk_token_id": config["cls_token_id"] - 1})
    _write_modules(folder, "cls", 64, normalize=False, longest=8192)
    _write_prompts(folder, __version__=_VERSIONS, prompts={})
    return folder


def write_nomic_embed(folder: Path) -> Path:
    """Write a model like nomic-ai/nomic-embed-text-v1.5: NomicBERT, mean."""
    write_tokenizer(folder, longest=8192)
    config = (
        {"activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0}
        | {"bos_token_id": None, "causal": False, "dense_seq_output": True, "embd_pdrop": 0.0}
        | {"eos_token_id": None, "fused_bias_fc": True, "fused_dropout_add_ln": True}
        | {"initializer_range": 0.02, "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048}
        | {"mlp_fc1_bias": False, "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 48}
        | {"n_head": 4, "n_inner": 72, "n_layer": 3, "n_positions": 8192, "pad_vocab_size_multiple": 64}
        | {"parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False}
        | {"qkv_proj_bias": False, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0}
        | {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False}
        | {"rotary_emb_scale_base": None, "rotary_scaling_factor": None}
        | {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "torch_dtype": "float32"}
        | {"transformers_version": "4.37.2", "type_vocab_size": 2, "use_cache": True, "use_flash_attn": True}
        | {"use_rms_norm": False, "use_xentropy": True, "vocab_size": len(VOCABULARY)}
    )
    # transformers does not read the published names, and has the published sizes without them.
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 4, "num_hidden_layers": 3}
    write_weights(folder, config | sizes)
    _write_modules(folder, "mean", 48, normalize=False, longest=8192)
    return folder


def write_arctic_embed_m_v2(folder: Path) -> Path:
    """Write a model like Snowflake/snowflake-arctic-embed-m-v2.0: GTE, first token."""
    config = (
        {"architectures": ["GteModel"], "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.1}
        | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 48, "initializer_range": 0.02}
        | {"intermediate_size": 72, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm"}
        | {"logn_attention_clip1": False, "logn_attention_scale": False, "max_position_embeddings": 8192}
        | {"model_type": "gte", "num_attention_heads": 4, "num_hidden_layers": 3, "pack_qkv": True}
        | {"pad_token_id": 1, "position_embedding_type": "rope", "rope_scaling": None, "rope_theta": 160000}
        | {"torch_dtype": "float32", "transformers_version": "4.41.2", "type_vocab_size": 1}
        | {"unpad_inputs": False, "use_memory_efficient_attention": True}
        | {"vocab_size": write_xlm_roberta_tokenizer(folder, 8192)}
    )
    write_weights(folder, config)
    _write_modules(folder, "cls", 48, longest=8192)
    _write_prompts(folder, __version__=_VERSIONS, prompts={"query": "query: "})
    return folder


EMBEDDING_MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3-embedding": write_qwen3_embedding,
    "embedding-gemma": write_embedding_gemma,
    "bge-m3": write_bge_m3,
    "multilingual-e5-base": write_multilingual_e5_base,
    "multilingual-e5-small": write_multilingual_e5_small,
    "gte-modernbert": write_gte_modernbert,
    "nomic-embed": write_nomic_embed,
    "arctic-embed-m-v2": write_arctic_embed_m_v2,
}


def write_dense(
    folder: Path,
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    activation: str = "torch.nn.modules.linear.Identity",
    **config: Any,
) -> None:
    """Write a Dense module with random weights, seeded by its sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(inputs * 1000 + outputs)
    sizes = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
    weights = {name: torch.randn(size, generator=random) * inputs**-0.5 for name, size in sizes.items()}
    save_file(weights, folder / "model.safetensors")
    described = {"in_features": inputs, "out_features": outputs, "bias": bias}
    write_json(folder / "config.json", described | {"activation_function": activation} | config)


def _write_prompts(folder: Path, **described: Any) -> None:
    usual = {"default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", usual | described)


def _write_modules(
    folder: Path,
    pooling: str,
    width: int,
    *,
    dense: list[tuple[int, int]] | None = None,
    normalize: bool = True,
    longest: int | None = None,
) -> None:
    if longest:
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    kinds = ["Pooling", *["Dense"] * len(dense or ()), *["Normalize"] * normalize]
    list_modules(folder, [f"{number}_{kind}" for number, kind in enumerate(kinds, start=1)])
    flags = {
        f"pooling_mode_{mode}": mode.startswith(pooling)
        for mode in (
            *("cls_token", "mean_tokens", "max_tokens"),
            *("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"),
        )
    }
    flags["pooling_mode_mean_sqrt_len_tokens"] = False
    described = {"word_embedding_dimension": width} | flags | {"include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", described)
    for number, sizes in enumerate(dense or (), start=2):
        write_dense(folder / f"{number}_Dense", *sizes)


def write_weights(folder: Path, config: dict[str, Any], loader: Any = AutoModel) -> Path:
    """Write config.json, and large random weights as in families.write_family under the published names."""
    write_json(folder / "config.json", config)
    torch.manual_seed(0)
    model = loader.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for values in model.parameters():
            if values.dim() > 1:
                torch.nn.init.normal_(values, std=0.25)
            else:
                values += torch.randn_like(values) * 0.1
    model.save_pretrained(folder)
    write_json(folder / "config.json", config)
    return folder
