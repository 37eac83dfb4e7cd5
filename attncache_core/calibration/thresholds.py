"""Fit the damage curves and the thresholds θ of one length group to measured probes.

fit_curve     expected damage by similarity, for each kind of record
choose_group  the lowest θ that keeps the budget with 95 % confidence
mean_keeps    whether the mean of a length may serve all sequences, without a search
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import scipy

from attncache_core.calibration.probes import Measured, Probes
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget, KindPolicy, LengthGroup
from attncache_core.reuse.storage.layout import RecordKind

CONFIDENCE = 0.95
# The mean of fewer hits is too uncertain to use.
MIN_PROBES = 20
_MAX_CURVE_POINTS = 16
# Factor that admits probes with exactly the damage limit in spite of rounding.
_MARGIN = 1 + 1e-9


def fit_curve(similarities: np.ndarray, damages: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fit a falling curve of damage by similarity to probes, and return its corners: (similarities, damages).

    similarities, damages: [n]. The fit is an isotonic regression: of all curves that never rise, the curve
    with the least squared error. The curve has at most 16 corners.
    """
    from sklearn.isotonic import IsotonicRegression

    order = np.argsort(similarities, kind="stable")
    x = similarities[order].astype(np.float64)
    y = IsotonicRegression(increasing=False, out_of_bounds="clip").fit_transform(x, damages[order])
    # A corner is the middle of a level. Between the corners the curve is linear.
    starts = np.flatnonzero(np.diff(y, prepend=np.inf))
    ends = np.append(starts[1:], len(y)) - 1
    middles, levels = (x[starts] + x[ends]) / 2, y[starts]
    if len(middles) > _MAX_CURVE_POINTS:
        kept = np.linspace(0, len(middles) - 1, _MAX_CURVE_POINTS).round().astype(int)
        middles, levels = middles[kept], levels[kept]
    return tuple(middles.tolist()), tuple(levels.tolist())


def upper_bounds(losses: np.ndarray, measure: Measure) -> np.ndarray:
    """Return, for each n, the one-sided 95 % upper bound of the mean loss, estimated from the first n hits.

    losses: 1 - fidelity, [hits]. Returns float64 [hits]. Agreement uses the exact bound of a share (Clopper
    and Pearson 1934). Cosine uses Student's t, corrected for the skewness of losses, of which a few are large
    (the first transformation of Hall 1992, "On the removal of skewness by transformation"). The bound is
    infinite for fewer than 20 hits.
    """
    count = np.arange(1, len(losses) + 1)
    total = np.cumsum(losses)
    if measure is Measure.AGREEMENT:
        bounds = scipy.special.betaincinv(total + 1, np.maximum(count - total, 1e-9), CONFIDENCE)
    else:
        bounds = _skewed_mean_bounds(losses, count)
    return np.where(count >= MIN_PROBES, bounds, np.inf)


