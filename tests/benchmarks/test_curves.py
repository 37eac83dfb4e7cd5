"""Points of the curves equal the results of real engines, and similarities equal plain map distances."""

from dataclasses import replace

import numpy as np
import pytest
from core_models import prefill, random_sequences
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.calibration.probes import find_probes
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.comparator import Measure
from attncache_core.heads.vectors import cosines
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.policy import KindPolicy, LengthGroup, ReusePolicy
from attncache_core.reuse.mask import mildest_mask
from attncache_core.reuse.storage.layout import RecordKind
from benchmarks.papers.curves import THRESHOLDS, Point, measure_curves, pareto_front

FULL_MICROSECONDS = 50.0
COMPARED = 8  # number of heads with compared maps: two thirds of twelve

points = st.builds(
    Point,
    family=st.just("any"),
    heads=st.integers(1, 12),
    hit_rate=st.just(1.0),
    saved=st.integers(0, 8).map(float),
    quality=st.integers(0, 8).map(float),
)


@given(st.lists(points, max_size=20))
def test_front_ascends_in_saved_time_descends_in_quality_and_no_point_beats_it(points):
    found = pareto_front(points)
    saved, quality = [p.saved for p in found], [p.quality for p in found]
    assert saved == sorted(set(saved))
    assert quality == sorted(set(quality), reverse=True)
    assert all(point in points for point in found)
    for point in points:
        # The front has a point that is as good, and no point that this one beats.
        assert any(other.saved >= point.saved and other.quality >= point.quality for other in found)
        assert not any(
            point.saved >= other.saved
            and point.quality >= other.quality
            and (point.saved, point.quality) != (other.saved, other.quality)
            for other in found
        )


@pytest.fixture(scope="module")
def sequences():
    return random_sequences([5, 6, 7, 8, 9, 10] * 6, seed=61)


@pytest.fixture(scope="module")
def database(tiny_prototypes_database):
    return AttentionDatabase.open(tiny_prototypes_database, heads="5")


@pytest.fixture(scope="module")
def probes(tiny_engine, database, sequences):
    return find_probes(tiny_engine.model, database.search, sequences)


@pytest.fixture(scope="module")
def rank(database):
    return np.array(database.manifest.rank)


def saved_per_hit(lengths: np.ndarray, heads: int) -> np.ndarray:
    return lengths * heads / 10


def measured(engine, database, probes):
    return measure_curves(
        engine.model,
        database.search.store,
        probes,
        np.array(database.manifest.rank),
        database.mask,
        engine.decisions.comparator(Measure.COSINE),
        saved_per_hit,
        FULL_MICROSECONDS,
    )


@pytest.fixture(scope="module")
def curves(tiny_engine, database, probes):
    return measured(tiny_engine, database, probes)


@pytest.fixture(scope="module")
def served(tiny_checkpoint, tiny_engine, tiny_prototypes_database, probes):
    """A function that returns cosines and similarities of all probes for (heads, kind), by an engine.

    In the engine, all probes hit records of this kind.
    """
    full = prefill(tiny_engine, probes.sequences, reuse=False).outputs
    made = {}

    def served(heads: str, kind: RecordKind):
        if (heads, kind) not in made:
            database = AttentionDatabase.open(tiny_prototypes_database, heads=heads)
            kinds = {each: KindPolicy(-100.0 if each is kind else 2.0) for each in RecordKind}
            policy = ReusePolicy(database.search.policy.budget, (LengthGroup(1, kinds),))
            database = replace(database, search=replace(database.search, policy=policy))
            engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
            result = prefill(engine, probes.sequences)
            assert all(outcome.is_hit for outcome in result.outcomes)
            made[heads, kind] = cosines(result.outputs, full), result.similarities
        return made[heads, kind]

    return served


def of_family(curves, family: str) -> list[Point]:
    return [point for point in curves.points if point.family == family]


