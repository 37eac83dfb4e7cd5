"""What an engine is loaded from: the packed model, its tokenizer, and what it may reuse."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from attncache_core.checkpoints.checkpoint import Checkpoint, Dtype
from attncache_core.checkpoints.template import Template
from attncache_core.engine.blending import SWITCHED_OFF
from attncache_core.errors import DatabaseRefused, UnsupportedModel
from attncache_core.models import PackedModel, load_model
from attncache_core.models.refitted import refitted_layers
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.reuse.kv.opening import KeyValueOptions, NotReusable, open_key_values
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.runtime.devices import resolve_dtype
from attncache_core.runtime.memory import keep_freed_memory, return_freed_memory
from attncache_core.text.tokenizer import TextTokenizer


class LoadedParts(NamedTuple):
    """Fields of a PrefillEngine."""

    model: PackedModel
    tokenizer: TextTokenizer
    dtype: torch.dtype
    strategy: ReuseStrategy | None
    key_values: KeyValueReuse | None
    key_values_off: str


def load_parts(
    checkpoint: Checkpoint,
    strategy: ReuseStrategy | None,
    dtype: Dtype,
    device: torch.device,
    max_tokens: int | None,
    key_values: KeyValueOptions | None,
) -> LoadedParts:
    """Load a checkpoint and pack its weights, in the order of heads that the strategy needs.

    checkpoint: with the digests of its files. Other arguments, and what is raised: see PrefillEngine.load.
    """
    if checkpoint.task == "classify" and checkpoint.default_prompt and checkpoint.template != Template():
        raise UnsupportedModel(
            f"config_sentence_transformers.json of model {checkpoint.name} has a default prompt "
            "(default_prompt_name) for the first text of a pair, which is not served; remove the name, and "
            "send the prompt with the text, or give a template with {query} and {document}",
            field="model",
        )
    keep_freed_memory()
    tokenizer = TextTokenizer(checkpoint, max_tokens)
    compute_dtype = resolve_dtype(dtype, device)
    mask = strategy.mask if strategy else None
    model = load_model(
        checkpoint,
        compute_dtype,
        prompt_tokens=tokenizer.prompt_tokens,
        head_order=mask.order if mask else None,
        reused_heads=mask.reused if mask else None,
        device=device,
    )
    if isinstance(strategy, MapReuse) and strategy.database.refitted:
        model = _with_refitted(model, strategy.database, checkpoint)
    return_freed_memory()
    opened, off = None, SWITCHED_OFF
    if key_values:
        try:
            opened = open_key_values(model, checkpoint, tokenizer.prompt_tokens, key_values)
        except NotReusable as reason:
            off = str(reason)
    return LoadedParts(model, tokenizer, compute_dtype, strategy, opened, off)


def _with_refitted(model: PackedModel, database: AttentionDatabase, checkpoint: Checkpoint) -> PackedModel:
    """Return a model with the weights that hits take. Raises DatabaseRefused if they do not fit the model."""
    assert database.refitted is not None
    try:
        return replace(model, refitted=refitted_layers(model, database.refitted, checkpoint.quantization))
    except ValueError as error:
        raise DatabaseRefused(
            f"refitted.safetensors of database {database.folder} does not fit the model: {error}; remove the "
            "database and build it again",
            field="database",
        ) from error


def map_reuse_of(database: AttentionDatabase, checkpoint: Checkpoint) -> MapReuse:
    """Return the reuse strategy of a database. Raises DatabaseRefused if it belongs to another model."""
    database.require_fingerprint(checkpoint)
    database.require_use(checkpoint)
    return MapReuse(database)
