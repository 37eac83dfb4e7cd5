"""The strangeness limit: the budget that it must keep, and the unfamiliar texts that it is chosen on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from attncache_core.calibration.policy_selection import Calibrated, could_keep_floor, keeps_budget
from attncache_core.calibration.strangeness_limit import find_unfamiliar
from attncache_core.calibration.thresholds import share_bound
from attncache_core.corpus import UnfamiliarText
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.budget import Budget
from attncache_core.reuse.maps.policy import uniform_policy
from attncache_core.reuse.mask import mildest_mask, natural_rank

FLOOR = Budget(Measure.COSINE, 0.98, 0.95)


def given(fidelity, misses: int = 0, budget: Budget = FLOOR) -> Calibrated:
    """Return results of a policy: hits with these fidelities, and a number of misses."""
    values = np.concatenate([np.array(fidelity, dtype=np.float64), np.full(misses, np.nan)])
    served = np.isfinite(values)
    kinds = np.zeros(len(values), dtype=np.int64)
    mask = mildest_mask(natural_rank(3, 4), 6)
    return Calibrated(mask, uniform_policy(budget, 0.5), kinds, served, values, 1 - values)


@pytest.mark.parametrize(("count", "of"), [(0, 1), (0, 299), (2, 640), (3, 640), (7, 7), (0, 0)])
def test_bound_of_a_share_is_clopper_pearson(count, of):
    expected = stats.binomtest(count, of, alternative="less").proportion_ci(0.95).high if of else 1.0
    assert share_bound(count, of) == pytest.approx(expected)


def test_299_probes_can_prove_a_floor_and_298_cannot():
    assert [could_keep_floor(FLOOR, probes) for probes in (298, 299)] == [False, True]
    assert could_keep_floor(Budget(Measure.COSINE, 0.98), 1)
    assert could_keep_floor(Budget(Measure.AGREEMENT, 0.98), 1)


@pytest.mark.parametrize(
    ("like", "unlike", "keeps"),
    [
        (given([0.99] * 299), given([0.99], misses=298), True),
        # Too few hits for a bound, or too many harmed hits.
        (given([0.99] * 298, misses=90), given([0.99], misses=298), False),
        (given([0.99] * 299 + [0.94]), given([0.99], misses=298), False),
        (given([0.99] * 472 + [0.94]), given([0.99], misses=298), True),
        # The share of harmed answers is of all unfamiliar texts. The mean is over the hits among them.
        (given([0.99] * 299), given([0.99, 0.94, 0.99], misses=300), False),
        (given([0.99] * 299), given([1.0, 0.94, 1.0, 1.0], misses=480), True),
        (given([0.99] * 299), given([0.96], misses=640), False),
        (given([0.99] * 299), given([], misses=640), True),
    ],
)
def test_budget_is_kept_if_few_enough_answers_are_harmed(like, unlike, keeps):
    assert keeps_budget(FLOOR, like, unlike) is keeps


def test_changed_decisions_are_harmed_in_a_budget_of_agreement():
    budget = Budget(Measure.AGREEMENT, 0.98)
    like = given([1.0] * 149, budget=budget)
    assert keeps_budget(budget, like, given([1.0], misses=148, budget=budget))
    assert not keeps_budget(budget, like, given([1.0, 0.0], misses=147, budget=budget))


def test_nan_fidelity_counts_as_harmed():
    assert FLOOR.harmed(np.array([0.95, 0.9499, np.nan])).tolist() == [False, True, True]


def test_unfamiliar_texts_are_cut_to_lengths_that_have_records(tiny_engine, recorded):
    # Records have 5 to 9 tokens; with the two special ones, the texts have 4, 8 and 22.
    texts = [
        UnfamiliarText(text, f"{word} {len(text.split())}", True)
        for word in ("card", "bank", "help", "money")
        for text in (f"{word} {word}", " ".join([word] * 6), " ".join(["my", word] * 10))
    ]
    found = find_unfamiliar(tiny_engine, recorded.search, texts, 99, fitted=True)
    assert set(found.probes.lengths.tolist()) <= set(recorded.search.store.segments)
    assert sorted(found.kinds) == sorted(text.kind for text in texts if not text.kind.endswith(" 2"))
    last = tiny_engine.tokenize(["card"])[0][-1]
    assert {ids[-1] for ids in found.probes.sequences} == {last}


def test_find_unfamiliar_keeps_the_maximum_and_skips_texts_of_the_other_side(tiny_engine, recorded):
    texts = [
        UnfamiliarText(f"{word} card my bank", word, word < "m")
        for word in ("help", "money", "lost", "late", "why")
    ]
    found = find_unfamiliar(tiny_engine, recorded.search, texts, 2, fitted=True)
    assert len(found.kinds) == 2
    assert set(found.kinds) <= {"help", "lost", "late"}
