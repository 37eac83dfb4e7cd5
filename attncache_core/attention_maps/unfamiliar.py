"""How strange a text may be that hits, chosen by what records do to texts unlike the corpus.

unfamiliar texts, some kinds of them  -> what records do to them under a mask      (probes.measure)
beside the probes like the corpus     -> the familiarity test                      (familiarity_fit)
                                      -> the loosest limit that keeps the budget   choose_limit
the other kinds of them               -> what that limit lets through              figures
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attncache_core.attention_maps.choice import (
    FEWEST_PROBES,
    Calibrated,
    Terms,
    apply_policy,
    calibrated,
    keeps_budget,
    policy_for,
)
from attncache_core.attention_maps.familiarity import Familiarity
from attncache_core.attention_maps.familiarity_fit import TokenStatistics, fit_familiarity
from attncache_core.attention_maps.policy import StrangenessLimit
from attncache_core.attention_maps.probes import Measured, Probes, find_probes
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.attention_maps.store import RecordKind
from attncache_core.corpus import UnfamiliarText
from attncache_core.corpus.reading import spread
from attncache_core.engine import PrefillEngine

# Shares of the probes like the corpus that a limit may take for too strange, tried in turn. A milder mask is
# better than a limit that refuses more of the texts that the database was made for.
_REJECTED = (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)


@dataclass(frozen=True)
class UnfamiliarProbes:
    """Unfamiliar texts as probes, and the kind of each."""

    probes: Probes
    kinds: list[str]


def find_unfamiliar(
    engine: PrefillEngine, search: SearchEngine, texts: Sequence[UnfamiliarText], most: int, *, fitted: bool
) -> UnfamiliarProbes:
    """Return the probes of the unfamiliar texts that may be fitted to, or of those that only measure.

    At most `most` texts, evenly of all kinds. Texts of a length without records are cut to lengths that have
    some. Texts of equal tokens count once, and recorded or shorter texts not at all.
    """
    chosen = spread([text for text in texts if text.fitted == fitted], most)
    lengths = sorted(search.store.segments)
    kinds: dict[tuple[int, ...], str] = {}
    for place, ids in enumerate(engine.tokenize([text.text for text in chosen])):
        fitting = [length for length in lengths if length <= len(ids)]
        if fitting and len(ids) not in search.store.segments:
            # The last token stays, which in most models is a special one.
            ids = [*ids[: fitting[place % len(fitting)] - 1], ids[-1]]
        if len(ids) in search.store.segments and search.store.record_of(ids) is None:
            kinds.setdefault(tuple(ids), chosen[place].kind)
    ordered = sorted(kinds, key=len)
    return UnfamiliarProbes(find_probes(engine.model, search, ordered), [kinds[ids] for ids in ordered])


@dataclass(frozen=True)
class Limited:
    """A policy with a limit of strangeness, the test for it, and what both gave on the probes."""

    calibrated: Calibrated
    familiarity: Familiarity


def choose_limit(
    option: Calibrated,
    terms: Terms,
    measured: Mapping[RecordKind, Measured],
    unfamiliar: UnfamiliarProbes,
    measured_unfamiliar: Mapping[RecordKind, Measured],
    tokens: TokenStatistics,
) -> Limited | None:
    """Return the option with the loosest limit that keeps the budget, or None if no limit does.

    option: a mask, and its policy without a limit. measured, measured_unfamiliar: what the mask does to the
    probes of the terms, and to the unfamiliar texts.
    """
    probes, odd = terms.probes, unfamiliar.probes
    kinds = apply_policy(odd, measured_unfamiliar, option.mask, option.policy).kinds
    damage = np.concatenate([_damage_of(measured, option.kinds), _damage_of(measured_unfamiliar, kinds)])
    known = np.flatnonzero(np.isfinite(damage))
    if (known < len(probes.sequences)).sum() < FEWEST_PROBES:
        return None
    sequences = [*probes.sequences, *odd.sequences]
    names: list[str | None] = [*[None] * len(probes.sequences), *unfamiliar.kinds]
    fit = fit_familiarity(
        tokens, [sequences[place] for place in known], damage[known], [names[place] for place in known]
    )
    strangeness = np.full(len(damage), np.inf)
    strangeness[known] = fit.strangeness
    like, unlike = np.split(strangeness, [len(probes.sequences)])
    usual = like[np.isfinite(like)]
    for share in _REJECTED:
        limit = StrangenessLimit(float(np.quantile(usual, 1 - share)), float(np.median(usual)))
        familiar = like <= limit.strangest
        policy = replace(policy_for(terms, measured, option.mask, familiar), limit=limit)
        on_like = calibrated(terms, measured, option.mask, policy, familiar)
        on_unlike = apply_policy(odd, measured_unfamiliar, option.mask, policy, unlike <= limit.strangest)
        if on_like.served.any() and keeps_budget(terms.budget, on_like, on_unlike):
            return Limited(on_like, fit.familiarity)
    return None


def figures(
    unfamiliar: UnfamiliarProbes, chosen: Limited, measured: Mapping[RecordKind, Measured]
) -> dict[str, Any]:
    """Return what a policy gives on unfamiliar texts that nothing was fitted to, for the manifest."""
    odd, policy = unfamiliar.probes, chosen.calibrated.policy
    assert policy.limit is not None
    if not odd.sequences:
        return {"texts": 0}
    ids = np.fromiter((token for own in odd.sequences for token in own), dtype=np.int64)
    familiar = chosen.familiarity.strangeness(ids, odd.lengths) <= policy.limit.strangest
    given = apply_policy(odd, measured, chosen.calibrated.mask, policy, familiar)
    hits = 1 - given.damage[given.served]
    harmed = policy.budget.harmed(given.fidelity[given.served])
    return {
        "texts": len(familiar),
        "kinds": len(set(unfamiliar.kinds)),
        "hit_rate": float(given.served.mean()),
        "harmed": int(harmed.sum()),
        "mean_cosine": float(hits.mean()) if len(hits) else None,
        "least_cosine": float(hits.min()) if len(hits) else None,
    }


def _damage_of(measured: Mapping[RecordKind, Measured], kinds: np.ndarray) -> np.ndarray:
    """The damage that the record of the kind int64 [n] does to each probe, float64 [n]."""
    of_kinds = np.array([measured[kind].damage for kind in RecordKind])
    damage: np.ndarray = of_kinds[kinds, np.arange(len(kinds))]
    return damage