def assert_points(points, heads: int, lengths, similarities, quality) -> None:
    """Assert that these are the 20 points of a mask if the most similar probes hit first."""
    order = np.argsort(-similarities.astype(np.float64), kind="stable")
    shares = [round(share * len(order)) for share in np.arange(1, 21) / 20]
    assert [point.hit_rate for point in points] == [count / len(order) for count in shares]
    for point, count in zip(points, shares, strict=True):
        hits = order[:count]
        saved = sum(lengths[probe] / 10 * heads for probe in hits) / len(order) / FULL_MICROSECONDS
        assert point.heads == heads
        assert point.saved == pytest.approx(saved)
        assert point.quality == pytest.approx(quality[hits].mean(), abs=2e-3)


def test_points_of_all_heads_equal_the_results_of_an_engine(curves, served, probes):
    quality, similarities = served("all", RecordKind.STORED)
    assert_points(of_family(curves, "all heads"), 12, probes.lengths, similarities, quality)


def test_points_of_whole_layers_equal_the_results_of_engines(curves, served, probes, rank):
    found = of_family(curves, "whole layers")
    order = np.argsort(rank.mean(axis=1), kind="stable").tolist()
    assert len(found) == 2 * 20
    for count in (1, 2):
        chosen = "layers:" + ",".join(map(str, sorted(order[:count])))
        quality, similarities = served(chosen, RecordKind.STORED)
        mine = found[20 * (count - 1) : 20 * count]
        assert_points(mine, 4 * count, probes.lengths, similarities, quality)


@pytest.mark.parametrize("heads", [1, 6, 12])
def test_points_of_prototypes_equal_the_results_of_engines(curves, served, probes, heads):
    found = [point for point in of_family(curves, "prototypes only") if point.heads == heads]
    quality, similarities = served(str(heads), RecordKind.PROTOTYPE)
    assert_points(found, heads, probes.lengths, similarities, quality)


@pytest.mark.parametrize("heads", [1, 6, 12])
def test_quality_of_the_better_kind_lies_between_the_worst_and_the_best_kind(curves, served, probes, heads):
    """The kind of each probe is not reported, so the mean is compared with the worst and the best choice."""
    last = [point for point in of_family(curves, "mildest heads, better kind") if point.heads == heads][-1]
    qualities = np.array([served(str(heads), kind)[0] for kind in RecordKind])
    assert last.hit_rate == 1
    assert last.saved == pytest.approx(probes.lengths.mean() / 10 * heads / FULL_MICROSECONDS)
    assert qualities.min(axis=0).mean() - 2e-3 <= last.quality <= qualities.max(axis=0).mean() + 2e-3
    # The choice by expected damage must not be worse than any single kind.
    assert last.quality >= qualities.mean(axis=1).max() - 5e-3


@pytest.mark.parametrize(("mask", "heads"), [("all heads", "all"), ("the policy's heads", "5")])
def test_points_by_threshold_equal_the_results_of_an_engine(curves, served, mask, heads):
    quality, similarities = served(heads, RecordKind.STORED)
    points = [point for point in curves.thresholds if point.mask == mask]
    assert [point.threshold for point in points] == THRESHOLDS.tolist()
    assert {point.heads for point in points} == {12 if heads == "all" else 5}
    for point in points:
        hits = similarities >= point.threshold
        assert point.hit_rate == hits.mean()
        assert point.quality_of_all == pytest.approx(np.where(hits, quality, 1).mean(), abs=2e-3)
        if hits.any():
            assert point.quality == pytest.approx(quality[hits].mean(), abs=2e-3)
        else:
            assert point.quality is None


def map_distance(reference, mask, ids: list[int], other: list[int]) -> float:
    """Return the mean total variation distance of the maps over the mask's heads, computed head by head."""
    mine, theirs = reference.maps(ids), reference.maps(other)
    heads = zip(*np.nonzero(mask.as_array()), strict=True)
    distances = [float((mine[head] - theirs[head]).abs().sum(dim=1).mean()) / 2 for head in heads]
    assert len(distances) == mask.total
    return sum(distances) / len(distances)


@pytest.fixture(scope="module")
def recorded(tiny_engine, tiny_corpus):
    return tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])


