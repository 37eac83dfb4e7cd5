"""Open the reuse of keys and values for a model: whether it can be, how blocks lie, and what names them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from attncache_core import native
from attncache_core.checkpoints.checkpoint import Checkpoint, Pooling
from attncache_core.errors import InvalidInput
from attncache_core.models import PackedModel
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, STATE_ROWS, BlockLayout
from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.reuse.kv.quantized import INT8_FORMAT, Int8Slots
from attncache_core.reuse.kv.remote import BlockValues, RemoteTier
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.reuse.kv.transfer import Transfers
from attncache_core.runtime.devices import CPU
from attncache_core.runtime.memory import available_memory

# A change of what blocks hold is a new format.
FORMAT = 2


@dataclass(frozen=True)
class KeyValueOptions:
    """What an operator may choose about stored keys and values."""

    memory_bytes: int | None = None  # None: a quarter of the memory that is available
    folder: Path | None = None  # of the disk tier; None: there is none
    disk_bytes: int = 16 * 2**30  # most bytes on disk
    # Of saved blocks, on disk and where other machines find them; int8 approximates.
    disk_dtype: Literal["model", "int8"] = "model"
    write_buffer_bytes: int = 256 * 2**20  # most bytes of blocks that wait to be saved
    shared: BlockValues | None = None  # where other machines find blocks too; None: they do not


def open_key_values(
    model: PackedModel, checkpoint: Checkpoint, prompt_tokens: int, options: KeyValueOptions
) -> KeyValueReuse:
    """Return the reuse of keys and values of a model. prompt_tokens: of sequences without a plan.

    Raises NotReusable, and InvalidInput if the memory or the folder of the disk tier cannot be used.
    """
    layout = block_layout(model)
    memory = available_memory() // 4 if options.memory_bytes is None else options.memory_bytes
    is_saved = options.folder is not None or options.shared is not None
    saved_as = INT8_FORMAT if is_saved and options.disk_dtype == "int8" else "model"
    fingerprint = values_fingerprint(model, checkpoint.fingerprint(), layout, saved_as)
    transfers = None
    if is_saved:
        quantized = None
        if options.disk_dtype == "int8":
            dtype = model.stack.dtype if model.stack else model.dtype
            quantized = Int8Slots(layout.part_bytes, layout.slot_bytes, dtype)
        part_bytes = quantized.part_bytes if quantized else layout.part_bytes
        transfers = Transfers(
            _disk_tier(options.folder, options, part_bytes, lambda: store.expected)
            if options.folder
            else None,
            max(1, options.write_buffer_bytes // layout.block_bytes),
            quantized,
            RemoteTier(options.shared, part_bytes) if options.shared else None,
        )
    try:
        store = KeyValueStore(layout, memory, transfers, fingerprint.hex())
    except (OSError, OverflowError) as error:
        raise InvalidInput(
            f"{memory} bytes of memory for keys and values cannot be reserved; choose fewer bytes by "
            "--kv-memory-bytes (in Python, KeyValueOptions.memory_bytes)",
            field="kv_memory_bytes",
        ) from error
    if transfers:
        transfers.measure(layout.part_bytes)
    pooling = Pooling(("lasttoken",)) if checkpoint.task == "classify" else checkpoint.pooling
    reuse = KeyValueReuse(store, fingerprint, pooling, prompt_tokens)
    reuse.approximation = "int8" if transfers and transfers.quantized else None
    return reuse


def _disk_tier(
    folder: Path,
    options: KeyValueOptions,
    part_bytes: Sequence[int],
    expected: Callable[[], Container[bytes]],
) -> DiskTier:
    """Return the disk tier in a folder. expected: returns the keys that must stay. Raises InvalidInput."""
    try:
        return DiskTier(folder, part_bytes, options.disk_bytes, protected=expected)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidInput(
            f"the folder for keys and values, {folder}, cannot be used: {reason}", field="kv_dir"
        ) from error


class NotReusable(Exception):
    """The keys and values of the model cannot be reused; the message says why."""


@torch.inference_mode()
def block_layout(model: PackedModel) -> BlockLayout:
    """Return how the blocks of a model lie in memory. Raises NotReusable."""
    if not model.is_causal:
        raise NotReusable("attention is bidirectional, so every token depends on all tokens of its text")
    if model.device != CPU:
        raise NotReusable("the model is not on the CPU, where keys and values are stored")
    if any(layer.reused_heads for layer in model.layers):
        raise NotReusable("the model is loaded for the attention maps of a database")
    if model.stack is not None:
        slot_bytes = model.stack.slot_bytes
    else:
        one = torch.zeros(1, model.hidden_size, dtype=model.dtype)
        position = torch.zeros(1, dtype=torch.int64)
        slots = [layer.projections.query_and_slots(one, position)[1] for layer in model.layers]
        sizes = {slot.shape[1] * slot.element_size() for slot in slots}
        slot_bytes = sizes.pop() if len(sizes) == 1 else None
    if slot_bytes is None:
        raise NotReusable("layers have keys and values of different sizes")
    return BlockLayout(len(model.layers), slot_bytes, model.hidden_size)


def values_fingerprint(
    model: PackedModel, checkpoint_fingerprint: str, layout: BlockLayout, saved_as: str
) -> bytes:
    """Return the SHA-256 of all that could change the keys and values of given tokens, 32 bytes.

    checkpoint_fingerprint: covers weights, architecture, tokenizer and variant. saved_as: the format on disk.
    Rounding depends on the dtype and on the code that computes, so they are covered too.
    """
    level = native.level()  # of the stack, or of the products and the attention between torch's operators
    computed_by = [str(model.device), level if model.stack else f"torch, {level}", str(model.dtype)]
    stored_as = [FORMAT, saved_as, BLOCK_TOKENS, STATE_ROWS, layout.layers, layout.slot_bytes, layout.width]
    return hashlib.sha256(json.dumps([checkpoint_fingerprint, computed_by, stored_as]).encode()).digest()
