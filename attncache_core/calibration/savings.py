"""Measure the time that hits save and the time that searches cost, on the machine that calibrates.

Whole passes are timed with two masks at a few lengths, and three coefficients are fitted to the times. The
fit gives the time saved for a mask of any size, without timing passes with that mask.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy
import torch

from attncache_core.calibration.gain import (
    BATCH_SEQUENCES,
    BATCH_TOKENS,
    Rehearsal,
    synthetic_batch,
)
from attncache_core.calibration.probes import Probes
from attncache_core.engine.forward import forward_pass
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.models import LayerHeads, PackedModel, load_model, with_heads
from attncache_core.reuse.maps.policy import uniform_policy
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.text.token_batch import TokenBatch, pack

_ROUNDS = 7


@dataclass(frozen=True)
class Savings:
    """The time that hits save and searches cost, in microseconds on the machine that calibrates."""

    # (lengths [n], number of reused heads) -> microseconds that a hit of each length saves, float64 [n]. A
    # value is negative if hits take longer.
    per_hit: Callable[[np.ndarray, int], np.ndarray]
    # Lengths to search -> microseconds per sequence of these lengths, in batches of sequences of all lengths.
    search: Callable[[Collection[int]], float]


def measure_savings(
    engine: PrefillEngine, search: SearchEngine, probes: Probes, order: Sequence[Sequence[int]]
) -> Savings:
    """Measure the time that hits save and searches cost on this machine.

    order: layer -> its heads, the mildest to reuse first. Hits are timed in whole passes at up to three
    lengths of the probes that have records, once with a third of the heads that records hold and once with
    all of these heads. Searches are timed on batches of probes of all lengths. Without a probe whose length
    has records, hits save nothing.
    """
    stored = search.store.layout.stored_heads
    recorded = probes.lengths[np.isin(probes.lengths, list(search.store.segments))]
    if not len(recorded):
        return Savings(lambda lengths, _: np.zeros(len(lengths)), lambda _: 0.0)
    spread = np.linspace(0, len(recorded) - 1, 7).round().astype(int)[1::2]
    passes = []
    for reused in ([-(-heads // 3) for heads in stored], stored):
        model = with_reused(engine, order, reused)
        for length in np.unique(recorded[spread]).tolist():
            passes.append((length, sum(reused), saved_by_hits(model, search, length)))
    batches = embedded_batches(engine.model, probes.sequences)
    return Savings(per_hit=fit_savings(passes), search=lambda lengths: search_cost(search, batches, lengths))


def saved_by_hits(model: PackedModel, search: SearchEngine, length: int) -> float:
    """Return the microseconds per text that reuse saves in a full batch of one length if all texts hit.

    model: a model with the heads of a reuse mask. The mean of the length serves all texts, without a search.
    """
    policy = uniform_policy(search.policy.budget, 1.0)
    policy = replace(policy, groups=(replace(policy.groups[0], searched=False),))
    batch = synthetic_batch([length] * max(1, min(BATCH_SEQUENCES, BATCH_TOKENS // length)))
    rehearsal = Rehearsal.of(replace(search, policy=policy), {0: 1.0})
    without, with_hits = _seconds_of(model, rehearsal, batch)
    return (without - with_hits) / len(batch.lengths) * 1e6


def _seconds_of(model: PackedModel, search: SearchEngine, batch: TokenBatch) -> tuple[float, float]:
    """Return the seconds of the fastest pass over a batch without reuse and with reuse; the two alternate.

    The fastest, because other programs only make passes slower.
    """
    allowed = np.ones(len(batch.lengths), dtype=bool)
    passes: list[Callable[[], object]] = [
        lambda: forward_pass(model, batch, None, allowed),
        lambda: forward_pass(model, batch, search, allowed),
    ]
    taken: list[list[float]] = [[], []]
    # The first round warms up: kernels are compiled, and records are read from disk. It is not counted.
    for turn in range(_ROUNDS + 1):
        for method in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            passes[method]()
            taken[method].append(time.perf_counter() - started)
    without, with_reuse = (min(seconds[1:]) for seconds in taken)
    return without, with_reuse


def fit_savings(
    passes: Sequence[tuple[int, int, float]],
) -> Callable[[np.ndarray, int], np.ndarray]:
    """Fit the time that a hit saves to measured passes: (tokens, reused heads, microseconds saved per text).

    For each reused head, a hit saves Q and K, which take time proportional to the length, and their product,
    which takes time proportional to its square. Each hit costs a constant time for digests and a second
    kernel call in each layer. The model is the sum of these three terms with coefficients of at least 0,
    fitted by least squares, so that the noise of one measurement has little effect. Returns a function:
    (lengths [n], number of reused heads) -> microseconds that a hit of each length saves, float64 [n].
    """
    tokens, heads, saved = (np.array(column, dtype=np.float64) for column in zip(*passes, strict=True))
    columns = np.stack([heads * tokens, heads * tokens**2, -np.ones_like(tokens)], axis=1)
    (by_length, by_square, price), _ = scipy.optimize.nnls(columns, saved)

    def per_hit(lengths: np.ndarray, heads: int) -> np.ndarray:
        return heads * (by_length * lengths + by_square * lengths**2) - price

    return per_hit


@torch.inference_mode()
def embedded_batches(
    model: PackedModel, sequences: Sequence[Sequence[int]]
) -> list[tuple[TokenBatch, torch.Tensor]]:
    """Return full batches drawn from the sequences, each with what the first layer's attention reads."""
    chosen = np.random.default_rng(0).permutation(len(sequences))[: 2 * _ROUNDS * BATCH_SEQUENCES]
    batches = [
        pack([sequences[index] for index in chosen[at : at + BATCH_SEQUENCES]])
        for at in range(0, len(chosen), BATCH_SEQUENCES)
    ]
    return [(batch, model.search_input(model.embed(batch))) for batch in batches]


def search_cost(
    search: SearchEngine, batches: Sequence[tuple[TokenBatch, torch.Tensor]], lengths: Collection[int]
) -> float:
    """Return the microseconds per sequence to search the records, if only these lengths are searched.

    batches: full batches of all lengths, see embedded_batches, because texts of many lengths share a batch
    while serving. Each length in a batch is a separate search. If only one length is searched, its sequences
    also bear the fixed cost of starting a search.
    """
    taken: list[float] = []
    for batch, hidden in batches:
        groups = [group for group in batch.groups() if group.length in lengths]
        if groups:
            started = time.perf_counter()
            search.nearest(batch, hidden, groups)
            taken.append((time.perf_counter() - started) / sum(group.count for group in groups))
    # The first search is a warm-up.
    return statistics.median(taken[1:] or taken) * 1e6 if taken else 0.0


def with_reused(engine: PrefillEngine, order: Sequence[Sequence[int]], reused: Sequence[int]) -> PackedModel:
    """Return the engine's model with the first `reused` heads of each layer's order reused."""
    try:
        heads = [LayerHeads(*layer) for layer in zip(order, reused, strict=True)]
        return with_heads(engine.model, engine.checkpoint, heads)
    except NotImplementedError:
        return load_model(
            engine.checkpoint,
            engine.dtype,
            prompt_tokens=engine.tokenizer.prompt_tokens,
            head_order=order,
            reused_heads=reused,
            device=engine.model.device,
        )
