"""Choose the mask and the policy that save the most time inside a quality budget.

    probes: sequences without a record of their own, with their nearest records   probes
      1 savings    time the microseconds that hits save and searches cost         savings
      2 masks      propose masks of growing size, mildest heads first             here
      3 damage     run the probes with the maps of their records, for each mask   probes, substitution
      4 policy     fit θ for each length group inside the budget, for each mask   thresholds, policy_selection
      5 masks      repeat 3 and 4 with sizes beside the best mask's               here
      6 weights    repeat 3 and 4 with larger masks and refitted weights          build.refitting
      7 limit      fit the familiarity test and the strangeness limit             strangeness_limit
      8 report     collect the figures for the manifest                           report

Steps 5 to 7 are skipped if the operator sets θ. `build.builder` calls `calibrate` for a new database, and
`calibration.database` calls `calibrate` for an existing database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from attncache_core.calibration.familiarity_fit import TokenStatistics
from attncache_core.calibration.policy_selection import (
    Calibrated,
    Terms,
    by_time_saved,
    calibrated,
    choose_policy,
    could_prove,
    recorded_only,
)
from attncache_core.calibration.probes import Measured, Probes, measure
from attncache_core.calibration.report import report
from attncache_core.calibration.savings import measure_savings
from attncache_core.calibration.strangeness_limit import (
    Limited,
    UnfamiliarProbes,
    choose_limit,
    figures,
    find_unfamiliar,
)
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.corpus import UnfamiliarText
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.models.refitted import LastProducts, refitted_layers
from attncache_core.reuse.maps.familiarity import Familiarity
from attncache_core.reuse.maps.policy import Budget, ReusePolicy, uniform_policy
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.mask import ReuseMask, head_order, mildest_mask, parse_heads
from attncache_core.reuse.storage.layout import RecordKind

# Number of mask sizes to try first, spread evenly up to the largest size.
_MASK_SIZES = 12


def held_first(rank: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return the rank with the heads that records hold moved to the front. held: bool [layers, heads]."""
    order = np.lexsort((rank.ravel(), ~held.ravel()))
    return order.argsort().reshape(rank.shape)


def candidate_masks(
    rank: np.ndarray, heads: str | None = None, max_heads: int | None = None
) -> list[ReuseMask]:
    """Return up to 12 masks of growing size, made of the mildest heads.

    heads: the operator's mask, see mask.parse_heads; if given, the only candidate. max_heads: size of the
    largest mask; None: all heads.
    """
    if heads:
        return [parse_heads(heads, rank)]
    max_heads = rank.size if max_heads is None else max_heads
    sizes = {max(1, round(max_heads * part / _MASK_SIZES)) for part in range(1, _MASK_SIZES + 1)}
    return [mildest_mask(rank, size) for size in sorted(sizes)]


def masks_between(masks: Sequence[ReuseMask], chosen: ReuseMask, rank: np.ndarray) -> list[ReuseMask]:
    """Return up to four new masks, with sizes between the chosen mask's size and its neighbours' sizes."""
    sizes = [mask.total for mask in masks]
    position = sizes.index(chosen.total)
    around = {
        round(chosen.total + (sizes[neighbour] - chosen.total) * part / 3)
        for neighbour in (position - 1, position + 1)
        if 0 <= neighbour < len(sizes)
        for part in (1, 2)
    }
    return [mildest_mask(rank, size) for size in sorted(around - set(sizes))]


# Reports progress: (stage, steps done, steps in total).
Progress = Callable[[str, int, int], None]

# Makes the weights that hits take with a mask; None: hits take the model's weights.
Refit = Callable[[ReuseMask], Sequence[LastProducts] | None]

# The damage of a head is a mean over probes. A few hundred probes are enough to rank the heads.
MAX_DAMAGE_PROBES = 300


@dataclass(frozen=True)
class Calibration:
    """The chosen mask, policy and familiarity test, and the report for the manifest."""

    mask: ReuseMask
    policy: ReusePolicy
    # None if no test is needed: the operator set θ (any text may hit), or only recorded sequences hit.
    familiarity: Familiarity | None
    quality: dict[str, Any]
    refitted: Sequence[LastProducts] | None = None  # the weights that hits take; None: the model's


