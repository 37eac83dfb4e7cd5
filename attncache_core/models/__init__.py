"""Model families: from a checkpoint to a model that runs on packed tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from attncache_core.checkpoint import Checkpoint
from attncache_core.errors import InvalidInput, UnsupportedModel, readable
from attncache_core.loading import loading
from attncache_core.models.bert import bert, roberta
from attncache_core.models.deberta import deberta
from attncache_core.models.decoder import decoder
from attncache_core.models.deepseek import deepseek
from attncache_core.models.distilbert import distilbert
from attncache_core.models.layer import (
    CPU,
    AttentionLayer,
    Dropped,
    LayerHeads,
    Outputs,
    PackedModel,
    Pool,
    Projection,
)
from attncache_core.models.linear import quantizing
from attncache_core.models.modernbert import modernbert
from attncache_core.models.mpnet import mpnet
from attncache_core.outputs import pool

_LOADERS = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "label-logits": AutoModelForCausalLM,
}

Family = Callable[[Any, Sequence[LayerHeads | Dropped], Pool], PackedModel]
ENCODERS: dict[str, Family] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "distilbert": distilbert,
    "mpnet": mpnet,
    "deberta-v2": deberta,
    "modernbert": modernbert,
}
DECODERS: dict[str, Family] = dict.fromkeys(
    (
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "deepseek",
    ),
    decoder,
) | {"deepseek_v2": deepseek, "deepseek_v3": deepseek}
FAMILIES = ENCODERS | DECODERS

# In the name of a weight, the number of its layer.
_LAYER = re.compile(r"(?:^|\.)layers?\.(\d{1,9})\.")

__all__ = [
    "CPU",
    "DECODERS",
    "FAMILIES",
    "AttentionLayer",
    "LayerHeads",
    "Outputs",
    "PackedModel",
    "Projection",
    "load_model",
    "model_shape",
]


def model_shape(checkpoint: Checkpoint) -> tuple[int, int]:
    """(layers that attend, heads of each) of a supported checkpoint.

    Raises UnsupportedModel for another family, InvalidInput for dropped layers that it cannot do without.
    """
    layers, heads = _layers_and_heads(checkpoint)
    return layers.count(None), heads


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    prompt_tokens: int = 0,
    head_order: Sequence[Sequence[int]] | None = None,
    reused_heads: Sequence[int] | None = None,
    device: torch.device = CPU,
) -> PackedModel:
    """The checkpoint's model with its weights in `dtype`, packed, without the layers that are dropped.

    The linear layers within its layers are quantised if the checkpoint says so; embeddings, norms and heads
    of classes are not.

    head_order: for each layer that attends its heads, mildest to reuse first (default: as the checkpoint has
    them); reused_heads: for each how many of these are the reuse mask's (default: none). Raises as
    model_shape does, and UnsupportedModel for weights that cannot be read.
    """
    layers, heads = _layers_and_heads(checkpoint)
    model = _read_weights(checkpoint, len(layers), dtype).eval().requires_grad_(False).to(device)
    attending = layers.count(None)
    orders = zip(head_order or [range(heads)] * attending, reused_heads or [0] * attending, strict=True)
    of_layers = iter([LayerHeads(list(order), reused) for order, reused in orders])
    with quantizing(checkpoint.quantization), readable(f"config.json of model {checkpoint.name}"):
        packed = FAMILIES[checkpoint.config["model_type"]](
            model,
            [dropped or next(of_layers) for dropped in layers],
            partial(pool, pooling=checkpoint.pooling, prompt_tokens=prompt_tokens),
        )
    embed = packed.embed
    return replace(packed, device=device, embed=lambda batch: embed(batch.on(device)))


def _layers_and_heads(checkpoint: Checkpoint) -> tuple[list[Dropped | None], int]:
    """What each of the checkpoint's layers is run without, and how many heads one that attends has."""
    family = checkpoint.config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedModel(
            f"model {checkpoint.name} is of the family {family!r}; served are: {', '.join(sorted(FAMILIES))}",
            field="model",
        )
    if family in ENCODERS and checkpoint.config.get("is_decoder"):
        raise UnsupportedModel(
            f"model {checkpoint.name} is an encoder that was trained to decode (is_decoder in config.json): "
            "its maps look back only, and no such encoder is served",
            field="model",
        )
    if checkpoint.task == "label-logits" and family not in DECODERS:
        raise UnsupportedModel(
            f"model {checkpoint.name} is an encoder, which predicts no next token: task label-logits is for "
            "decoders; without it, give /classify labels, which are compared by embedding",
            field="task",
        )
    # Before anything is made for each of them.
    _require_layers_of_weights(checkpoint)
    with loading(f"config.json of model {checkpoint.name}"):
        config = AutoConfig.from_pretrained(checkpoint.folder)
    heads = config.num_attention_heads
    if not 1 <= heads <= config.hidden_size:
        raise UnsupportedModel(
            f"config.json of model {checkpoint.name} says num_attention_heads {heads}: it must be 1 at "
            "least, and hidden_size at most",
            field="model",
        )
    attention, blocks = checkpoint.dropped.attention, checkpoint.dropped.blocks
    _require_droppable(attention, blocks, config.num_hidden_layers)
    dropped = dict.fromkeys(attention, Dropped.ATTENTION) | dict.fromkeys(blocks, Dropped.BLOCK)
    return [dropped.get(number) for number in range(config.num_hidden_layers)], heads


