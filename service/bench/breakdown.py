"""Where the time goes: the stages of one layer and of a request, computed in full and on a hit.

Parts that the engine runs as one (Q, K and V are one product, map and map x V one kernel) are also timed by
themselves here, so that each stage has its figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from attncache_core import AttentionDatabase, Checkpoint, PrefillEngine
from attncache_core.attention_maps.fetch import HitRecords, RecordGroup
from attncache_core.models import AttentionLayer
from attncache_core.models.linear import Norm
from attncache_core.models.prepacked import PackedLinear
from attncache_core.tokens import TokenBatch, pack
from service.bench.synthetic import random_sequence, write_database

_ROUNDS = 30


class Stage(NamedTuple):
    """Microseconds of one stage for a batch; None where the stage does not run."""

    name: str
    full: float | None
    hit: float | None


class Breakdown(NamedTuple):
    """One batch shape."""

    shape: tuple[int, int]
    layer: list[Stage]
    request: list[Stage]
    search_in_every_layer: float  # microseconds: what AttnCache-f would search for, estimated


@torch.inference_mode()
def break_down(
    checkpoint: Checkpoint, shapes: Sequence[tuple[int, int]], threads: int, folder: Path
) -> list[Breakdown]:
    """The stages at each shape (sequences, tokens), all heads of all sequences reused on the hit path."""
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
    assert hits.database is not None
    search = hits.database.search
    value, query, key = layer.project(hidden, batch.positions)
    context = torch.empty(value.shape, dtype=value.dtype)
    width, inner = full.model.hidden_size, checkpoint.config["intermediate_size"]
    sizes = ((width, width), (width, inner), (inner, width))
    output, up, down = (_linear(inputs, outputs, hidden) for inputs, outputs in sizes)
    norm = Norm(nn.LayerNorm(width, dtype=hidden.dtype))
    segment = search.store.segments[length]
    scattered = random.integers(0, len(segment), count)
    everything = np.ones(count, dtype=bool)
    with (
        HitRecords([RecordGroup(segment, scattered)]) as records,
        HitRecords([RecordGroup(segment, np.zeros(count, dtype=np.int64))]) as one_record,
    ):
        taken = _microseconds(
            {
                "tokenise": lambda: full.tokenize(texts),
                "embed": lambda: full.model.embed(batch),
                "project": lambda: search.projector.project(hidden, batch.groups()),
                "plan": lambda: search.plan(batch, hidden, everything),
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
                "run": lambda: full.run(sequences, [False] * count),
                "hit run": lambda: hits.run(sequences, [True] * count),
            }
        )
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
        Stage("layer, as it runs", taken["layer"], taken["hit layer"]),
    ]
    layers = len(full.model.layers)
    request = [
        Stage("tokenise", taken["tokenise"], taken["tokenise"]),
        Stage("embed", taken["embed"], taken["embed"]),
        Stage("project", None, taken["project"]),
        Stage("search", None, taken["plan"] - taken["project"]),
        Stage(f"{layers} layers", layers * taken["layer"], layers * taken["hit layer"]),
        Stage("pool", taken["pool"], taken["pool"]),
        Stage("forward pass, as it runs", taken["run"], taken["hit run"]),
    ]
    return Breakdown(shape, stages, request, layers * taken["plan"])


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


def _microseconds(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of each step, taken in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(_ROUNDS + 3):
        for name, step in steps.items():
            step()  # what the step before left in the cache is not this one's
            started = time.perf_counter()
            step()
            if number >= 3:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) * 1e6 for name, taken in seconds.items()}
