"""The true map distance of the records that the projector chooses, against brute force."""

import numpy as np
import pytest
import torch

from attncache_core.build.quality import donor_distances
from attncache_core.build.sentences import Sentences
from attncache_core.build.training import masked_maps
from attncache_core.calibration.probes import find_probes
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.mask import mildest_mask
from attncache_core.reuse.storage.layout import RecordKind

STORED = RecordKind.STORED
NAMES = ("chosen", "best", "nearest_by_input", "random", "predicted")


@pytest.fixture(scope="module")
def mask(recorded):
    chosen = mildest_mask(recorded.rank, 6)
    assert chosen.reused == (4, 2, 0)
    return chosen


@pytest.fixture(scope="module")
def probes(tiny_engine, recorded):
    return find_probes(tiny_engine.model, recorded.search, recorded.held_out)


def test_masked_maps_are_the_masks_heads_of_the_records(recorded, mask):
    maps = masked_maps(recorded.store, mask, 7, [3, 1])
    assert maps.dtype == torch.float32
    assert maps.shape == (2, 6, 7, 7)
    for row, record in enumerate((3, 1)):
        segment = recorded.store.segments[7]
        layers = [segment.layer_maps(record, layer, heads) for layer, heads in ((0, 4), (1, 2))]
        assert torch.equal(maps[row], torch.cat(layers).float())


def brute_force(recorded, probes, mask) -> np.ndarray:
    """Return the five distances of each probe with a record, in the order of NAMES."""
    sentences, by_length, rows = recorded.sentences, recorded.recording.by_length, []

    def flat(length, record):
        return masked_maps(recorded.store, mask, length, [record]).numpy().reshape(-1, length)

    def inputs(index):
        return recorded.first_inputs.of(sentences.chosen([index]))[0].flatten()

    for ids, record, similarity in zip(
        probes.sequences, probes.records[STORED], probes.similarities[STORED], strict=True
    ):
        if record < 0:
            continue
        members = by_length[len(ids)]
        (row,) = (row for row, index in enumerate(members) if sentences.sequences[index] == ids)
        maps = flat(len(ids), row)
        recorded_rows = [row for row in range(len(members)) if not sentences.held_out[members[row]]]
        true = {other: np.abs(maps - flat(len(ids), other)).sum(axis=1).mean() / 2 for other in recorded_rows}
        nearest = min(
            recorded_rows, key=lambda other: float((inputs(members[other]) - inputs(members[row])).norm())
        )
        everyone = list(true.values())
        rows.append(
            [true[int(record)], min(everyone), true[nearest], np.mean(everyone), (1 - similarity) / 0.2]
        )
    return np.array(rows)


def test_distances_of_the_report_equal_those_of_brute_force(recorded, probes, mask):
    rows = brute_force(recorded, probes, mask)
    near = rows[np.argsort(rows[:, -1], kind="stable")[: round(0.3 * len(rows))]]
    assert 1 < len(near) < len(rows)
    expected = dict(zip(NAMES, rows.mean(axis=0).tolist(), strict=True))
    expected |= {f"{name}_near": mean for name, mean in zip(NAMES, near.mean(axis=0).tolist(), strict=True)}
    projectors = {"chosen": recorded.search.projector}
    report = donor_distances(recorded.first_inputs, recorded.sentences, recorded.store, projectors, mask)
    assert report == pytest.approx(expected, abs=1e-5)


def test_each_projectors_choice_is_measured(recorded, mask):
    torch.manual_seed(2)
    other = FeatureProjector(recorded.search.projector.hidden_size, 9).requires_grad_(False)
    report = donor_distances(
        recorded.first_inputs,
        recorded.sentences,
        recorded.store,
        {"chosen": recorded.search.projector, "chosen_before": other},
        mask,
    )
    alone = donor_distances(
        recorded.first_inputs, recorded.sentences, recorded.store, {"chosen_before": other}, mask
    )
    assert report["chosen_before"] == pytest.approx(alone["chosen_before"])
    assert report["chosen"] != pytest.approx(report["chosen_before"], abs=1e-4)
    assert report["best"] <= min(report["chosen"], report["chosen_before"])


def test_without_held_out_sentences_of_a_recorded_length_there_are_no_distances(recorded, mask):
    longest = [ids for ids in recorded.sentences.sequences if len(ids) == 9]
    assert len(longest) == 12
    nobody = Sentences(longest, np.ones(12, dtype=bool))
    projectors = {"chosen": recorded.search.projector}
    assert donor_distances(recorded.first_inputs, nobody, recorded.store, projectors, mask) == {}
