"""Choose a mask and a policy inside a quality budget, from measured probes.

curve     damage by similarity, for each length group and kind of record       thresholds.fit_curve
-> θ      the lowest threshold that keeps the budget with 95 % confidence      thresholds.choose_group
-> group  search, the unsearched mean, or recorded sequences only              policy_for, rare_length
-> mask   the mask with which the hits save the most time                      choose_policy
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from attncache_core.calibration.probes import Measured, Probes
from attncache_core.calibration.savings import Savings
from attncache_core.calibration.thresholds import (
    MIN_PROBES,
    choose_group,
    mean_keeps,
    mean_or_none,
    share_bound,
)
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget, KindPolicy, LengthGroup, ReusePolicy
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.storage.layout import RecordKind

# Probes that a length group needs. Agreement is 0 or 1 for each probe, so telling 0.98 from 0.96 takes many
# more.
_PROBES_PER_GROUP = {Measure.COSINE: 100, Measure.AGREEMENT: 600}
_MAX_GROUPS = 6
# The shortest texts are hardly measured if they are fewer than this share of the probes, and than MIN_PROBES.
_RARE_SHARE = 0.02


def rare_length(lengths: np.ndarray, shortest: int) -> int:
    """Return the number of tokens up to which at most a few probes were measured; 0 if no record is so short.

    A text of a few tokens, such as a single word, differs from the mean of its length more than a longer text
    does. In one length group with longer texts, it would hardly count. lengths: tokens of each probe, rising.
    shortest: tokens of the shortest record.
    """
    few = int(np.ceil(min(MIN_PROBES, _RARE_SHARE * len(lengths))))
    common = int(lengths[few - 1])  # the shortest length that is not rare
    return common - 1 if shortest < common else 0


def length_groups(lengths: np.ndarray, measure: Measure) -> list[np.ndarray]:
    """Divide probes into at most six length groups of similar size, and return the probe indices of each.

    lengths: tokens of each probe, int64 [probes], rising. Probes of equal length are in the same group.
    """
    groups = int(np.clip(len(lengths) // _PROBES_PER_GROUP[measure], 1, _MAX_GROUPS))
    ends = {int(lengths[end - 1]) for end in np.linspace(0, len(lengths), groups + 1).astype(int)[1:]}
    bounds = [0, *sorted(ends)]
    return [np.flatnonzero((lengths > first) & (lengths <= last)) for first, last in pairwise(bounds)]


@dataclass(frozen=True)
class Terms:
    """The probes, budget and costs by which all masks and policies are compared."""

    probes: Probes
    groups: Sequence[np.ndarray]  # for each length group the indices of its probes
    budget: Budget
    savings: Savings
    search_costs: np.ndarray  # microseconds to search the records for each probe, float64 [probes]
    may_search: bool  # whether a length group may be searched
    rare: int  # tokens of the longest texts that were hardly measured; see rare_length

    @classmethod
    def of(
        cls, probes: Probes, budget: Budget, savings: Savings, *, shortest: int, may_search: bool = True
    ) -> Terms:
        """Divide the probes into length groups, and measure the cost of searching each group.

        shortest: tokens of the shortest record.
        """
        groups = length_groups(probes.lengths, budget.measure)
        search_costs = np.zeros(len(probes.sequences))
        for group in groups:
            search_costs[group] = savings.search(set(probes.lengths[group].tolist()))
        rare = rare_length(probes.lengths, shortest)
        return cls(probes, groups, budget, savings, search_costs, may_search, rare)

    @property
    def probes_that_may_hit(self) -> int:
        """The number of probes that are longer than the rare ones."""
        return int((self.probes.lengths > self.rare).sum())


@dataclass(frozen=True)
class Calibrated:
    """A mask, the policy for the mask, and the results of both on probes."""

    mask: ReuseMask
    policy: ReusePolicy
    kinds: np.ndarray  # RecordKind of the record chosen for each probe, int64 [probes]
    served: np.ndarray  # bool [probes], True for hits
    fidelity: np.ndarray  # float64 [probes], nan for misses
    damage: np.ndarray  # float64 [probes], nan for misses
    saved: float = 0.0  # microseconds per probe, less the cost of searching; mean over all probes


def apply_policy(
    probes: Probes,
    measured: Mapping[RecordKind, Measured],
    mask: ReuseMask,
    policy: ReusePolicy,
    familiar: np.ndarray | None = None,
) -> Calibrated:
    """Return the hits and their quality if a policy serves the probes, without the time saved.

    The decisions are the same as while serving. familiar: bool [probes], False for probes that are too
    strange to hit; None: all are familiar.
    """
    count = len(probes.sequences)
    kinds, served = np.full(count, RecordKind.MEAN), np.zeros(count, dtype=bool)
    group_indices = policy.group_indices(probes.lengths)
    for index in np.unique(group_indices).tolist():
        rows, group = np.flatnonzero(group_indices == index), policy.groups[index]
        if group.searched:
            similarities = {kind: probes.similarities[kind][rows] for kind in RecordKind}
            kinds[rows], served[rows] = group.choose(similarities)
        else:
            served[rows] = group.mean_serves & (probes.records[RecordKind.MEAN][rows] >= 0)
    if familiar is not None:
        served &= familiar
    fidelity, damage = (
        np.where(served, np.array(of_kinds)[kinds, np.arange(count)], np.nan)
        for of_kinds in (
            [measured[kind].fidelity for kind in RecordKind],
            [measured[kind].damage for kind in RecordKind],
        )
    )
    return Calibrated(mask, policy, kinds, served, fidelity, damage)


def calibrated(
    terms: Terms,
    measured: Mapping[RecordKind, Measured],
    mask: ReuseMask,
    policy: ReusePolicy,
    familiar: np.ndarray | None = None,
) -> Calibrated:
    """Return the hits, their quality and the time saved if a policy serves the probes of the terms.

    familiar: see apply_policy.
    """
    outcome = apply_policy(terms.probes, measured, mask, policy, familiar)
    group_indices = policy.group_indices(terms.probes.lengths)
    searched = np.array([group.searched for group in policy.groups])[group_indices]
    if familiar is not None:
        searched &= familiar
    saved = terms.savings.per_hit(terms.probes.lengths, mask.total) * outcome.served
    return replace(outcome, saved=float((saved - terms.search_costs * searched).mean()))


def policy_for(
    terms: Terms,
    measured: Mapping[RecordKind, Measured],
    mask: ReuseMask,
    familiar: np.ndarray | None = None,
) -> ReusePolicy:
    """Return the policy that saves the most time inside the budget in each length group.

    A group either is searched with the lowest θ that keeps the budget, or the mean serves all its sequences
    without a search. If neither keeps the budget, nothing is searched and only recorded sequences hit.
    familiar: bool [probes], False for probes that are too strange to hit. The budget must hold for the
    familiar probes. None: all are familiar. Of lengths that are too rare to be measured, only recorded
    sequences hit; see rare_length.
    """
    lengths, rare = terms.probes.lengths, terms.rare
    may_hit = (lengths > rare) if familiar is None else (lengths > rare) & familiar
    longest = [int(lengths[group].max()) for group in terms.groups]
    groups = [
        replace(_group_for(terms, rows, measured, mask), longest=tokens)
        if len(rows := group[may_hit[group]])
        else recorded_only(tokens)
        for group, tokens in zip(terms.groups, longest, strict=True)
        if tokens > rare
    ]
    return ReusePolicy(terms.budget, (*([recorded_only(rare)] if rare else []), *groups))


def _group_for(
    terms: Terms, rows: np.ndarray, measured: Mapping[RecordKind, Measured], mask: ReuseMask
) -> LengthGroup:
    """Return the policy of a length group. rows: the indices of its familiar probes."""
    probes, budget = terms.probes, terms.budget
    group = choose_group(probes, rows, measured, budget)
    per_hit = terms.savings.per_hit(probes.lengths[rows], mask.total)
    _, served = group.choose({kind: probes.similarities[kind][rows] for kind in RecordKind})
    searches = terms.may_search and served.any()
    by_search = (per_hit * served - terms.search_costs[rows]).sum() if searches else -np.inf
    if not terms.may_search:
        # Nothing can serve a length without a mean, so such a length does not speak against the others.
        rows, per_hit = (array[probes.records[RecordKind.MEAN][rows] >= 0] for array in (rows, per_hit))
    mean_serves = len(rows) > 0 and mean_keeps(rows, probes, measured[RecordKind.MEAN], budget)
    by_mean = per_hit.sum() if mean_serves else -np.inf
    if by_search > by_mean:
        return group
    return replace(group, searched=False) if mean_serves else group.recorded_only()


def recorded_only(longest: int) -> LengthGroup:
    """Return the policy of a length group, up to `longest` tokens, in which only recorded sequences hit."""
    return LengthGroup(longest, {kind: KindPolicy(1.0) for kind in RecordKind}).recorded_only()


def choose_policy(
    terms: Terms,
    masks: Sequence[ReuseMask],
    measured: Sequence[Mapping[RecordKind, Measured]],
    threshold: float | None = None,
) -> tuple[Calibrated, list[Calibrated]]:
    """Return the option that saves the most time inside the budget, and the best option of every mask.

    threshold: the operator's θ for every group and kind. If given, the largest mask inside the budget is
    chosen, or the smallest mask if none is inside the budget.
    """
    options = []
    for mask, rows in zip(masks, measured, strict=True):
        policy = policy_for(terms, rows, mask)
        if threshold is not None:
            policy = policy.with_threshold(threshold)
        options.append(calibrated(terms, rows, mask, policy))
    if threshold is None:
        return max(options, key=by_time_saved), options
    means = [mean_or_none(option.fidelity) for option in options]
    inside = [
        option
        for option, mean in zip(options, means, strict=True)
        if mean is None or mean >= terms.budget.least
    ]
    if inside:
        return max(inside, key=lambda option: option.mask.total), options
    return min(options, key=lambda option: option.mask.total), options


def by_time_saved(option: Calibrated) -> tuple[bool, float, float, int]:
    """Return the sort key of an option: whether anything hits, then the time saved. Larger is better.

    Options that save no time are sorted by the number of heads that their hits skip, on average over all
    probes. So if reuse does not pay on this machine, the best option is still the one that skips most. The
    server measures the gain at its start and decides whether to reuse.
    """
    heads, hit_rate = option.mask.total, float(option.served.mean())
    return hit_rate > 0, max(option.saved, 0.0), heads * hit_rate, heads


def could_prove(budget: Budget, probes: int) -> bool:
    """Return whether this number of probes, none of them harmed, can prove that few enough hits are harmed.

    A floor needs 299. True for a budget of cosines without a floor.
    """
    is_mean = budget.measure is Measure.COSINE and not budget.floor
    return is_mean or share_bound(0, probes) <= budget.allowed_harm
