"""Curves, bounds and the choice of mask and policy, against scikit-learn, SciPy and brute force."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.isotonic import IsotonicRegression

from attncache_core.calibration.policy_selection import (
    Terms,
    calibrated,
    choose_policy,
    length_groups,
    policy_for,
    rare_length,
)
from attncache_core.calibration.probes import Measured, Probes
from attncache_core.calibration.report import report
from attncache_core.calibration.savings import Savings
from attncache_core.calibration.thresholds import (
    CONFIDENCE,
    MIN_PROBES,
    choose_group,
    fit_curve,
    mean_keeps,
    upper_bounds,
)
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget, LengthGroup, ReusePolicy, uniform_policy
from attncache_core.reuse.mask import mildest_mask, natural_rank
from attncache_core.reuse.storage.layout import RecordKind

STORED, PROTOTYPE = RecordKind.STORED, RecordKind.PROTOTYPE
COSINE, AGREEMENT = Measure.COSINE, Measure.AGREEMENT

# Similarities are multiples of 1/64 and damages multiples of 1/8, so many are equal.
grid = st.integers(-20, 63).map(lambda number: number / 64)
eighths = st.integers(0, 8).map(lambda number: number / 8)
points = st.lists(st.tuples(grid, eighths), min_size=1, max_size=60)
measures = st.sampled_from(Measure)


def columns(rows) -> list[np.ndarray]:
    return [np.array(column) for column in zip(*rows, strict=True)]


@given(points)
def test_curve_falls_from_corner_to_corner_through_scikit_learns_levels(rows):
    similarities, damages = columns(rows)
    xs, ys = fit_curve(similarities, damages)
    assert 1 <= len(xs) == len(ys) <= 16
    assert (np.diff(xs) > 0).all()
    assert (np.diff(ys) < 0).all()
    oracle = IsotonicRegression(increasing=False, out_of_bounds="clip").fit(similarities, damages)
    np.testing.assert_allclose(oracle.predict(np.array(xs)), ys, atol=1e-9)
    levels = oracle.predict(similarities)
    assert (ys[0], ys[-1]) == pytest.approx((levels.max(), levels.min()))


@given(points, st.integers(0, 9))
def test_curve_does_not_depend_on_the_order_of_the_probes(rows, seed):
    shuffled = [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]
    for left, right in zip(fit_curve(*columns(rows)), fit_curve(*columns(shuffled)), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-9)


def test_level_stands_at_the_middle_of_its_probes():
    similarities = np.array([0.1, 0.2, 0.5, 0.6, 0.9])
    xs, ys = fit_curve(similarities, np.array([0.3, 0.5, 0.1, 0.1, 0.2]))
    assert xs == pytest.approx((0.15, 0.7))
    assert ys == pytest.approx((0.4, 0.4 / 3))
    # A curve of many levels keeps sixteen and both ends.
    many = np.linspace(0, 0.9, 100)
    xs, ys = fit_curve(many, 1 - many)
    assert len(xs) == 16
    assert (xs[0], xs[-1]) == (many[0], many[-1])
    np.testing.assert_allclose(ys, 1 - np.array(xs))


@given(st.lists(st.floats(0, 1), min_size=MIN_PROBES, max_size=80))
def test_bound_of_a_mean_cosine_solves_halls_equation_and_is_never_below_students_t(losses):
    bounds = upper_bounds(np.array(losses), COSINE)
    assert (bounds[: MIN_PROBES - 1] == math.inf).all()
    for count, bound in enumerate(bounds[MIN_PROBES - 1 :], MIN_PROBES):
        first = np.array(losses[:count])
        quantile = stats.t.ppf(CONFIDENCE, count - 1) / count**0.5
        spread = first.std(ddof=1)
        if spread < 1e-6:
            assert bound == pytest.approx(first.mean(), abs=1e-4)
            continue
        skewness = max(float(stats.skew(first)), 0.0)
        studentized = (first.mean() - bound) / spread
        transformed = studentized + skewness * studentized**2 / 3 + skewness**2 * studentized**3 / 27
        assert transformed + skewness / (6 * count) == pytest.approx(-quantile, abs=1e-5)
        assert bound >= first.mean() + quantile * spread - 1e-6


@pytest.mark.parametrize(
    "losses", [stats.expon(), stats.lognorm(0.8), stats.beta(0.5, 20)], ids=lambda law: law.dist.name
)
def test_bound_of_a_mean_cosine_is_missed_by_about_5_of_100_skewed_samples(losses):
    samples = losses.rvs((4000, 100), random_state=7)
    missed = np.mean([upper_bounds(sample, COSINE)[-1] < losses.mean() for sample in samples])
    quantile = stats.t.ppf(CONFIDENCE, 99) / 10
    missed_by_students_t = np.mean(samples.mean(1) + quantile * samples.std(1, ddof=1) < losses.mean())
    assert missed < 0.07 < missed_by_students_t


def test_bound_of_a_mean_cosine_is_not_rounded_away():
    small = np.random.default_rng(0).random(40) * 1e-9
    expected = upper_bounds(small, COSINE)[-1]
    assert upper_bounds(0.5 + small, COSINE)[-1] - 0.5 == pytest.approx(expected, rel=1e-4)
    # Equal losses have no skewness, whatever comes behind them.
    assert upper_bounds(np.array([0.1] * 30 + [1.0] * 3), COSINE)[29] == pytest.approx(0.1, abs=2e-9)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=MIN_PROBES, max_size=80))
def test_bound_of_a_share_is_clopper_pearson(losses):
    bounds = upper_bounds(np.array(losses), AGREEMENT)
    assert (bounds[: MIN_PROBES - 1] == math.inf).all()
    for count, bound in enumerate(bounds[MIN_PROBES - 1 :], MIN_PROBES):
        test = stats.binomtest(int(sum(losses[:count])), count, alternative="less")
        assert bound == pytest.approx(test.proportion_ci(0.95, method="exact").high, abs=1e-6)


@st.composite
def probe_sets(draw):
    """Draw probes of one length, the effect of reuse on them, and a budget: (probes, measured, budget)."""
    row = st.tuples(
        *(st.one_of(grid, st.just(-math.inf)), st.one_of(grid, st.just(-math.inf)), eighths, eighths)
    )
    rows = columns(draw(st.lists(row, min_size=draw(st.sampled_from([1, 20, 40])), max_size=60)))
    measure = draw(measures)
    budget = Budget(measure, draw(st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.9, 1.0])))
    return (*probes_of([9] * len(rows[0]), *rows, measure), budget)


def probes_of(lengths, stored, prototype, stored_damage, prototype_damage, measure, mean_damage=None):
    """Return probes and the measured effect of reuse, from similarities and damages of each kind.

    mean_damage: damage of the mean record; None: no probe has a mean record.
    """
    nothing = np.full(len(lengths), -np.inf)
    mean = nothing if mean_damage is None else np.full(len(lengths), -1.0)
    damages = {STORED: stored_damage, PROTOTYPE: prototype_damage, RecordKind.MEAN: mean_damage}
    columns = {STORED: stored, PROTOTYPE: prototype, RecordKind.MEAN: mean}
    similarities = {kind: np.float32(values) for kind, values in columns.items()}
    records = {kind: np.where(np.isfinite(values), 3, -1) for kind, values in similarities.items()}
    measured = {}
    for kind in RecordKind:
        damage = np.where(records[kind] >= 0, nothing if damages[kind] is None else damages[kind], np.nan)
        # A decision changes if the damage is above a quarter.
        fidelity = 1 - damage if measure is COSINE else np.where(damage > 0.25, 0.0, 1.0)
        measured[kind] = Measured(damage, np.where(records[kind] >= 0, fidelity, np.nan))
    return Probes([[2] * length for length in lengths], records, similarities), measured


def all_rows(probes: Probes) -> np.ndarray:
    return np.arange(len(probes.sequences))


def expected_of(probes, group: LengthGroup, index, kinds) -> dict[RecordKind, float]:
    """Return the expected damage of records of these kinds to one probe."""
    one = slice(index, index + 1)
    return {
        kind: float(group.kinds[kind].expected_damage(probes.similarities[kind][one])[0]) for kind in kinds
    }


def reached(probes, group: LengthGroup, index) -> dict[RecordKind, float]:
    """Return the expected damage of the kinds whose threshold one probe reaches."""
    kinds = [kind for kind in RecordKind if probes.similarities[kind][index] >= group.kinds[kind].threshold]
    return expected_of(probes, group, index, kinds)


def mildest(expected: dict[RecordKind, float]) -> RecordKind | None:
    return min(expected, key=expected.__getitem__, default=None)


def served_by(probes, measured, group: LengthGroup):
    """Return the served probes, bool [probes], and the losses of the served probes, one probe at a time."""
    kinds = [mildest(reached(probes, group, index)) for index in all_rows(probes)]
    losses = [1 - measured[kind].fidelity[index] for index, kind in enumerate(kinds) if kind is not None]
    return np.array([kind is not None for kind in kinds]), np.array(losses)


@settings(max_examples=50)
@given(probe_sets())
def test_chosen_thresholds_are_the_loosest_of_all_limits_of_expected_damage_that_keep_the_bound(table):
    probes, measured, budget = table
    group = choose_group(probes, all_rows(probes), measured, budget)
    expected, loss = [], []
    for index in all_rows(probes):
        known = [
            kind
            for kind in RecordKind
            if group.kinds[kind].similarities and probes.similarities[kind][index] > -math.inf
        ]
        of_kinds = expected_of(probes, group, index, known)
        best = mildest(of_kinds)
        expected.append(of_kinds[best] if of_kinds else math.inf)
        loss.append(1 - measured[best].fidelity[index] if of_kinds else math.nan)
    expected, loss = np.array(expected), np.array(loss)
    best = np.zeros(len(expected), dtype=bool)
    # The limits rise, so each limit admits more than the limit before.
    for limit in np.unique(expected[np.isfinite(expected)]):
        inside = expected <= limit + 1e-12
        if upper_bounds(loss[inside], budget.measure)[-1] <= 1 - budget.least:
            best = inside
    served, losses = served_by(probes, measured, group)
    assert served.tolist() == best.tolist()
    if len(losses):
        assert upper_bounds(losses, budget.measure)[-1] <= 1 - budget.least + 1e-9


@settings(max_examples=50)
@given(probe_sets())
def test_curves_are_those_of_the_probes_that_have_a_record_of_the_kind(table):
    probes, measured, budget = table
    group = choose_group(probes, all_rows(probes), measured, budget)
    assert group.longest == 9
    assert group.tightened == 0
    for kind, policy in group.kinds.items():
        known = probes.records[kind] >= 0
        curve = ((), ())
        if known.sum() >= MIN_PROBES:
            curve = fit_curve(probes.similarities[kind][known], measured[kind].damage[known])
        assert (policy.similarities, policy.damages) == curve
        assert curve[0] or policy.threshold == 1


def test_threshold_extends_below_the_probes_if_all_probes_keep_the_budget():
    similarities = np.linspace(0.5, 0.8, 40)
    nothing = np.full(40, -np.inf)
    probes, measured = probes_of(
        [9] * 40, similarities, nothing, np.linspace(0.02, 0.01, 40), nothing, COSINE
    )
    group = choose_group(probes, all_rows(probes), measured, Budget(COSINE, 0.9))
    # θ extends the range of the similarities downwards by its own width.
    assert group.kinds[STORED].threshold == pytest.approx(0.2)
    assert group.kinds[PROTOTYPE].threshold == 1


@settings(max_examples=50)
@given(probe_sets())
def test_no_kind_hits_beyond_the_expected_damage_of_the_served_probes(table):
    probes, measured, budget = table
    group = choose_group(probes, all_rows(probes), measured, budget)
    served, _ = served_by(probes, measured, group)
    worst = max(
        (min(reached(probes, group, index).values()) for index in np.flatnonzero(served)), default=0.0
    )
    refused = [
        expected_of(probes, group, index, [kind])[kind]
        for kind, policy in group.kinds.items()
        if policy.similarities
        for index in np.flatnonzero(~served & np.isfinite(probes.similarities[kind]))
    ]
    for policy in group.kinds.values():
        if policy.threshold < 1:
            # θ lies at most half way to the mildest refused probe.
            at_threshold = float(policy.expected_damage(np.array([policy.threshold]))[0])
            assert at_threshold <= (worst + min(refused, default=worst)) / 2 + 1e-6


@pytest.mark.parametrize(("mean_damage", "least", "keeps"), [(0.05, 0.94, True), (0.05, 0.96, False)])
def test_mean_may_serve_a_group_if_its_bound_is_inside_the_budget(mean_damage, least, keeps):
    nothing = np.full(40, -np.inf)
    damages = np.full(40, mean_damage)
    probes, measured = probes_of([9] * 40, nothing, nothing, nothing, nothing, COSINE, damages)
    mean = measured[RecordKind.MEAN]
    assert mean_keeps(all_rows(probes), probes, mean, Budget(COSINE, least)) is keeps
    assert not mean_keeps(all_rows(probes)[: MIN_PROBES - 1], probes, mean, Budget(COSINE, least))


def test_mean_that_keeps_the_budget_as_a_whole_but_not_for_the_longest_sequences_serves_no_group():
    nothing, damages = np.full(120, -np.inf), np.repeat([0.0, 0.0, 0.09], 40)
    probes, measured = probes_of([9] * 120, nothing, nothing, nothing, nothing, COSINE, damages)
    assert not mean_keeps(all_rows(probes), probes, measured[RecordKind.MEAN], Budget(COSINE, 0.94))


def test_group_with_a_length_without_a_mean_is_not_served_unsearched():
    nothing = np.full(40, -np.inf)
    probes, measured = probes_of([9] * 40, nothing, nothing, nothing, nothing, COSINE, np.zeros(40))
    probes.records[RecordKind.MEAN][7] = -1
    measured[RecordKind.MEAN].fidelity[7] = 1.0
    assert not mean_keeps(all_rows(probes), probes, measured[RecordKind.MEAN], Budget(COSINE, 0.5))


@pytest.mark.parametrize(
    ("mean_damage", "search", "searched", "kinds"),
    [
        (0.01, 0.0, False, {RecordKind.MEAN}),  # the mean keeps the budget and serves all
        # Only a search with a negative cost saves more than the mean.
        (0.01, -60.0, True, {STORED, RecordKind.MEAN}),
        (0.3, 1.0, True, {STORED}),  # the mean breaks the budget, a search pays
        # The search costs more than it saves, which the server measures at its start.
        (0.3, 1e6, True, {STORED}),
    ],
)
def test_length_group_uses_search_or_mean_whichever_saves_more_time(mean_damage, search, searched, kinds):
    # Half of the sentences are good donors, which a search finds.
    similarities = np.linspace(0.5, 0.9, 40)
    damages = np.where(similarities > 0.7, 0.001, 0.4)
    nothing = np.full(40, -np.inf)
    mean = np.full(40, mean_damage)
    probes, measured = probes_of([9] * 40, similarities, nothing, damages, nothing, COSINE, mean)
    mask, budget = mildest_mask(natural_rank(3, 4), 6), Budget(COSINE, 0.98)
    terms = replace(terms_of(probes, budget), search_costs=np.full(40, search))
    policy = policy_for(terms, measured, mask)
    (group,) = policy.groups
    assert group.searched is searched
    applied = applied_to(probes, measured, mask, policy, search)
    assert set(applied.kinds[applied.served].tolist()) == kinds
    saved = 2.0 * 9 * 6 * applied.served.mean() - searched * search
    assert applied.saved == pytest.approx(saved)
    told = report(applied, [applied], probes)
    assert told["groups"][0]["searched"] is searched
    assert told["prototype_hit_rate"] == np.mean(applied.served & (applied.kinds != STORED))
    if kinds == {RecordKind.MEAN}:
        assert applied.served.all()
        np.testing.assert_array_equal(applied.damage, mean)


@settings(max_examples=60)
@given(st.dictionaries(st.integers(1, 40), st.integers(1, 300), min_size=1, max_size=20), measures)
def test_length_groups_hold_every_probe_once_and_do_not_split_a_length(probes, measure):
    lengths = np.sort(np.repeat(list(probes), list(probes.values())))
    groups = length_groups(lengths, measure)
    assert np.concatenate(groups).tolist() == list(range(len(lengths)))
    held = [set(lengths[group]) for group in groups]
    assert sum(map(len, held)) == len(set(lengths))
    assert all(max(left) < min(right) for left, right in pairwise(held))
    wanted = {COSINE: 100, AGREEMENT: 600}[measure]
    assert 1 <= len(groups) <= max(1, min(6, len(lengths) // wanted))


@pytest.mark.parametrize(
    ("measure", "count", "groups"),
    [(COSINE, 199, 1), (COSINE, 200, 2), (COSINE, 5000, 6), (AGREEMENT, 1199, 1), (AGREEMENT, 1200, 2)],
)
def test_length_groups_are_equally_large_where_no_length_is_common(measure, count, groups):
    sizes = [len(group) for group in length_groups(np.arange(1, count + 1), measure)]
    assert len(sizes) == groups
    assert max(sizes) - min(sizes) <= 1


@given(st.dictionaries(st.integers(1, 60), st.integers(1, 300), min_size=1, max_size=20))
def test_lengths_up_to_the_rare_one_are_few_probes_and_with_the_next_length_they_are_not(probes):
    lengths = np.sort(np.repeat(list(probes), list(probes.values())))
    rare, few = rare_length(lengths, lengths[0]), min(20, 0.02 * len(lengths))
    following = lengths[lengths > rare].min()
    assert np.sum(lengths <= following) >= few
    if rare:
        assert 0 < np.sum(lengths <= rare) < few
        assert following == rare + 1  # also lengths between them, of which nothing was measured, are rare
    else:
        assert np.sum(lengths == lengths[0]) >= few
    # A length with records and without any probe is hardly measured too.
    assert rare_length(lengths, lengths[0] - 1) == following - 1


def test_of_lengths_that_are_hardly_measured_only_recorded_texts_hit():
    probes, masks, measured = some_probes(count=600)
    budget, lengths = Budget(COSINE, 0.5), probes.lengths.copy()
    without = policy_for(terms_of(probes, budget), measured[0], masks[0])
    lengths[:11] = 1
    rare = Probes([[2] * length for length in lengths], probes.records, probes.similarities)
    policy = policy_for(terms_of(rare, budget), measured[0], masks[0])
    assert [group.longest for group in policy.groups] == [2, *(group.longest for group in without.groups)]
    assert not policy.groups[0].approximates
    assert all(group.approximates for group in policy.groups[1:])
    # The texts that cannot hit do not count in the group of the longer ones.
    behind = choose_group(
        rare, np.arange(11, np.sum(lengths <= policy.groups[1].longest)), measured[0], budget
    )
    assert policy.groups[1].kinds == behind.kinds
    # A group that has only such lengths is a part of theirs.
    _, first, *others = policy.groups
    narrowed = policy_for(replace(terms_of(rare, budget), rare=first.longest), measured[0], masks[0])
    assert [group.longest for group in narrowed.groups] == [
        first.longest,
        *(group.longest for group in others),
    ]
    assert [group.approximates for group in narrowed.groups] == [False, *[True] * len(others)]


# A hit saves two microseconds per token and head. A search costs seven microseconds.
SAVINGS = Savings(per_hit=lambda lengths, heads: 2.0 * lengths * heads, search=lambda _: 7.0)


def applied_to(probes, measured, mask, policy, search=7.0):
    """Return the results of a policy on probes if each search costs `search` microseconds."""
    terms = replace(terms_of(probes, policy.budget), search_costs=np.full(len(probes.sequences), search))
    return calibrated(terms, measured, mask, policy)


def terms_of(probes, budget):
    return Terms.of(probes, budget, SAVINGS, shortest=int(probes.lengths[0]))


def some_probes(measure=COSINE, count=240):
    """Return probes of three length groups and the effect of masks of 2, 6 and 12 heads.

    Larger masks do more damage.
    """
    random = np.random.default_rng(0)
    lengths = np.sort(random.integers(3, 30, count))
    stored, prototype = random.uniform(0, 0.99, (2, count))
    prototype[random.random(count) < 0.2] = -np.inf
    noise = random.gamma(2, 0.005, (2, count))
    tables = [
        probes_of(
            lengths,
            stored,
            prototype,
            noise[0] * heads / 6 + 0.05 * (1 - stored),
            noise[1] * heads / 6 + 0.02,
            measure,
        )
        for heads in (2, 6, 12)
    ]
    masks = [mildest_mask(natural_rank(3, 4), heads) for heads in (2, 6, 12)]
    return tables[0][0], masks, [measured for _, measured in tables]


def by_hand(probes, measured, policy: ReusePolicy):
    """Return (served, kind, fidelity, damage) of all probes, each array from one decision at a time."""
    rows = []
    for index, length in enumerate(probes.lengths):
        group = policy.group_of(int(length))
        kind = mildest(reached(probes, group, index)) if group.searched else None
        found = measured[kind] if kind is not None else None
        rows.append(
            (True, kind, found.fidelity[index], found.damage[index]) if found else (False, -1, np.nan, np.nan)
        )
    return columns(rows)


@pytest.mark.parametrize("least", [0.96, 0.965, 0.97])
def test_policy_is_applied_to_probes_as_when_serving(least):
    probes, masks, measured = some_probes()
    chosen, _ = choose_policy(terms_of(probes, Budget(COSINE, least)), masks, measured)
    applied = applied_to(probes, measured[masks.index(chosen.mask)], chosen.mask, chosen.policy)
    served, kinds, fidelity, damage = by_hand(probes, measured[masks.index(chosen.mask)], chosen.policy)
    assert 0 < served.sum() < len(served)
    assert applied.served.tolist() == served.tolist()
    assert applied.kinds[served].tolist() == kinds[served].tolist()
    np.testing.assert_array_equal(applied.fidelity, fidelity)
    np.testing.assert_array_equal(applied.damage, damage)
    saved = sum(2.0 * length * chosen.mask.total for length in probes.lengths[served]) / len(served) - 7.0
    assert applied.saved == pytest.approx(saved)


@pytest.mark.parametrize("least", [0.5, 0.9, 0.95, 0.97, 1.0])
@pytest.mark.parametrize("measure", Measure)
def test_chosen_mask_is_the_one_whose_hits_save_the_most(measure, least):
    probes, masks, measured = some_probes(measure)
    budget = Budget(measure, least)
    chosen, options = choose_policy(terms_of(probes, budget), masks, measured)
    assert [option.mask for option in options] == masks
    saved = []
    for mask, rows, option in zip(masks, measured, options, strict=True):
        groups, by_group = [], []
        for indices in length_groups(probes.lengths, measure):
            group = choose_group(probes, indices, rows, budget)
            served = by_hand(probes, rows, ReusePolicy(budget, (group,)))[0][indices]
            by_search = 2.0 * probes.lengths[indices][served].sum() * mask.total - 7.0 * len(indices)
            by_group.append(max(by_search, 0.0))
            # A group whose search does not pay is not searched.
            groups.append(group if by_search > 0 else group.recorded_only())
        assert option.policy == ReusePolicy(budget, tuple(groups))
        saved.append((sum(by_group) / len(probes.lengths), mask.total))
    assert (pytest.approx(max(saved)[0]), max(saved)[1]) == (chosen.saved, chosen.mask.total)


@pytest.mark.parametrize(("least", "heads"), [(0.5, 12), (0.97, 6), (0.999, 2)])
def test_with_a_given_threshold_the_largest_mask_inside_the_budget_is_taken_or_the_mildest(least, heads):
    probes, masks, measured = some_probes()
    budget = Budget(COSINE, least)
    chosen, options = choose_policy(terms_of(probes, budget), masks, measured, threshold=0.4)
    means = [np.nanmean(option.fidelity) for option in options]
    assert means == sorted(means, reverse=True)
    inside = [mask.total for mask, mean in zip(masks, means, strict=True) if mean >= least]
    assert chosen.mask.total == max(inside, default=2) == heads
    for group in chosen.policy.groups:
        assert {policy.threshold for policy in group.kinds.values()} == {0.4}
    unreached, _ = choose_policy(terms_of(probes, budget), masks, measured, threshold=1.0)
    assert unreached.mask.total == 12
    assert not unreached.served.any()


def test_hits_that_change_every_decision_are_outside_the_budget():
    count = 30
    similarities = np.full(count, 0.5)
    masks = [mildest_mask(natural_rank(3, 4), heads) for heads in (2, 12)]
    tables = [
        probes_of([9] * count, similarities, similarities, *([np.full(count, damage)] * 2), AGREEMENT)
        for damage in (0.1, 1.0)
    ]
    chosen, options = choose_policy(
        terms_of(tables[0][0], Budget(AGREEMENT, 0.9)), masks, [measured for _, measured in tables], 0.4
    )
    assert [np.mean(option.fidelity) for option in options] == [1.0, 0.0]
    assert chosen.mask.total == 2


@pytest.mark.parametrize("measure", Measure)
def test_report_has_the_results_of_the_chosen_policy_in_total_and_per_group(measure):
    probes, masks, measured = some_probes(measure, count=1300)
    chosen, options = choose_policy(terms_of(probes, Budget(measure, 0.95)), masks, measured)
    served, kinds, fidelity, damage = by_hand(probes, measured[masks.index(chosen.mask)], chosen.policy)
    told = report(chosen, options, probes)
    assert (told["measured"], told["confidence"], told["heads"]) == (1300, 0.95, chosen.mask.total)
    assert told["saved_microseconds"] == chosen.saved
    group_indices = np.array([chosen.policy.group_index(length) for length in probes.lengths])
    everyone = np.ones(1300, dtype=bool)
    of_groups = [group_indices == index for index in range(len(chosen.policy.groups))]
    assert len(of_groups) == (6 if measure is COSINE else 2)
    assert [group["lengths"] for group in told["groups"]] == chosen.policy.names()
    for figures, rows in zip([told, *told["groups"]], [everyone, *of_groups], strict=True):
        hits = served & rows
        assert MIN_PROBES <= hits.sum() <= rows.sum()
        assert figures["probes"] == rows.sum()
        assert figures["hit_rate"] == pytest.approx(hits.sum() / rows.sum())
        assert figures["prototype_hit_rate"] == pytest.approx((hits & (kinds == 1)).sum() / rows.sum())
        assert figures["mean"] == pytest.approx(fidelity[hits].mean())
        assert figures["mean_cosine"] == pytest.approx(1 - damage[hits].mean())
        assert figures["cosine_5th_percentile"] == pytest.approx(np.percentile(1 - damage[hits], 5))
        bound = 1 - upper_bounds(1 - fidelity[hits], measure)[-1]
        assert figures["lower_bound"] == pytest.approx(bound)
        assert 0.95 - 1e-9 <= figures["lower_bound"] <= figures["mean"]
    for row, mask, option in zip(told["candidates"], masks, options, strict=True):
        assert row["heads"] == mask.total
        assert row["hit_rate"] == option.served.mean()
        assert row["mean_cosine"] == pytest.approx(1 - np.nanmean(option.damage))
        assert row["saved_microseconds"] == option.saved


def test_report_of_a_policy_without_hits_has_no_quality_figures():
    probes, masks, measured = some_probes()
    nothing = applied_to(probes, measured[0], masks[0], uniform_policy(Budget(COSINE, 0.9), 1.0))
    told = report(nothing, [nothing], probes)
    assert told["hit_rate"] == told["prototype_hit_rate"] == 0
    assert told["saved_microseconds"] == -7.0
    for name in ("mean", "mean_cosine", "cosine_5th_percentile", "lower_bound"):
        assert told[name] is None
    assert told["candidates"][0]["mean_cosine"] is None


def test_without_records_to_search_no_group_is_searched():
    probes, masks, measured = some_probes()
    terms = terms_of(probes, Budget(COSINE, 0.9))
    assert any(group.searched for group in policy_for(terms, measured[0], masks[0]).groups)
    unsearched = policy_for(replace(terms, may_search=False), measured[0], masks[0])
    assert not any(group.searched for group in unsearched.groups)


def test_length_without_any_record_does_not_keep_the_mean_from_serving_other_lengths():
    lengths, nothing = np.repeat([9, 10], 30), np.full(60, -np.inf)
    probes, measured = probes_of(lengths, nothing, nothing, nothing, nothing, COSINE, np.full(60, 0.01))
    probes.records[RecordKind.MEAN] = np.where(lengths == 9, 0, -1)  # 0 is the first record
    measured[RecordKind.MEAN].fidelity[lengths == 10] = np.nan
    mask = mildest_mask(natural_rank(3, 4), 6)
    for may_search in (True, False):
        terms = replace(terms_of(probes, Budget(COSINE, 0.9)), may_search=may_search)
        policy = policy_for(terms, measured, mask)
        assert [group.mean_serves for group in policy.groups] == [not may_search]
    found = calibrated(terms, measured, mask, policy)
    assert found.served.tolist() == (lengths == 9).tolist()
