"""Measure how much faster whole passes are with reuse, and in which length groups reuse pays.

    synthetic batches of one text and of 1,024 tokens, with the lengths that calibration saw
      -> time each pass with and without reuse, alternating -> Gain of each length group
      -> time passes with all groups that gain enough, in batches of several sizes
      -> MeasuredGain, stored in the database's folder

The share of the synthetic texts that hit is the hit rate that calibration measured. The passes do the same
work as passes while serving: familiarity test, digests, search, fetch and layers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attncache_core import native
from attncache_core.engine.forward import forward_pass
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.models import PackedModel
from attncache_core.reuse.execution.fetch import Fetch
from attncache_core.reuse.maps.gain import (
    KEPT_GAINS,
    MOST_KEPT,
    Gain,
    MeasuredGain,
    Traffic,
    newest_of_machine,
    read_gains,
)
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.maps.search import SearchEngine, SearchPlan
from attncache_core.reuse.plan import ReusePlan
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.segment import RecordsChanged
from attncache_core.runtime.files import locked, write_whole
from attncache_core.runtime.processor import processor_name
from attncache_core.text.token_batch import Group, TokenBatch, pack
from attncache_core.version import __version__

BATCH_TOKENS = 1024
BATCH_SEQUENCES = 64
_BATCHES = 3  # number of different batches of each size
# Sizes of batches that may be the least that reuse. A full batch leaves a place empty now and then.
_LEAST_TOKENS = (128, 256, 512, 896)
ROUNDS = 7
# When the gain is measured again, a group that reused before keeps reusing down to this share of `min_gain`.
_HYSTERESIS = 0.5
_ANY_STRANGENESS = 1e9


@dataclass(frozen=True)
class Rehearsal(SearchEngine):
    """A search engine that does its usual work for synthetic texts, then simulates a given hit rate."""

    hit_rates: Mapping[int, float] = field(default_factory=dict)  # index of a length group -> share that hits

    @classmethod
    def of(cls, search: SearchEngine, hit_rates: Mapping[int, float]) -> Rehearsal:
        """Return the rehearsal of a search engine, without its strangeness limit."""
        limit = search.policy.limit
        policy = replace(search.policy, limit=limit and replace(limit, strangest=_ANY_STRANGENESS))
        parts = {part.name: getattr(search, part.name) for part in fields(SearchEngine)}
        return cls(
            **{**parts, "policy": policy, "paying": frozenset(hit_rates), "least_tokens": 0},
            hit_rates=hit_rates,
        )

    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> SearchPlan:
        """Return the plan of the search engine with simulated hits; see SearchEngine.plan."""
        plan = super().plan(batch, allowed)
        return plan if plan.compared else self._with_simulated_hits(plan, batch)

    def refine(self, plan: ReusePlan, batch: TokenBatch, hidden: torch.Tensor) -> SearchPlan:
        """Return the finished plan of the search engine with simulated hits; see SearchEngine.refine."""
        return self._with_simulated_hits(super().refine(plan, batch, hidden), batch)

    def _with_simulated_hits(self, plan: SearchPlan, batch: TokenBatch) -> SearchPlan:
        """Replace the hits of a plan by random hits at the hit rate of each length group, in place."""
        random = np.random.default_rng(0)
        for group in batch.groups():
            hits = random.random(group.count) < self.hit_rates.get(self.policy.group_index(group.length), 0.0)
            records, kind = self._donors(group)
            plan.records[group.sequences] = np.where(hits, records, -1)
            plan.kinds[group.sequences] = kind
        return plan

    def _donors(self, group: Group) -> tuple[np.ndarray, RecordKind]:
        """Return the records that serve the sequences of a group, int64 [sequences], and their kind.

        The mean serves all sequences of a length that is not searched. Otherwise stored records serve in
        turn.
        """
        if not self._is_searched(group.length):
            return np.full(group.count, self.prototypes.means[group.length]), RecordKind.MEAN
        segment = self.store.segments[group.length]
        records = np.arange(group.count) % len(segment)
        segment.are_sound(records)
        return records, RecordKind.STORED


def require_gain(engine: PrefillEngine, min_gain: float, *, keep: bool = True) -> None:
    """Restrict reuse to the length groups and batches in which passes are faster by at least `min_gain`.

    min_gain: a fraction (0.05 is 5 %). With 0 the engine reuses wherever the budget holds, at any speed.
    keep: store the measurement in the database's folder. The gain of each length group is measured on this
    machine, which takes a few seconds; see measure_gain. Does nothing for an engine without a database.
    """
    reuse = engine.map_reuse
    if reuse is None:
        return
    reuse.reuse_in(None)
    if min_gain == 0:
        return
    search = reuse.search
    reuse.reuse_in(())
    traffic = reuse.database.traffic(search.policy)
    if not traffic.hit_rates:
        return
    folder = reuse.database.folder if keep else None
    try:
        gain = measure_gain(
            engine.model, search, traffic, min_gain, _circumstances(engine, reuse), folder, engine.fetch
        )
    except RecordsChanged as changed:
        reuse.prepare(changed.lengths)
        reuse.reuse_off.append("files of the database changed while the gain of reuse was measured")
        return
    reuse.reuse_in(gain.paying, gain)


def _circumstances(engine: PrefillEngine, reuse: MapReuse) -> dict[str, Any]:
    """Return the software, hardware and settings that a measured gain depends on."""
    return {
        "version": __version__,
        "processor": processor_name(),
        "threads": engine.threads,
        "attention": native.level(),
        "torch": torch.__version__,
        "dtype": str(engine.dtype),
        "device": str(engine.model.device),
        "fetch": engine.fetch.value,
        "reused_heads": list(reuse.mask.reused),
        "policy": reuse.policy.digest,
    }


def measure_gain(
    model: PackedModel,
    search: SearchEngine,
    traffic: Traffic,
    min_gain: float,
    circumstances: Mapping[str, Any],
    folder: Path | None,
    fetch: Fetch = Fetch.AUTO,
) -> MeasuredGain:
    """Measure in which length groups reuse makes passes faster by at least `min_gain` on this machine.

    The measurement is stored in gain.json in `folder`, and later calls with equal `circumstances` read it
    from there. Otherwise the gain is measured again, which takes seconds. A group that reused before on the
    same processor then keeps reusing unless it gains less than half of `min_gain`. With another `min_gain`,
    the decision is made again on the stored gains of the groups. If several processes call this function, one
    measures and the others wait. With folder None nothing is stored.
    """
    if folder is None:
        measured = _measure(model, search, traffic, circumstances, fetch)
        return _decide(model, search, traffic, replace(measured, min_gain=min_gain), None, fetch)
    path = folder / "gain.json"
    with contextlib.ExitStack() as stack:
        # Locking a read-only database fails. Its gain is then measured at each start.
        with contextlib.suppress(OSError):
            stack.enter_context(locked(path, on_wait=lambda: None))
        kept = read_gains(path)
        known = next((entry for entry in kept if entry.circumstances == dict(circumstances)), None)
        if known and known.min_gain == min_gain:
            return known
        before = known or newest_of_machine(kept, circumstances)
        measured = known or _measure(model, search, traffic, circumstances, fetch)
        decided = _decide(model, search, traffic, replace(measured, min_gain=min_gain), before, fetch)
        others = [entry for entry in kept if entry.circumstances != dict(circumstances)]
        with contextlib.suppress(OSError):
            write_whole(path, KEPT_GAINS.dump_json([decided, *others][:MOST_KEPT], indent=1))
    return decided


def _measure(
    model: PackedModel,
    search: SearchEngine,
    traffic: Traffic,
    circumstances: Mapping[str, Any],
    fetch: Fetch,
) -> MeasuredGain:
    """Measure the gain of each length group alone. The result has no paying groups yet."""
    rehearsal = Rehearsal.of(search, traffic.hit_rates)
    groups = {
        group: gain_of(model, rehearsal, traffic.of_group(search.policy, group), fetch)
        for group in traffic.hit_rates
    }
    return MeasuredGain(dict(circumstances), 0.0, groups, (), Gain(0.0, 0.0))


def _decide(
    model: PackedModel,
    search: SearchEngine,
    traffic: Traffic,
    measured: MeasuredGain,
    before: MeasuredGain | None,
    fetch: Fetch,
) -> MeasuredGain:
    """Return `measured` with the groups that pay, and the least batch that reuses.

    Each of the groups gains enough in full batches alone, and all gain enough together.
    """
    least = measured.min_gain
    # A decision for a smaller `min_gain` does not justify hysteresis for this one.
    reused = set(before.paying) if before and before.min_gain >= least else set()
    paying = [
        group
        for group, gain in measured.groups.items()
        if gain.full_batch >= least * (_HYSTERESIS if group in reused else 1.0)
    ]
    served = paying or list(measured.groups)
    rates = {group: traffic.hit_rates[group] for group in served}
    rehearsal = Rehearsal.of(search, rates)
    together = gain_of(model, rehearsal, traffic.lengths, fetch)
    enough = least * traffic.token_share(search.policy, paying)
    keeps = together.full_batch >= enough * (_HYSTERESIS if reused & set(paying) else 1.0)
    if not (keeps and paying):
        return replace(measured, paying=(), together=together, least_tokens=0)
    least_tokens = (
        0 if together.one_text >= enough else _least_batch(model, rehearsal, traffic, enough, fetch)
    )
    return replace(measured, paying=tuple(paying), together=together, least_tokens=least_tokens)


def _least_batch(
    model: PackedModel, search: SearchEngine, traffic: Traffic, enough: float, fetch: Fetch
) -> int:
    """Return the tokens of the smallest batch that gains enough, if all larger ones do too."""
    *smaller, least_tokens = _LEAST_TOKENS
    for tokens in reversed(smaller):
        if gain_at(model, search, traffic.lengths, tokens, fetch) < enough:
            break
        least_tokens = tokens
    return least_tokens


def gain_of(
    model: PackedModel,
    search: SearchEngine,
    lengths: Mapping[int, int],
    fetch: Fetch = Fetch.AUTO,
    rounds: int = ROUNDS,
) -> Gain:
    """Measure the gain of reuse in batches with these lengths (tokens -> number of texts).

    rounds: number of timed passes per batch and method, after one warm-up pass; the methods alternate.
    """
    one_text, full_batch = (
        _gain_in(model, search, batches, fetch, rounds)
        for batches in (_single_texts(lengths), _batches_of(lengths, BATCH_TOKENS))
    )
    return Gain(one_text, full_batch)


def gain_at(
    model: PackedModel,
    search: SearchEngine,
    lengths: Mapping[int, int],
    tokens: int,
    fetch: Fetch = Fetch.AUTO,
) -> float:
    """Measure the gain of reuse in batches of up to this number of tokens; see gain_of."""
    return _gain_in(model, search, _batches_of(lengths, tokens), fetch, ROUNDS)


def _gain_in(
    model: PackedModel, search: SearchEngine, batches: Sequence[TokenBatch], fetch: Fetch, rounds: int
) -> float:
    seconds = [seconds_of(model, search, batch, fetch, rounds) for batch in batches]
    without, with_reuse = np.sum(seconds, axis=0)
    return float(without / with_reuse - 1)


def seconds_of(
    model: PackedModel, search: SearchEngine, batch: TokenBatch, fetch: Fetch, rounds: int
) -> tuple[float, float]:
    """Return the seconds of the fastest pass over a batch without reuse and with reuse; the two alternate.

    The fastest, because other programs only make passes slower, and the decision is kept.
    """
    allowed = np.ones(len(batch.lengths), dtype=bool)
    passes: list[Callable[[], object]] = [
        lambda: forward_pass(model, batch, None, allowed, fetch),
        lambda: forward_pass(model, batch, search, allowed, fetch),
    ]
    taken: list[list[float]] = [[], []]
    # The first round warms up: kernels are compiled, and records are read from disk. It is not counted.
    for turn in range(rounds + 1):
        for method in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            passes[method]()
            taken[method].append(time.perf_counter() - started)
    without, with_reuse = (min(seconds[1:]) for seconds in taken)
    return without, with_reuse


def _single_texts(lengths: Mapping[int, int]) -> list[TokenBatch]:
    """Return three batches of one text, with the 1/6, 3/6 and 5/6 quantiles of the lengths."""
    spread = np.repeat(sorted(lengths), [lengths[length] for length in sorted(lengths)])
    indices = [(2 * batch + 1) * len(spread) // (2 * _BATCHES) for batch in range(_BATCHES)]
    return [synthetic_batch([int(spread[index])]) for index in indices]


def _batches_of(lengths: Mapping[int, int], tokens: int) -> list[TokenBatch]:
    """Return batches of up to `tokens` tokens and 64 texts, with lengths drawn from the distribution."""
    random = np.random.default_rng(0)
    values, weights = np.array(list(lengths)), np.array(list(lengths.values()), dtype=np.float64)
    batches = []
    for _ in range(_BATCHES):
        drawn = random.choice(values, size=BATCH_SEQUENCES, p=weights / weights.sum())
        fitting = max(1, int(np.searchsorted(np.cumsum(drawn), tokens, side="right")))
        batches.append(synthetic_batch(drawn[:fitting].tolist()))
    return batches


def synthetic_batch(lengths: Sequence[int]) -> TokenBatch:
    """Return a batch of sequences of these lengths. All tokens have id 0, which every vocabulary has."""
    return pack([[0] * length for length in lengths])
