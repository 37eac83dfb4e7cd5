"""Choose the strangeness limit, above which a text may not hit.

some kinds of unfamiliar texts   -> damage of reuse under a mask                probes.measure
and the probes like the corpus   -> the familiarity test                        familiarity_fit
                                 -> the highest limit that keeps the budget     choose_limit
other kinds of unfamiliar texts  -> hits and damage with this limit             figures
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attncache_core.calibration.familiarity_fit import TokenStatistics, fit_familiarity
from attncache_core.calibration.policy_selection import (
    Calibrated,
    Terms,
    apply_policy,
    calibrated,
    policy_for,
)
from attncache_core.calibration.probes import Measured, Probes, find_probes
from attncache_core.calibration.thresholds import MIN_PROBES, share_bound, share_bound_over, upper_bounds
from attncache_core.corpus import UnfamiliarText
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.familiarity import Familiarity
from attncache_core.reuse.maps.policy import Budget, StrangenessLimit
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.storage.layout import RecordKind

# Shares of the probes like the corpus that a limit may reject as too strange, tried in this order. A smaller
# mask is better than a limit that rejects more of the texts that the database was made for.
_REJECTED = (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)
_FEW_HITS = "kinds of fewer than 20 hits, together"


@dataclass(frozen=True)
class UnfamiliarProbes:
    """Unfamiliar texts as probes, and the kind of each text."""

    probes: Probes
    kinds: list[str]


def find_unfamiliar(
    engine: PrefillEngine,
    search: SearchEngine,
    texts: Sequence[UnfamiliarText],
    *,
    fitted: bool,
) -> UnfamiliarProbes:
    """Return unfamiliar texts as probes.

    fitted: True for the texts that the familiarity test is fitted to, False for the texts that only measure
    the result. A text of a length without records is cut to a length that has records. Texts with equal
    tokens count once. Recorded texts are skipped, and so are texts shorter than all records.
    """
    chosen = [text for text in texts if text.fitted == fitted]
    lengths = sorted(search.store.segments)
    kinds: dict[tuple[int, ...], str] = {}
    for index, ids in enumerate(engine.tokenize([text.text for text in chosen])):
        fitting = [length for length in lengths if length <= len(ids)]
        if fitting and len(ids) not in search.store.segments:
            # The last token is kept, because it is a special token in most models.
            ids = [*ids[: fitting[index % len(fitting)] - 1], ids[-1]]
        if len(ids) in search.store.segments and search.store.record_of(ids) is None:
            kinds.setdefault(tuple(ids), chosen[index].kind)
    ordered = sorted(kinds, key=len)
    return UnfamiliarProbes(find_probes(engine.model, search, ordered), [kinds[ids] for ids in ordered])


@dataclass(frozen=True)
class Limited:
    """A policy with a strangeness limit, its results on the probes, and the familiarity test."""

    calibrated: Calibrated
    familiarity: Familiarity
    left_out: Mapping[str, np.ndarray]  # see keeps_budget


def choose_limit(
    option: Calibrated,
    terms: Terms,
    measured: Mapping[RecordKind, Measured],
    unfamiliar: UnfamiliarProbes,
    measured_unfamiliar: Mapping[RecordKind, Measured],
    tokens: TokenStatistics,
) -> Limited | None:
    """Return the option with the highest strangeness limit that keeps the budget, or None if no limit does.

    Lower limits are not tried in order to let short texts hit: among several limits, one would do so by
    chance.

    option: a mask, and its policy without a limit. measured, measured_unfamiliar: the effect of the mask on
    the probes of the terms, and on the unfamiliar texts.
    """
    probes, unfamiliar_probes = terms.probes, unfamiliar.probes
    kinds = apply_policy(unfamiliar_probes, measured_unfamiliar, option.mask, option.policy).kinds
    damage = np.concatenate(
        [
            np.choose(of_kinds, [effect[kind].damage for kind in RecordKind])
            for effect, of_kinds in ((measured, option.kinds), (measured_unfamiliar, kinds))
        ]
    )
    # The test is asked about no text of a rare length, and a fit to such texts is worse for others.
    long_enough = np.concatenate([probes.lengths, unfamiliar_probes.lengths]) > terms.rare
    known = np.flatnonzero(np.isfinite(damage) & long_enough)
    if (known < len(probes.sequences)).sum() < MIN_PROBES:
        return None
    sequences = [*probes.sequences, *unfamiliar_probes.sequences]
    names: list[str | None] = [*[None] * len(probes.sequences), *unfamiliar.kinds]
    strangeness = np.full(len(damage), np.inf)
    familiarity, strangeness[known] = fit_familiarity(
        tokens, [sequences[index] for index in known], damage[known], [names[index] for index in known]
    )
    like, unlike = np.split(strangeness, [len(probes.sequences)])
    limits = _Limits(option.mask, terms, measured, unfamiliar, measured_unfamiliar, like, unlike)
    usual = like[np.isfinite(like)]
    for share in _REJECTED:
        limit = StrangenessLimit(float(np.quantile(usual, 1 - share)), float(np.median(usual)))
        if found := limits.within_budget(limit):
            return Limited(found.on_like, familiarity, found.left_out)
    return None


@dataclass(frozen=True)
class _Results:
    """The results of a mask with a strangeness limit."""

    on_like: Calibrated  # on the probes of the terms
    left_out: dict[str, np.ndarray]  # see hits_by_kind
    keeps_budget: bool
    too_short: int | None  # see too_short


@dataclass(frozen=True)
class _Limits:
    """A mask, its effect on the probes and on unfamiliar texts, and their strangeness."""

    mask: ReuseMask
    terms: Terms
    measured: Mapping[RecordKind, Measured]
    unfamiliar: UnfamiliarProbes
    measured_unfamiliar: Mapping[RecordKind, Measured]
    like: np.ndarray  # strangeness of the probes of the terms
    unlike: np.ndarray  # strangeness of the unfamiliar texts

    def within_budget(self, limit: StrangenessLimit) -> _Results | None:
        """Return the results with a limit, without hits on texts that are too short.

        Returns None unless the budget is kept both with the short texts and without them. So leaving short
        texts out never admits a larger mask.
        """
        found = self._results(limit, self.terms.rare)
        if not found.keeps_budget:
            return None
        while found.too_short is not None:
            found = self._results(limit, found.too_short)
        return found if found.keeps_budget else None

    def _results(self, limit: StrangenessLimit, rare: int) -> _Results:
        """Return the results with a limit, if texts of up to `rare` tokens do not hit."""
        terms, probes = replace(self.terms, rare=rare), self.unfamiliar.probes
        familiar = self.like <= limit.strangest
        policy = replace(policy_for(terms, self.measured, self.mask, familiar), limit=limit)
        on_like = calibrated(terms, self.measured, self.mask, policy, familiar)
        on_unlike = apply_policy(
            probes, self.measured_unfamiliar, self.mask, policy, self.unlike <= limit.strangest
        )
        served, groups = on_unlike.served, policy.group_indices(probes.lengths)
        left_out = hits_by_kind(on_unlike, self.unfamiliar.kinds)
        of_lengths = [on_unlike.fidelity[served & (groups == group)] for group in range(len(policy.groups))]
        return _Results(
            on_like,
            left_out,
            bool(on_like.served.any()) and keeps_budget(terms.budget, on_like, left_out, of_lengths),
            too_short(terms.budget, probes.lengths[served], on_unlike.fidelity[served]),
        )


def too_short(budget: Budget, lengths: np.ndarray, fidelity: np.ndarray) -> int | None:
    """Return the length up to which texts are too short to hit; None if the shortest hits keep the budget.

    A text of a few tokens differs from the mean of its length more than a longer text does, and would hardly
    count among the longer texts of its group. So the 20 shortest hits must keep the budget by themselves.
    Otherwise the length of the shortest hit is too short. lengths, fidelity: of each hit on unfamiliar texts.
    """
    if not len(lengths):
        return None
    shortest = fidelity[lengths <= np.sort(lengths)[:MIN_PROBES][-1]]
    return None if _keep_budget(budget, shortest) else int(lengths.min())


def hits_by_kind(unlike: Calibrated, kinds: Sequence[str]) -> dict[str, np.ndarray]:
    """Return for each kind of text the fidelity of its hits, float64 [hits]. kinds: of each text."""
    names = np.array(kinds)
    return {kind: unlike.fidelity[unlike.served & (names == kind)] for kind in dict.fromkeys(kinds)}


def keeps_budget(
    budget: Budget,
    like: Calibrated,
    left_out: Mapping[str, np.ndarray],
    of_lengths: Sequence[np.ndarray] = (),
) -> bool:
    """Return whether hits keep the budget, of texts like the corpus and of every other kind of text.

    The mean of texts like the corpus is checked elsewhere, in each length group (thresholds.choose_group).

    like: the results on probes like the corpus. With 95 % confidence, few enough of their hits are harmed.
    left_out: the fidelity of the hits of each kind of unfamiliar text, chosen by a fit without this kind.
    Each kind stands for a corpus that the database did not see, so each must keep the mean by itself, with
    95 % confidence, and the share of harmed hits must be small enough with 95 % confidence over the kinds.
    of_lengths: the same fidelity by length group, and all kinds together. Each group must keep the mean too.
    """
    corpora = judged_together(left_out)
    if budget.measure is Measure.COSINE and not all(_keeps_mean(budget, hits) for hits in of_lengths):
        return False
    if not all(_keep_budget(budget, hits) for hits in corpora.values()):
        return False
    if budget.measure is Measure.COSINE and not budget.floor:
        return True
    hits = like.fidelity[like.served]
    if share_bound(int(budget.harmed(hits).sum()), len(hits)) > budget.allowed_harm:
        return False
    return _harmed_at_most(budget, left_out) <= budget.allowed_harm


def _keep_budget(budget: Budget, hits: np.ndarray) -> bool:
    """Return whether hits of one kind, or of a few lengths, keep the budget, as far as so few can show it."""
    if budget.measure is Measure.COSINE and not _keeps_mean(budget, hits):
        return False
    # One harmed hit says little, but two of fewer than 200 hits are too many.
    return bool(budget.harmed(hits).sum() <= max(1, budget.allowed_harm * len(hits)))


def _keeps_mean(budget: Budget, hits: np.ndarray) -> bool:
    """Return whether the mean fidelity keeps the budget: with 95 % confidence, if there are 20 hits or more.

    The best of many masks and limits is chosen, so one whose measured mean just keeps the budget was lucky.
    """
    if len(hits) < MIN_PROBES:
        return not len(hits) or bool(hits.mean() >= budget.least)
    return bool(upper_bounds(1 - hits, budget.measure)[-1] <= 1 - budget.least)


def judged_together(left_out: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the hits of each kind, with the kinds of fewer than 20 hits as one kind, `_FEW_HITS`."""
    corpora = {kind: hits for kind, hits in left_out.items() if len(hits) >= MIN_PROBES}
    few = [hits for hits in left_out.values() if 0 < len(hits) < MIN_PROBES]
    return corpora | ({_FEW_HITS: np.concatenate(few)} if few else {})


