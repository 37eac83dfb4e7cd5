"""Load a checkpoint as a model that runs on packed tokens."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from attncache_core.checkpoints.checkpoint import Checkpoint, Quantization
from attncache_core.checkpoints.hugging_face import loading
from attncache_core.errors import InvalidInput, UnsupportedModel, readable
from attncache_core.heads.embedding import load_embedding_head
from attncache_core.heads.pooling import Pooler
from attncache_core.models.bare import WeightReport, is_bare, read_bare, wrong_shape, wrong_type
from attncache_core.models.experts import require_routing
from attncache_core.models.families import ENCODERS, FAMILIES, is_causal
from attncache_core.models.layer import Dropped
from attncache_core.models.linear import quantizing
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LayerHeads
from attncache_core.models.smoothing import calibration_sequences, smooth
from attncache_core.runtime.devices import CPU

logger = logging.getLogger(__name__)

_LOADERS = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "label-logits": AutoModelForCausalLM,
}


# The layer number in the name of a weight.
_LAYER = re.compile(r"(?:^|\.)layers?\.(\d{1,9})\.")


def model_shape(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return (number of layers with attention, heads per layer) of a checkpoint.

    Raises UnsupportedModel if the family is not supported, and InvalidInput if the checkpoint's dropped
    layers do not exist, are named twice, or leave no layer with attention.
    """
    layers, config = _layers_and_config(checkpoint)
    return layers.count(None), config.num_attention_heads


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    prompt_tokens: int = 0,
    head_order: Sequence[Sequence[int]] | None = None,
    reused_heads: Sequence[int] | None = None,
    device: torch.device = CPU,
) -> PackedModel:
    """Load the checkpoint's model with weights in `dtype`, packed, without the dropped layers.

    If the checkpoint has a quantisation, the linear layers of its layers are quantised. Embeddings, norms and
    classification heads are not. For int8, the model first runs over the checkpoint's calibration texts, with
    all layers, also those that are dropped.

    prompt_tokens: the number of prompt tokens that pooling may skip; see pooling.Pooler. head_order: for each
    layer with attention, its heads in the order of damage, least damage first (default: the checkpoint's
    order). reused_heads: for each layer with attention, how many of the first heads are reused (default: 0).
    Raises as model_shape does, and UnsupportedModel if weights cannot be read or do not match config.json, or
    if files of a checkpoint with digests were changed.
    """
    layers, config = _layers_and_config(checkpoint)
    heads = config.num_attention_heads
    model = _read_weights(checkpoint, config, dtype).eval().requires_grad_(False).to(device)
    if device == CPU:
        _unmap(model)
    if checkpoint.quantization is Quantization.INT8 and device == CPU:
        sequences = calibration_sequences(checkpoint)
        # Modules of transformers compute in the default dtype, which another load would change meanwhile.
        with loading(f"the weights of model {checkpoint.name}"):
            smooth(model, sequences)
    width = model.config.hidden_size * len(checkpoint.pooling.modes)
    attending = layers.count(None)
    orders = zip(head_order or [range(heads)] * attending, reused_heads or [0] * attending, strict=True)
    of_layers = iter([LayerHeads(list(order), reused) for order, reused in orders])
    prompt = None if checkpoint.pooling.include_prompt else prompt_tokens
    pool = Pooler(checkpoint.pooling.modes, prompt, load_embedding_head(checkpoint, width, device))
    with quantizing(checkpoint.quantization), readable(f"config.json of model {checkpoint.name}"):
        packed = FAMILIES[checkpoint.config["model_type"]](
            model,
            [dropped or next(of_layers) for dropped in layers],
            pool,
        )
    if checkpoint.digests:
        checkpoint.as_it_is()  # raises if files were changed while they were read
    if device == CPU:
        return replace(packed, dtype=dtype)
    embed = packed.embed
    return replace(packed, dtype=dtype, device=device, embed=lambda batch: embed(batch.on(device)))


def _unmap(model: nn.Module) -> None:
    """Copy what packing does not copy, so that nobody who rewrites a weight file changes answers.

    Packing copies the linear layers of layers, but for those of one output (gates of experts), and experts in
    stacks.
    """
    for name, module in model.named_modules():
        is_packed = type(module) is nn.Linear and _LAYER.search(f"{name}.") and module.out_features > 1
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if not is_packed and tensor.dim() < 3:
                tensor.data = tensor.data.clone()


