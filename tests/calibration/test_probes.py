"""Probes, their nearest records of each kind, and the damage of the records, against brute force."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import random_sequences

from attncache_core.calibration import probes as probes_module
from attncache_core.calibration.probes import Probes, find_probes, measure, stored_batches, stored_maps
from attncache_core.calibration.substitution import collect_maps, probed, substituted_outputs, traced_forward
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget, uniform_policy
from attncache_core.reuse.maps.search import MOST_SIMILAR_OTHER
from attncache_core.reuse.mask import head_order, mildest_mask
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.text.token_batch import pack

STORED = RecordKind.STORED
# Features are sums of a few hundred float32 products.
TOLERANCE = 1e-5
# Records keep 11 bits of a map; outputs are means over tokens of values about 1.
SIXTEEN_BITS = 2e-3


@pytest.fixture(scope="module")
def probes(tiny_engine, recorded):
    return find_probes(tiny_engine.model, recorded.search, recorded.held_out)


@pytest.fixture(scope="module")
def masks(recorded):
    return [mildest_mask(recorded.rank, size) for size in (2, 6, 12)]


@pytest.fixture(scope="module")
def measured(tiny_engine, recorded, probes, masks):
    comparator = tiny_engine.decisions.comparator(Measure.COSINE)
    return measure(tiny_engine.model, recorded.store, probes, masks, comparator)


def features(engine, recorded, ids) -> np.ndarray:
    with torch.inference_mode():
        return recorded.search.projector(engine.model.embed(pack([ids]))[None])[0].double().numpy()


def test_probes_are_the_sequences_by_rising_length_and_none_is_taken_for_a_recorded_one(recorded, probes):
    assert probes.sequences == sorted(recorded.held_out, key=len)
    assert probes.lengths.tolist() == [len(ids) for ids in probes.sequences]
    assert max(probes.similarities[kind].max() for kind in RecordKind) <= MOST_SIMILAR_OTHER < 1
    # Sequences of nine tokens have no record.
    nothing = np.all([probes.records[kind] < 0 for kind in RecordKind], axis=0)
    assert nothing.tolist() == (probes.lengths == 9).tolist()
    for index, record in enumerate(probes.most_similar()):
        kind = max(RecordKind, key=lambda kind: probes.similarities[kind][index])
        assert record == probes.records[kind][index]


def records_of(engine, recorded, length, kind) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers and the features of the records of one length and kind that are searched."""
    if kind is STORED:
        members = recorded.recording.by_length[length]
        rows = recorded.sentences.rows(members, held_out=False)
        sequences = [recorded.sentences.sequences[members[row]] for row in rows]
        return np.array(rows), np.array([features(engine, recorded, ids) for ids in sequences])
    prototypes = recorded.search.prototypes
    assert (prototypes.kinds == kind).sum() > 1
    alike = np.flatnonzero((prototypes.lengths == length) & (prototypes.kinds == kind))
    return prototypes.records[alike], prototypes.features[alike]


@pytest.mark.parametrize("kind", RecordKind)
def test_nearest_record_of_a_probe_equals_that_of_brute_force(tiny_engine, recorded, probes, kind):
    known = {
        length: records_of(tiny_engine, recorded, length, kind) for length in set(probes.lengths.tolist())
    }
    for index, ids in enumerate(probes.sequences):
        numbers, vectors = known[len(ids)]
        if not len(numbers):
            assert probes.records[kind][index] == -1
            assert probes.similarities[kind][index] == -np.inf
            continue
        distances = np.linalg.norm(vectors - features(tiny_engine, recorded, ids), axis=1)
        assert probes.records[kind][index] == numbers[distances.argmin()]
        assert probes.similarities[kind][index] == pytest.approx(1 - distances.min(), abs=TOLERANCE)


