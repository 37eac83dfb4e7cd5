"""Policies choose the record that plain loops choose, and tightening only removes hits."""

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import (
    Budget,
    KindPolicy,
    LengthGroup,
    ReusePolicy,
    Steps,
    StrangenessLimit,
    uniform_policy,
)
from attncache_core.reuse.storage.layout import RecordKind

BUDGET = Budget(Measure.COSINE, 0.985)
STORED, PROTOTYPE = RecordKind.STORED, RecordKind.PROTOTYPE
JSON = TypeAdapter(ReusePolicy)

similarities = st.floats(-2, 1, width=32)


@st.composite
def kind_policies(draw):
    """A KindPolicy with a threshold that is mostly reachable, and a falling curve of zero to three points."""
    corners = sorted(draw(st.lists(similarities, max_size=3, unique=True)))
    damages = st.floats(0, 1)
    falling = sorted(draw(st.lists(damages, min_size=len(corners), max_size=len(corners))), reverse=True)
    threshold = draw(st.just(1.0) | st.floats(-2, 1.1))
    return KindPolicy(threshold, tuple(corners), tuple(falling))


@st.composite
def groups(draw, longest=60):
    kinds = {kind: draw(kind_policies()) for kind in RecordKind}
    return LengthGroup(longest, kinds, searched=draw(st.booleans()))


@st.composite
def policies(draw):
    longest = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=3)))
    return ReusePolicy(BUDGET, tuple(draw(groups(tokens)) for tokens in longest))


@st.composite
def divisions(draw):
    """A policy that differs from others in its length groups only."""
    longest = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=3)))
    kinds = [{kind: KindPolicy(0.5 + 0.1 * kind + 0.01 * index) for kind in RecordKind} for index in range(3)]
    return ReusePolicy(BUDGET, tuple(map(LengthGroup, longest, kinds)))


@st.composite
def nearest(draw):
    """Similarities of the nearest record of each kind for some sequences with at least one record each."""
    found = st.one_of(st.just(-math.inf), st.just(1.0), similarities)
    row = st.tuples(*[found] * len(RecordKind)).filter(lambda row: max(row) > -math.inf)
    rows = draw(st.lists(row, min_size=1, max_size=6))
    return {kind: np.array([row[kind] for row in rows], np.float32) for kind in RecordKind}


def damage_plainly(policy: KindPolicy, similarity: float) -> float:
    """Return the expected damage at one similarity, by a loop over the segments of the curve."""
    if not policy.similarities:
        return 1 - similarity
    if similarity >= 1:
        return 0.0
    corners = list(zip(policy.similarities, policy.damages, strict=True))
    if similarity <= corners[0][0]:
        return corners[0][1]
    for (x0, y0), (x1, y1) in pairwise(corners):
        if x0 <= similarity <= x1:
            return y0 + (y1 - y0) * (similarity - x0) / (x1 - x0)
    return corners[-1][1]


def test_measure_of_a_budget_may_be_given_by_its_name():
    assert Budget("cosine", 0.9).measure is Measure.COSINE
    assert Budget("agreement", 0.9).measure is Measure.AGREEMENT
    with pytest.raises(ValueError, match="not a valid Measure"):
        Budget("cosines", 0.9)


@given(policies(), st.data())
def test_compiled_code_chooses_what_each_length_group_chooses(policy, data):
    if policy.compiled is None:
        pytest.skip("the choice was not compiled")
    found = data.draw(nearest())
    count = len(found[STORED])
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=count, max_size=count))
    laid_out = np.array([(row, 1, 0, length) for row, length in enumerate(lengths)])
    similarities = np.array([found[kind] for kind in RecordKind])
    records = np.arange(similarities.size).reshape(similarities.shape)
    chosen = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.float32)
    policy.compiled.choose(laid_out, (records, similarities), chosen)
    for row, (served, kind, similarity) in enumerate(zip(*(part.tolist() for part in chosen), strict=True)):
        alone = {of: values[row : row + 1] for of, values in found.items()}
        kinds, serves = policy.group_of(lengths[row]).choose(alone)
        assert (kind, similarity) == (kinds[0], found[RecordKind(kind)][row])
        assert served == (records[kind, row] if serves[0] else -1)