def with_heads(model: PackedModel, checkpoint: Checkpoint, heads: Sequence[LayerHeads]) -> PackedModel:
    """Return a loaded model with the heads of each layer in another order and some of them reused.

    model: without reused heads, heads in the checkpoint's order. Only Q, K, V and the output projection are
    packed again; everything else is shared with `model`. Raises NotImplementedError for a family with other
    projections (DeepSeek).
    """
    with quantizing(checkpoint.quantization):
        layers = [
            layer.with_heads(layer_heads) for layer, layer_heads in zip(model.layers, heads, strict=True)
        ]
    return replace(model, layers=layers)


def _layers_and_config(checkpoint: Checkpoint) -> tuple[list[Dropped | None], Any]:
    """Return (for each layer of the checkpoint the part that is dropped, or None; its configuration).

    Raises as model_shape does.
    """
    family = checkpoint.config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedModel(
            f"model {checkpoint.name} is of the family {family!r}; served are: {', '.join(sorted(FAMILIES))}",
            field="model",
        )
    causal = [flag for flag in ("is_decoder", "is_causal") if checkpoint.config.get(flag)]
    if family in ENCODERS and causal:
        raise UnsupportedModel(
            f"model {checkpoint.name} is an encoder that was trained to decode ({causal[0]} in config.json): "
            "its attention is causal, and causal encoders are not served",
            field="model",
        )
    if checkpoint.task == "label-logits" and not is_causal(checkpoint):
        raise UnsupportedModel(
            f"the tokens of model {checkpoint.name} attend to later tokens, so it predicts no next token: "
            "task label-logits is for causal decoders; without it, give /classify labels, which are compared "
            "by embedding",
            field="task",
        )
    # First, so that a wrong layer count in config.json cannot make the lists below huge.
    _require_layers_of_weights(checkpoint)
    with loading(f"config.json of model {checkpoint.name}"):
        if family == "deepseek":
            # Makes the family known to transformers. Only now, because it imports what bare.py avoids.
            import_module("attncache_core.models.deepseek_moe")
        config = AutoConfig.from_pretrained(checkpoint.folder)
    heads = config.num_attention_heads
    if heads < 1 or (heads > config.hidden_size and getattr(config, "head_dim", None) is None):
        raise UnsupportedModel(
            f"config.json of model {checkpoint.name} says num_attention_heads {heads}, which must be "
            "at least 1, and without head_dim at most hidden_size",
            field="model",
        )
    if config.num_hidden_layers < 1:
        raise UnsupportedModel(
            f"config.json of model {checkpoint.name} says num_hidden_layers {config.num_hidden_layers}, "
            "which must be at least 1",
            field="model",
        )
    require_routing(config)
    attention, blocks = checkpoint.dropped.attention, checkpoint.dropped.blocks
    _require_droppable(attention, blocks, config.num_hidden_layers)
    dropped = dict.fromkeys(attention, Dropped.ATTENTION) | dict.fromkeys(blocks, Dropped.BLOCK)
    return [dropped.get(number) for number in range(config.num_hidden_layers)], config


def _require_layers_of_weights(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModel unless the layer count in config.json matches the checkpoint's weights.

    transformers ignores the weights of surplus layers without an error.
    """
    config = checkpoint.config
    declared = config.get("num_hidden_layers", config.get("n_layers"))  # DistilBERT's name
    if declared is None:
        return
    numbers = {int(found[1]) for name in checkpoint.weight_names() if (found := _LAYER.search(name))}
    held = max(numbers, default=-1) + 1
    # A checkpoint may come with or without the weights of the further layers.
    if declared not in (held, held - _further_layers(checkpoint)):
        raise UnsupportedModel(
            f"config.json of model {checkpoint.name} says num_hidden_layers {declared!r}, and it has weights "
            f"of {held} layers",
            field="model",
        )


def _further_layers(checkpoint: Checkpoint) -> int:
    """Return the number of DeepSeek-V3's extra layers, which predict further tokens and are never run."""
    further = checkpoint.config.get("num_nextn_predict_layers")
    return further if isinstance(further, int) else 0


def _require_droppable(attention: frozenset[int], blocks: frozenset[int], layers: int) -> None:
    """Raise InvalidInput unless a model of `layers` layers can run without the dropped ones.

    attention, blocks: the numbers of layers that lose their attention, and of layers dropped as a whole.
    """
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
            f"{field}: at least one layer must keep its attention, because only attention combines tokens",
            field=field,
        )