def test_probes_do_not_depend_on_the_policy(tiny_engine, recorded, probes):
    off = replace(recorded.search, policy=uniform_policy(Budget(Measure.COSINE, 0.9), np.inf))
    same = find_probes(tiny_engine.model, off, recorded.held_out)
    for kind in RecordKind:
        assert same.records[kind].tolist() == probes.records[kind].tolist()
        assert same.similarities[kind].tolist() == probes.similarities[kind].tolist()


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_sample_is_spread_over_the_probes_and_keeps_their_records(probes, most):
    sample = probes.sample(most)
    indices = [probes.sequences.index(ids) for ids in sample.sequences]
    assert len(indices) == min(most, len(probes.sequences))
    assert indices == sorted(set(indices))
    assert most < 2 or (indices[0], indices[-1]) == (0, len(probes.sequences) - 1)
    for kind in RecordKind:
        assert sample.records[kind].tolist() == probes.records[kind][indices].tolist()
        assert sample.similarities[kind].tolist() == probes.similarities[kind][indices].tolist()


def full_precision_cosine(engine, recorded, ids, kind, record, mask) -> float:
    """Return the cosine of a probe's output with and without reuse, with maps in full precision.

    The maps are computed again from the token sequences that the record was made from.
    """
    recording, length = recorded.recording, len(ids)
    if kind is STORED:
        makers = [recorded.sentences.sequences[recording.by_length[length][record]]]
    elif kind is RecordKind.MEAN:
        makers = recording.members(length)
    else:
        cluster = record - recording.stored(length) - 1
        indices = np.flatnonzero(recording.clusters(length) == cluster)
        makers = [recording.members(length)[index] for index in indices]
    maps = [collect_maps(engine.model, pack([maker])) for maker in makers]
    donors = [[torch.stack([of_maker[layer][0] for of_maker in maps]).mean(dim=0)] for layer in range(3)]
    alone = probed(engine.model, pack([ids]), donors)
    changed = substituted_outputs(engine.model, alone, mask.as_array())
    return torch.cosine_similarity(torch.from_numpy(changed), torch.from_numpy(alone.outputs)).item()


@pytest.mark.parametrize("kind", RecordKind)
def test_measured_damage_matches_maps_computed_in_full_precision(
    tiny_engine, recorded, probes, masks, measured, kind
):
    for index in range(0, len(probes.sequences), 5):
        ids, record = probes.sequences[index], int(probes.records[kind][index])
        for mask, rows in zip(masks, measured, strict=True):
            if record < 0:
                assert np.isnan(rows[kind].damage[index])
                assert np.isnan(rows[kind].fidelity[index])
                continue
            cosine = full_precision_cosine(tiny_engine, recorded, ids, kind, record, mask)
            assert rows[kind].damage[index] == pytest.approx(1 - cosine, abs=SIXTEEN_BITS)
            assert rows[kind].fidelity[index] == pytest.approx(cosine, abs=SIXTEEN_BITS)


def test_larger_masks_do_more_damage_and_damage_is_never_negative(measured):
    for kind in RecordKind:
        known = np.isfinite(measured[0][kind].damage)
        means = [rows[kind].damage[known].mean() for rows in measured]
        assert means == sorted(means)
        assert all((rows[kind].damage[known] >= 0).all() for rows in measured)


def test_damage_of_a_probe_does_not_depend_on_the_others(tiny_engine, recorded, probes, masks, measured):
    comparator = tiny_engine.decisions.comparator(Measure.COSINE)
    few = probes.sample(5)
    for mask, rows in zip(
        masks, measure(tiny_engine.model, recorded.store, few, masks, comparator), strict=True
    ):
        for index, ids in enumerate(few.sequences):
            before = measured[masks.index(mask)]
            for kind in RecordKind:
                expected = before[kind].damage[probes.sequences.index(ids)]
                assert rows[kind].damage[index] == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_decisions_are_compared_where_the_budget_is_agreement(tiny_engine, recorded, probes, masks):
    class FirstTwo:
        """A classifier that decides by the larger of the first two values."""

        labels = ("first", "second")
        logits = staticmethod(lambda outputs: outputs[:, :2])

    engine = replace(tiny_engine, classifier=FirstTwo())
    comparator = engine.decisions.comparator(Measure.AGREEMENT)
    (rows,) = measure(engine.model, recorded.store, probes, masks[-1:], comparator)
    batches = stored_batches(engine.model, recorded.store, masks[-1].order, probes, probes.records[STORED])
    indices = np.flatnonzero(probes.records[STORED] >= 0)
    for make in batches:
        batch = make()
        chosen, indices = np.split(indices, [len(batch.batch.lengths)])
        changed = substituted_outputs(engine.model, batch, masks[-1].as_array())
        same = (changed[:, 0] < changed[:, 1]) == (batch.outputs[:, 0] < batch.outputs[:, 1])
        assert rows[STORED].fidelity[chosen].tolist() == same.astype(float).tolist()
        assert 0 < same.mean() < 1


