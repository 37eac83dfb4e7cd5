"""The search plans the records that a comparison with every record finds, and obeys the laws of θ."""

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from core_models import planned
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core import native
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.index import FeatureIndex
from attncache_core.reuse.plan import ALL_LAYERS, Outcome, ReusePlan, no_reuse, outcome_code
from attncache_core.text.token_batch import pack

# Features are sums of a few hundred float32 products, and the order of summation depends on the batch.
TOLERANCE = 1e-5


class Asked(NamedTuple):
    """Sequences to search for: recorded sequences, new sequences, and one of a length without records."""

    sequences: list[list[int]]
    recorded: list[bool]


@pytest.fixture(scope="module")
def asked(tiny_engine, tiny_corpus):
    random = np.random.default_rng(5)
    known = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus[::24]])
    new = [[2, *random.integers(5, 40, length - 2).tolist(), 3] for length in (5, 6, 6, 8, 10, 7)]
    return Asked([*new, [2, 3], *known], [False] * 7 + [True] * len(known))


@pytest.fixture(scope="module")
def opened(tiny_database):
    return AttentionDatabase.open(tiny_database)


def plan_of(engine, database, sequences, threshold, allowed=None) -> tuple[list[int], list[float], int]:
    """Return records and similarities in the caller's order, and the number of corrupt records."""
    search = replace(database.search, policy=database.search.policy.with_threshold(threshold))
    batch = pack(sequences)
    allowed = np.ones(len(sequences), dtype=bool) if allowed is None else np.array(allowed)
    with torch.inference_mode():
        plan = planned(search, batch, engine.model.embed(batch), allowed[batch.order])
    rows = (batch.in_callers_order(plan.records), batch.in_callers_order(plan.similarities))
    return rows[0].tolist(), rows[1].tolist(), plan.corrupt_records


def features(engine, database, ids) -> np.ndarray:
    batch = pack([ids])
    with torch.inference_mode():
        return database.search.projector(engine.model.embed(batch)[None])[0].double().numpy()


def test_record_and_similarity_are_those_of_the_brute_force_nearest_record(
    tiny_engine, tiny_corpus, opened, asked
):
    recorded = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])
    vectors = [features(tiny_engine, opened, ids) for ids in recorded]
    records, similarities, _ = plan_of(tiny_engine, opened, asked.sequences, threshold=-np.inf)
    for ids, record, similarity in zip(asked.sequences, records, similarities, strict=True):
        distances = {
            tuple(other): np.linalg.norm(features(tiny_engine, opened, ids) - vector)
            for other, vector in zip(recorded, vectors, strict=True)
            if len(other) == len(ids)
        }
        if not distances:
            assert record == -1
            assert np.isnan(similarity)
            continue
        nearest = min(distances, key=distances.__getitem__)
        assert opened.search.store.segments[len(ids)].holds_tokens(record, nearest)
        assert similarity == pytest.approx(1 - distances[nearest], abs=TOLERANCE)


def test_recorded_sequence_takes_its_record_however_far_rounding_puts_it(tiny_engine, opened, asked):
    """Also where Faiss compares so few codes that it misses the record."""
    index = FeatureIndex()
    for length in opened.manifest.records:
        # The vectors of other records, half of them in compressed form.
        other = np.roll(opened.search.index.vectors(length), 1, axis=0)
        index.add(length, other, exact_below=16 if length % 2 else 10**6)
    searched = replace(opened, search=replace(opened.search, index=index))
    for threshold in (0.0, 1.0):
        records, similarities, _ = plan_of(tiny_engine, searched, asked.sequences, threshold)
        assert [similarity == 1 for similarity in similarities] == asked.recorded
        own = [opened.search.store.record_of(ids) for ids in asked.sequences]
        assert [record for record, is_own in zip(records, asked.recorded, strict=True) if is_own] == [
            record for record in own if record is not None
        ]


