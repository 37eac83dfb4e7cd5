"""Measure where time is spent: the stages of one layer and of a request, in full and on a hit.

The engine runs some stages together: Q, K and V are one product, and map and map x V are one kernel. Such
stages are also timed alone here, so that each stage has a figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from attncache_core import AttentionDatabase, Checkpoint, PrefillEngine
from attncache_core.models import AttentionLayer
from attncache_core.models.linear import Norm
from attncache_core.models.prepacked import PackedLinear
from attncache_core.reuse.execution.reused_maps import HitRecords, RecordGroup
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.plan import ReusePlan
from attncache_core.text.token_batch import TokenBatch, pack
from benchmarks.measuring.synthetic import random_sequence, write_database

_ROUNDS = 30


class Stage(NamedTuple):
    """The microseconds of one stage for a batch; None if the stage does not run."""

    name: str
    full: float | None
    hit: float | None


class Breakdown(NamedTuple):
    """The stages for one batch shape."""

    shape: tuple[int, int]
    layer: list[Stage]
    request: list[Stage]
    search_in_every_layer: float  # microseconds: an estimate for AttnCache-f, which searches in every layer


@torch.inference_mode()
def break_down(
    checkpoint: Checkpoint, shapes: Sequence[tuple[int, int]], threads: int, folder: Path
) -> list[Breakdown]:
    """Measure the stages for each shape (sequences, tokens). On a hit, all heads of all sequences are reused.

    folder: the folder to write a synthetic database to; must not exist.
    """
    write_database(folder, checkpoint, sorted({length for _, length in shapes}))
    full = PrefillEngine.load(checkpoint, threads=threads)
    hits = PrefillEngine.load(checkpoint, database=AttentionDatabase.open(folder), threads=threads)
    return [_break_down(checkpoint, full, hits, shape) for shape in shapes]


def _break_down(
    checkpoint: Checkpoint, full: PrefillEngine, hits: PrefillEngine, shape: tuple[int, int]
) -> Breakdown:
    count, length = shape
    random = np.random.default_rng(0)
    sequences = [random_sequence(random, length) for _ in range(count)]
    texts = [" ".join(["word"] * (length - 2))] * count
    batch = pack(sequences)
    hidden = full.model.embed(batch)
    layer, hit_layer = full.model.layers[0], hits.model.layers[0]
    assert hits.map_reuse is not None
    search = hits.map_reuse.database.search
    value, query, key = layer.project(hidden, batch.positions)
    context = torch.empty(value.shape, dtype=value.dtype)
    width, inner = full.model.hidden_size, checkpoint.config["intermediate_size"]
    sizes = ((width, width), (width, inner), (inner, width))
    output, up, down = (_linear(inputs, outputs, hidden) for inputs, outputs in sizes)
    norm = Norm(nn.LayerNorm(width, dtype=hidden.dtype))
    segment = search.store.segments[length]
    scattered = random.integers(0, len(segment), count)
    everything = np.ones(count, dtype=bool)
    records = HitRecords([RecordGroup(segment, scattered)])
    one_record = HitRecords([RecordGroup(segment, np.zeros(count, dtype=np.int64))])
    seconds = median_seconds(
        {
            "tokenise": lambda: full.tokenize(texts),
            "embed": lambda: full.model.embed(batch),
            "project": lambda: search.projector.project(hidden, batch.groups()),
            "plan": lambda: _planned(search, batch, hidden, everything),
            "one projection": lambda: output(hidden),
            "attend": lambda: layer.attend(query, key, value, batch.offsets, slice(layer.heads), context),
            "fetch": lambda: records.apply(0, value, context),
            "multiply": lambda: one_record.apply(0, value, context),
            "output": lambda: norm(output(hidden, hidden)),
            "mlp": lambda: norm(down(up(hidden), hidden)),
            "layer": lambda: layer.finish(hidden, _attended(layer, hidden, batch, context)),
            "hit layer": lambda: hit_layer.finish(
                hidden, _fetched(hit_layer, hidden, batch, records, context)
            ),
            "pool": lambda: full.model.outputs(hidden, batch),
            "run": lambda: full.run(full.requests(sequences, reuse=False)),
            "hit run": lambda: hits.run(hits.requests(sequences)),
        },
        _ROUNDS,
    )
    taken = {name: 1e6 * passed for name, passed in seconds.items()}
    projection, multiply = taken["one projection"], taken["multiply"]
    stages = [
        Stage("Q", projection, None),
        Stage("K", projection, None),
        Stage("rotary", None, None),
        Stage("map", taken["attend"] - multiply, None),
        Stage("fetch", None, taken["fetch"] - multiply),
        Stage("V", projection, projection),
        Stage("map x V", multiply, multiply),
        Stage("output", taken["output"], taken["output"]),
        Stage("MLP", taken["mlp"], taken["mlp"]),
        Stage("whole layer", taken["layer"], taken["hit layer"]),
    ]
    layers = len(full.model.layers)
    request = [
        Stage("tokenise", taken["tokenise"], taken["tokenise"]),
        Stage("embed", taken["embed"], taken["embed"]),
        Stage("project", None, taken["project"]),
        Stage("search", None, taken["plan"] - taken["project"]),
        Stage(f"{layers} layers", layers * taken["layer"], layers * taken["hit layer"]),
        Stage("pool", taken["pool"], taken["pool"]),
        Stage("whole forward pass", taken["run"], taken["hit run"]),
    ]
    return Breakdown(shape, stages, request, layers * taken["plan"])


def _planned(search: SearchEngine, batch: TokenBatch, hidden: torch.Tensor, allowed: np.ndarray) -> ReusePlan:
    plan = search.plan(batch, allowed)
    return search.refine(plan, batch, hidden) if plan.compared else plan


def _attended(
    layer: AttentionLayer, hidden: torch.Tensor, batch: TokenBatch, context: torch.Tensor
) -> torch.Tensor:
    value, query, key = layer.project(hidden, batch.positions)
    layer.attend(query, key, value, batch.offsets, slice(layer.heads), context)
    return context


def _fetched(
    layer: AttentionLayer, hidden: torch.Tensor, batch: TokenBatch, records: HitRecords, context: torch.Tensor
) -> torch.Tensor:
    records.apply(0, layer.project(hidden, batch.positions).value, context)
    return context


def _linear(inputs: int, outputs: int, like: torch.Tensor) -> PackedLinear:
    weight = torch.randn(outputs, inputs, dtype=like.dtype) * inputs**-0.5
    return PackedLinear(weight, torch.zeros(outputs, dtype=like.dtype))


def median_seconds(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each step over the rounds, in which the steps alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        for name, step in steps.items():
            step()  # warms up, because the processor's caches hold the data of the step before
            started = time.perf_counter()
            step()
            if number >= 3:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}
