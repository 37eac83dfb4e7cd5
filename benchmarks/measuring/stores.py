"""Stores of keys and values for measurements: opened for a loaded engine, and read from the disk itself."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from attncache_core import InvalidInput, PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.heads.vectors import cosines
from attncache_core.reuse.kv.blocks import BlockLayout
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.reuse.kv.memory import MemoryTier
from attncache_core.reuse.kv.opening import (
    KeyValueOptions,
    NotReusable,
    block_layout,
    open_key_values,
)
from benchmarks.papers.eviction import EVICTION

T = TypeVar("T")

_TEST_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_PREFILL_TOKENS = 256


def open_store(
    engine: PrefillEngine, prefill_speed: float = 0.0, eviction: str | None = None, **options: Any
) -> KeyValueReuse:
    """Return an empty store for a model with a layout, or the store that is in `folder`.

    prefill_speed: tokens per second; blocks on disk are loaded only if that is faster. 0: they always are.
    eviction: a name in EVICTION; None: as served. options: of KeyValueOptions.
    """
    prompt_tokens = engine.tokenizer.prompt_tokens
    found = open_key_values(engine.model, engine.checkpoint, prompt_tokens, KeyValueOptions(**options))
    if found.store.transfers:
        found.store.transfers.prefill_speed = prefill_speed
    if eviction:
        store = found.store
        store.memory = MemoryTier(store.layout, options["memory_bytes"], EVICTION[eviction]())
        if eviction == "fifo" and store.transfers and store.transfers.disk:
            # Files in the order in which they were written.
            vars(store.transfers.disk)["_touch"] = lambda _: None
    return found


def measured_prefill_speed(engine: PrefillEngine) -> float:
    """Return how many tokens per second the model computes, measured as a server does at its start."""
    requests = [PrefillRequest([0] * _PREFILL_TOKENS, reuse=False)]
    engine.run(requests)  # the first pass also prepares what later passes share
    return _PREFILL_TOKENS / engine.run(requests).report.forward_seconds


def layout_of(engine: PrefillEngine) -> BlockLayout:
    """Return the layout of a model's blocks.

    Raises InvalidInput if keys and values of the model cannot be reused.
    """
    try:
        return block_layout(engine.model)
    except NotReusable as reason:
        raise InvalidInput(
            f"keys and values of model {engine.checkpoint.name} cannot be reused: {reason}; "
            "choose a decoder like Llama",
            field="model",
        ) from reason


def settle(key_values: KeyValueReuse | None) -> None:
    """Wait until a store has saved what it was given and loaded what it was told to expect."""
    transfers = key_values and key_values.store.transfers
    if transfers:
        transfers.flush()


def drop_from_page_cache(folder: Path) -> None:
    """Let the next reader of the files in a folder read them from the disk itself."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only pages that have reached the disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes_per_second(folder: Path) -> float:
    """Measure how fast one thread reads a file of the folder that is not in the page cache."""
    path = folder / f"{secrets.token_hex(8)}.speed"
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(_TEST_BYTES // _READ_BYTES):
                file.write(secrets.token_bytes(_READ_BYTES))
            os.fsync(file.fileno())
        drop_from_page_cache(folder)
        started = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
        return _TEST_BYTES / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


class Exactness:
    """How far results are from those of computing everything."""

    def __init__(self) -> None:
        self.difference = 0.0  # the largest difference, relative to the largest number of the expected row
        self.cosine = 1.0  # the least

    def add(self, found: np.ndarray, expected: np.ndarray) -> None:
        """Compare rows, float32 [n, d] each."""
        scale = np.abs(expected).max(axis=1)
        self.difference = max(self.difference, float((np.abs(found - expected).max(axis=1) / scale).max()))
        self.cosine = min(self.cosine, float(cosines(found, expected).min()))


def alternating(items: Sequence[T], number: int) -> list[T]:
    """Return the items in the order of one round: each round begins with another item."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of an action and its result."""
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
