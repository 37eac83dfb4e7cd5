"""Measure how much faster whole passes are with reuse, and in which length groups reuse pays.

    synthetic batches of one text and of 1,024 tokens, with the lengths that calibration saw
      -> pairs of passes, without reuse and with reuse (paired.py) -> Gain of each length group
      -> pairs of passes with all groups that gain enough, in batches of several sizes
      -> MeasuredGain, stored in the database's folder

The share of the synthetic texts that hit is the hit rate that calibration measured. The passes do the same
work as passes while serving: familiarity test, digests, search, fetch and layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attncache_core import native
from attncache_core.calibration.paired import (
    IdleMark,
    PairedGain,
    always_idle,
    compare,
)
from attncache_core.engine.forward import forward_pass
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.runner import threads_of
from attncache_core.reuse.maps.gain import (
    KEPT_GAINS,
    MAX_KEPT,
    Gain,
    MeasuredGain,
    Traffic,
    read_gains,
)
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.maps.search import SearchEngine, SearchPlan
from attncache_core.reuse.plan import ReusePlan
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.segment import RecordsChanged
from attncache_core.runtime.files import locked, remove_unfinished, write_whole
from attncache_core.runtime.processor import processor_name
from attncache_core.text.token_batch import Group, TokenBatch, pack
from attncache_core.version import __version__

BATCH_TOKENS = 1024
BATCH_SEQUENCES = 64
_BATCHES = 3  # number of different batches of each size
# Sizes of batches that may be the least that reuse. A full batch leaves a place empty now and then.
_MIN_TOKENS = (128, 256, 512, 896)
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
        if not self.is_searched(group.length):
            return np.full(group.count, self.prototypes.means[group.length]), RecordKind.MEAN
        segment = self.store.segments[group.length]
        records = np.arange(group.count) % len(segment)
        segment.are_sound(records)
        return records, RecordKind.STORED


def require_gain(
    engine: PrefillEngine,
    min_gain: float,
    *,
    measure: bool = True,
    idle_mark: IdleMark = always_idle,
) -> None:
    """Restrict reuse to the length groups and batches in which passes are faster by at least `min_gain`.

    min_gain: a fraction (0.05 is 5 %). With 0 the engine reuses wherever the budget holds, at any speed. The
    gain is measured on this machine, which takes seconds, and stored in the database's folder, where the next
    call finds it; see measure_gain. measure: False only adopts a stored measurement.
    idle_mark: when the engine computes requests; the measurement waits meanwhile.

    Until the gain is known, the engine reuses nothing (MapReuse.awaits_gain). Does nothing without a
    database. Raises MachineBusy if other programs used the processors, so that nothing could be measured.
    """
    reuse = engine.map_reuse
    if reuse is None:
        return
    # Nothing else may be reused in between, because the engine may serve already.
    reuse.reuse_in(None if min_gain == 0 else ())
    if min_gain == 0:
        return
    search = replace(reuse.search, policy=reuse.lasting_policy)
    traffic = reuse.database.traffic(search.policy)
    if not traffic.hit_rates:
        return
    reuse.awaits_gain = True
    folder, circumstances = reuse.database.folder, _circumstances(engine, reuse)
    gain = _kept_gain(folder, circumstances, min_gain)
    if gain is None and not measure:
        return
    try:
        gain = gain or measure_gain(
            Timing(engine, search, idle_mark), traffic, min_gain, circumstances, folder
        )
    except RecordsChanged as changed:
        with engine.deciding:
            reuse.prepare(changed.lengths)
        reuse.reuse_off.append("files of the database changed while the gain of reuse was measured")
        return
    # What was measured does not hold for groups that were tightened meanwhile.
    measured, now = search.policy.groups, reuse.policy.groups
    reuse.reuse_in(
        [index for index in gain.paying if measured[index].tightened == now[index].tightened], gain
    )


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
        "reused_heads": list(reuse.mask.reused),
        "policy": reuse.lasting_policy.digest,
    }


@dataclass(frozen=True)
class Timing:
    """What times passes with a search engine, in an engine that may serve meanwhile."""

    engine: PrefillEngine
    search: SearchEngine
    idle_mark: IdleMark

    def gain_in(
        self, batches: Sequence[TokenBatch], hit_rates: Mapping[int, float], limit: float
    ) -> PairedGain:
        """Measure how much faster passes over the batches are if the length groups hit at these rates.

        limit: see compare.
        """
        engine, rehearsal = self.engine, Rehearsal.of(self.search, hit_rates)

        def passed(batch: TokenBatch, strategy: SearchEngine | None) -> None:
            allowed = np.ones(len(batch.lengths), dtype=bool)
            with threads_of(engine.model, engine.threads):
                forward_pass(engine.model, batch, strategy, allowed, engine.deciding)

        passes = [(partial(passed, batch, None), partial(passed, batch, rehearsal)) for batch in batches]
        return compare(passes, limit, self.idle_mark)


def measure_gain(
    timing: Timing,
    traffic: Traffic,
    min_gain: float,
    circumstances: Mapping[str, Any],
    folder: Path,
) -> MeasuredGain:
    """Measure in which length groups reuse makes passes faster by at least `min_gain` on this machine.

    What counts is the lower bound of each gain, so that noise starts no reuse. If both bounds of every gain
    are on one side of its limit, the measurement is stored in gain.json in `folder`, and a later call with
    equal `circumstances` and `min_gain` reads it from there. Otherwise a later call measures again. If
    several processes call this function, one measures and the others wait. Raises MachineBusy if other
    programs used the processors, and RecordsChanged.
    """
    with contextlib.ExitStack() as stack:
        # Locking a read-only database fails. Its gain is then measured at each start.
        with contextlib.suppress(OSError):
            stack.enter_context(locked(folder / "gain.json", on_wait=lambda: None))
        kept = _kept_gain(folder, circumstances, min_gain)
        if kept is not None:
            return kept
        measured, is_clear = _measure(timing, traffic, min_gain, circumstances)
        if is_clear:
            others = [
                gain for gain in read_gains(folder / "gain.json") if gain.circumstances != circumstances
            ]
            with contextlib.suppress(OSError):
                remove_unfinished(folder, "gain.json")
                write_whole(
                    folder / "gain.json", KEPT_GAINS.dump_json([measured, *others][:MAX_KEPT], indent=1)
                )
    return measured


def _kept_gain(folder: Path, circumstances: Mapping[str, Any], min_gain: float) -> MeasuredGain | None:
    """Return the stored measurement with these circumstances and this `min_gain`, or None."""
    kept = read_gains(folder / "gain.json")
    return next(
        (gain for gain in kept if gain.circumstances == circumstances and gain.min_gain == min_gain), None
    )


def _measure(
    timing: Timing, traffic: Traffic, min_gain: float, circumstances: Mapping[str, Any]
) -> tuple[MeasuredGain, bool]:
    """Measure each length group alone, then all groups that pay together, in batches of several sizes.

    Also returns whether each decision about full batches is clear: both bounds on one side of the limit.
    """
    policy, rates = timing.search.policy, traffic.hit_rates
    alone = {
        group: _gain_of(timing, traffic.of_group(policy, group), {group: rate}, min_gain)
        for group, rate in rates.items()
    }
    groups = {group: gain for group, (gain, _) in alone.items()}
    paying = [group for group, gain in groups.items() if gain.full_batch_bound >= min_gain]
    served = {group: rates[group] for group in paying or groups}
    # The texts of the other groups gain nothing, but they are in the same batches.
    required = min_gain * traffic.token_share(policy, served)
    together, together_is_clear = _gain_of(timing, traffic.lengths, served, required)
    is_clear = together_is_clear and all(clear for _, clear in alone.values())
    measured = MeasuredGain(dict(circumstances), min_gain, groups, (), together, required)
    if not paying or together.full_batch_bound < required:
        return measured, is_clear
    least_tokens = (
        0 if together.one_text_bound >= required else _min_batch(timing, traffic.lengths, served, required)
    )
    return replace(measured, paying=tuple(paying), least_tokens=least_tokens), is_clear


def _min_batch(
    timing: Timing, lengths: Mapping[int, int], served: Mapping[int, float], required: float
) -> int:
    """Return the tokens of the smallest batch that gains enough, if all larger ones do too."""
    *smaller, least_tokens = _MIN_TOKENS
    for tokens in reversed(smaller):
        if timing.gain_in(batches_of(lengths, tokens), served, required).lower < required:
            break
        least_tokens = tokens
    return least_tokens


def _gain_of(
    timing: Timing, lengths: Mapping[int, int], hit_rates: Mapping[int, float], limit: float
) -> tuple[Gain, bool]:
    """Measure the gain of reuse in batches with these lengths (tokens -> number of texts).

    Also returns whether it is clear on which side of the limit full batches are.
    """
    batches = single_texts(lengths), batches_of(lengths, BATCH_TOKENS)
    one_text, full_batch = (timing.gain_in(batch, hit_rates, limit) for batch in batches)
    tokens = [float(batch.offsets[-1]) for batch in batches[1]]
    saved = full_batch.saved_seconds / float(np.mean(tokens)) / max(hit_rates.values())
    gain = Gain(one_text.median, one_text.lower, full_batch.median, full_batch.lower, saved)
    return gain, not full_batch.leaves_open(limit)


def single_texts(lengths: Mapping[int, int]) -> list[TokenBatch]:
    """Return three batches of one text, with the 1/6, 3/6 and 5/6 quantiles of the lengths."""
    spread = np.repeat(sorted(lengths), [lengths[length] for length in sorted(lengths)])
    indices = [(2 * batch + 1) * len(spread) // (2 * _BATCHES) for batch in range(_BATCHES)]
    return [synthetic_batch([int(spread[index])]) for index in indices]


def batches_of(lengths: Mapping[int, int], tokens: int) -> list[TokenBatch]:
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