def _skewed_mean_bounds(losses: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the bounds of the means of the first `count` losses by Hall's transformation, [losses]."""
    centre = losses.mean() if len(losses) else 0.0  # moments about a near value are not rounded away
    first, second, third = (np.cumsum((losses - centre) ** power) / count for power in (1, 2, 3))
    variance = np.maximum(second - first**2, 0)
    skewness = (third - 3 * first * second + 2 * first**3) / np.maximum(variance, 1e-200) ** 1.5
    # No sample of n values is more skewed than the root of n. A bound is not lowered for skewness below 0.
    skewness = np.clip(skewness, 1e-6, np.sqrt(count))
    freedom = np.maximum(count - 1, 1)
    quantile = -scipy.special.stdtrit(freedom, CONFIDENCE) / np.sqrt(count)
    studentized = 3 / skewness * (np.cbrt(1 + skewness * (quantile - skewness / (6 * count))) - 1)
    return centre + first - studentized * np.sqrt(variance * count / freedom)


def choose_group(
    probes: Probes, rows: np.ndarray, measured: Mapping[RecordKind, Measured], budget: Budget
) -> LengthGroup:
    """Return the curves and the lowest θ inside the budget for one length group.

    rows: the indices of the group's probes. The probes are sorted by the expected damage of their better kind
    of record. The group admits the longest prefix of that order with an upper bound of the mean loss inside
    the budget. If there is no such prefix, θ = 1: only recorded sequences hit.
    """
    similarities = {kind: probes.similarities[kind][rows] for kind in RecordKind}
    kinds = {kind: _with_curve(similarities[kind], measured[kind].damage[rows]) for kind in RecordKind}
    usable = [kind for kind in RecordKind if kinds[kind].similarities]
    longest = int(probes.lengths[rows].max())
    closed = LengthGroup(longest, kinds)
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
    # Probes with equal expected damage are admitted together or not at all.
    last_of_ties = np.append(ranked[:-1] < ranked[1:], True)
    allowed = np.flatnonzero((bounds <= 1 - budget.least) & last_of_ties[: len(order)])
    if not len(allowed):
        return closed
    last = int(allowed[-1])
    # The limit is half way to the first refused probe, so that rounding on another machine changes neither
    # decision. If no probe is refused, the limit is the largest expected damage, because a kind of record
    # that served no probe may do more damage than was measured.
    limit = float(ranked[last : last + 2].mean()) if last + 1 < len(ranked) else float(ranked[-1]) * _MARGIN
    thresholds = {kind: _threshold(kinds[kind], similarities[kind], limit) for kind in usable}
    return LengthGroup(
        longest, kinds | {kind: replace(kinds[kind], threshold=thresholds[kind]) for kind in usable}
    )


def mean_keeps(rows: np.ndarray, probes: Probes, mean: Measured, budget: Budget) -> bool:
    """Return whether the mean of each length may serve all probes of a group without a search.

    rows: the indices of the group's probes, lengths rising. mean: the measured effect of the means.
    """
    if (probes.records[RecordKind.MEAN][rows] < 0).any():
        return False
    # The mean must keep the budget for short, middle and long sequences of the group separately.
    thirds = [part for part in np.array_split(rows, 3) if len(part)]
    if any(mean.fidelity[part].mean() < budget.least for part in thirds):
        return False
    return bool(upper_bounds(1 - mean.fidelity[rows], budget.measure)[-1] <= 1 - budget.least)


def _with_curve(similarities: np.ndarray, damages: np.ndarray) -> KindPolicy:
    """Return a policy with θ = 1 and the curve of the probes that have a record, if these are enough."""
    known = np.isfinite(similarities)
    if known.sum() < MIN_PROBES:
        return KindPolicy(1.0)
    return KindPolicy(1.0, *fit_curve(similarities[known], damages[known]))


def _threshold(policy: KindPolicy, similarities: np.ndarray, limit: float) -> float:
    """Return the least similarity at which the curve expects a damage of at most `limit`."""
    known = similarities[np.isfinite(similarities)].astype(np.float64)
    if limit >= policy.damages[0]:
        # All probes are admitted. Extend the range below the least similar probe by the range of the probes.
        return float(2 * known.min() - known.max())
    if limit < policy.damages[-1]:
        return 1.0
    return float(np.interp(-limit, -np.array(policy.damages), policy.similarities))


def share_bound(count: int, of: int) -> float:
    """Return the one-sided 95 % upper bound for a share, given `count` cases in a sample of size `of`.

    The bound is exact (Clopper and Pearson 1934), and 1 if the sample is empty.
    """
    return float(scipy.special.betaincinv(count + 1, of - count, CONFIDENCE)) if count < of else 1.0


def share_bound_over(counts: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the one-sided 95 % upper bound for a share, estimated from corpora instead of single texts.

    counts, sizes: for each corpus its cases and its texts. Texts of one corpus resemble each other, so the
    corpora are the sample: the bound is Student's t bound of a ratio, with one residual for each corpus. The
    bound is 0 without a case.
    """
    cases, texts = np.array(counts, dtype=np.float64), np.array(sizes, dtype=np.float64)
    if not cases.any():
        return 0.0
    if len(cases) < 2:
        return 1.0
    share = cases.sum() / texts.sum()
    spread = np.sqrt(((cases - share * texts) ** 2).sum() * len(cases) / (len(cases) - 1)) / texts.sum()
    return float(share + scipy.special.stdtrit(len(cases) - 1, CONFIDENCE) * spread)


def mean_or_none(values: np.ndarray) -> float | None:
    """Return the mean of the finite values, or None if there are no finite values."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
