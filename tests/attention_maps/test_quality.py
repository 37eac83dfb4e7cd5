"""Probes, their nearest records, and the report on mask and projector, against brute force."""

import numpy as np
import pytest
import torch

from attncache_core.attention_maps.calibration import collect_maps, probed, substituted_outputs
from attncache_core.attention_maps.mask import damage_order, mildest_mask
from attncache_core.attention_maps.quality import (
    Probes,
    donor_distances,
    find_probes,
    masked_maps,
    measure_policy,
)
from attncache_core.attention_maps.sentences import Sentences
from attncache_core.attention_maps.store import (
    AttentionMapStore,
    RecordKind,
    RecordLayout,
    SegmentWriter,
    segment_path,
)
from attncache_core.tokens import pack

# In another order than the heads', so that a mix-up shows.
DAMAGE = np.array([[0.4, 0.1, 0.3, 0.2], [0.5, 0.9, 0.6, 0.7], [1.3, 1.2, 1.1, 1.0]])
ORDER = damage_order(DAMAGE)
MASKS = [mildest_mask(DAMAGE, size) for size in (2, 6, 12)]
COUNTS = {5: 60, 7: 40, 9: 12}
# Records keep 11 bits of a map; outputs are means over tokens of values about 1.
TOLERANCE = 2e-3


def made_sentences() -> Sentences:
    random = np.random.default_rng(11)
    sequences = [
        [2, *random.integers(5, 40, length - 2).tolist(), 3]
        for length, count in COUNTS.items()
        for _ in range(count)
    ]
    held_out = random.random(len(sequences)) < 0.3
    held_out[-COUNTS[9] :] = True  # no training sentence of the longest length
    return Sentences(sequences, held_out)


@pytest.fixture(scope="module")
def sentences():
    made = made_sentences()
    assert len({tuple(ids) for ids in made.sequences}) == sum(COUNTS.values())
    assert made.held_out.sum() - COUNTS[9] >= 20
    return made


@pytest.fixture(scope="module")
def features():
    random = np.random.default_rng(12)
    return {length: random.normal(size=(count, 8)).astype(np.float32) / 9 for length, count in COUNTS.items()}


@pytest.fixture(scope="module")
def store(tiny_engine, sentences, tmp_path_factory):
    folder, layout = tmp_path_factory.mktemp("store"), RecordLayout((4, 4, 4), torch.float16)
    for length, indices in sentences.by_length().items():
        with SegmentWriter(segment_path(folder, length), length, len(indices), layout) as writer:
            for index in indices:
                ids = sentences.sequences[index]
                maps = collect_maps(tiny_engine.model, pack([ids]))
                stored = [maps[layer][0][0, list(order)].half() for layer, order in enumerate(ORDER)]
                writer.append(stored, ids, RecordKind.STORED)
    return AttentionMapStore(folder, list(COUNTS), layout)


@pytest.fixture(scope="module")
def probes(sentences, features):
    return find_probes(sentences, features)


def test_probe_has_the_nearest_record_of_a_training_sentence(sentences, features, probes):
    place = 0
    for length, members in sentences.by_length().items():
        held = sentences.held_out[members]
        for row in np.flatnonzero(held):
            if held.all():
                continue
            distances = np.linalg.norm(features[length] - features[length][row], axis=1)
            distances[held] = np.inf
            assert probes.indices[place] == members[row]
            assert probes.records[place] == distances.argmin()
            assert probes.similarities[place] == pytest.approx(1 - distances.min(), abs=1e-6)
            place += 1
    assert place == len(probes.indices)


def test_held_out_sentences_of_a_length_without_records_are_counted(sentences, probes):
    assert probes.without_record == COUNTS[9]
    assert len(probes.indices) + probes.without_record == sentences.held_out.sum()


def substituted_cosines(model, sentences, probes, mask) -> np.ndarray:
    """Cosine of each probe alone, its maps computed anew from its donor's tokens in full precision."""
    by_length, cosines = sentences.by_length(), []
    for index, record in zip(probes.indices, probes.records, strict=True):
        ids = sentences.sequences[index]
        donor = sentences.sequences[by_length[len(ids)][record]]
        measured = probed(model, pack([ids]), collect_maps(model, pack([donor])))
        changed = substituted_outputs(model, measured, mask.as_array())
        left, right = torch.from_numpy(changed), torch.from_numpy(measured.outputs)
        cosines.append(torch.cosine_similarity(left, right).item())
    return np.array(cosines)