@pytest.mark.parametrize("kinds", [1, len(RecordKind)])
def test_progress_counts_the_batches_of_all_kinds_to_the_end(tiny_engine, recorded, probes, masks, kinds):
    none = np.full(len(probes.sequences), -1)
    records = {kind: probes.records[kind] if kind < kinds else none for kind in RecordKind}
    probes = Probes(probes.sequences, records, probes.similarities)
    seen = []
    comparator = tiny_engine.decisions.comparator(Measure.COSINE)
    measure(tiny_engine.model, recorded.store, probes, masks, comparator, lambda *step: seen.append(step))
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
    assert len(seen) == kinds


def test_the_full_model_runs_once_for_each_probe(tiny_engine, recorded, probes, masks, measured, monkeypatch):
    ran = []

    def noted(model, batch, on_maps):
        ran.extend(batch.lengths.tolist())
        return traced_forward(model, batch, on_maps)

    monkeypatch.setattr(probes_module, "traced_forward", noted)
    fresh = Probes(probes.sequences, probes.records, probes.similarities)
    comparator = tiny_engine.decisions.comparator(Measure.COSINE)
    for mask, expected in zip(masks, measured, strict=True):
        (rows,) = measure(tiny_engine.model, recorded.store, fresh, [mask], comparator)
        for kind in RecordKind:
            np.testing.assert_allclose(rows[kind].damage, expected[kind].damage, atol=1e-6)
    with_a_record = np.any([probes.records[kind] >= 0 for kind in RecordKind], axis=0)
    assert sorted(ran) == probes.lengths[with_a_record].tolist()


def test_batches_hold_every_probe_that_has_a_record_once(tiny_engine, recorded, probes):
    records = probes.records[RecordKind.PROTOTYPE]
    order = head_order(recorded.rank)
    batches = stored_batches(tiny_engine.model, recorded.store, order, probes, records)
    ids = np.concatenate([make().batch.ids.numpy() for make in batches])
    assert ids.tolist() == [
        token for ids, record in zip(probes.sequences, records, strict=True) if record >= 0 for token in ids
    ]


def test_stored_maps_are_at_their_heads_and_zero_for_heads_that_are_not_stored(recorded):
    order = head_order(recorded.rank)
    sequences = random_sequences([5, 5, 7])
    numbers = np.array([3, 1, 2])
    fewer = replace(recorded.store.layout, stored_heads=(4, 1, 0))

    class Fewer:
        """The store with a layout of fewer stored heads."""

        layout, segments = fewer, recorded.store.segments

    whole = stored_maps(recorded.store, order, pack(sequences), numbers)
    part = stored_maps(Fewer(), order, pack(sequences), numbers)
    for layer in range(3):
        for group, (length, records) in enumerate([(5, numbers[:2]), (7, numbers[2:])]):
            segment = recorded.store.segments[length]
            for row, record in enumerate(records.tolist()):
                stored = segment.layer_maps(record, layer, 4)
                for position, head in enumerate(order[layer]):
                    assert torch.equal(whole[layer][group][row, head], stored[position])
                    held = position < fewer.stored_heads[layer]
                    expected = stored[position] if held else torch.zeros_like(stored[position])
                    assert torch.equal(part[layer][group][row, head], expected)