@pytest.mark.parametrize("way", ["compiled", "compressed", "plain"])
def test_other_sequence_has_a_similarity_below_1_even_if_its_features_are_those_of_the_record(
    tiny_engine, tiny_prototypes_database, asked, way
):
    """So that θ = 1 admits recorded sequences only. Here, all features are zero."""
    database, index = AttentionDatabase.open(tiny_prototypes_database), FeatureIndex()
    search = database.search
    projector = search.projector.extended(search.projector.max_length)
    projector.requires_grad_(False).position.zero_()
    for length in database.manifest.records:
        vectors = np.zeros_like(search.index.vectors(length))
        index.add(length, vectors, exact_below=16 if way == "compressed" else 10**6)
    prototypes = replace(search.prototypes, features=np.zeros_like(search.prototypes.features))
    same = replace(database, search=replace(search, projector=projector, index=index, prototypes=prototypes))
    with mock.patch.object(native, "kernel", return_value=None) if way == "plain" else nullcontext():
        records, similarities, _ = plan_of(tiny_engine, same, asked.sequences, 1.0)
    assert [similarity == 1 for similarity in similarities] == asked.recorded
    assert [record >= 0 for record in records] == asked.recorded


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.integers(0, 50), min_size=1, max_size=12), threshold=st.floats(0.5, 1.0))
def test_compiled_code_finds_what_is_found_without_it(tiny_engine, opened, asked, rows, threshold):
    sequences = [asked.sequences[row % len(asked.sequences)] for row in rows]
    (group,) = opened.search.policy.groups
    groups = (replace(group, longest=5), replace(group, longest=7), group)
    policy = replace(opened.search.policy, groups=groups)

    def in_groups(database):
        return replace(database, search=replace(database.search, policy=policy))

    compiled = plan_of(tiny_engine, in_groups(opened), sequences, threshold)
    with mock.patch.object(native, "kernel", return_value=None):
        plainly = in_groups(AttentionDatabase.open(opened.folder))
        records, similarities, _ = plan_of(tiny_engine, plainly, sequences, threshold)
        assert plainly.search.projector.packed is None
    assert similarities == pytest.approx(compiled[1], abs=TOLERANCE, nan_ok=True)
    near = [abs(similarity - threshold) < TOLERANCE for similarity in similarities]
    assert [record if not is_near else None for record, is_near in zip(records, near, strict=True)] == [
        record if not is_near else None for record, is_near in zip(compiled[0], near, strict=True)
    ]


def test_length_whose_segment_is_lost_behind_the_plan_is_still_found(tiny_engine, tiny_database):
    database = AttentionDatabase.open(tiny_database)
    search, longest = database.search, max(database.search.store.segments)
    batch, before = pack([[2, *range(5, 3 + longest), 3]]), search.store.segments
    with torch.inference_mode():
        hidden = tiny_engine.model.embed(batch)
        expected = search.nearest(batch, hidden, batch.groups(), before)
        search.store.segments = {length: segment for length, segment in before.items() if length != longest}
        # As after a step of tightening, which makes another search of the same records.
        found = replace(search).nearest(batch, hidden, batch.groups(), before)
    np.testing.assert_array_equal(found.records, expected.records)


