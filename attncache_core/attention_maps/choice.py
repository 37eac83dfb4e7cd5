"""From measured probes to a mask and a policy inside a quality budget.

curves   for each length group and kind of record, the damage by similarity    fit_curve
-> θ     the loosest whose hits keep the budget with 95 % confidence           choose_group
-> mask  the one with which the hits save the most time                        choose_policy
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats
from sklearn.isotonic import IsotonicRegression

from attncache_core.attention_maps.mask import ReuseMask
from attncache_core.attention_maps.policy import Budget, KindPolicy, LengthGroup, ReusePolicy
from attncache_core.attention_maps.probes import Measured, Probes
from attncache_core.attention_maps.store import RecordKind
from attncache_core.outputs import Measure

CONFIDENCE = 0.95
# Fewer hits than this say nothing about their mean.
FEWEST_PROBES = 20
# Probes that a length group needs. Agreement is 0 or 1 for each: many more are needed to tell 0.98 from 0.96.
_PROBES_PER_GROUP = {Measure.COSINE: 100, Measure.AGREEMENT: 600}
_MOST_GROUPS = 6
_MOST_CURVE_POINTS = 16
_A_LITTLE = 1 + 1e-9


def fit_curve(similarities: np.ndarray, damages: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """A falling curve of damage by similarity through probes [n]: (similarities, damages) of its corners.

    Isotonic regression: of all curves that never rise, the one with the least squared error.
    """
    order = np.argsort(similarities, kind="stable")
    x = similarities[order].astype(np.float64)
    y = IsotonicRegression(increasing=False, out_of_bounds="clip").fit_transform(x, damages[order])
    # Each level stands for its middle; between the middles the curve goes straight.
    starts = np.flatnonzero(np.diff(y, prepend=np.inf))
    ends = np.append(starts[1:], len(y)) - 1
    middles, levels = (x[starts] + x[ends]) / 2, y[starts]
    if len(middles) > _MOST_CURVE_POINTS:
        kept = np.linspace(0, len(middles) - 1, _MOST_CURVE_POINTS).round().astype(int)
        middles, levels = middles[kept], levels[kept]
    return tuple(middles.tolist()), tuple(levels.tolist())


def upper_bounds(losses: np.ndarray, measure: Measure) -> np.ndarray:
    """For each n the one-sided 95 % upper bound of the mean loss that the first n hits speak for, [n].

    Agreement: the exact bound of a share (Clopper and Pearson 1934). Cosine: Student's t. Infinite for fewer
    than 20.
    """
    count = np.arange(1, len(losses) + 1)
    total = np.cumsum(losses)
    if measure is Measure.AGREEMENT:
        bounds = stats.beta.ppf(CONFIDENCE, total + 1, np.maximum(count - total, 1e-9))
    else:
        means = total / count
        spread = np.sqrt(np.maximum(np.cumsum(losses**2) / count - means**2, 0) / np.maximum(count - 1, 1))
        bounds = means + stats.t.ppf(CONFIDENCE, np.maximum(count - 1, 1)) * spread
    return np.where(count >= FEWEST_PROBES, bounds, np.inf)


def choose_group(
    probes: Probes, rows: np.ndarray, measured: Mapping[RecordKind, Measured], budget: Budget
) -> LengthGroup:
    """Curves and the loosest θ inside the budget for one length group: the probes `rows` (places).

    In order of the damage to expect of each, by its better kind, as many probes as possible are taken whose
    mean loss has an upper bound inside the budget. When there are none, θ = 1: only recorded sequences hit.
    """
    similarities = {kind: probes.similarities[kind][rows] for kind in RecordKind}
    kinds = {kind: _with_curve(similarities[kind], measured[kind].damage[rows]) for kind in RecordKind}
    usable = [kind for kind in RecordKind if kinds[kind].similarities]
    longest = int(probes.lengths[rows].max())
    closed = LengthGroup(longest, {kind: KindPolicy(1.0, *_curve(kinds[kind])) for kind in RecordKind})
    if not usable:
        return closed
    expected = np.full((len(RecordKind), len(rows)), np.inf)
    for kind in usable:
        known = np.isfinite(similarities[kind])
        expected[kind, known] = kinds[kind].expected_damage(similarities[kind][known])
    better, least = expected.argmin(axis=0), expected.min(axis=0)
    fidelity = np.array([measured[kind].fidelity[rows] for kind in RecordKind])[better, np.arange(len(rows))]
    order = np.argsort(least, kind="stable")
    order = order[np.isfinite(least[order])]
    ranked = least[order]
    bounds = upper_bounds(1 - fidelity[order], budget.measure)
    # Probes of one expected damage come in together or not at all.
    last_of_ties = np.append(ranked[:-1] < ranked[1:], True)
    allowed = np.flatnonzero((bounds <= 1 - budget.least) & last_of_ties[: len(order)])
    if not len(allowed):
        return closed
    last = int(allowed[-1])
    # Half way to the first one refused, so that rounding on another machine changes neither. Where none is,
    # no further than the probes speak for: a kind that serves none may do more damage than any of them.
    limit = float(ranked[last : last + 2].mean()) if last + 1 < len(ranked) else float(ranked[-1]) * _A_LITTLE
    thresholds = {
        kind: _threshold(kinds[kind], similarities[kind], limit) if kind in usable else 1.0
        for kind in RecordKind
    }
    return LengthGroup(
        longest, {kind: KindPolicy(thresholds[kind], *_curve(kinds[kind])) for kind in RecordKind}
    )


def mean_keeps(rows: np.ndarray, probes: Probes, mean: Measured, budget: Budget) -> bool:
    """Whether the mean of each length may serve all of the probes `rows` (places), unsearched."""
    if (probes.records[RecordKind.MEAN][rows] < 0).any():
        return False
    # Short ones of a group must not pay for its long ones.
    thirds = [part for part in np.array_split(rows, 3) if len(part)]
    if any(mean.fidelity[part].mean() < budget.least for part in thirds):
        return False
    return bool(upper_bounds(1 - mean.fidelity[rows], budget.measure)[-1] <= 1 - budget.least)


def _curve(policy: KindPolicy) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return policy.similarities, policy.damages


def _with_curve(similarities: np.ndarray, damages: np.ndarray) -> KindPolicy:
    known = np.isfinite(similarities)
    if known.sum() < FEWEST_PROBES:
        return KindPolicy(1.0)
    return KindPolicy(1.0, *fit_curve(similarities[known], damages[known]))


def _threshold(policy: KindPolicy, similarities: np.ndarray, limit: float) -> float:
    """The least similarity of which the curve expects a damage of at most `limit`."""
    known = similarities[np.isfinite(similarities)].astype(np.float64)
    if limit >= policy.damages[0]:
        # All probes fit: what lies no further below the least similar than the most similar lies above.
        return float(2 * known.min() - known.max())
    if limit < policy.damages[-1]:
        return 1.0
    return float(np.interp(-limit, -np.array(policy.damages), policy.similarities))


def length_groups(lengths: np.ndarray, measure: Measure) -> list[np.ndarray]:
    """Places of the probes of each length group, lengths [probes] rising: about equally many in each."""
    wanted = int(np.clip(len(lengths) // _PROBES_PER_GROUP[measure], 1, _MOST_GROUPS))
    ends = {int(lengths[place - 1]) for place in np.linspace(0, len(lengths), wanted + 1).astype(int)[1:]}
    bounds = [0, *sorted(ends)]
    return [np.flatnonzero((lengths > first) & (lengths <= last)) for first, last in pairwise(bounds)]


@dataclass(frozen=True)
class Savings:
    """What hits save and searches cost, on the machine that calibrates."""

    # lengths [n], reused heads -> microseconds that a hit of each length saves [n], which may be negative
    per_hit: Callable[[np.ndarray, int], np.ndarray]
    # Lengths that are searched -> microseconds for each of their sequences, in batches of all lengths.
    search: Callable[[Collection[int]], float]


@dataclass(frozen=True)
class Terms:
    """On what all masks and policies are compared."""

    probes: Probes
    groups: Sequence[np.ndarray]  # for each length group the places of its probes
    budget: Budget
    savings: Savings
    search_costs: np.ndarray  # microseconds to search each probe's records, float64 [probes]

    @classmethod
    def of(cls, probes: Probes, budget: Budget, savings: Savings) -> Terms:
        """Divide the probes into length groups, and measure what searching each group costs."""
        groups = length_groups(probes.lengths, budget.measure)
        search_costs = np.zeros(len(probes.sequences))
        for group in groups:
            search_costs[group] = savings.search(set(probes.lengths[group].tolist()))
        return cls(probes, groups, budget, savings, search_costs)


@dataclass(frozen=True)
class Calibrated:
    """A mask, the policy for it, and what they gave on probes."""

    mask: ReuseMask
    policy: ReusePolicy
    kinds: np.ndarray  # RecordKind of each probe, int64 [probes]
    served: np.ndarray  # bool [probes]
    fidelity: np.ndarray  # float64 [probes], nan for misses
    damage: np.ndarray  # float64 [probes], nan for misses
    saved: float = 0.0  # microseconds, mean over all probes


def apply_policy(
    probes: Probes,
    measured: Mapping[RecordKind, Measured],
    mask: ReuseMask,
    policy: ReusePolicy,
    familiar: np.ndarray | None = None,
) -> Calibrated:
    """What a policy gives on probes, decided as when serving; what that saves is left out.

    familiar: bool [probes], of the probes that are not too strange to hit; None: all.
    """
    count = len(probes.sequences)
    kinds, served = np.full(count, RecordKind.MEAN), np.zeros(count, dtype=bool)
    places = policy.places_of(probes.lengths)
    for place in np.unique(places).tolist():
        rows, group = np.flatnonzero(places == place), policy.groups[place]
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
    """What a policy gives on the probes of the terms, and how much time that saves."""
    given = apply_policy(terms.probes, measured, mask, policy, familiar)
    places = policy.places_of(terms.probes.lengths)
    searched = np.array([group.searched for group in policy.groups])[places]
    if familiar is not None:
        searched &= familiar
    saved = terms.savings.per_hit(terms.probes.lengths, mask.total) * given.served
    return replace(given, saved=float((saved - terms.search_costs * searched).mean()))


def policy_for(
    terms: Terms,
    measured: Mapping[RecordKind, Measured],
    mask: ReuseMask,
    familiar: np.ndarray | None = None,
) -> ReusePolicy:
    """For each length group what saves the most time inside the budget.

    That is a search with the loosest θ, or no search, and the mean serves. Where neither keeps the budget,
    nothing is searched, and only recorded sequences hit. familiar: bool [probes], of the probes that are not
    too strange to hit, and with which the budget is to be kept; None: all.
    """
    members = [group if familiar is None else group[familiar[group]] for group in terms.groups]
    longest = [int(terms.probes.lengths[group].max()) for group in terms.groups]
    groups = (
        replace(_group_for(terms, rows, measured, mask), longest=tokens)
        if len(rows)
        else recorded_only(tokens)
        for rows, tokens in zip(members, longest, strict=True)
    )
    return ReusePolicy(terms.budget, tuple(groups))


def _group_for(
    terms: Terms, rows: np.ndarray, measured: Mapping[RecordKind, Measured], mask: ReuseMask
) -> LengthGroup:
    """The policy of a length group whose familiar probes are `rows` (places)."""
    probes, budget = terms.probes, terms.budget
    group = choose_group(probes, rows, measured, budget)
    per_hit = terms.savings.per_hit(probes.lengths[rows], mask.total)
    _, served = group.choose({kind: probes.similarities[kind][rows] for kind in RecordKind})
    by_search = (per_hit * served - terms.search_costs[rows]).sum() if served.any() else -np.inf
    mean_serves = mean_keeps(rows, probes, measured[RecordKind.MEAN], budget)
    by_mean = per_hit.sum() if mean_serves else -np.inf
    if by_search > by_mean:
        return group
    return replace(group, searched=False) if mean_serves else group.recorded_only()


def recorded_only(longest: int) -> LengthGroup:
    """The policy of a length group in which only recorded sequences hit."""
    return LengthGroup(longest, {kind: KindPolicy(1.0) for kind in RecordKind}).recorded_only()


def choose_policy(
    terms: Terms,
    masks: Sequence[ReuseMask],
    measured: Sequence[Mapping[RecordKind, Measured]],
    threshold: float | None = None,
) -> tuple[Calibrated, list[Calibrated]]:
    """The mask and policy that save the most time inside the budget, and the best policy of every mask.

    A given `threshold` is every group's and kind's θ; then the largest mask inside the budget is taken, or
    the mildest if none is.
    """
    options = []
    for mask, rows in zip(masks, measured, strict=True):
        policy = policy_for(terms, rows, mask)
        if threshold is not None:
            policy = policy.with_threshold(threshold)
        options.append(calibrated(terms, rows, mask, policy))
    if threshold is None:
        return max(options, key=by_time_saved), options
    means = [_mean(option.fidelity) for option in options]
    inside = [
        option
        for option, mean in zip(options, means, strict=True)
        if mean is None or mean >= terms.budget.least
    ]
    if inside:
        return max(inside, key=lambda option: option.mask.total), options
    return min(options, key=lambda option: option.mask.total), options


def by_time_saved(option: Calibrated) -> tuple[bool, float, float, int]:
    """The order of options: those that let anything hit first, then by the time saved.

    Options that save no time are ordered by how many heads their hits skip, on average over all probes. So
    where reuse does not pay, the best option is still the one that skips most; a server decides for itself.
    """
    heads, hit_rate = option.mask.total, float(option.served.mean())
    return hit_rate > 0, max(option.saved, 0.0), heads * hit_rate, heads


def keeps_budget(budget: Budget, like: Calibrated, unlike: Calibrated) -> bool:
    """Whether hits keep what the budget says beside each length group's mean, with 95 % confidence.

    like: what the policy gives on probes like the corpus: the share of harmed hits is small enough.
    unlike: what it gives on unfamiliar texts: so is the share of harmed answers, whether they hit or not, and
    the mean over their hits keeps the budget.
    """
    hits, odd_hits = like.fidelity[like.served], unlike.fidelity[unlike.served]
    if len(odd_hits) and odd_hits.mean() < budget.least:
        return False
    if budget.measure is Measure.COSINE and not budget.floor:
        return True
    harmed, odd_harmed = (int(budget.harmed(rows).sum()) for rows in (hits, odd_hits))
    bounds = [share_bound(harmed, len(hits))]
    if len(unlike.served):
        bounds.append(share_bound(odd_harmed, len(unlike.served)))
    return max(bounds) <= budget.allowed_harm


def could_keep_floor(budget: Budget, probes: int) -> bool:
    """Whether so many probes can tell that hits keep the floor, if there is one: 299 are needed."""
    return not budget.floor or share_bound(0, probes) <= budget.allowed_harm


def share_bound(count: int, of: int) -> float:
    """The one-sided 95 % upper bound of a share of which `count` were seen among `of`.

    Clopper and Pearson 1934; 1 where nothing was seen.
    """
    return float(stats.beta.ppf(CONFIDENCE, count + 1, of - count)) if count < of else 1.0


def report(chosen: Calibrated, options: Sequence[Calibrated], probes: Probes) -> dict[str, Any]:
    """What was measured, for the manifest and for people. Nothing measured is None."""
    policy = chosen.policy
    places = policy.places_of(probes.lengths)
    groups = [
        {"lengths": name, "searched": group.searched, **_figures(chosen, places == place)}
        for place, (name, group) in enumerate(zip(policy.names(), policy.groups, strict=True))
    ]
    return {
        "measured": len(probes.sequences),
        "confidence": CONFIDENCE,
        "heads": chosen.mask.total,
        **_figures(chosen, np.ones(len(places), dtype=bool)),
        "saved_microseconds": chosen.saved,
        "lengths": _counts(probes.lengths),
        "groups": groups,
        "candidates": [
            {
                "heads": option.mask.total,
                "hit_rate": float(option.served.mean()),
                "mean_cosine": _mean(1 - option.damage),
                "saved_microseconds": option.saved,
            }
            for option in options
        ],
    }


def _figures(chosen: Calibrated, rows: np.ndarray) -> dict[str, Any]:
    """Hit rate by kind and quality of the hits among these probes (bool [probes])."""
    hits = chosen.served & rows
    count = max(1, int(rows.sum()))
    fidelity = chosen.fidelity[hits]
    bound = upper_bounds(1 - fidelity, chosen.policy.budget.measure)[-1] if hits.any() else np.inf
    return {
        "probes": int(rows.sum()),
        "hit_rate": float(hits.sum() / count),
        "prototype_hit_rate": float((hits & (chosen.kinds != RecordKind.STORED)).sum() / count),
        "mean_cosine": _mean(1 - chosen.damage[hits]),
        "cosine_5th_percentile": float(np.percentile(1 - chosen.damage[hits], 5)) if hits.any() else None,
        "mean": _mean(fidelity),
        "lower_bound": float(1 - bound) if np.isfinite(bound) else None,
    }


def _counts(lengths: np.ndarray) -> dict[str, int]:
    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(map(str, values.tolist()), counts.tolist(), strict=True))


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
