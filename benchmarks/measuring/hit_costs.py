"""Measure once what a hit saves and what a miss costs, in seconds of the processor, by length and batch.

    passes without reuse, and passes in which all texts or none hit -> medians over alternating pairs
      -> HitCosts, for full batches and for batches of one text

Results of databases that were served at different times are compared by these costs, so that the noise of the
machine does not decide between them. Seconds of the processor do not count while other programs run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from attncache_core import PrefillEngine
from attncache_core.calibration.gain import BATCH_SEQUENCES, BATCH_TOKENS, Rehearsal, synthetic_batch
from attncache_core.calibration.savings import fit_savings, with_reused
from attncache_core.engine.forward import forward_pass
from attncache_core.engine.runner import threads_of
from attncache_core.models import PackedModel
from attncache_core.reuse.maps.policy import uniform_policy
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.text.token_batch import TokenBatch


@dataclass(frozen=True)
class LengthCosts:
    """Microseconds per text of one length, in one shape of batch."""

    length: int  # tokens
    full: float  # without reuse
    hits: tuple[tuple[int, float], ...]  # (reused heads, saved by a hit without a search)
    miss: float  # lost by a familiar text that is not searched and does not hit
    searched_miss: float  # lost by a text that is searched and does not hit
    # Lost by each text of a batch in which half of the texts hit, beside what its hits save and its misses
    # lose, because hits and misses are computed in two parts.
    mixed: float


@dataclass(frozen=True)
class LengthCount:
    """How many texts of one length were served, and what reuse did to them."""

    length: int  # tokens
    texts: int
    hits: int
    misses: int  # texts that were tested for familiarity and did not hit
    searched: int  # texts that were compared with records


@dataclass(frozen=True)
class HitCosts:
    """What hits save and misses cost in one shape of batch."""

    lengths: tuple[LengthCosts, ...]  # rising

    def full_microseconds(self, counts: Sequence[LengthCount]) -> float:
        """Return the time of all texts without reuse."""
        return sum(count.texts * self._at(count.length, "full") for count in counts)

    def saved_microseconds(self, counts: Sequence[LengthCount], heads: int) -> float:
        """Return the time that reuse saves for all texts; negative if the texts take longer.

        counts: of texts that were served together, in batches of all lengths. heads: number of reused heads.
        What a batch of hits and misses loses is a parabola of its share of hits: it was measured for none,
        half and all.
        """
        share = sum(count.hits for count in counts) / sum(count.texts for count in counts)
        mixing = 4 * share * (1 - share)
        passes = [(costs.length, heads, saved) for costs in self.lengths for heads, saved in costs.hits]
        per_hit = fit_savings(passes)(np.array([count.length for count in counts]), heads)
        saved = 0.0
        for count, saved_by_hit in zip(counts, per_hit.tolist(), strict=True):
            miss = self._at(count.length, "miss")
            search = max(0.0, self._at(count.length, "searched_miss") - miss)
            saved += saved_by_hit * count.hits - miss * count.misses - search * count.searched
            saved -= mixing * self._at(count.length, "mixed") * count.texts
        return saved

    def _at(self, length: int, name: str) -> float:
        known = [costs.length for costs in self.lengths]
        return float(np.interp(length, known, [getattr(costs, name) for costs in self.lengths]))

    def as_json(self) -> list[dict[str, Any]]:
        """Return the costs as JSON holds them."""
        return [asdict(costs) for costs in self.lengths]

    @classmethod
    def of_json(cls, content: Sequence[dict[str, Any]]) -> Self:
        """Return the costs that `as_json` returned."""
        return cls(
            tuple(LengthCosts(**{**entry, "hits": tuple(map(tuple, entry["hits"]))}) for entry in content)
        )


def measure_costs(
    engine: PrefillEngine,
    search: SearchEngine,
    order: Sequence[Sequence[int]],
    lengths: Sequence[int],
    pairs: int,
) -> dict[str, HitCosts]:
    """Measure the costs in full batches of 1,024 tokens ("full batch"), and of one text ("one text").

    engine: with the model of the database and without a database. order: layer -> its heads, the mildest to
    reuse first. lengths: to measure, each with a mean in the database. Hits are measured with a third of the
    heads that records hold and with all of these heads.
    """
    stored = search.store.layout.stored_heads
    models = {
        sum(reused): with_reused(engine, order, reused) for reused in ([-(-h // 3) for h in stored], stored)
    }
    fewest, everything = min(models), models[sum(stored)]
    costs: dict[str, list[LengthCosts]] = {"full batch": [], "one text": []}
    for length in sorted(lengths):
        full = max(1, min(BATCH_SEQUENCES, BATCH_TOKENS // length))
        for shape, count in (("full batch", full), ("one text", 1)):
            passes = _Passes(engine, synthetic_batch([length] * count), pairs)
            unsearched, searched = (_one_group(search, searched=is_searched) for is_searched in (False, True))
            hits = {
                heads: passes.gained(model, Rehearsal.of(unsearched, {0: 1.0}))
                for heads, model in models.items()
            }
            miss, searched_miss = (
                -passes.gained(everything, Rehearsal.of(rehearsed, {0: 0.0}))
                for rehearsed in (unsearched, searched)
            )
            mixed = 0.0
            if count > 1:
                half = Rehearsal.of(unsearched, {0: 0.5})
                share = float(half.plan(passes.batch, passes.allowed).hits.mean())
                mixed = share * hits[fewest] - (1 - share) * miss - passes.gained(models[fewest], half)
            measured = (length, passes.full(), tuple(hits.items()), miss, searched_miss, mixed)
            costs[shape].append(LengthCosts(*measured))
    return {shape: HitCosts(tuple(lengths)) for shape, lengths in costs.items()}


def _one_group(search: SearchEngine, *, searched: bool) -> SearchEngine:
    """Return the search engine with a policy of one group, which is searched or served by means."""
    policy = uniform_policy(search.policy.budget, 1.0)
    group = replace(policy.groups[0], searched=searched)
    return replace(search, policy=replace(policy, groups=(group,), limit=search.policy.limit))


class _Passes:
    """Passes over one batch.

    One way is timed at a time, beside passes without reuse, because many models in turn would find the cache
    of the processor filled with each other's weights.
    """

    def __init__(self, engine: PrefillEngine, batch: TokenBatch, pairs: int) -> None:
        self._engine, self.batch, self._pairs = engine, batch, pairs
        self.allowed = np.ones(len(batch.lengths), dtype=bool)
        self._full: list[float] = []  # seconds of each pass without reuse

    def full(self) -> float:
        """Return the microseconds per text without reuse, median over all passes."""
        return statistics.median(self._full) / len(self.batch.lengths) * 1e6

    def gained(self, model: PackedModel, search: SearchEngine) -> float:
        """Return the microseconds per text that passes with a search engine gain, median over the pairs."""
        engine = self._engine
        ways: list[Callable[[], object]] = [
            lambda: forward_pass(engine.model, self.batch, None, self.allowed),
            lambda: forward_pass(model, self.batch, search, self.allowed),
        ]
        gained = []
        with threads_of(engine.model, engine.threads):
            for turn in range(self._pairs + 1):
                seconds = [0.0, 0.0]
                for way in (0, 1) if turn % 2 else (1, 0):
                    started = time.process_time()
                    ways[way]()
                    seconds[way] = time.process_time() - started
                if turn:  # the first pair reads files and fills caches
                    self._full.append(seconds[0])
                    gained.append(seconds[0] - seconds[1])
        return statistics.median(gained) / len(self.batch.lengths) * 1e6
