"""`benchmarks index` measures the vectors that the index finds, not the distances that it reports."""

import json

import numpy as np
import pytest
from command_line import run, succeeded

from attncache_core.reuse.maps import index as product
from benchmarks.__main__ import main
from benchmarks.measuring import index as bench
from benchmarks.measuring.index import Cloud

# Enough vectors for a compressed partition, which is built in a moment.
LARGE = product.EXACT_BELOW + 900


def measured(count: int) -> bench.IndexReport:
    return bench.measure(Cloud.RANDOM, count, 32, queries=8, threads=1, rounds=1, progress=lambda *_: None)


def test_command_reports_every_cloud_and_number_of_vectors(tmp_path):
    arguments = ("--vectors", 500, "--vectors", LARGE, "--dimensions", 32, "--queries", 8)
    file = tmp_path / "report.json"
    shared = ("--rounds", 3, "--threads", 1, "--json", file)
    stdout = succeeded(run("index", *arguments, *shared, program=main))
    report = json.loads(file.read_text("utf-8"))
    assert report["rounds"] == 3
    assert report["machine"]["threads"] == 1
    assert [(row["vectors"], row["cloud"]) for row in report["reports"]] == [
        (count, cloud) for count in (500, LARGE) for cloud in Cloud
    ]
    for row in report["reports"]:
        assert row["partition"] == ("exact" if row["vectors"] == 500 else "compressed")
        # The exact partition holds every vector in full.
        assert row["index_bytes"] >= row["vectors"] * 32 * 4
        assert row["queries"] == 8
        assert 0 < row["one"]["median"] <= row["one"]["p95"]
        assert 0 < row["many"]["median"] <= row["many"]["p95"]
        if row["partition"] == "exact":
            assert row["recall"] == 1
            assert abs(row["excess"]) < 1e-5
    assert "500 vectors x 32" in stdout
    assert f"{LARGE:,} vectors x 32" in stdout
    for cloud in Cloud:
        assert cloud in stdout


def test_recall_falls_if_fewer_vectors_are_compared_exactly(monkeypatch):
    sound = measured(LARGE)
    assert sound.partition == "compressed"
    assert sound.recall >= 0.99
    monkeypatch.setattr(product, "_COMPARED_EXACTLY", 1)
    crippled = measured(LARGE)
    assert crippled.recall < 0.9
    assert crippled.excess > sound.excess


def test_recall_does_not_trust_the_distances_of_the_index(monkeypatch):
    def lie(_index, _length, features):
        return np.zeros(len(features), dtype=np.int64), np.zeros(len(features), dtype=np.float32)

    monkeypatch.setattr(product.FeatureIndex, "nearest", lie)
    report = measured(500)
    assert report.recall < 0.05
    assert report.excess > 0.1


@pytest.mark.parametrize("cloud", Cloud)
def test_queries_are_new_and_brute_force_finds_the_nearest_of_several_blocks(cloud, monkeypatch):
    monkeypatch.setattr(bench, "_BLOCK", 700)
    vectors, queries = bench.draw(cloud, 2000, 32)
    assert not (queries[:, None] == vectors[None, :, :]).all(axis=2).any()
    found = bench.brute_force(vectors, queries[:50])
    distances = np.linalg.norm(queries[:50, None].astype(np.float64) - vectors, axis=2)
    assert found.tolist() == distances.argmin(axis=1).tolist()


def test_clusters_are_nearer_than_random_vectors():
    def typical(cloud: Cloud) -> float:
        vectors, queries = bench.draw(cloud, 6000, 64)
        nearest = vectors[bench.brute_force(vectors, queries)]
        return float(np.median(np.linalg.norm(nearest - queries, axis=1)))

    assert typical(Cloud.LARGE_CLUSTERS) < typical(Cloud.SMALL_CLUSTERS) < typical(Cloud.RANDOM)