def figures(
    unfamiliar: UnfamiliarProbes, chosen: Limited, measured: Mapping[RecordKind, Measured]
) -> dict[str, Any]:
    """Return the results of a policy on unfamiliar texts outside the fit, for the manifest."""
    probes, policy = unfamiliar.probes, chosen.calibrated.policy
    assert policy.limit is not None
    if not probes.sequences:
        return {"texts": 0}
    ids = np.fromiter((token for sequence in probes.sequences for token in sequence), dtype=np.int64)
    familiar = chosen.familiarity.strangeness(ids, probes.lengths) <= policy.limit.strangest
    outcome = apply_policy(probes, measured, chosen.calibrated.mask, policy, familiar)
    hits = 1 - outcome.damage[outcome.served]
    harmed = policy.budget.harmed(outcome.fidelity[outcome.served])
    return {
        "texts": len(familiar),
        "kinds": len(set(unfamiliar.kinds)),
        "hit_rate": float(outcome.served.mean()),
        "harmed": int(harmed.sum()),
        "mean_cosine": float(hits.mean()) if len(hits) else None,
        "least_cosine": float(hits.min()) if len(hits) else None,
        "left_out": _left_out_figures(policy.budget, chosen.left_out),
    }


def _left_out_figures(budget: Budget, left_out: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the results on the kinds that the limit was chosen on, and the kind with the worst mean."""
    corpora = judged_together(left_out)
    worst = min(corpora, key=lambda kind: corpora[kind].mean()) if corpora else None
    hits = sum(map(len, left_out.values()))
    harmed = sum(int(budget.harmed(fidelities).sum()) for fidelities in left_out.values())
    return {
        "kinds": len(left_out),
        "hits": hits,
        "harmed": harmed,
        # Few hits say little: the bound is not below that of independent hits.
        "harmed_at_most": max(_harmed_at_most(budget, left_out), share_bound(harmed, hits)),
        "worst": worst
        and {
            "kind": worst,
            "hits": len(corpora[worst]),
            "harmed": int(budget.harmed(corpora[worst]).sum()),
            "mean": float(corpora[worst].mean()),
        },
    }


def _harmed_at_most(budget: Budget, left_out: Mapping[str, np.ndarray]) -> float:
    """Return the upper bound of the share of harmed hits, with 95 % confidence over the kinds of text.

    Kinds without hits are left out, because they say nothing about the share.
    """
    with_hits = [hits for hits in left_out.values() if len(hits)]
    return share_bound_over([int(budget.harmed(hits).sum()) for hits in with_hits], list(map(len, with_hits)))
