"""Decide whether a new generation of a database is better than the one that serves, on held-out texts.

    held-out sequences, an engine with each generation, as a server would use it
      -> try_generation: which texts hit, how near to the full model, how much time the hits save   -> Trial
      -> why_refused:    the budget, by the rules of a build and for each client, and 1 % more time saved

The generation that serves takes part with the policy that servers have tightened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attncache_core.calibration.policy_selection import could_prove
from attncache_core.calibration.probes import Probes
from attncache_core.calibration.quality import Quality
from attncache_core.calibration.savings import Savings, embedded_batches, measure_savings, search_cost
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.vectors import require_finite
from attncache_core.reuse.maps.policy import Budget, shown_below
from attncache_core.reuse.maps.search import SearchEngine

# A new generation must save at least this many times the time that the present one saves.
MIN_GROWTH = 1.01
_BATCH_SEQUENCES = 64


@dataclass(frozen=True)
class Trial:
    """What one generation did with the held-out texts."""

    texts: int
    saved: float  # microseconds per text, less the cost of searching; mean over all texts
    fidelity: np.ndarray  # of each hit that is not exact, in the budget's measure, float64 [hits]
    groups: np.ndarray  # index of the length group of each of these hits, int64 [hits]
    names: list[str]  # of the length groups
    clients: np.ndarray  # index of the client of each of these hits, int64 [hits]; -1: not known
    pays: bool = True  # whether reuse was measured to save enough time in any length group

    def figures(self) -> dict[str, Any]:
        """Return the figures for renewals.jsonl."""
        hits = len(self.fidelity)
        return {
            "hit_rate": hits / self.texts,
            "mean": float(self.fidelity.mean()) if hits else None,
            "least": float(self.fidelity.min()) if hits else None,
            "saved_microseconds": self.saved,
        }


def savings_of(engine: PrefillEngine, search: SearchEngine, sequences: Sequence[Sequence[int]]) -> Savings:
    """Measure the time that hits of held-out sequences save on this machine.

    engine: without a database. search: of a generation; the times hold for each generation of the model.
    """
    order = sorted((list(ids) for ids in sequences if len(ids) in search.store.segments), key=len)
    heads = [tuple(range(layer.heads)) for layer in engine.model.layers]
    return measure_savings(engine, search, Probes(order, {}, {}), heads)


def full_outputs(
    engine: PrefillEngine,
    sequences: Sequence[Sequence[int]],
    batch_size: int = _BATCH_SEQUENCES,
    *,
    field: str = "data",
) -> np.ndarray:
    """Return the engine's outputs without reuse for one or more sequences, float32 [sequences, d].

    Raises NotFinite for `field` with the index of the first sequence whose output is not finite.
    """
    batches = [sequences[at : at + batch_size] for at in range(0, len(sequences), batch_size)]
    results = [engine.run(engine.requests(batch, reuse=False)) for batch in batches]
    require_finite(np.concatenate([result.finite for result in results]), field)
    return np.concatenate([result.outputs for result in results])


def try_generation(
    engine: PrefillEngine,
    sequences: Sequence[Sequence[int]],
    clients: Sequence[bytes],
    full: np.ndarray,
    savings: Savings,
) -> Trial:
    """Serve the held-out sequences with a generation.

    engine: with the generation. clients: who asked for each sequence; empty if nobody knows. full: the
    outputs without reuse, float32 [sequences, d]. savings: the same for all generations, so that the noise of
    a measurement does not decide.
    """
    reuse = engine.map_reuse
    assert reuse is not None
    policy = reuse.policy
    results = [
        engine.run(engine.requests(sequences[at : at + _BATCH_SEQUENCES]))
        for at in range(0, len(sequences), _BATCH_SEQUENCES)
    ]
    similarities = np.concatenate([result.similarities for result in results])
    outcomes = [outcome for result in results for outcome in result.outcomes]
    # Recorded texts are exact, and say nothing about other texts.
    hits = np.array([outcome.is_hit for outcome in outcomes]) & (similarities != 1)
    searched = np.isfinite(similarities) & (similarities != 1)
    lengths = np.array([len(ids) for ids in sequences])
    outputs = np.concatenate([result.outputs for result in results])
    fidelity = engine.decisions.comparator(policy.budget.measure).fidelity(outputs[hits], full[hits])
    saved = savings.per_hit(lengths[hits], reuse.mask.total).sum()
    if searched.any():
        batches = embedded_batches(engine.model, sequences)
        saved -= search_cost(reuse.search, batches, set(lengths[searched].tolist())) * searched.sum()
    return Trial(
        len(sequences),
        float(saved / len(sequences)),
        fidelity,
        policy.group_indices(lengths[hits]),
        policy.names(),
        _numbered(clients)[hits],
        pays=reuse.search.paying is None or bool(reuse.search.paying),
    )


def _numbered(clients: Sequence[bytes]) -> np.ndarray:
    """Return a number for each client, int64 [sequences]; -1 if the client is not known."""
    numbers = {b"": -1}
    return np.array([numbers.setdefault(client, len(numbers) - 1) for client in clients], dtype=np.int64)


def why_refused(present: Trial, new: Trial, budget: Budget) -> str | None:
    """Return why the new generation may not serve, for people; None if it may."""
    return _why_outside(new, budget) or _why_no_better(present, new)


def _why_outside(trial: Trial, budget: Budget) -> str | None:
    hits = len(trial.fidelity)
    if not trial.pays:
        return "reuse makes batches with it faster by less than --min-gain on this machine"
    if not hits:
        return "no held-out text hits"
    if hits < MIN_PROBES or not could_prove(budget, hits):
        return (
            f"{hits} of {trial.texts} held-out texts hit, which are too few to show that the budget is kept; "
            "give more texts"
        )
    all_hits = Quality.of(trial.fidelity, budget.measure)
    if not all_hits.keeps(budget):
        kept, floor = "", ""
        if budget.floor:
            kept, floor = (
                f" and the kept floor {shown_below(all_hits.floor or 0.0, budget.floor)}",
                f" and {budget.floor}",
            )
        bound = shown_below(all_hits.lower_bound, budget.least)
        return (
            f"the mean {budget.measure} of the held-out hits is {all_hits.mean:.4f} (bound {bound}){kept}, "
            f"and the budget is {budget.least}{floor}"
        )
    for index in np.unique(trial.groups).tolist():
        fidelity = trial.fidelity[trial.groups == index]
        if len(fidelity) < MIN_PROBES:
            return (
                f"{len(fidelity)} held-out texts of {trial.names[index]} tokens hit, and at least "
                f"{MIN_PROBES} are needed to show that the budget is kept; give more texts"
            )
        quality = Quality.of(fidelity, budget.measure)
        if quality.lower_bound < budget.least:
            bound = shown_below(quality.lower_bound, budget.least)
            return (
                f"the mean {budget.measure} of the held-out hits of {trial.names[index]} tokens is "
                f"{quality.mean:.4f} (bound {bound}), and the budget is {budget.least}"
            )
    return _why_outside_for_a_client(trial, budget)


def _why_outside_for_a_client(trial: Trial, budget: Budget) -> str | None:
    """Judge each client by its mean, because few clients have texts enough for a bound of their own."""
    for client in np.unique(trial.clients[trial.clients >= 0]).tolist():
        fidelity = trial.fidelity[trial.clients == client]
        if len(fidelity) >= MIN_PROBES and fidelity.mean() < budget.least:
            return (
                f"the mean {budget.measure} of the {len(fidelity)} held-out hits of one API key is "
                f"{shown_below(fidelity.mean(), budget.least)}, and the budget is {budget.least}"
            )
    return None


def _why_no_better(present: Trial, new: Trial) -> str | None:
    if new.saved <= 0:
        return "its hits save no time on this machine"
    if new.saved >= MIN_GROWTH * max(present.saved, 0.0):
        return None
    return (
        f"it saves {new.saved:.2f} microseconds per text, and the present generation saves "
        f"{present.saved:.2f}; at least 1 % more is needed"
    )
