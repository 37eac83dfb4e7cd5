"""The option `--quantize` of all commands, and databases and classifiers that are bound to it."""

from dataclasses import replace

import numpy as np
import pytest
from command_line import model_arguments, run, succeeded
from core_models import prefill

from attncache_core import (
    AttentionDatabase,
    DatabaseRefused,
    InvalidInput,
    Outcome,
    PrefillEngine,
    Quantization,
    find_variant,
)
from attncache_core.heads.vectors import cosines
from service.loading.checkpoints import checkpoint_of
from service.loading.engines import load_engine
from service.settings import read_settings

# A quantisation that every processor can compute.
KIND = Quantization.INT8_WEIGHT_ONLY
pytestmark = pytest.mark.usefixtures("fixed_costs")


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint):
    return replace(tiny_checkpoint, quantization=KIND)


@pytest.fixture(scope="module")
def built(tiny_checkpoint, files, tmp_path_factory, few_steps):  # noqa: ARG001 - trains less
    folder = tmp_path_factory.mktemp("built") / "quantized.db"
    options = ("--corpus", files / "corpus.tsv", "--database", folder, "--heads", "all", "--threshold", "0.5")
    succeeded(run("build", *model_arguments(tiny_checkpoint), "--quantize", KIND, *options))
    return folder


def test_database_is_bound_to_the_quantisation_it_was_built_with(built, quantized, tiny_checkpoint):
    database = AttentionDatabase.open(built)
    assert database.manifest.fingerprint == quantized.fingerprint()
    for other in (tiny_checkpoint, replace(tiny_checkpoint, quantization=Quantization.INT4)):
        with pytest.raises(DatabaseRefused, match="quantisation"):
            PrefillEngine.load(other, database=database, dtype="float32")


def test_recorded_text_hits_itself_and_keeps_its_embedding(built, quantized, tiny_corpus):
    engine = PrefillEngine.load(quantized, database=AttentionDatabase.open(built), dtype="float32")
    sequences = engine.tokenize([sentence.text for sentence in tiny_corpus[:40:2]])
    hits, full = (prefill(engine, sequences, reuse=reuse) for reuse in (True, False))
    assert set(hits.outcomes) == {Outcome.HIT}
    # The tolerance is for records, which hold maps in 16 bits.
    assert cosines(hits.outputs, full.outputs).min() > 0.9999


def test_server_computes_with_the_quantisation_it_is_told(built, tiny_checkpoint, tiny_engine, tiny_corpus):
    settings = read_settings({"dtype": "float32", "quantize": "int8-weight-only", "database": str(built)})
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


def test_unknown_quantisation_is_refused_with_the_known_ones(tiny_checkpoint):
    result = run("build", *model_arguments(tiny_checkpoint), "--quantize", "int3")
    assert result.exit_code == 2
    assert "'int8', 'int8-weight-only', 'int4'" in result.stderr
