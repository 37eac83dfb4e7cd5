"""The cost model: for each length, what a search costs, and what a hit saves.

Measured on the loaded engine at a few lengths, kept beside the database, and asked before each search: where
a search costs more than a hit could save, reuse cannot pay, and nothing is searched.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from scipy.optimize import nnls

from attncache_core.attention_maps.fetch import Fetch, HitRecords, RecordGroup
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.files import write_whole
from attncache_core.models import PackedModel
from attncache_core.tokens import TokenBatch, pack

_MOST_LENGTHS = 8
_ROUNDS = 7
_BATCH_TOKENS = 1024
_BATCH_SEQUENCES = 64


@dataclass(frozen=True)
class CostModel:
    """Microseconds for each sequence, in full batches, at a few of the database's lengths, which rise."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lengths: tuple[int, ...]  # tokens
    search: tuple[float, ...]  # projector, index and checks
    fetch: tuple[float, ...]  # maps @ V of the reused heads, from their records
    compute: tuple[float, ...]  # the same computed: their Q, K, softmax and product

    def __post_init__(self) -> None:
        """Raise ValueError for figures that do not fit each other, as a damaged file has them."""
        figures = (self.search, self.fetch, self.compute)
        if not self.lengths or {len(row) for row in figures} != {len(self.lengths)}:
            raise ValueError("not one figure for each length")
        if list(self.lengths) != sorted(set(self.lengths)) or not np.isfinite(figures).all():
            raise ValueError("lengths that do not rise, or figures that are no numbers")

    def pays(self, length: int) -> bool:
        """Whether a hit saves more than a search costs; between measured lengths, on the straight line."""
        return bool(np.interp(length, self.lengths, self._gains) > 0)

    def saved(self, lengths: np.ndarray) -> np.ndarray:
        """Microseconds that a hit of these lengths [n] saves, the search left out: float64 [n]."""
        return np.interp(lengths, self.lengths, np.subtract(self.compute, self.fetch))

    def saved_per_head(self, lengths: np.ndarray, heads: int) -> np.ndarray:
        """Microseconds that a hit of these lengths [n] saves for each of its `heads` measured heads, [n].

        Q and K cost time by the length, their product by its square: a sum of both, neither negative, is
        fitted to the measured savings, so that a disturbance at one length weighs little.
        """
        measured = np.array(self.lengths, dtype=np.float64)
        saved = np.subtract(self.compute, self.fetch) / measured
        (by_length, by_square), _ = nnls(np.stack([np.ones_like(measured), measured], axis=1), saved)
        return (by_length * lengths + by_square * lengths**2) / heads

    @cached_property
    def _gains(self) -> np.ndarray:
        return np.subtract(self.compute, self.fetch) - self.search

    def info(self) -> dict[str, Any]:
        """The figures, for people and /info, and for each length whether reuse can pay."""
        return {**asdict(self), "can_pay": [self.pays(length) for length in self.lengths]}


def cost_model(
    model: PackedModel,
    search: SearchEngine,
    folder: Path,
    circumstances: Mapping[str, Any],
    fetch: Fetch = Fetch.AUTO,
) -> CostModel:
    """The model that was kept in `folder` under the same circumstances (processor, threads, mask, ...).

    Else it is measured, in a second or two, and kept, if the folder can be written to.
    """
    path = folder / "cost.json"
    kept = _read(path)
    if kept and kept.circumstances == dict(circumstances):
        return kept.costs
    costs = measure_costs(model, search, fetch)
    # A read-only database is measured at each start.
    with contextlib.suppress(OSError):
        write_whole(path, TypeAdapter(_Kept).dump_json(_Kept(dict(circumstances), costs), indent=1))
    return costs


@torch.inference_mode()
def measure_costs(model: PackedModel, search: SearchEngine, fetch: Fetch = Fetch.AUTO) -> CostModel:
    """Measure full batches of one length at up to eight lengths of the database."""
    held = sorted(search.store.segments)
    places = np.linspace(0, len(held) - 1, min(len(held), _MOST_LENGTHS)).round().astype(int)
    lengths = [held[place] for place in places]
    measured = [_measure(model, search, length, fetch) for length in lengths]
    return CostModel(tuple(lengths), *zip(*measured, strict=True))


@torch.inference_mode()
def search_cost(
    model: PackedModel, search: SearchEngine, sequences: Sequence[Sequence[int]], lengths: Collection[int]
) -> float:
    """Microseconds to compare a sequence with its records, if only those of these lengths are compared.

    In full batches of all `sequences`: texts of many lengths share a batch, and each length is a search of
    its own. A length that is alone in being searched also bears what a search costs to start.
    """
    chosen = np.random.default_rng(0).permutation(len(sequences))[: 2 * _ROUNDS * _BATCH_SEQUENCES]
    taken: list[float] = []
    for at in range(0, len(chosen), _BATCH_SEQUENCES):
        batch = pack([sequences[place] for place in chosen[at : at + _BATCH_SEQUENCES]])
        groups = [group for group in batch.groups() if group.length in lengths]
        if groups:
            hidden = model.search_input(model.embed(batch))
            started = time.perf_counter()
            search.nearest(batch, hidden, groups)
            taken.append((time.perf_counter() - started) / sum(group.count for group in groups))
    # The first one is there to warm up.
    return statistics.median(taken[1:] or taken) * 1e6 if taken else 0.0


def _measure(
    model: PackedModel, search: SearchEngine, length: int, fetch: Fetch
) -> tuple[float, float, float]:
    """Microseconds a sequence of search, fetch and compute at one length."""
    count = max(1, min(_BATCH_SEQUENCES, _BATCH_TOKENS // length))
    batch = pack([[0] * length] * count)
    hidden = model.search_input(model.embed(batch))
    values = [layer.project(hidden, batch.positions).value[:, : layer.reused_heads] for layer in model.layers]
    segment = search.store.segments[length]
    records = HitRecords([RecordGroup(segment, np.arange(count) % len(segment))], fetch)
    steps: dict[str, Callable[[], object]] = {
        # Whatever the policy, so that the figures hold for all of them.
        "search": lambda: search.nearest(batch, hidden, batch.groups()),
        "fetch": lambda: _fetch(model, values, records),
        "compute": lambda: _compute(model, hidden, values, batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with records:
        # In turn, so that a disturbance meets all; the first round reads records from the disk.
        for _ in range(_ROUNDS + 1):
            for name, step in steps.items():
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
    search_time, fetch_time, compute_time = (
        statistics.median(taken[1:]) / count * 1e6 for taken in seconds.values()
    )
    return search_time, fetch_time, compute_time


def _fetch(model: PackedModel, values: Sequence[torch.Tensor], records: HitRecords) -> None:
    for number, (layer, value) in enumerate(zip(model.layers, values, strict=True)):
        if layer.reused_heads:
            records.apply(number, value, torch.empty_like(value))


def _compute(model: PackedModel, x: torch.Tensor, values: Sequence[torch.Tensor], batch: TokenBatch) -> None:
    for layer, value in zip(model.layers, values, strict=True):
        if layer.reused_heads:
            query, key = layer.project_reused(x, batch.positions)
            context = torch.empty_like(value)
            layer.attend(query, key, value, batch.offsets, slice(layer.reused_heads), context)


@dataclass(frozen=True)
class _Kept:
    """The content of cost.json."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    circumstances: dict[str, Any]
    costs: CostModel


def _read(path: Path) -> _Kept | None:
    """What was kept; None if nothing was, or it cannot be read: then it is measured anew."""
    try:
        return TypeAdapter(_Kept).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