def test_true_similarities_equal_plain_map_distances(
    curves, tiny_reference, database, probes, rank, recorded
):
    mask = mildest_mask(rank, COMPARED)
    predicted, true = curves.similarities[RecordKind.STORED]
    np.testing.assert_array_equal(predicted, probes.similarities[RecordKind.STORED])
    assert len(true) == len(probes.sequences)
    numbers = {(len(ids), database.search.store.record_of(ids)): ids for ids in recorded}
    for probe in range(0, len(true), 7):
        ids = probes.sequences[probe]
        donor = numbers[len(ids), int(probes.records[RecordKind.STORED][probe])]
        distance = map_distance(tiny_reference, mask, ids, donor)
        assert true[probe] == pytest.approx(1 - 0.2 * distance, abs=1e-3)


def test_true_similarity_of_a_mean_equals_the_plain_distance_from_the_mean_maps(
    curves, tiny_reference, database, probes, rank, recorded
):
    mask = mildest_mask(rank, COMPARED)
    ids = probes.sequences[0]
    maps, others = (
        tiny_reference.maps(ids),
        [tiny_reference.maps(other) for other in recorded if len(other) == len(ids)],
    )
    segment = database.search.store.segments[len(ids)]
    assert len(others) == (segment.kinds == RecordKind.STORED).sum()
    distances = []
    for head in zip(*np.nonzero(mask.as_array()), strict=True):
        mean = sum(maps[head] for maps in others) / len(others)
        distances.append(float((maps[head] - mean).abs().sum(dim=1).mean()) / 2)
    true = curves.similarities[RecordKind.MEAN][1]
    assert true[0] == pytest.approx(1 - 0.2 * np.mean(distances), abs=3e-3)


@pytest.fixture(scope="module")
def best(tiny_reference, probes, rank, recorded):
    """For each probe the recorded sequence with the least map distance by brute force, and this distance."""
    heads = list(zip(*np.nonzero(mildest_mask(rank, COMPARED).as_array()), strict=True))

    def stacked(ids):
        maps = tiny_reference.maps(ids)
        return np.stack([maps[head].numpy() for head in heads])

    maps_of = [stacked(ids) for ids in recorded]
    found = []
    for ids in probes.sequences:
        stored = stacked(ids)
        distances = [
            np.abs(stored - maps).sum(axis=2).mean() / 2 if len(other) == len(ids) else np.inf
            for other, maps in zip(recorded, maps_of, strict=True)
        ]
        found.append((recorded[int(np.argmin(distances))], min(distances)))
    return found


def test_no_found_record_is_nearer_than_the_best_record(curves, best):
    nearest = 1 - 0.2 * np.array([distance for _, distance in best])
    assert (nearest >= curves.similarities[RecordKind.STORED][1] - 1e-3).all()


@pytest.mark.parametrize("heads", [1, 6, 12])
def test_quality_of_the_best_records_equals_outputs_with_their_maps(
    curves, best, tiny_reference, probes, rank, heads
):
    reused = [
        tuple(map(int, head)) for head in zip(*np.nonzero(mildest_mask(rank, heads).as_array()), strict=True)
    ]
    quality = []
    for ids, (record, _) in zip(probes.sequences, best, strict=True):
        maps = tiny_reference.maps(record)
        changed = tiny_reference.hidden_with_maps(ids, {head: maps[head] for head in reused})
        rows = [hidden.mean(dim=0, keepdim=True).numpy() for hidden in (tiny_reference.hidden(ids), changed)]
        quality.append(float(cosines(*rows)[0]))
    last = [point for point in of_family(curves, "best stored record") if point.heads == heads][-1]
    assert last.hit_rate == 1
    assert last.quality == pytest.approx(np.mean(quality), abs=2e-3)


def test_without_prototypes_their_family_is_missing(tiny_engine, tiny_database, sequences):
    database = AttentionDatabase.open(tiny_database)
    found = measured(tiny_engine, database, find_probes(tiny_engine.model, database.search, sequences))
    families = {point.family for point in found.points}
    assert families == {"mildest heads, better kind", "whole layers", "all heads", "best stored record"}
    counts = {kind: len(true) for kind, (_, true) in found.similarities.items()}
    assert counts == {RecordKind.STORED: len(sequences), RecordKind.PROTOTYPE: 0, RecordKind.MEAN: 0}