def _require_layers_of_weights(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModel unless config.json counts the layers that the checkpoint has weights of.

    transformers would leave surplus ones out without a word.
    """
    config = checkpoint.config
    declared = config.get("num_hidden_layers", config.get("n_layers"))  # DistilBERT's name
    if declared is None:
        return
    numbers = {int(found[1]) for name in checkpoint.weight_names() if (found := _LAYER.search(name))}
    held = max(numbers, default=-1) + 1
    # Further layers are not always kept.
    if declared not in (held, held - _further_layers(checkpoint)):
        raise UnsupportedModel(
            f"config.json of model {checkpoint.name} says num_hidden_layers {declared!r}, and it has weights "
            f"of {held} layers",
            field="model",
        )


def _further_layers(checkpoint: Checkpoint) -> int:
    """DeepSeek-V3's layers behind the others, which predict further tokens and are not run."""
    further = checkpoint.config.get("num_nextn_predict_layers")
    return further if isinstance(further, int) else 0


def _require_droppable(attention: frozenset[int], blocks: frozenset[int], layers: int) -> None:
    """Raise InvalidInput unless a model of so many layers can do without these."""
    for field, numbers in (("drop_attention", attention), ("drop_block", blocks)):
        if not numbers <= set(range(layers)):
            raise InvalidInput(f"{field}: the model has layers 0 to {layers - 1}", field=field)
    if attention & blocks:
        raise InvalidInput(
            f"drop_attention: layer {min(attention & blocks)} is dropped with its whole block; name it once",
            field="drop_attention",
        )
    if len(attention | blocks) == layers:
        field = "drop_attention" if attention else "drop_block"
        raise InvalidInput(
            f"{field}: one layer at least must keep its attention, or tokens would never meet", field=field
        )


def _read_weights(checkpoint: Checkpoint, layers: int, dtype: torch.dtype) -> Any:
    """The Hugging Face module of so many layers.

    Raises UnsupportedModel if weights are unreadable, if some are not there, or if its layers have others.
    """
    loader: Any = _LOADERS[checkpoint.task]
    with loading(f"the weights of model {checkpoint.name}"):
        model, report = loader.from_pretrained(
            checkpoint.folder, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    # transformers fills what is missing with random numbers. Embedding models come without a pooler.
    missing = [key for key in report["missing_keys"] if checkpoint.task != "embed" or "pooler." not in key]
    if missing:
        raise UnsupportedModel(
            f"model {checkpoint.name} has no weights for {sorted(missing)[0]}", field="model"
        )
    # And it ignores what it has no use for: a head or a pooler may go, a part of a layer may not. Early
    # Llamas were saved with their angles.
    further = range(layers, layers + _further_layers(checkpoint))
    surplus = [
        key
        for key in report["unexpected_keys"]
        if (found := _LAYER.search(key)) and int(found[1]) not in further and "rotary_emb." not in key
    ]
    if surplus:
        raise UnsupportedModel(
            f"model {checkpoint.name} has weights for {sorted(surplus)[0]}, which the model that config.json "
            "describes has not",
            field="model",
        )
    return model
