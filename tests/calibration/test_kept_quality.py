"""A way keeps a budget only if its quality on held-out texts proves it with 95 % confidence."""

import numpy as np
import pytest
from scipy import stats

from attncache_core import Budget, InvalidInput, Measure
from attncache_core.calibration.quality import Quality, texts_needed
from attncache_core.calibration.thresholds import upper_bounds

COSINE = Budget(Measure.COSINE, 0.98, 0.95)


def random_cosines(count: int) -> np.ndarray:
    return 1 - np.random.default_rng(3).exponential(0.01, count)


def test_quality_is_the_mean_and_the_lower_bound_of_all_texts():
    cosines = random_cosines(400)
    found = Quality.of(cosines, Measure.COSINE)
    assert found.mean == pytest.approx(cosines.mean(), abs=1e-12)
    assert found.lower_bound == pytest.approx(1 - upper_bounds(1 - cosines, Measure.COSINE)[-1], abs=1e-12)
    assert found.lower_bound < found.mean


@pytest.mark.parametrize(("count", "below"), [(299, 0), (472, 0), (473, 1), (1000, 4)])
def test_floor_is_the_cosine_below_which_so_few_texts_lie_that_the_binomial_law_proves_it(count, below):
    """The oracle: with a true share of 1 % below, `below` texts or fewer are seen in 5 % of samples."""
    cosines = random_cosines(count)
    assert stats.binom.cdf(below, count, 0.01) <= 0.05 < stats.binom.cdf(below + 1, count, 0.01)
    assert Quality.of(cosines, Measure.COSINE).floor == np.sort(cosines)[below]


@pytest.mark.parametrize(
    "budget",
    [COSINE, Budget(Measure.COSINE, 0.98), *(Budget(Measure.AGREEMENT, least) for least in (0.98, 0.9, 0.0))],
    ids=str,
)
def test_number_of_texts_needed_is_the_least_with_which_the_exact_model_keeps_the_budget(budget):
    needed = texts_needed(budget)
    for count, keeps in ((needed, True), (needed - 1, False)):
        with np.errstate(invalid="ignore"):
            assert Quality.of(np.ones(count), budget.measure).keeps(budget) is keeps


def test_full_agreement_cannot_be_proven():
    with pytest.raises(InvalidInput, match="cannot be proven") as refused:
        texts_needed(Budget(Measure.AGREEMENT, 1.0))
    assert refused.value.field == "min_agreement"


def test_decisions_have_the_exact_bound_and_no_floor():
    same = np.ones(300)
    same[:3] = 0
    found = Quality.of(same, Measure.AGREEMENT)
    assert (found.mean, found.floor) == (0.99, None)
    # Clopper and Pearson: at the bound, three or fewer changes have a probability of 5 %.
    assert stats.binom.cdf(3, 300, 1 - found.lower_bound) == pytest.approx(0.05, abs=1e-6)
    assert found.keeps(Budget(Measure.AGREEMENT, 0.97))
    assert not found.keeps(Budget(Measure.AGREEMENT, 0.98))


def test_rest_of_a_budget_is_what_a_part_leaves_to_another():
    rest = Quality(0.995, 0.994, 0.97).rest_of(COSINE)
    assert (rest.least, rest.floor) == (pytest.approx(0.985), pytest.approx(0.98))
    assert Quality(0.98, 0.98, 0.99).rest_of(COSINE) is None
    assert Quality(0.99, 0.99, 0.95).rest_of(COSINE) is None