def _read_weights(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> Any:
    """Load the modules of a checkpoint. config: its configuration in transformers.

    Raises UnsupportedModel if the weights are unreadable, if weights are missing, or if a layer has weights
    that the module does not.
    """
    family = checkpoint.config["model_type"]
    # DeepSeek's models name code of their own, and transformers has the same.
    if checkpoint.config.get("auto_map") and family in CONFIG_MAPPING and "deepseek" not in family:
        logger.warning(
            "config.json of model %s names code of its own (auto_map), which is not run: the model is "
            "computed as the family %s of transformers; compare its answers with the publisher's",
            checkpoint.name,
            family,
        )
    with loading(f"the weights of model {checkpoint.name}"):
        read = read_bare if is_bare(config) else _read_by_transformers
        model, (missing, unexpected) = read(checkpoint, config, dtype)
    if missing:
        raise UnsupportedModel(
            f"model {checkpoint.name} has no weights for {sorted(missing)[0]}", field="model"
        )
    if empty := [name for name, weight in model.named_parameters() if not weight.numel()]:
        raise UnsupportedModel(
            f"config.json of model {checkpoint.name} gives the weight {empty[0]} a width of 0, which is not "
            "served",
            field="model",
        )
    named = len(checkpoint.classes) if checkpoint.task == "classify" else 0
    if named and named != config.num_labels:
        raise UnsupportedModel(
            f"id2label in config.json of model {checkpoint.name} names {named} classes, and the model has "
            f"{config.num_labels}; name all of them, or give num_labels without id2label and label2id",
            field="model",
        )
    # An unused head or pooler is harmless, but an unexpected weight in a layer means another architecture.
    # Early Llama checkpoints contain their rotary frequencies.
    layers = config.num_hidden_layers
    further = range(layers, layers + _further_layers(checkpoint))
    surplus = [
        key
        for key in unexpected
        if (found := _LAYER.search(key)) and int(found[1]) not in further and "rotary_emb." not in key
    ]
    if surplus:
        raise UnsupportedModel(
            f"model {checkpoint.name} has weights for {sorted(surplus)[0]}, which does not exist in the "
            "model that config.json describes",
            field="model",
        )
    # Most encoders are published with a pooler and the numbers of positions, which embeddings do not need.
    usual = ("pooler.", "position_ids")
    beside = [key for key in unexpected if not _LAYER.search(key) and not any(part in key for part in usual)]
    unused = sorted({key.removesuffix(".weight").removesuffix(".bias") for key in beside})
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        logger.info("model %s does not use the weights of %s%s", checkpoint.name, ", ".join(unused[:5]), more)
    return model


def _read_by_transformers(checkpoint: Checkpoint, _: Any, dtype: torch.dtype) -> tuple[Any, WeightReport]:
    """Return the module of transformers for a checkpoint, and how its weights differ from the module's."""
    loader: Any = _LOADERS[checkpoint.task]
    # The layers attend by other code, so what config.json asks for need not be installed.
    asked = {"attn_implementation", "_attn_implementation"} & checkpoint.config.keys()
    model, report = loader.from_pretrained(
        checkpoint.folder,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by their names
        # Others refuse experts whose rows are not a multiple of 16 bytes, when int8 is calibrated.
        experts_implementation="eager",
        **dict.fromkeys(asked, "eager"),
    )
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise wrong_shape(checkpoint, name, found, expected)
    if checkpoint.config.get("quantization_config") is None:
        _require_floating_point(checkpoint, report["unexpected_keys"])
    # transformers initialises missing weights at random. Only the pooler of an embedding model may be
    # missing.
    missing = [key for key in report["missing_keys"] if checkpoint.task != "embed" or "pooler." not in key]
    return model, WeightReport(missing, report["unexpected_keys"])


def _require_floating_point(checkpoint: Checkpoint, unused: Iterable[str]) -> None:
    """Raise UnsupportedModel if a weight has integers, which transformers would take for its numbers.

    unused: the names of weights that are not read.
    """
    for path in checkpoint.weight_files():
        with safe_open(path, "pt") as file:
            for name in set(file.keys()).difference(unused):
                found = file.get_slice(name).get_dtype()
                # Some checkpoints hold the numbers of positions, which are not read.
                if not found.startswith(("F", "BF")) and "position_ids" not in name:
                    raise wrong_type(checkpoint, name, found)