@given(groups(), nearest())
def test_kind_with_the_least_expected_damage_among_those_at_their_threshold_serves(group, found):
    kinds, served = group.choose(found)
    for row in range(len(kinds)):
        damages = {}
        for kind, policy in group.kinds.items():
            similarity = float(found[kind][row])
            if similarity > -math.inf and similarity >= policy.threshold:
                damages[kind] = damage_plainly(policy, similarity)
        assert served[row] == bool(damages)
        if damages:
            # The tolerance covers two ways of computing a linear interpolation.
            assert damages[RecordKind(kinds[row])] <= min(damages.values()) + 1e-9
        assert found[RecordKind(kinds[row])][row] > -math.inf  # there is a record, also if it does not serve


def test_own_record_serves_a_recorded_sequence_even_if_a_prototype_has_low_damage():
    kinds = {
        STORED: KindPolicy(0.5, (0.2, 0.9), (0.4, 0.3)),
        PROTOTYPE: KindPolicy(0.5, (0.2, 0.9), (0.1, 0.0)),
    }
    chosen, served = LengthGroup(9, kinds).choose(
        {STORED: np.array([1.0, 0.9], np.float32), PROTOTYPE: np.array([0.99, 0.9], np.float32)}
    )
    assert chosen.tolist() == [STORED, PROTOTYPE]
    assert served.tolist() == [True, True]


@given(kind_policies(), st.lists(similarities, min_size=1))
def test_expected_damage_follows_the_curve_and_is_zero_for_a_recorded_sequence(policy, values):
    expected = [damage_plainly(policy, value) for value in values]
    np.testing.assert_allclose(policy.expected_damage(np.array(values)), expected, atol=1e-9)
    assert policy.expected_damage(np.array([1.0])) == 0


@given(divisions(), st.lists(st.integers(1, 80), min_size=1))
def test_a_sequence_belongs_to_the_first_group_that_takes_its_length_or_to_the_last(policy, lengths):
    expected = [
        next(
            (index for index, group in enumerate(policy.groups) if length <= group.longest),
            len(policy.groups) - 1,
        )
        for length in lengths
    ]
    assert [policy.group_index(length) for length in lengths] == expected
    assert policy.group_indices(np.array(lengths)).tolist() == expected
    assert [policy.group_of(length) for length in lengths] == [policy.groups[index] for index in expected]


@given(divisions())
def test_names_give_the_range_of_lengths_of_each_group_and_info_its_thresholds(policy):
    for index, name in enumerate(policy.names()):
        first, _, last = name.partition("-")
        assert policy.group_index(int(first)) == index
        assert index == 0 or policy.group_index(int(first) - 1) == index - 1
        assert (last == "") == (index == len(policy.groups) - 1)
        if last:
            assert policy.group_index(int(last)) == index
            assert policy.group_index(int(last) + 1) == index + 1
    tighter = policy.tightened(0)
    told = tighter.info().groups
    assert all(group.reuses for group in told)
    assert not any(group.reuses for group in policy.switched_off().info().groups)
    assert [group.lengths for group in told] == policy.names()
    assert [group.tightened for group in told] == [1] + [0] * (len(told) - 1)
    assert told[-1].threshold == {
        kind.name.lower(): of_kind.threshold for kind, of_kind in tighter.groups[-1].kinds.items()
    }


@given(groups(), st.floats(-2, 2))
def test_one_threshold_for_all_keeps_the_curves_and_drops_the_budget(group, threshold):
    policy = ReusePolicy(BUDGET, (group, replace(group, longest=70)))
    same = replace(policy, budget=replace(BUDGET, floor=0.9)).with_threshold(threshold)
    assert same.budget == Budget(BUDGET.measure, 0.0)
    for before, after in zip(policy.groups, same.groups, strict=True):
        kinds = {kind: replace(of_kind, threshold=threshold) for kind, of_kind in before.kinds.items()}
        assert (after.longest, after.searched, after.kinds) == (before.longest, True, kinds)


@given(policies(), nearest(), st.data())
def test_tightening_only_removes_hits_and_the_sixth_step_switches_off(policy, found, data):
    index = data.draw(st.integers(0, len(policy.groups) - 1))
    served = policy.groups[index].choose(found)[1]
    for times in range(1, 8):
        tighter = policy.tightened(index)
        group = tighter.groups[index]
        assert group.tightened == times
        now = group.choose(found)[1]
        assert (now <= served).all()
        assert times < 6 or (group.is_off and not now.any())
        assert tighter.groups[:index] == policy.groups[:index]
        assert tighter.groups[index + 1 :] == policy.groups[index + 1 :]
        assert tighter.budget == policy.budget
        policy, served = tighter, now