def calibrate(
    engine: PrefillEngine,
    search: SearchEngine,
    probes: Probes,
    unfamiliar: Sequence[UnfamiliarText],
    token_counts: np.ndarray,
    rank: np.ndarray,
    budget: Budget,
    *,
    heads: str | None = None,
    threshold: float | None = None,
    refit: Refit | None = None,
    refit_masks: Sequence[ReuseMask] | None = None,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Choose the mask and the policy that save the most time inside the budget.

    engine: an engine with the model and without a database. unfamiliar: texts unlike the corpus.
    token_counts: occurrences of each token in the corpus, int64 [vocabulary]. rank: int [layers, heads], see
    damage.reuse_rank. heads: the operator's mask, see mask.parse_heads; None: choose the mask. threshold: the
    operator's θ; None: choose θ. With the operator's θ there is no familiarity test, so any text may hit.

    With fewer than 20 probes nothing is measured. Then the largest mask is returned with the operator's θ or,
    by default, θ = 1, with which only recorded sequences hit.

    refit: makes the weights of hits; None: hits take the model's. refit_masks: the masks to try with weights,
    in growing order, until one saves less than the one before; None: the operator's mask, or all that are
    larger than the best mask without weights.
    """
    masks = candidate_masks(rank, heads, sum(search.store.layout.stored_heads))
    if len(probes.sequences) < MIN_PROBES:
        policy = uniform_policy(budget, 1.0)
        if threshold is not None:
            policy = policy.with_threshold(threshold)
        return Calibration(masks[-1], policy, None, {"measured": 0})
    savings = measure_savings(engine, search, probes, head_order(rank))
    # Without records of single texts there is nothing to search but a few means.
    shortest = min(search.store.segments, default=0)
    terms = Terms.of(probes, budget, savings, shortest=shortest, may_search=not search.index.is_empty)
    trials = _Trials(engine, search, terms, progress)
    trials.measure(masks)
    chosen, options = choose_policy(trials.terms, trials.masks, trials.measured, threshold)
    if threshold is not None:
        return Calibration(chosen.mask, chosen.policy, None, report(chosen, options, probes))
    trials.measure(masks_between(masks, chosen.mask, rank))
    if refit:
        if refit_masks is None:
            refit_masks = [mask for mask in masks if heads or mask.total > chosen.mask.total]
        trials.measure_refitted(refit_masks, refit)
    return _with_limit(trials, unfamiliar, token_counts, rank)


class _Trials:
    """The masks tried so far, and what each mask did to the probes."""

    def __init__(self, engine: PrefillEngine, search: SearchEngine, terms: Terms, progress: Progress) -> None:
        self.engine, self.search, self.terms, self._progress = engine, search, terms, progress
        self.masks: list[ReuseMask] = []
        self.measured: list[dict[RecordKind, Measured]] = []
        self.refitted: list[Sequence[LastProducts] | None] = []  # the weights that hits took

    def measure(self, masks: Sequence[ReuseMask]) -> None:
        """Measure what these masks do to the probes, and add the results to `masks` and `measured`."""
        if masks:
            self.measured += self.measure_on(self.terms.probes, masks, "measuring masks")
            self.masks += masks
            self.refitted += [None] * len(masks)

    def options(self) -> list[Calibrated]:
        """Return the best policy of each mask, without a limit of strangeness."""
        return choose_policy(self.terms, self.masks, self.measured)[1]

    def measure_refitted(self, masks: Sequence[ReuseMask], refit: Refit) -> None:
        """Measure masks of growing size with the weights that `refit` makes, until a mask saves less."""
        best: Calibrated | None = None
        for done, mask in enumerate(masks):
            self._progress("refitting weights", done, len(masks))
            products = refit(mask)
            if products is None:
                continue
            (measured,) = self.measure_on(self.terms.probes, [mask], "measuring masks", products=products)
            self.measured.append(measured)
            self.masks.append(mask)
            self.refitted.append(products)
            option, _ = choose_policy(self.terms, [mask], [measured])
            if best and by_time_saved(option) <= by_time_saved(best):
                return
            best = option

    def measure_on(
        self,
        probes: Probes,
        masks: Sequence[ReuseMask],
        stage: str,
        kinds: Sequence[RecordKind] = tuple(RecordKind),
        products: Sequence[LastProducts] | None = None,
    ) -> list[dict[RecordKind, Measured]]:
        """Return what each mask does to the probes if records of these kinds serve the probes.

        products: the weights that hits take; None: the model's.
        """
        comparator, model = self.engine.decisions.comparator(self.terms.budget.measure), self.engine.model
        hit_model, on_pass = model, partial(self._progress, stage)
        if products:
            layers = refitted_layers(model, products, self.engine.checkpoint.quantization)
            hit_model = replace(model, layers=layers)
        return measure(model, self.search.store, probes, masks, comparator, on_pass, kinds, hit_model)


def _with_limit(
    trials: _Trials, unfamiliar: Sequence[UnfamiliarText], token_counts: np.ndarray, rank: np.ndarray
) -> Calibration:
    """Return the option that saves the most time with a strangeness limit.

    If no option keeps the budget, only recorded sequences hit.
    """
    terms = trials.terms
    if not could_prove(terms.budget, terms.probes_that_may_hit):
        return _exact_calibration(trials)
    fitted, unseen = (
        find_unfamiliar(trials.engine, trials.search, unfamiliar, fitted=fitted) for fitted in (True, False)
    )
    tokens = TokenStatistics(trials.engine.model, token_counts)
    best = _best_with_limit(trials, fitted, tokens)
    if best is None:
        return _exact_calibration(trials)
    # The next larger mask is often refused. Try the sizes between.
    tried = len(trials.masks)
    plain = [mask for mask, products in zip(trials.masks, trials.refitted, strict=True) if not products]
    if (mask := best[0].calibrated.mask) in plain:
        between = masks_between(sorted(plain, key=lambda each: each.total), mask, rank)
        trials.measure([each for each in between if each.total > mask.total])
        best = _best_with_limit(trials, fitted, tokens, tried, best) or best
    limited, best_products = best
    chosen = limited.calibrated
    (measured_unfamiliar,) = trials.measure_on(
        unseen.probes,
        [chosen.mask],
        "checking the strangeness limit",
        _serving_kinds(chosen.policy),
        best_products,
    )
    quality = report(chosen, trials.options(), terms.probes)
    for candidate, products in zip(quality["candidates"], trials.refitted, strict=True):
        candidate["refitted"] = products is not None
    quality["unfamiliar"] = figures(unseen, limited, measured_unfamiliar)
    return Calibration(chosen.mask, chosen.policy, limited.familiarity, quality, best_products)


_Best = tuple[Limited, Sequence[LastProducts] | None]


def _best_with_limit(
    trials: _Trials,
    fitted: UnfamiliarProbes,
    tokens: TokenStatistics,
    first: int = 0,
    best: _Best | None = None,
) -> _Best | None:
    """Return the option that saves the most time with a limit, and the weights of its hits, or `best`.

    A limit only removes hits, so an option never saves more time with a limit than without one. The options
    are therefore tried in falling order of the time saved without a limit. The search stops at the first
    option that saves no more without a limit than the best option so far saves with one. Masks grow by the
    mildest head that is left, so masks larger than a refused one are refused too. first: the number of the
    first mask to try.
    """
    refused = np.inf  # heads of the smallest mask for which no limit keeps the budget
    for option, measured, products in sorted(
        list(zip(trials.options(), trials.measured, trials.refitted, strict=True))[first:],
        key=lambda tried: (by_time_saved(tried[0]), tried[2] is not None),
        reverse=True,
    ):
        if best and by_time_saved(option) <= by_time_saved(best[0].calibrated):
            break
        if products is None and option.mask.total > refused:
            continue
        (measured_unfamiliar,) = trials.measure_on(
            fitted.probes,
            [option.mask],
            "measuring unfamiliar texts",
            _serving_kinds(option.policy),
            products,
        )
        limited = choose_limit(option, trials.terms, measured, fitted, measured_unfamiliar, tokens)
        if limited is None and products is None:
            refused = min(refused, option.mask.total)
        if limited and (
            best is None or by_time_saved(limited.calibrated) > by_time_saved(best[0].calibrated)
        ):
            best = limited, products
    return best


def _exact_calibration(trials: _Trials) -> Calibration:
    """Return the smallest mask with a policy that lets only recorded sequences hit."""
    terms = trials.terms
    mask, measured = min(zip(trials.masks, trials.measured, strict=True), key=lambda pair: pair[0].total)
    lengths = (int(terms.probes.lengths[group].max()) for group in terms.groups)
    policy = ReusePolicy(terms.budget, tuple(map(recorded_only, lengths)))
    chosen = calibrated(terms, measured, mask, policy)
    quality = report(chosen, trials.options(), terms.probes) | {"may_hit": terms.probes_that_may_hit}
    return Calibration(mask, policy, None, quality)


def _serving_kinds(policy: ReusePolicy) -> Sequence[RecordKind]:
    """Return the kinds of records that may serve: only means if no length group is searched."""
    return tuple(RecordKind) if any(group.searched for group in policy.groups) else (RecordKind.MEAN,)