def test_lengths_that_are_searched_in_compressed_form_find_the_same_records(tiny_engine, opened, asked):
    index, mixed = opened.search.index, FeatureIndex()
    lengths = sorted(opened.manifest.records)
    for number, length in enumerate(lengths):
        # All compressed vectors of such small partitions are compared exactly, so none can be overlooked.
        mixed.add(length, index.vectors(length), exact_below=16 if number % 2 else 10**6)
    assert {mixed.is_compressed(length) for length in lengths} == {True, False}
    compressed = replace(opened, search=replace(opened.search, index=mixed))
    expected = plan_of(tiny_engine, opened, asked.sequences, 0.0)
    records, similarities, _ = plan_of(tiny_engine, compressed, asked.sequences, 0.0)
    assert records == expected[0]
    assert similarities == pytest.approx(expected[1], abs=TOLERANCE, nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(thresholds=st.tuples(st.floats(0.5, 1.1), st.floats(0.5, 1.1)))
def test_raising_the_threshold_only_removes_hits(tiny_engine, opened, asked, thresholds):
    everything = plan_of(tiny_engine, opened, asked.sequences, 0.0)
    loose, strict = (
        plan_of(tiny_engine, opened, asked.sequences, threshold) for threshold in sorted(thresholds)
    )
    for threshold, plan in zip(sorted(thresholds), (loose, strict), strict=True):
        # With a threshold above 1 nothing can hit, so nothing is searched.
        expected = everything[1] if threshold <= 1 else [np.nan] * len(asked.sequences)
        assert plan[1] == pytest.approx(expected, nan_ok=True, abs=0)
    for before, after, similarity in zip(loose[0], strict[0], everything[1], strict=True):
        assert after in (before, -1)
        assert (after >= 0) == (similarity >= max(thresholds))


def test_outcomes_follow_from_records_similarities_and_reasons():
    records = np.array([4, -1, -1, 0, -1, -1, 7])
    kinds = np.array([0, 0, 0, 1, 0, 1, 0])
    similarities = np.array([0.9, 0.3, np.nan, 0.8, np.nan, 0.7, 1.0], np.float32)
    reasons = no_reuse(7).reasons
    reasons[4] = outcome_code(Outcome.SKIPPED_BY_COST)
    plan = ReusePlan(records, kinds, similarities, reasons, np.zeros(7))
    assert plan.hits.tolist() == [True, False, False, True, False, False, True]
    assert plan.outcomes().tolist() == [
        *(Outcome.HIT, Outcome.MISS, Outcome.NOT_SEARCHED, Outcome.PROTOTYPE_HIT, Outcome.SKIPPED_BY_COST),
        *(Outcome.MISS, Outcome.HIT),
    ]


def test_only_hits_of_records_of_any_kind_count_as_hits():
    assert {outcome for outcome in Outcome if outcome.is_hit} == {Outcome.HIT, Outcome.PROTOTYPE_HIT}


def test_length_groups_in_which_reuse_does_not_pay_are_skipped(tiny_engine, opened, asked):
    batch = pack(asked.sequences)
    hidden = tiny_engine.model.embed(batch)
    (group,) = opened.search.policy.groups
    shortest = min(set(batch.lengths.tolist()) & set(opened.search.store.segments))
    policy = replace(opened.search.policy, groups=(replace(group, longest=shortest), group))
    search = replace(opened.search, policy=policy)
    allowed = np.ones(len(batch.lengths), dtype=bool)
    everywhere = planned(search, batch, hidden, allowed)
    plan = planned(replace(search, paying=frozenset({1})), batch, hidden, allowed)
    skipped = batch.lengths == shortest  # shorter lengths have no records
    assert skipped.any()
    assert not skipped.all()
    assert (plan.outcomes()[skipped] == Outcome.SKIPPED_BY_COST).all()
    assert (plan.outcomes()[~skipped] == everywhere.outcomes()[~skipped]).all()
    assert plan.records[~skipped].tolist() == everywhere.records[~skipped].tolist()
    allowed[:] = False
    plan = planned(replace(search, paying=frozenset()), batch, hidden, allowed)
    assert (plan.outcomes() == Outcome.NOT_SEARCHED).all()


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(3, 12), min_size=1, max_size=4),
    paying=st.none() | st.frozensets(st.integers(0, 1)),
    least_tokens=st.integers(0, 30),
    data=st.data(),
)
def test_lengths_rule_out_reuse_with_the_reasons_of_the_plan(opened, lengths, paying, least_tokens, data):
    (group,) = opened.search.policy.groups
    policy = replace(opened.search.policy, groups=(replace(group, longest=7), group))
    if data.draw(st.booleans()):
        policy = policy.switched_off()
    search = replace(opened.search, policy=policy, paying=paying, least_tokens=least_tokens)
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    batch = pack([[2] * length for length in lengths])
    reasons, plan = search.rule_out(batch.lengths, allowed), search.plan(batch, allowed)
    if reasons is None:
        assert plan.until == 0
    else:
        assert plan.until == ALL_LAYERS
        assert not plan.hits.any()
        assert reasons.tolist() == plan.reasons.tolist()
