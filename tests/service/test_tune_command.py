"""`attncache tune`, from a file of texts to settings that `serve --config` takes."""

import json
import os
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from command_line import PRIVATE, assert_one_line, model_arguments, run, succeeded
from core_models import random_text

from attncache_core import LinearClassifier, PrefillEngine, Quantization, UnsupportedModel
from attncache_core.evaluation.tuning import tune as tuning
from attncache_core.runtime.files import locked_at_once
from service.loading.checkpoints import checkpoint_of
from service.loading.engines import load_engine
from service.settings import Settings, gather_settings

# Of ways that change answers little; a test cannot know how fast a machine is.
SPEEDS = {"int8-weight-only": 1.5, "int4": 1.6, "maps": 1.7}
ONE_WAY = ("--ways", "int8-weight-only")


@pytest.fixture(autouse=True)
def fixed_speeds(monkeypatch):
    real = tuning.measure

    def measure(way, *arguments, **options):
        measured = real(way, *arguments, **options)
        return replace(measured, speed=SPEEDS.get(way.name, 1.0), speed_alone=1.0)

    monkeypatch.setattr(tuning, "measure", measure)
    # Counting the bytes of all tensors of a large test process takes longer than everything else.
    monkeypatch.setattr(tuning, "tensor_bytes", lambda: 0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A table with 60 different texts and their labels; a text is twice in it."""
    random = np.random.default_rng(21)
    made = list(dict.fromkeys(random_text(random, words) for words in np.repeat(np.arange(3, 9), 11)))[:60]
    rows = [f"{text}\t{'card' if 'card' in text else 'other'}\tone" for text in [*made, made[0]]]
    path = tmp_path_factory.mktemp("asked") / "asked.tsv"
    path.write_text("\n".join(["asked\tlabel\tsame", *rows]) + "\n", encoding="utf-8")
    return path


def tune(checkpoint, texts, output, *arguments):
    options = ("--texts", f"{texts}:asked", "--min-text-cosine", "0", "--min-cosine", "0.99", "--rounds", "1")
    if "--ways" not in arguments:
        arguments = ("--ways", "int8-weight-only,int4", *arguments)
    return run("tune", *model_arguments(checkpoint), *options, "--output", output, *arguments)


def served(path):
    """Return what `serve --config` reads and runs."""
    settings = gather_settings({}, path)
    return settings, load_engine(settings, checkpoint_of(settings))


def test_fastest_way_inside_the_budget_is_what_the_settings_serve(tiny_checkpoint, texts, tmp_path):
    output = tmp_path / "tuned.toml"
    result = tune(tiny_checkpoint, texts, output, "--label-column", "label", "--plot", tmp_path / "plot.png")
    shown = succeeded(result)
    assert "30 texts measure, 30 choose" in result.stderr
    settings, engine = served(output)
    expected = Settings(
        model=str(tiny_checkpoint.folder), dtype="float32", quantize=Quantization.INT8_WEIGHT_ONLY, maps=False
    )
    assert settings == expected
    assert engine.info().variant == {"quantization": "int8-weight-only"}
    assert engine.map_reuse is None
    comment = [line for line in output.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    rows = {line.split("  ")[0].removeprefix("# "): line for line in comment if line.endswith("side")}
    assert list(rows) == ["int4", "* int8-weight-only", "exact"]
    assert [line.split()[-1] for line in rows.values()] == ["outside", "inside", "inside"]
    assert any("cosine  95 % bound" in line for line in comment)
    kept = json.loads((tmp_path / "tuned.json").read_text(encoding="utf-8"))
    figures = {
        measured["measured"]["way"]["quantization"]: measured["measured"] for measured in kept["measured"]
    }
    for name, figure in figures.items():
        row = rows[{"int8-weight-only": "* int8-weight-only", None: "exact"}.get(name, name)]
        mean, bound = (f"{figure['quality'][name]:.4f}" for name in ("mean", "lower_bound"))
        assert f"{mean}  {bound:>10}" in row
        assert f"{figure['accuracy']:.4f}" in row
    for part in ("chosen: int8-weight-only", "cosine", "accuracy", "one text", "processor", "inside"):
        assert part in shown
    # The first eight bytes of a PNG file.
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len((tmp_path / "plot.csv").read_text(encoding="utf-8").splitlines()) == 4
    asked = [line.split("\t")[0] for line in texts.read_text(encoding="utf-8").splitlines()[1:]]
    written = [path for path in tmp_path.iterdir() if path.suffix in (".toml", ".json", ".csv")]
    assert not any(text in path.read_text(encoding="utf-8") for path in written for text in asked)


def test_exact_settings_are_written_if_nothing_pays(tiny_checkpoint, texts, tmp_path):
    output = tmp_path / "tuned.toml"
    shown = succeeded(tune(tiny_checkpoint, texts, output, "--min-gain", "0.7", "--threads", "1", *ONE_WAY))
    assert "chosen: exact, because nothing inside the budget pays" in shown
    settings, engine = served(output)
    assert settings == Settings(model=str(tiny_checkpoint.folder), dtype="float32", threads=1, maps=False)
    assert engine.info().variant == {}


def test_float32_is_served_if_no_way_keeps_the_budget(tiny_checkpoint, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "choose", lambda *_: None)
    output = tmp_path / "tuned.toml"
    options = ("--dtype", "auto", "--ways", "int4")
    assert "no way keeps the budget: serve in float32" in succeeded(
        tune(tiny_checkpoint, texts, output, *options)
    )
    assert served(output)[0] == Settings(model=str(tiny_checkpoint.folder), dtype="float32", maps=False)


def test_run_that_was_stopped_continues_when_the_command_is_given_again(
    tiny_checkpoint, texts, tmp_path, monkeypatch
):
    output, real, measured = tmp_path / "tuned.toml", tuning.measure, []

    def stopped_at_the_third(way, *arguments, **options):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(way.name)
        return real(way, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "measure", stopped_at_the_third)
        stopped = tune(tiny_checkpoint, texts, output)
    assert stopped.exit_code == 130
    assert "run the same command again to continue" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not output.exists()
    continued = tune(tiny_checkpoint, texts, output)
    succeeded(continued)
    assert "2 ways were measured before" in continued.stderr
    lines = [line for line in continued.stderr.splitlines() if ": quality" in line]
    assert [line.endswith("(measured before)") for line in lines] == [True, True, False]
    assert served(output)[0].quantize is Quantization.INT8_WEIGHT_ONLY
    # The file of an earlier run is replaced.
    changed = tune(tiny_checkpoint, texts, output, "--max-tokens", "7")
    succeeded(changed)
    assert "measuring anew, because this changed: fingerprint" in changed.stderr
    assert served(output)[0].max_tokens == 7


def test_way_that_fails_is_reported_and_the_others_are_measured(
    tiny_checkpoint, texts, tmp_path, monkeypatch
):
    real = PrefillEngine.load

    def load(checkpoint, **options):
        if checkpoint.quantization is Quantization.INT4:
            raise UnsupportedModel("int4 is refused")
        return real(checkpoint, **options)

    monkeypatch.setattr(PrefillEngine, "load", load)
    output = tmp_path / "tuned.toml"
    shown = succeeded(tune(tiny_checkpoint, texts, output))
    assert "not measured: int4: int4 is refused" in shown
    assert "# not measured: int4: int4 is refused" in output.read_text(encoding="utf-8")
    assert served(output)[0].quantize is Quantization.INT8_WEIGHT_ONLY


def test_reuse_of_maps_is_served_as_it_was_measured(tiny_checkpoint, texts, tiny_database, tmp_path):
    output = tmp_path / "tuned.toml"
    options = ("--ways", "maps", "--database", tiny_database, "--min-cosine", "0")
    result = tune(tiny_checkpoint, texts, output, *options)
    shown = succeeded(result)
    assert "chosen: maps" in shown
    assert "held-out" not in shown
    for said in (result.stderr, output.read_text()):
        assert "of 240 records excluded: records of evaluated texts" in said
    settings, engine = served(output)
    assert (settings.database, settings.min_gain, settings.maps) == (tiny_database, 0.0, True)
    assert engine.map_reuse.database.folder == tiny_database
    assert engine.map_reuse.approximates


def test_classifier_is_served_with_the_variant_that_keeps_its_decisions(
    tiny_checkpoint, texts, tmp_path, monkeypatch
):
    output, fitted = tmp_path / "tuned.toml", tmp_path / "tuned.classifier"
    columns = ("--text-column", "asked", "--label-column", "label")
    succeeded(
        run(
            "fit-classifier", *model_arguments(tiny_checkpoint), "--data", texts, "--output", fitted, *columns
        )
    )
    given = {path: path.read_bytes() for path in fitted.iterdir()}
    options = ("--classifier", fitted, "--min-agreement", "0.85", *ONE_WAY)
    # It goes on if it is stopped before any of its last files.
    for written in ("service.commands.tune.write_settings", "attncache_core.LinearClassifier.save"):
        with monkeypatch.context() as patch:
            patch.setattr(written, mock.Mock(side_effect=KeyboardInterrupt))
            assert tune(tiny_checkpoint, texts, output, *options).exit_code == 130
    succeeded(tune(tiny_checkpoint, texts, output, *options))
    settings, engine = served(output)
    assert {path: path.read_bytes() for path in fitted.iterdir()} == given
    assert [settings.classifier] == list(tmp_path.glob("tuned.*.classifier"))
    assert engine.decisions.labels == LinearClassifier.load(fitted).labels == ("card", "other")
    assert engine.info().variant == {"quantization": "int8-weight-only"}


def served_digest(path):
    """Return the digest of the classifier that the settings name."""
    return LinearClassifier.load(gather_settings({}, path).classifier).digest()


def test_settings_keep_their_classifier_if_a_later_run_is_stopped_before_it_writes_its_own(
    tiny_checkpoint, texts, tmp_path, monkeypatch
):
    output = tmp_path / "tuned.toml"
    rows = [line.split("\t") for line in texts.read_text(encoding="utf-8").splitlines()[1:]]
    for name, word in (("first", "card"), ("second", "money")):
        table = tmp_path / f"{name}.tsv"
        table.write_text("\n".join(["asked\tlabel", *(f"{row[0]}\t{word in row[0]}" for row in rows)]))
        columns = ("--text-column", "asked", "--label-column", "label")
        options = ("--data", table, "--output", tmp_path / name, *columns)
        succeeded(run("fit-classifier", *model_arguments(tiny_checkpoint), *options))
    options = ("--min-agreement", "0", *ONE_WAY, "--classifier")
    succeeded(tune(tiny_checkpoint, texts, output, *options, tmp_path / "first"))
    first = output.read_bytes()
    for written in ("service.commands.tune.write_settings", "attncache_core.LinearClassifier.save"):
        with monkeypatch.context() as patch:
            patch.setattr(written, mock.Mock(side_effect=KeyboardInterrupt))
            assert tune(tiny_checkpoint, texts, output, *options, tmp_path / "second").exit_code == 130
        assert output.read_bytes() == first
        assert served_digest(output) == LinearClassifier.load(tmp_path / "first").digest()
    succeeded(tune(tiny_checkpoint, texts, output, *options, tmp_path / "second"))
    assert served_digest(output) == LinearClassifier.load(tmp_path / "second").digest()


def test_two_tunings_with_one_output_are_kept_apart(tiny_checkpoint, texts, tmp_path):
    output = tmp_path / "tuned.toml"
    with locked_at_once(tmp_path / ".tuned.toml.lock"):
        refused = tune(tiny_checkpoint, texts, output, *ONE_WAY)
        assert refused.exit_code == 2
        assert f"process {os.getpid()} tunes with --output {output} at present" in refused.stderr
    assert not {output, output.with_suffix(".json")}.intersection(tmp_path.iterdir())
    succeeded(tune(tiny_checkpoint, texts, output, *ONE_WAY))


def test_labels_are_compared_by_embedding_and_their_decisions_are_kept(tiny_checkpoint, texts, tmp_path):
    output = tmp_path / "tuned.toml"
    options = ("--labels", "card,other", "--min-agreement", "0.85", "--label-column", "label", *ONE_WAY)
    shown = succeeded(tune(tiny_checkpoint, texts, output, *options))
    assert "at least 0.85 of the decisions" in shown
    settings, engine = served(output)
    assert (settings.labels, engine.decisions.labels) == ("card,other", ("card", "other"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--min-text-cosine", "0.9"), "60 different texts, and at least 598 are needed"),
        (("--label-column", PRIVATE), "has no column"),
        (("--label-column", "same"), "label_column: the texts that choose have one label"),
        (("--ways", "int8,int3"), "'int3' is not a known way"),
        (("--plot", "plot.jpg"), "must end in .png"),
        (("--output", "tuned.json"), "must end in .toml"),
        (("--output", "absent/tuned.toml"), "the folder of --output absent/tuned.toml does not exist"),
        (("--sample", "5"), "sample must be at least 20"),
        (("--texts", "absent.txt"), "absent.txt cannot be read"),
        (("--min-cosine", "1.5"), "--min-cosine"),
        (("--quantize-texts", "absent.txt"), "absent.txt cannot be read"),
        (("--database", "absent.db"), "there is no database"),
        (("--classifier", "absent"), "there is no classifier"),
    ],
)
def test_mistake_is_refused_in_one_line(tiny_checkpoint, texts, tmp_path, options, words):
    result = tune(tiny_checkpoint, texts, tmp_path / "tuned.toml", *options)
    if PRIVATE in options:
        assert result.exit_code == 2
        assert words in result.stderr
    else:
        assert_one_line(result, words)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_an_operator_wrote_are_not_replaced(tiny_checkpoint, texts, tmp_path):
    output = tmp_path / "attncache.toml"
    for written in (b"port = 81\n", b"\xff\xfe"):
        output.write_bytes(written)
        assert_one_line(tune(tiny_checkpoint, texts, output), "was not written by tune")
        assert output.read_bytes() == written


def test_texts_of_the_operator_are_not_overwritten(tiny_checkpoint, texts, tmp_path):
    asked = tmp_path / "plot.csv"
    asked.write_bytes(texts.read_bytes().replace(b"\t", b","))
    named = tune(tiny_checkpoint, asked, tmp_path / "tuned.toml", "--plot", tmp_path / "plot.png")
    assert_one_line(named, "--plot would overwrite", "plot.csv", "--texts names")
    other = tune(tiny_checkpoint, texts, tmp_path / "tuned.toml", "--plot", tmp_path / "plot.png")
    assert_one_line(other, "plot.csv", "was not written by tune")


def test_texts_that_calibrate_int8_are_written_only_for_int8(tiny_checkpoint, texts, tmp_path):
    output, calibrating = tmp_path / "tuned.toml", tmp_path / "calibrating.txt"
    calibrating.write_text("\n".join(["my card is lost"] * 16), encoding="utf-8")
    succeeded(tune(tiny_checkpoint, texts, output, "--quantize-texts", calibrating, *ONE_WAY))
    assert served(output)[0].quantize_texts is None