@pytest.mark.parametrize("threshold", [0.0, 0.75])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask.total} heads")
def test_reported_cosine_is_that_of_full_precision_maps(
    tiny_engine, sentences, store, probes, mask, threshold
):
    chosen, report = measure_policy(tiny_engine.model, sentences, store, probes, [mask], 0.0, threshold)
    hits = probes.similarities >= threshold
    cosines = substituted_cosines(tiny_engine.model, sentences, probes, mask)[hits]
    assert chosen is mask
    assert hits.any()
    assert report["mean_cosine"] == pytest.approx(cosines.mean(), abs=TOLERANCE)
    assert report["cosine_5th_percentile"] == pytest.approx(np.percentile(cosines, 5), abs=5 * TOLERANCE)
    # A held-out sentence without a record of its length is a miss, not left out.
    assert report["measured"] == len(hits) + COUNTS[9]
    assert report["hit_rate"] == pytest.approx(hits.sum() / (len(hits) + COUNTS[9]))


def test_chosen_mask_is_the_one_of_the_report_and_keeps_the_budget(tiny_engine, sentences, store, probes):
    seen = []
    mask, report = measure_policy(
        tiny_engine.model, sentences, store, probes, MASKS, 0.9, None, lambda *step: seen.append(step)
    )
    assert mask in MASKS
    assert mask.total == report["heads"]
    assert [row["heads"] for row in report["candidates"]] == [2, 6, 12]
    assert report["mean_cosine"] >= 0.9
    assert report["hit_rate"] * report["heads"] == max(
        row["hit_rate"] * row["heads"] for row in report["candidates"]
    )
    assert seen[-1] == (len(seen), len(seen))


def test_too_few_probes_measure_nothing_and_take_the_largest_mask(tiny_engine, sentences, store, probes):
    few = Probes(probes.indices[:19], probes.records[:19], probes.similarities[:19], 0)
    mask, report = measure_policy(tiny_engine.model, sentences, store, few, MASKS, 0.985)
    assert mask.total == 12
    assert report == {"measured": 0, "threshold": 1.0}
    assert measure_policy(tiny_engine.model, sentences, store, few, MASKS, 0.985, 0.5)[1]["threshold"] == 0.5


def test_masked_maps_are_the_masks_heads_of_the_records(store):
    mask = MASKS[1]  # 4, 2 and 0 heads
    maps = masked_maps(store, mask, 7, [3, 1])
    assert maps.dtype == torch.float32
    assert maps.shape == (2, 6, 7, 7)
    for row, record in enumerate((3, 1)):
        layers = [store.segments[7].layer_maps(record, layer, heads) for layer, heads in ((0, 4), (1, 2))]
        assert torch.equal(maps[row], torch.cat(layers).float())


def test_distances_of_the_report_are_those_of_brute_force(tiny_engine, sentences, store, probes):
    mask = MASKS[1]
    rows, by_length = [], sentences.by_length()

    def flat(length, record):
        return masked_maps(store, mask, length, [record]).numpy().reshape(-1, length)  # [heads * L, L]

    def row_inputs(index):
        return sentences.inputs(tiny_engine.model, [index])[0].flatten()

    for index, record, similarity in zip(probes.indices, probes.records, probes.similarities, strict=True):
        length = len(sentences.sequences[index])
        members = by_length[length]
        own = flat(length, members.index(index))
        recorded = [row for row in range(len(members)) if not sentences.held_out[members[row]]]
        true = {row: np.abs(own - flat(length, row)).sum(axis=1).mean() / 2 for row in recorded}
        nearest = min(recorded, key=lambda row: float((row_inputs(members[row]) - row_inputs(index)).norm()))
        chosen, all_of_them = true[int(record)], list(true.values())
        rows.append([chosen, min(all_of_them), true[nearest], np.mean(all_of_them), (1 - similarity) / 0.2])
    report = donor_distances(tiny_engine.model, sentences, store, probes, mask)
    names = ("chosen", "best", "nearest_by_input", "random", "predicted")
    assert report == pytest.approx(dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True)), abs=1e-5)


def test_without_probes_there_are_no_distances(tiny_engine, sentences, store):
    nobody = Probes([], np.array([]), np.array([]), 3)
    assert donor_distances(tiny_engine.model, sentences, store, nobody, MASKS[0]) == {}
