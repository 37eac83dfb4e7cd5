"""Decide which ways are measured, and which one is chosen.

    the exact model -> dtypes, quantisations, maps -> layers dropped, as many as the budget allows
                    -> combinations of ways that keep the budget and are faster

A part that breaks the budget alone, or that saves no time alone, is in no combination.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from attncache_core.evaluation.tuning.measuring import MeasuredWay
from attncache_core.evaluation.tuning.ways import KINDS, Way
from attncache_core.reuse.maps.policy import Budget

# Measures a way, or returns None if the way cannot be measured. Knows ways that it measured before.
Measurer = Callable[[Way], MeasuredWay | None]


class Search:
    """Measures ways, and remembers those that keep the budget."""

    def __init__(self, measure: Measurer, budget: Budget, min_gain: float) -> None:
        """min_gain: a part belongs to a combination only if it makes batches faster by this share."""
        self._measure, self._budget, self._min_gain = measure, budget, min_gain
        self._parts: dict[str, list[MeasuredWay]] = defaultdict(list)  # kind -> ways that pay

    def try_each(self, ways: Iterable[Way]) -> None:
        """Measure ways of one part each."""
        for way in ways:
            self._try(way)

    def try_dropping(self, make: Callable[[tuple[int, ...]], Way], least_important: Sequence[int]) -> None:
        """Measure how many layers can be dropped inside the budget.

        make: layers -> way. least_important: layers, the least important first; not all layers can be
        dropped. The number grows twofold while the budget is kept, and is then bisected.
        """
        kept, broken = 0, len(least_important)
        while kept + 1 < broken:
            grows = broken == len(least_important)
            count = min(max(1, 2 * kept), broken - 1) if grows else (kept + broken) // 2
            if self._try(make(tuple(sorted(least_important[:count])))):
                kept = count
            else:
                broken = count

    def combine(self) -> None:
        """Measure combinations of the parts that pay, two parts first, while they get faster."""
        found = [measured for of_kind in self._parts.values() for measured in of_kind]
        while found:
            found = [
                better
                for first in sorted(found, key=lambda measured: -measured.speed)
                # In the order of the kinds only, so that no combination is met twice.
                for kind in KINDS[1 + max(map(KINDS.index, first.way.parts)) :]
                if (better := self._best_with(first, kind))
            ]

    def _best_with(self, first: MeasuredWay, kind: str) -> MeasuredWay | None:
        """Return the fastest way of `first` and one part of this kind that keeps the budget and pays."""
        for part in sorted(self._parts[kind], key=lambda measured: -measured.speed):
            way = first.way.with_part(part.way)
            measured = self._measure(way) if way else None
            if measured and measured.quality.keeps(self._budget):
                return measured if measured.speed >= first.speed * (1 + self._min_gain) else None
        return None

    def _try(self, way: Way) -> bool:
        """Measure a way of one part. Returns whether it keeps the budget."""
        measured = self._measure(way)
        if measured is None or not measured.quality.keeps(self._budget):
            return False
        if measured.speed >= 1 + self._min_gain and measured.can_pay:
            (kind,) = way.parts
            self._parts[kind].append(measured)
        return True


def choose(measured: Sequence[MeasuredWay], budget: Budget, min_gain: float) -> MeasuredWay | None:
    """Return the way to serve; None if no way keeps the budget.

    A way that makes one text alone slower by more than `min_gain` is not chosen, if another way keeps the
    budget. Of the ways that are as fast as the fastest one within `min_gain`, the way with the best quality
    is chosen: so quality is not spent on a gain that may be noise, and the exact model is chosen if nothing
    pays.
    """
    inside = [way for way in measured if way.quality.keeps(budget) and way.can_pay]
    inside = [way for way in inside if way.speed_alone >= 1 - min_gain] or inside
    if not inside:
        return None
    fastest = max(way.speed for way in inside)
    near = [way for way in inside if way.speed * (1 + min_gain) >= fastest]
    return max(near, key=lambda way: (way.quality.mean, way.speed))
