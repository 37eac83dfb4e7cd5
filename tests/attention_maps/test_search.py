"""Algorithm 1: the plan of a batch against a comparison with every record, and the laws of θ."""

import shutil
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.search import Outcome, ReusePlan, no_reuse, place_of
from attncache_core.tokens import pack

# Features are sums of a few hundred float32 products; a batch sums them in another order.
TOLERANCE = 1e-5


class Asked(NamedTuple):
    """Sequences put to a search: some recorded, some new, one of a length that has no records."""

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
    """Records and similarities in the caller's order, and the number of corrupt records."""
    search = replace(database.search, policy=database.search.policy.with_threshold(threshold))
    batch = pack(sequences)
    allowed = np.ones(len(sequences), dtype=bool) if allowed is None else np.array(allowed)
    with torch.inference_mode():
        plan = search.plan(batch, engine.model.embed(batch), allowed[batch.order])
    rows = (batch.in_callers_order(plan.records), batch.in_callers_order(plan.similarities))
    return rows[0].tolist(), rows[1].tolist(), plan.corrupt_records


def features(engine, database, ids) -> np.ndarray:
    batch = pack([ids])
    with torch.inference_mode():
        return database.search.projector(engine.model.embed(batch)[None])[0].double().numpy()


def test_record_and_similarity_are_those_of_a_comparison_with_every_record(
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


def test_recorded_sequence_has_similarity_one_and_its_own_record(tiny_engine, opened, asked):
    records, similarities, _ = plan_of(tiny_engine, opened, asked.sequences, threshold=1.0)
    for ids, record, similarity, known in zip(
        asked.sequences, records, similarities, asked.recorded, strict=True
    ):
        assert (similarity == 1.0) is known
        assert (record >= 0) is known
        if known:
            assert opened.search.store.segments[len(ids)].holds_tokens(record, ids)


def test_rounding_costs_a_recorded_sequence_nothing(tiny_engine, opened, asked):
    # A projector that is off by a hundred thousandth, more than another batch's order of adding up.
    projector = FeatureProjector.load(opened.folder / "projector.safetensors")
    projector.position.mul_(1 + 1e-5)
    rounded = replace(opened, search=replace(opened.search, projector=projector))
    records, similarities, _ = plan_of(tiny_engine, rounded, asked.sequences, threshold=1.0)
    assert [similarity == 1.0 for similarity in similarities] == asked.recorded
    assert [record >= 0 for record in records] == asked.recorded


@settings(max_examples=30, deadline=None)
@given(thresholds=st.tuples(st.floats(0.5, 1.1), st.floats(0.5, 1.1)))
def test_raising_the_threshold_only_removes_hits(tiny_engine, opened, asked, thresholds):
    everything = plan_of(tiny_engine, opened, asked.sequences, 0.0)
    loose, strict = (
        plan_of(tiny_engine, opened, asked.sequences, threshold) for threshold in sorted(thresholds)
    )
    for threshold, plan in zip(sorted(thresholds), (loose, strict), strict=True):
        # Above 1 nothing could hit, and nothing is searched.
        expected = everything[1] if threshold <= 1 else [np.nan] * len(asked.sequences)
        assert plan[1] == pytest.approx(expected, nan_ok=True, abs=0)
    for before, after, similarity in zip(loose[0], strict[0], everything[1], strict=True):
        assert after in (before, -1)
        assert (after >= 0) == (similarity >= max(thresholds))


def test_threshold_above_one_searches_nothing_and_gives_no_hit(tiny_engine, opened, asked):
    records, similarities, _ = plan_of(tiny_engine, opened, asked.sequences, threshold=1.001)
    assert set(records) == {-1}
    assert np.isnan(similarities).all()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sequence_is_planned_alike_alone_and_in_any_batch(tiny_engine, opened, asked, data):
    rows = data.draw(st.permutations(range(len(asked.sequences))).map(lambda order: order[: 1 + order[0]]))
    together = plan_of(tiny_engine, opened, [asked.sequences[row] for row in rows], threshold=0.8)
    for place, row in enumerate(rows):
        alone = plan_of(tiny_engine, opened, [asked.sequences[row]], threshold=0.8)
        assert together[1][place] == pytest.approx(alone[1][0], abs=TOLERANCE, nan_ok=True)
        if not abs(alone[1][0] - 0.8) < TOLERANCE:
            assert together[0][place] == alone[0][0]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_sequence_that_may_not_be_reused_is_not_searched_and_the_others_are(tiny_engine, opened, asked, data):
    count = len(asked.sequences)
    allowed = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    everyone = plan_of(tiny_engine, opened, asked.sequences, 0.0)
    records, similarities, _ = plan_of(tiny_engine, opened, asked.sequences, 0.0, allowed)
    for row in range(count):
        if allowed[row]:
            assert records[row] == everyone[0][row]
            assert similarities[row] == pytest.approx(everyone[1][row], abs=TOLERANCE, nan_ok=True)
        else:
            assert records[row] == -1
            assert np.isnan(similarities[row])


def test_damaged_record_serves_nobody_and_is_counted(tiny_engine, tiny_database, opened, asked, tmp_path):
    target = max(range(len(asked.sequences)), key=lambda row: asked.recorded[row])
    ids = asked.sequences[target]
    before = plan_of(tiny_engine, opened, asked.sequences, 0.0)
    record, segment = before[0][target], opened.search.store.segments[len(ids)]
    spoilt = tmp_path / "a.db"
    shutil.copytree(tiny_database, spoilt)
    path = spoilt / "maps" / segment.path.name
    with path.open("r+b") as file:
        file.seek(segment.file_bytes - (len(segment) - record) * segment.layout.record_bytes(len(ids)))
        file.write(b"\xff\xff")
    damaged = AttentionDatabase.open(spoilt)
    records, similarities, corrupt = plan_of(tiny_engine, damaged, asked.sequences, 0.0)
    served = [
        row
        for row, other in enumerate(before[0])
        if other == record and len(asked.sequences[row]) == len(ids)
    ]
    assert before[2] == 0
    assert corrupt == len(served) >= 1
    assert [row for row in range(len(records)) if records[row] != before[0][row]] == served
    assert {records[row] for row in served} == {-1}
    assert similarities[target] == 1.0


def test_outcomes_tell_hit_miss_and_not_searched_apart():
    records = np.array([4, -1, -1, 0, -1, -1, 7])
    kinds = np.array([0, 0, 0, 1, 0, 1, 0])
    similarities = np.array([0.9, 0.3, np.nan, 0.8, np.nan, 0.7, 1.0], np.float32)
    reasons = no_reuse(7).reasons
    reasons[4] = place_of(Outcome.CANNOT_PAY)
    plan = ReusePlan(records, kinds, similarities, reasons, np.zeros(7))
    assert plan.hits.tolist() == [True, False, False, True, False, False, True]
    assert plan.outcomes().tolist() == [
        *(Outcome.HIT, Outcome.MISS, Outcome.NOT_SEARCHED, Outcome.PROTOTYPE_HIT, Outcome.CANNOT_PAY),
        *(Outcome.MISS, Outcome.HIT),
    ]


def test_hits_of_either_kind_of_record_are_hits_and_nothing_else_is():
    assert {outcome for outcome in Outcome if outcome.is_hit} == {Outcome.HIT, Outcome.PROTOTYPE_HIT}


def test_plan_follows_a_permutation_of_its_batch():
    kinds, similarities = np.array([0, 1, 1]), np.array([0.9, 0.3, 0.8], np.float32)
    plan = ReusePlan(np.array([4, -1, 7]), kinds, similarities, np.array([3, 4, 5]), np.array([6, 7, 8]), 2)
    moved = plan.reordered(np.array([2, 0, 1]))
    assert moved.records.tolist() == [7, 4, -1]
    assert moved.kinds.tolist() == [1, 0, 1]
    assert moved.similarities.tolist() == plan.similarities[[2, 0, 1]].tolist()
    assert moved.reasons.tolist() == [5, 3, 4]
    assert moved.strangeness.tolist() == [8, 6, 7]
    assert moved.corrupt_records == 2


def test_plan_without_reuse_serves_nobody():
    plan = no_reuse(3)
    assert plan.outcomes().tolist() == [Outcome.NOT_SEARCHED] * 3
    assert plan.records.tolist() == [-1] * 3


def test_length_groups_in_which_reuse_does_not_pay_are_not_searched(tiny_engine, opened, asked):
    batch = pack(asked.sequences)
    hidden = tiny_engine.model.embed(batch)
    (group,) = opened.search.policy.groups
    shortest = min(set(batch.lengths.tolist()) & set(opened.search.store.segments))
    policy = replace(opened.search.policy, groups=(replace(group, longest=shortest), group))
    search = replace(opened.search, policy=policy)
    allowed = np.ones(len(batch.lengths), dtype=bool)
    everywhere = search.plan(batch, hidden, allowed)
    plan = replace(search, paying=frozenset({1})).plan(batch, hidden, allowed)
    left_out = batch.lengths == shortest  # what is shorter has no records
    assert left_out.any()
    assert not left_out.all()
    assert (plan.outcomes()[left_out] == Outcome.CANNOT_PAY).all()
    assert (plan.outcomes()[~left_out] == everywhere.outcomes()[~left_out]).all()
    assert plan.records[~left_out].tolist() == everywhere.records[~left_out].tolist()
    allowed[:] = False
    plan = replace(search, paying=frozenset()).plan(batch, hidden, allowed)
    assert (plan.outcomes() == Outcome.NOT_SEARCHED).all()
