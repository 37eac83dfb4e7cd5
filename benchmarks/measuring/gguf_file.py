"""Write a model of the Llama architecture as a GGUF file, which llama.cpp reads; without its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from attncache_core import Checkpoint, UnsupportedModel

_OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Checkpoint, path: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint with its matrices in bfloat16 or float32.

    Raises UnsupportedModel for another architecture, and ModuleNotFoundError without the package gguf.
    """
    import gguf

    config = checkpoint.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") not in ("default", "llama3"):
        raise UnsupportedModel(f"model {checkpoint.name} is not a Llama", field="model")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    for name, tensor in _tensors(checkpoint):
        if tensor.dim() == 1 or dtype == torch.float32:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            rounded = tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
            writer.add_tensor(name, rounded.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(rope, _head_size(config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with their names in GGUF files."""
    heads = {
        "self_attn.q_proj": checkpoint.config["num_attention_heads"],
        "self_attn.k_proj": checkpoint.config["num_key_value_heads"],
    }
    for file in sorted(checkpoint.folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            plain = name.removeprefix("model.").removesuffix(".weight")
            if plain.startswith("layers."):
                _, layer, part = plain.split(".", 2)
                found = _paired(tensor, heads[part]) if part in heads else tensor
                yield f"blk.{layer}.{_OF_LAYERS[part]}.weight", found
            elif plain != "lm_head" or not checkpoint.config.get("tie_word_embeddings"):
                yield f"{_OTHERS[plain]}.weight", tensor


def _paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of Q or K in llama.cpp's order: it rotates neighbours, transformers rotates halves."""
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _frequency_factors(rope: Mapping[str, Any], size: int) -> np.ndarray:
    """Return what llama.cpp divides the rotary frequencies by, float32 [size / 2], for Llama 3's scaling."""
    lengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)  # of the waves, tokens
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((original / lengths - low) / (high - low), 0, 1)  # 1: the frequency stays
    return (1 / ((1 - share) / factor + share)).astype(np.float32)
