"""`python -m benchmarks evaluate` compares the papers' baselines, and plots curves of a database."""

import csv
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import assert_one_line, model_arguments, succeeded
from command_line import run as run_command
from core_models import random_text

from attncache_core import AttentionDatabase, BuildOptions
from attncache_core.build.builder import build_database
from benchmarks.__main__ import main
from benchmarks.papers.curves import THRESHOLDS
from benchmarks.papers.methods import PAPER_METHODS, Preset
from benchmarks.papers.per_layer_search import train_layerwise_search

run = partial(run_command, program=main)


@pytest.fixture(scope="module")
def files(tiny_corpus, tmp_path_factory) -> Path:
    """A folder with the recorded texts in corpus.txt, and 60 other texts of 3 to 8 words in texts.txt."""
    folder = tmp_path_factory.mktemp("evaluated")
    random = np.random.default_rng(83)
    recorded = [sentence.text for sentence in tiny_corpus]
    unseen = [random_text(random, words) for words in np.repeat(np.arange(3, 9), 10)]
    assert len(set(unseen) - set(recorded)) == 60
    for name, texts in (("corpus.txt", recorded), ("texts.txt", unseen)):
        (folder / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
    return folder


def test_methods_of_the_papers_have_a_row_each_with_their_figures(
    tiny_checkpoint, tiny_database, files, tmp_path, monkeypatch
):
    monkeypatch.setitem(train_layerwise_search.__kwdefaults__, "steps", 5)
    sources = ("--database", tiny_database, "--corpus", files / "corpus.txt", "--data", files / "texts.txt")
    options = ("--methods", ",".join(PAPER_METHODS), "--san-threshold", "0", "--rounds", "1")
    outputs = ("--markdown", tmp_path / "a.md", *options)
    text = succeeded(run("evaluate", "agreement", *model_arguments(tiny_checkpoint), *sources, *outputs))
    assert "0 of 240 corpus texts excluded" in text
    rows = [
        line.strip("|").split("|") for line in (tmp_path / "a.md").read_text(encoding="utf-8").splitlines()
    ]
    table = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert table[""] == list(PAPER_METHODS)
    cosines = dict(zip(PAPER_METHODS, table["cosine of the hits"], strict=True))
    assert cosines["full"] == ""
    # A method that shares maps between layers changes every text; below a divergence of 0, SAN shares none.
    assert 0 < float(cosines["lazyformer"]) < 1
    assert cosines["san"] == "1.0000"


PLOTS = ("damage", "presets", "quality_against_time", "similarity", "thresholds")


def curves(checkpoint, database: Path, data: object, output: Path, *options: object):
    arguments = ("--database", database, "--data", data, "--output", output, *options)
    return run("evaluate", "curves", *model_arguments(checkpoint), *arguments)


@pytest.fixture(scope="module")
def plotted(tiny_checkpoint, tiny_prototypes_database, files, tmp_path_factory):
    """The folder of the plots, and the output of the command."""
    folder = tmp_path_factory.mktemp("plots") / "new" / "folder"
    data = files / "texts.txt"
    text = succeeded(curves(tiny_checkpoint, tiny_prototypes_database, data, folder, "--most", 40))
    return folder, text


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_five_plots_and_their_data_are_written_and_named(plotted):
    folder, text = plotted
    names = sorted(f"{name}.{ending}" for name in PLOTS for ending in ("csv", "png"))
    assert sorted(path.name for path in folder.iterdir()) == names
    assert text == f"{folder}: {', '.join(names)}\n"
    for path in folder.glob("*.png"):
        assert path.stat().st_size > 5000, path  # not an empty picture


def test_data_of_the_plots_have_all_rows_and_columns(plotted, tiny_prototypes_database):
    folder, _ = plotted
    points = rows_of(folder / "quality_against_time.csv")
    assert list(points[0]) == ["family", "heads", "hit_rate", "saved", "quality"]
    assert Counter(row["family"] for row in points) == {
        "mildest heads, better kind": 240,
        "whole layers": 40,
        "all heads": 20,
        "prototypes only": 240,
        "best stored record": 240,
    }
    for row in points:
        assert 0 < float(row["hit_rate"]) <= 1
        assert -1 <= float(row["quality"]) <= 1 + 1e-6
        assert float(row["saved"]) < 1  # a share of the full model's time; negative if hits take longer

    damage = AttentionDatabase.open(tiny_prototypes_database).manifest.damage
    assert rows_of(folder / "damage.csv") == [
        {"layer": str(layer), "head": str(head), "damage": str(damage[layer][head])}
        for layer in range(3)
        for head in range(4)
    ]

    similarities = rows_of(folder / "similarity.csv")
    assert list(similarities[0]) == ["kind", "predicted", "true"]
    assert Counter(row["kind"] for row in similarities) == {"stored": 40, "prototype": 40, "mean": 40}
    for row in similarities:
        assert 0.8 <= float(row["true"]) < 1  # the distance is at most 1, and α is 0.2
        assert float(row["predicted"]) < 1

    thresholds = rows_of(folder / "thresholds.csv")
    columns = ["mask", "heads", "threshold", "hit_rate", "quality_of_hits", "quality_of_all"]
    assert list(thresholds[0]) == columns
    assert [(row["mask"], float(row["threshold"])) for row in thresholds] == [
        (mask, threshold) for mask in ("all heads", "the policy's heads") for threshold in THRESHOLDS
    ]
    for row in thresholds:
        assert (row["quality_of_hits"] == "") == (float(row["hit_rate"]) == 0)
        assert 0 < float(row["quality_of_all"]) <= 1 + 1e-6

    presets = rows_of(folder / "presets.csv")
    assert list(presets[0]) == ["method", "hit_rate", "score", "speedup", "attention_speedup"]
    names = ["full", "attncache", *(f"attncache:{each}" for each in Preset)]
    assert [row["method"] for row in presets] == names
    full, policy, *_ = presets
    assert [float(full[name]) for name in ("hit_rate", "speedup", "attention_speedup")] == [0, 1, 1]
    assert float(full["score"]) == pytest.approx(1)
    assert float(policy["hit_rate"]) == 1  # the θ of the policy is 0
    assert all(float(row["speedup"]) > 0 for row in presets)


def test_curves_that_would_be_wrong_are_refused_in_one_line(
    tiny_checkpoint,
    tiny_classifier_checkpoint,
    tiny_prototypes_database,
    tiny_engine,
    tiny_corpus,
    files,
    tmp_path,
):
    output, texts = tmp_path / "out", files / "texts.txt"
    result = curves(tiny_checkpoint, tiny_prototypes_database, files / "corpus.txt", output)
    assert_one_line(result, "0 of the texts are not in the database", "at least 20 such texts are needed")
    result = curves(tiny_classifier_checkpoint, tiny_prototypes_database, texts, output)
    assert_one_line(result, "fingerprint", "build a database")
    options = BuildOptions(heads="layers:0-1", threshold=0.0, prototypes=0, training_steps=5)
    build_database(tiny_engine, tiny_corpus, tmp_path / "some.db", options)
    result = curves(tiny_checkpoint, tmp_path / "some.db", texts, output)
    assert_one_line(result, "8 of 12 heads", "build a database without --heads")
    assert not output.exists()
