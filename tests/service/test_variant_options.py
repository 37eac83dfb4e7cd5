"""Variants of a model, in all commands: `--drop-attention`, `--drop-block` and `--quantize`."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from command_line import PRIVATE, assert_one_line, model_arguments, run, succeeded
from core_models import prefill, random_sequences

from attncache_core import (
    AttentionDatabase,
    DatabaseRefused,
    InvalidInput,
    LinearClassifier,
    Outcome,
    PrefillEngine,
    Quantization,
    find_variant,
)
from attncache_core.evaluation.importance import measure_importance
from attncache_core.heads.vectors import cosines
from benchmarks.__main__ import main as benchmarks
from benchmarks.measuring.worker import Worker
from service.loading.checkpoints import checkpoint_of
from service.loading.engines import load_engine
from service.settings import read_settings

DROPPED = ("--drop-attention", "1", "--drop-block", "2")
# A quantisation that every processor can compute.
KIND = Quantization.INT8_WEIGHT_ONLY
pytestmark = pytest.mark.usefixtures("fixed_costs")


@pytest.fixture(scope="module")
def built(tiny_checkpoint, files, tmp_path_factory, few_steps):  # noqa: ARG001 - trains less
    """A database of the tiny model with attention in one layer only, and the output of the build."""
    folder = tmp_path_factory.mktemp("built") / "pruned.db"
    options = ("--corpus", files / "corpus.tsv", "--database", folder, "--heads", "all", "--threshold", "0.5")
    return folder, succeeded(run("build", *model_arguments(tiny_checkpoint), *DROPPED, *options))


@pytest.fixture
def pruned(tiny_checkpoint):
    return find_variant(str(tiny_checkpoint.folder), drop_attention="1", drop_block="2")


def importance(checkpoint, *arguments):
    return run("importance", *model_arguments(checkpoint), *arguments, program=benchmarks)


def test_importance_of_every_layer_is_shown_and_kept(tiny_checkpoint, tiny_engine, files, tmp_path):
    report = tmp_path / "importance.json"
    shown = succeeded(
        importance(tiny_checkpoint, "--texts", f"{files / 'corpus.tsv'}:text", "--json", report)
    )
    kept = json.loads(report.read_text())
    texts = [line.split("\t")[0] for line in (files / "corpus.tsv").read_text().splitlines()[1:]]
    found = measure_importance(tiny_engine.model, tiny_engine.tokenize(texts))
    for name, expected in (("attention", found.attention), ("blocks", found.blocks)):
        np.testing.assert_allclose(kept[name], expected, rtol=1e-6)
        in_order = kept[f"{name}_least_important_first"]
        assert sorted(in_order) == [0, 1, 2]
        assert (np.diff(np.array(kept[name])[in_order]) > 0).all()
        for value in expected:
            assert f"{value:.4f}" in shown
    assert "[" not in shown.partition("┏")[2]  # no markup
    assert kept["machine"]["texts"] == len(texts) == 120
    assert "processor" in shown
    least = [kept[f"{name}_least_important_first"][0] for name in ("attention", "blocks")]
    assert "--drop-attention {}, --drop-block {}".format(*least) in shown


def test_sample_of_the_shipped_corpus_is_measured_by_default(tiny_checkpoint, tmp_path):
    succeeded(importance(tiny_checkpoint, "--sample", "7", "--json", tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text())["machine"]["texts"] == 7


def test_importance_of_no_texts_or_of_a_part_of_the_layers_is_refused(tiny_checkpoint, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    assert_one_line(importance(tiny_checkpoint, "--texts", tmp_path / "empty.txt"), "no texts")
    assert_one_line(importance(tiny_checkpoint, "--drop-block", "1"), "--drop-block")


def test_built_database_says_what_was_dropped(built):
    folder, shown = built
    manifest = AttentionDatabase.open(folder).manifest
    assert manifest.build["variant"] == {"dropped_attention": [1], "dropped_blocks": [2]}
    assert len(manifest.reused_heads) == 1
    assert "variant      dropped attention [1], dropped blocks [2]" in shown
    assert succeeded(run("inspect", folder)) == shown


def test_server_runs_the_model_it_is_told_with_its_database(
    built, tiny_checkpoint, pruned, files, loaded, monkeypatch
):
    monkeypatch.setenv("ATTNCACHE_DROP_BLOCK", "2")
    options = ("--drop-attention", "1", "--database", built[0], "--min-gain", "0", "--port", "0")
    succeeded(run("serve", *model_arguments(tiny_checkpoint), *options))
    (engine,) = loaded
    assert engine.info().variant == {"dropped_attention": [1], "dropped_blocks": [2]}
    text = (files / "corpus.tsv").read_text().splitlines()[1].split("\t")[0]
    result = prefill(engine, engine.tokenize([text]))
    assert result.outcomes == (Outcome.HIT,)
    full = PrefillEngine.load(pruned, dtype="float32")
    np.testing.assert_allclose(
        result.outputs, prefill(full, full.tokenize([text]), reuse=False).outputs, atol=2e-3
    )


@pytest.mark.parametrize("nothing", ["", " "])
def test_server_that_drops_nothing_runs_the_whole_model(tiny_checkpoint, tiny_engine, nothing):
    settings = read_settings({"dtype": "float32", "reuse": False, "drop_attention": nothing})
    checkpoint = find_variant(str(tiny_checkpoint.folder), drop_attention=settings.drop_attention)
    engine = load_engine(settings, checkpoint)
    assert engine.info().variant == {}
    np.testing.assert_array_equal(engine.embed(["my card"]), tiny_engine.embed(["my card"]))


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("calibrate --min-text-cosine 0", ("--texts",)),
        ("evaluate agreement", ("--data",)),
        ("evaluate classification", ("--train", "--data")),
    ],
)
def test_command_opens_the_database_only_if_the_same_layers_are_dropped(
    command, options, built, files, tiny_checkpoint, tmp_path
):
    suffix = "" if "--train" in options else ":text"
    arguments = (
        *command.split(),
        *(part for option in options for part in (option, f"{files / 'unseen.tsv'}{suffix}")),
        "--database",
        shutil.copytree(built[0], tmp_path / "a.db"),  # a copy, because calibrating changes the database
        *model_arguments(tiny_checkpoint),
    )
    succeeded(run(*arguments, *DROPPED))
    for other in ((), ("--drop-attention", "2", "--drop-block", "1")):
        refused = run(*arguments, *other)
        assert refused.exit_code == 2
        assert "layers dropped" in refused.stderr


def test_evaluation_says_what_was_dropped(files, tiny_checkpoint, tmp_path):
    data = ("--data", f"{files / 'unseen.tsv'}:text", "--methods", "full", "--json", tmp_path / "a.json")
    succeeded(run("evaluate", "agreement", *model_arguments(tiny_checkpoint), *DROPPED, *data))
    facts = json.loads((tmp_path / "a.json").read_text())["machine"]
    assert (facts["dropped_attention"], facts["dropped_blocks"]) == ([1], [2])


def test_classifier_is_bound_to_what_is_dropped(files, tiny_checkpoint, pruned, tmp_path):
    options = ("--data", files / "corpus.tsv", "--output", tmp_path / "fitted")
    succeeded(run("fit-classifier", *model_arguments(tiny_checkpoint), *DROPPED, *options))
    classifier = LinearClassifier.load(tmp_path / "fitted")
    assert classifier.fingerprint == pruned.embedding_fingerprint() != tiny_checkpoint.embedding_fingerprint()


@pytest.mark.parametrize("command", [("serve",), ("build", "--corpus", "a.txt", "--database", "a.db")])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--drop-attention", "3"), "drop_attention: the model has layers 0 to 2"),
        (("--drop-block", PRIVATE), "drop_block: layers are written like"),
        (("--drop-attention", "0-2"), "at least one layer must keep its attention"),
        (("--quantize", "int3"), "'int8', 'int8-weight-only'"),
    ],
)
def test_variant_that_there_is_not_is_refused_in_one_line(tiny_checkpoint, command, given, words):
    assert_one_line(run(*command, *model_arguments(tiny_checkpoint), *given), words)


@pytest.mark.usefixtures("forked_peers")
def test_engine_is_timed_without_what_is_dropped(tiny_checkpoint, pruned):
    dropped = {"quantization": None, "drop_attention": "1", "drop_block": "2"}
    worker = Worker("attncache fp32", {"model": str(tiny_checkpoint.folder), **dropped}, 1, [])
    try:
        worker.load()
        assert worker.absent is None
        sequences = random_sequences([6, 6])
        expected = prefill(PrefillEngine.load(pruned, dtype="float32"), sequences, reuse=False).outputs
        np.testing.assert_allclose(worker.embeddings(tokens=sequences), expected, atol=1e-5)
    finally:
        worker.close()


# Quantisation.


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint):
    return replace(tiny_checkpoint, quantization=KIND)


@pytest.fixture(scope="module")
def built_quantized(tiny_checkpoint, files, tmp_path_factory, few_steps):  # noqa: ARG001 - trains less
    folder = tmp_path_factory.mktemp("built") / "quantized.db"
    options = ("--corpus", files / "corpus.tsv", "--database", folder, "--heads", "all", "--threshold", "0.5")
    succeeded(run("build", *model_arguments(tiny_checkpoint), "--quantize", KIND, *options))
    return folder


def test_database_is_bound_to_the_quantisation_it_was_built_with(built_quantized, quantized, tiny_checkpoint):
    database = AttentionDatabase.open(built_quantized)
    assert database.manifest.fingerprint == quantized.fingerprint()
    for other in (tiny_checkpoint, replace(tiny_checkpoint, quantization=Quantization.INT4)):
        with pytest.raises(DatabaseRefused, match="quantisation"):
            PrefillEngine.load(other, database=database, dtype="float32")


def test_recorded_text_hits_itself_and_keeps_its_embedding(built_quantized, quantized, tiny_corpus):
    engine = PrefillEngine.load(quantized, database=AttentionDatabase.open(built_quantized), dtype="float32")
    sequences = engine.tokenize([sentence.text for sentence in tiny_corpus[:40:2]])
    hits, full = (prefill(engine, sequences, reuse=reuse) for reuse in (True, False))
    assert set(hits.outcomes) == {Outcome.HIT}
    # The tolerance is for records, which hold maps in 16 bits.
    assert cosines(hits.outputs, full.outputs).min() > 0.9999


def test_server_computes_with_the_quantisation_it_is_told(
    built_quantized, tiny_checkpoint, tiny_engine, tiny_corpus
):
    settings = read_settings(
        {"dtype": "float32", "quantize": "int8-weight-only", "database": str(built_quantized)}
    )
    engine = load_engine(settings, find_variant(str(tiny_checkpoint.folder), quantization=settings.quantize))
    assert engine.info().variant == {"quantization": "int8-weight-only"}
    texts = [tiny_corpus[0].text]
    ours, full = (each.embed(texts, reuse=False) for each in (engine, tiny_engine))
    assert np.abs(ours - full).max() > 1e-5
    assert cosines(ours, full).min() > 0.999


TEXTS = tuple(f"text {number}" for number in range(20))


def texts_file(folder, content):
    if content is not None:
        (folder / "texts.txt").write_bytes(content)
    return folder / "texts.txt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "texts.txt cannot be read: No such file or directory"),
        (b"", "texts.txt has no texts"),
        (b"\n\n", "texts.txt has no texts"),
        (b"one\ntwo\n", "quantize_texts needs at least 16 texts, and has 2"),
        ("ä".encode("latin-1") + b"bc\n" * 20, "texts.txt, line 1 is not UTF-8; save the file as UTF-8"),
    ],
)
@pytest.mark.parametrize("command", [("build", "--corpus", "a.txt", "--database", "a.db"), ("serve",)])
def test_file_without_usable_texts_is_refused(command, content, message, tiny_checkpoint, tmp_path):
    options = ("--model", tiny_checkpoint.folder, "--quantize", "int8")
    refused = run(*command, *options, "--quantize-texts", texts_file(tmp_path, content))
    assert refused.exit_code == 2
    assert message in refused.stderr


@pytest.mark.parametrize("kind", [(), ("--quantize", "int4")])
def test_texts_are_refused_where_they_have_no_effect(kind, tiny_checkpoint, tmp_path):
    texts = texts_file(tmp_path, "\n".join(TEXTS).encode())
    refused = run("serve", "--model", tiny_checkpoint.folder, *kind, "--quantize-texts", texts)
    assert refused.exit_code == 2
    assert "quantize_texts calibrates int8 only" in refused.stderr


def test_texts_of_the_option_calibrate_the_model(tiny_checkpoint, tmp_path):
    texts = texts_file(tmp_path, "\n".join(TEXTS).encode())
    settings = {"model": str(tiny_checkpoint.folder), "quantize": "int8", "quantize_texts": str(texts)}
    chosen, default = (
        checkpoint_of(read_settings(values))
        for values in (settings, {name: settings[name] for name in ("model", "quantize")})
    )
    assert chosen.calibration_texts == TEXTS
    assert chosen.variant != default.variant
    assert chosen.fingerprint() != default.fingerprint()


def test_of_many_texts_100_are_used(tiny_checkpoint):
    many = [str(number) for number in range(991)]
    checkpoint = find_variant(
        str(tiny_checkpoint.folder), quantization=Quantization.INT8, quantization_texts=many
    )
    assert checkpoint.calibration_texts == tuple(many[::10])


def test_quantisation_by_its_name_is_the_same_and_an_unknown_one_is_refused(tiny_checkpoint):
    folder = str(tiny_checkpoint.folder)
    named, same = (find_variant(folder, quantization=kind) for kind in ("int8", Quantization.INT8))
    assert named == same
    assert named.quantization is Quantization.INT8
    with pytest.raises(InvalidInput, match="quantization must be int8, int8-weight-only, int4"):
        find_variant(folder, quantization="int3")
    with pytest.raises(InvalidInput, match="quantization_texts must be a list"):
        find_variant(folder, quantization="int8", quantization_texts="a text of more than 16 characters")
