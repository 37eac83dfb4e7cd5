"""Serve token sequences with a database, verify every hit as a server does, and count what reuse did.

batches -> engine -> hits -> the service's verifier, which tightens the policy
                  -> fidelity of each hit, by window -> how many windows keep the budget
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import scipy

from attncache_core import AttentionDatabase, PrefillEngine
from attncache_core.evaluation.tuning.measuring import service_batches
from attncache_core.reuse.maps.policy import Budget, ReusePolicy
from attncache_core.reuse.maps.verification import Window, window_of
from benchmarks.measuring.hit_costs import LengthCount
from service.observability.metrics import Metrics
from service.upkeep.verifier import Verifier

WINDOW_HITS = 200
MIN_WINDOW_HITS = 50  # the mean of fewer hits says little


@dataclass(frozen=True)
class Served:
    """What reuse did to the texts of a day."""

    texts: int
    hits: int
    mean: float | None  # cosine over the hits; None without hits
    below: int  # number of hits below the budget's floor
    windows: int  # windows of verified hits that count, see count_windows
    kept: int  # windows of these that keep the budget
    lengths: tuple[LengthCount, ...]


def serve(
    engine: PrefillEngine,
    database: AttentionDatabase,
    sequences: Sequence[Sequence[int]],
    exact: np.ndarray,
    budget: Budget,
) -> tuple[Served, ReusePolicy]:
    """Serve token sequences in full batches with a database, and verify every hit.

    engine: without a database. exact: its outputs, float32 [sequences, d]. budget: by which windows are
    judged; a policy without a budget is never tightened. Returns what reuse did, and the policy at the end.
    """
    reusing = PrefillEngine.load(
        engine.checkpoint, database=database, threads=engine.threads, dtype=_dtype(engine)
    )
    verified = 1.0 if database.search.policy.budget.binds else 0.0
    verifier = Verifier(reusing, verified, Metrics())
    comparator = reusing.decisions.comparator(budget.measure)
    fidelities: list[float] = []
    windows: dict[Window, list[float]] = {}
    counts: dict[int, np.ndarray] = {}  # length -> what LengthCount counts
    end = 0
    for requests in service_batches([[request] for request in reusing.requests(sequences)], False):
        first, end = end, end + len(requests)
        policy = verifier.policy
        result = reusing.run(requests)
        verifier.offer(requests, result, policy)
        while verifier.has_work:
            verifier.verify_some()
        strangeness = np.full(len(requests), np.nan) if result.strangeness is None else result.strangeness
        measured = comparator.fidelity(result.outputs, exact[first:end])
        for index, request in enumerate(requests):
            length, fidelity = len(request.ids), float(measured[index])
            hit = result.outcomes[index].is_hit
            tested, searched = (not np.isnan(scores[index]) for scores in (strangeness, result.similarities))
            own_count = counts.setdefault(length, np.zeros(4, dtype=int))
            own_count += (1, hit, tested and not hit, searched)
            if hit:
                fidelities.append(fidelity)
            if hit and result.similarities[index] != 1:  # a recorded text takes its own maps, unverified
                window = window_of(policy, length, float(strangeness[index]))
                windows.setdefault(window, []).append(fidelity)
    verifier.close()
    counted, kept = count_windows(windows.values(), budget)
    served = Served(
        len(sequences),
        len(fidelities),
        fmean(fidelities) if fidelities else None,
        int(budget.harmed(np.array(fidelities)).sum()),
        counted,
        kept,
        tuple(LengthCount(length, *numbers.tolist()) for length, numbers in sorted(counts.items())),
    )
    return served, verifier.policy


def count_windows(windows: Iterable[Sequence[float]], budget: Budget) -> tuple[int, int]:
    """Return how many windows of verified hits count, and how many of these keep the budget.

    windows: the fidelities of the hits of each length group and band under one state of the policy, in the
    order in which they were served. They are divided into windows of 200 hits. A window of fewer than 50 hits
    counts only if it fails.
    """
    counted = kept = 0
    for fidelities in windows:
        for first in range(0, len(fidelities), WINDOW_HITS):
            window = fidelities[first : first + WINDOW_HITS]
            fails = _fails(window, budget)
            counted += fails or len(window) >= MIN_WINDOW_HITS
            kept += not fails and len(window) >= MIN_WINDOW_HITS
    return counted, kept


def _fails(window: Sequence[float], budget: Budget) -> bool:
    """Return whether the mean of a window is too low, or its share of harmed hits too large.

    The share: with 95 % confidence (Clopper and Pearson 1934), of at least two harmed hits.
    """
    if len(window) >= MIN_WINDOW_HITS and not fmean(window) >= budget.least:
        return True
    harmed = int(budget.harmed(np.array(window)).sum())
    if not budget.floor or harmed < 2:
        return False
    return float(scipy.special.betaincinv(harmed, len(window) - harmed + 1, 0.05)) > budget.allowed_harm


def _dtype(engine: PrefillEngine) -> Any:
    return str(engine.dtype).removeprefix("torch.")