def test_tightening_halves_the_distance_of_the_threshold_from_1():
    policy = uniform_policy(BUDGET, 0.9)
    assert policy.names() == ["1-"]
    assert {kind.threshold for kind in policy.groups[0].kinds.values()} == {0.9}
    for threshold in (0.95, 0.975, 0.9875, 0.99375, 0.996875):
        policy = policy.tightened(0)
        assert policy.groups[0].kinds[STORED].threshold == pytest.approx(threshold)
        similarities = {STORED: np.ones(1, np.float32), PROTOTYPE: np.zeros(1, np.float32)}
        assert policy.groups[0].choose(similarities)[1].tolist() == [True]
        assert not policy.groups[0].is_off
    assert policy.tightened(0).groups[0].is_off


@given(policies(), st.integers(1, 8))
def test_thresholds_stay_finite_because_json_knows_no_other_numbers(policy, times):
    off = policy.switched_off()
    for _ in range(times):
        policy = policy.tightened(0)
    for group in (*policy.info().groups, *off.info().groups):
        assert all(map(math.isfinite, group.threshold.values()))


@given(groups())
def test_a_group_for_recorded_sequences_only_has_no_search_and_no_mean_before_its_first_step(group):
    closed = group.recorded_only()
    assert not closed.searched
    assert not closed.mean_serves
    assert not closed.is_off
    others = {kind: policy for kind, policy in group.kinds.items() if kind is not RecordKind.MEAN}
    assert {kind: closed.kinds[kind] for kind in others} == others
    # A manifest, which holds finite numbers only, keeps it and any other group.
    policy = ReusePolicy(BUDGET, (closed, replace(group, longest=70)))
    assert JSON.validate_json(json.dumps(asdict(policy)), strict=True) == policy
    assert math.isfinite(closed.kinds[RecordKind.MEAN].threshold)
    # The first step of a group without a search starts the search, and tightens lengths that are searched.
    for before in (group, closed):
        tighter = before.one_step_tighter()
        assert tighter.searched
        if not before.searched:
            assert tighter.is_off == (not before.mean_serves)
            searched = replace(before, searched=True)
            assert tighter == (searched.one_step_tighter() if before.mean_serves else tighter)


@pytest.mark.parametrize(
    ("stored", "prototype", "off"),
    [(1.0, 1.0, False), (1.0, 2.0, False), (2.0, 0.9, False), (1.001, math.inf, True)],
)
def test_a_group_is_off_when_no_kind_can_reach_its_threshold_and_approximates_below_1(stored, prototype, off):
    kinds = {STORED: KindPolicy(stored), PROTOTYPE: KindPolicy(prototype), RecordKind.MEAN: KindPolicy(7.0)}
    assert LengthGroup(9, kinds).is_off is off
    assert LengthGroup(9, kinds).approximates is (prototype < 1)
    # Without a search, recorded sequences hit whatever the thresholds are.
    assert not LengthGroup(9, kinds, searched=False).is_off


def test_limit_comes_half_as_near_to_the_usual_strangeness_and_the_sixth_step_lets_no_text_pass():
    limit = StrangenessLimit(strangest=0.9, usual=0.1)
    steps = [limit := limit.one_step_tighter() for _ in range(6)]
    assert [step.strangest for step in steps] == pytest.approx([0.5, 0.3, 0.2, 0.15, 0.125, -1.0])
    assert [step.is_off for step in steps] == [False] * 5 + [True]
    # It never rises.
    assert StrangenessLimit(strangest=0.1, usual=0.9).one_step_tighter().strangest == 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Steps((0,), -1),
        lambda: ReusePolicy(BUDGET, uniform_policy(BUDGET, 1.0).groups * 2),
        lambda: KindPolicy(1.0, (0.5,), (math.inf,)),
        lambda: StrangenessLimit(strangest=1.0, usual=math.nan),
    ],
)
def test_numbers_that_no_calibration_writes_are_refused(make):
    with pytest.raises(ValueError, match=r"loosened|must rise|not a finite number"):
        make()


def test_budget_is_kept_at_its_bounds_and_by_no_unknown_floor():
    budget = Budget(Measure.COSINE, 0.99, floor=0.98)
    assert budget.kept_by(0.99, 0.98)
    assert not any(budget.kept_by(*bounds) for bounds in ((0.989, 0.98), (0.99, 0.979), (0.99, None)))
    assert Budget(Measure.COSINE, 0.99).kept_by(0.99, None)
    assert Budget(Measure.COSINE, 0, floor=0.9).binds
    assert not Budget(Measure.COSINE, 0).binds
    assert Budget(Measure.AGREEMENT, 0.9).harmed(np.array([1.0, 0.0, np.nan])).tolist() == [False, True, True]
