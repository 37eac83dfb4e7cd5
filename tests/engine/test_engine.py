"""The engine returns outputs in the caller's order, outcomes, counts and classes, and refuses invalid use."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from core_decoders import write_llama
from core_models import (
    attention_by,
    prefill,
    random_sequences,
    update_json,
    write_json,
    write_model,
    write_sentence_transformer,
)
from families import CASES, write_family

from attncache_core import native
from attncache_core.calibration.damage import model_for_damage
from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.errors import CorruptDatabase, InvalidInput, NoClassifier, UnsupportedModel
from attncache_core.heads.classifier import LinearClassifier
from attncache_core.heads.comparator import Measure
from attncache_core.heads.decisions import class_scores
from attncache_core.models import load
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.plan import Outcome
from attncache_core.runtime import devices
from attncache_core.runtime.devices import resolve_dtype
from attncache_core.runtime.threads import limit_threads
from attncache_core.text.pairs import PairTokens

LABELS = ("transfer", "card", "help")


def test_result_counts_tokens_and_durations_and_without_a_database_nothing_is_searched(tiny_engine):
    result = prefill(tiny_engine, random_sequences([3, 9, 3]))
    assert result.report.tokens == 15
    assert result.outputs.dtype == result.similarities.dtype == np.float32
    assert 0 < result.report.attention_seconds < result.report.forward_seconds
    assert result.report.search_seconds >= 0
    assert result.report.corrupt_records == 0
    assert result.outcomes == (Outcome.NOT_SEARCHED,) * 3
    assert np.isnan(result.similarities).all()
    assert tiny_engine.map_reuse is None
    assert tiny_engine.reuse_off == []


@pytest.mark.parametrize("sequences", [[], [[]]], ids=["no-sequence", "no-token"])
def test_batch_without_tokens_is_refused(tiny_engine, sequences):
    with pytest.raises(ValueError, match="at least one"):
        prefill(tiny_engine, sequences)


def test_text_without_a_token_is_refused_and_named(tmp_path):
    folder = write_llama(tmp_path)
    update_json(folder / "tokenizer.json", post_processor=None)  # which adds <s>
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    with pytest.raises(InvalidInput, match="no token that the model knows; change this text") as refused:
        engine.embed(["my card", ""])
    assert refused.value.field == "inputs[1]"


@pytest.mark.parametrize("ids", [[5, 6.9], "56", [5, None]], ids=["fraction", "text", "none"])
def test_token_id_that_is_no_whole_number_is_refused(tiny_engine, ids):
    with pytest.raises(TypeError, match="integer"):
        prefill(tiny_engine, [[5, 6], ids])
    np.testing.assert_array_equal(
        prefill(tiny_engine, [np.array([5, 6])]).outputs, prefill(tiny_engine, [torch.tensor([5, 6])]).outputs
    )


def test_embeddings_have_unit_length_if_the_checkpoint_says_so(tiny_engine, tmp_path):
    np.testing.assert_allclose(np.linalg.norm(tiny_engine.embed(["my card", "lost"]), axis=1), 1, atol=1e-6)
    raw = PrefillEngine.load(
        read_checkpoint(write_sentence_transformer(tmp_path, normalize=False)), dtype="float32"
    )
    outputs = prefill(raw, raw.tokenize(["my card", "lost"])).outputs
    np.testing.assert_array_equal(raw.embed(["my card", "lost"]), outputs)
    unit = raw.embed(["my card", "lost"], normalize=True)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(
        tiny_engine.embed(["lost"], normalize=False),
        prefill(tiny_engine, tiny_engine.tokenize(["lost"])).outputs,
    )
    assert abs(np.linalg.norm(outputs, axis=1) - 1).min() > 0.1


@pytest.mark.parametrize(
    "names", [[f"class {letter}" for letter in "abcdefghijkl"], ["LABEL_0", "LABEL_1"]], ids=len
)
def test_labels_are_sorted_as_numbers_or_have_the_names_of_hugging_face(tmp_path, names):
    engine = PrefillEngine.load(read_checkpoint(write_model(tmp_path, labels=names)), dtype="float32")
    assert engine.decisions.labels == tuple(names)


def test_number_of_classes_without_names_is_read_from_the_configuration(tmp_path):
    folder = write_model(tmp_path, labels=LABELS)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["id2label"], config["label2id"]
    write_json(folder / "config.json", config | {"num_labels": 3})
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    assert prefill(engine, random_sequences([5])).outputs.shape == (1, 3)
    assert engine.decisions.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0": "a", "1": "b"}, "names 2 classes, and the model has 3"),
        ({"1": "a", "2": "b", "3": "c"}, "must be an object"),
        (["a", "b", "c"], "must be an object"),
        ({"0": 1, "1": 2, "2": 3}, "each by a string"),
        ({"0": "a", "1": None, "2": "c"}, "each by a string"),
        ({"0": "a", "1": "\ud800", "2": "c"}, "each by a string"),
    ],
    ids=str,
)
def test_names_that_are_not_those_of_all_classes_are_refused(tmp_path, names, message):
    folder = write_model(tmp_path, labels=LABELS)
    update_json(folder / "config.json", id2label=names, num_labels=3)
    with pytest.raises(UnsupportedModel, match=message):
        PrefillEngine.load(read_checkpoint(folder))


@pytest.mark.parametrize("path", ["model.safetensors", "tokenizer.json", "config.json"])
def test_model_whose_files_change_while_they_are_read_is_refused(tmp_path, monkeypatch, path):
    checkpoint = read_checkpoint(write_model(tmp_path))

    def changed_behind(*arguments, real=load.load_embedding_head):
        (tmp_path / path).write_bytes((tmp_path / path).read_bytes() + b" ")
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(load, "load_embedding_head", changed_behind)
        with pytest.raises(UnsupportedModel, match="changed since they were first read") as refused:
            PrefillEngine.load(checkpoint)
    assert refused.value.field == "model"


def test_model_whose_configuration_changed_since_it_was_described_is_refused(tmp_path):
    checkpoint = read_checkpoint(write_model(tmp_path))
    update_json(tmp_path / "config.json", layer_norm_eps=0.5)
    with pytest.raises(UnsupportedModel, match="were changed since they were first read"):
        PrefillEngine.load(checkpoint)
    assert PrefillEngine.load(read_checkpoint(tmp_path)).embed(["one"]).shape == (1, 32)


def test_model_that_is_loaded_again_to_measure_damage_is_refused_if_its_files_changed(tmp_path):
    checkpoint = replace(read_checkpoint(write_model(tmp_path)), quantization=Quantization.INT8)
    engine = PrefillEngine.load(checkpoint)
    write_model(tmp_path, seed=1)
    with pytest.raises(UnsupportedModel, match="changed since they were first read"):
        model_for_damage(engine)


def test_encoder_without_a_classifier_has_no_classes_and_a_classifier_no_embeddings(tiny_engine, classifier):
    assert tiny_engine.decisions.labels is None
    with pytest.raises(NoClassifier) as caught:
        tiny_engine.decisions.class_logits(np.zeros((1, 32)))
    assert caught.value.field == "labels"
    with pytest.raises(NoClassifier):
        tiny_engine.decisions.comparator(Measure.AGREEMENT)
    with pytest.raises(InvalidInput, match="classifier"):
        classifier.embed(["my card"])


def test_fitted_classifier_names_the_classes_and_gives_the_logits(tiny_checkpoint):
    fitted = signs(32, labels=("no", "yes"), fingerprint=tiny_checkpoint.embedding_fingerprint())
    engine = PrefillEngine.load(tiny_checkpoint, dtype="float32", classifier=fitted)
    assert (engine.checkpoint.task, engine.decisions.labels) == ("embed", ("no", "yes"))
    outputs = prefill(engine, random_sequences([5, 8])).outputs
    np.testing.assert_array_equal(engine.decisions.class_logits(outputs), fitted.logits(outputs))


def test_info_has_model_dtype_threads_and_database(tiny_checkpoint, tiny_engine, tiny_database):
    before = torch.get_num_threads()
    engine = PrefillEngine.load(
        tiny_checkpoint, database=AttentionDatabase.open(tiny_database), dtype="float32", threads=1
    )
    assert torch.get_num_threads() == 1
    limit_threads(before)
    assert asdict(engine.info()) == (
        {"model": "tiny-bert", "model_source": "folder", "revision": None, "commit": None}
        | {"fingerprint": engine.fingerprint, "template": "{}", "prompts": {}, "pooling": ("mean",)}
        | {"dimensions": 32, "matryoshka_dimensions": (), "variant": {}, "task": "embed", "labels": []}
        | {"max_tokens": 512, "dtype": "float32", "device": "cpu", "threads": 1}
        | {"attention": native.level() or "torch", "compiled_off": native.compiled_off(), "gain": None}
        | {"reuse_off": [], "database": asdict(engine.map_reuse.database.info()), "key_values": None}
        | {"key_values_off": "switched off", "blending": None}
    )
    assert tiny_engine.info().database is None


@pytest.mark.parametrize(
    ("avx512", "amx", "name", "expected"),
    [
        (False, False, "AMD EPYC", torch.float32),
        (True, False, "AMD EPYC", torch.bfloat16),
        (True, False, "Intel(R) Xeon(R) Processor", torch.float32),
        (True, True, "Intel(R) Xeon(R) Processor", torch.bfloat16),
    ],
)
def test_auto_dtype_is_the_faster_one(monkeypatch, avx512, amx, name, expected):
    monkeypatch.setattr(devices, "processor_name", lambda: name)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: amx)
    assert resolve_dtype("auto", devices.CPU) is expected
    assert resolve_dtype("float32", devices.CPU) is torch.float32
    assert resolve_dtype("bfloat16", devices.CPU) is torch.bfloat16


@pytest.mark.parametrize("types", [[0, 2, 0], [0, 0, 2], [0, -1, 0]])
@pytest.mark.parametrize("way", ["stack", "operators"])
def test_type_of_a_token_that_the_model_does_not_have_is_refused(tiny_checkpoint, types, way):
    with attention_by(way):
        engine = PrefillEngine.load(tiny_checkpoint, dtype="float32")
        with pytest.raises(IndexError):
            engine.run([PrefillRequest(PairTokens([5, 6, 7], types))])
    with pytest.raises(ValueError, match="one type for each token"):
        PairTokens([5, 6, 7], types[:2])


@pytest.mark.parametrize("way", ["stack", "operators"])
def test_sequence_that_is_longer_than_the_distances_of_a_model_is_refused(tmp_path, way):
    config = CASES["deberta-shared-buckets"].made()
    checkpoint = read_checkpoint(write_family(tmp_path, config))
    with attention_by(way):
        engine = PrefillEngine.load(checkpoint, dtype="float32")
        assert engine.run([PrefillRequest([7] * config.max_position_embeddings)]).finite.all()
        with pytest.raises(IndexError, match="more tokens than the model has positions"):
            engine.run([PrefillRequest([7] * (config.max_position_embeddings + 1))])


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "tpu"), ("dtype", "int8"), ("threads", 0), ("threads", 1.5), ("max_tokens", 0)],
)
def test_option_of_loading_that_is_not_accepted_is_refused(tiny_checkpoint, field, value):
    with pytest.raises(InvalidInput, match=f"{field} must be") as refused:
        PrefillEngine.load(tiny_checkpoint, **{field: value})
    assert refused.value.field == field


@pytest.mark.parametrize("texts", ["one text", b"one text", None, 7, ""], ids=str)
def test_one_text_is_no_list_of_its_characters(tiny_engine, texts):
    for method in (tiny_engine.embed, tiny_engine.tokenize):
        with pytest.raises(InvalidInput, match="texts must be a list of texts; for one") as refused:
            method(texts)
        assert refused.value.field == "texts"
        with pytest.raises(InvalidInput, match="of a table, give one column"):
            method({"text": ["one text"]})


def test_comparator_compares_embeddings_of_an_encoder_and_classes_of_a_classifier(tiny_engine, classifier):
    embeddings = prefill(tiny_engine, random_sequences([5, 9])).outputs
    expected = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    np.testing.assert_allclose(
        tiny_engine.decisions.comparator(Measure.COSINE).comparable(embeddings), expected, atol=1e-6
    )
    logits = prefill(classifier, random_sequences([5, 9])).outputs
    roots = np.sqrt(class_scores(logits))
    np.testing.assert_allclose(
        classifier.decisions.comparator(Measure.COSINE).comparable(logits), roots, atol=1e-6
    )
    comparator = classifier.decisions.comparator(Measure.AGREEMENT)
    assert comparator.fidelity(logits, logits[:, ::-1]).tolist() == [
        float(first == 2 - second) for first, second in zip(*[logits.argmax(axis=1)] * 2, strict=True)
    ]


def signs(dimensions: int, **changes) -> LinearClassifier:
    """Return a classifier of two classes by the sign of the first number."""
    weight = np.zeros((2, dimensions), np.float32)
    weight[:, 0] = (-1, 1)
    return replace(
        LinearClassifier(("minus", "plus"), weight, np.zeros(2, np.float32), "f", "m", {}), **changes
    )


@pytest.fixture
def deciding(tiny_checkpoint, tiny_engine, tiny_database, tmp_path) -> PrefillEngine:
    """An engine whose database was calibrated for decisions."""
    folder = Path(shutil.copytree(tiny_database, tmp_path / "a.db"))
    database = AttentionDatabase.open(folder)
    files = database.keep_decisions(signs(tiny_engine.model.hidden_size))
    replace(database.manifest, files=files).write(folder)
    return PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(folder), dtype="float32")


def test_agreement_of_an_encoder_uses_its_classifier_or_else_that_of_its_database(deciding):
    outputs = prefill(deciding, random_sequences([5, 9])).outputs
    outputs[:, 0] = (-1, 1)
    comparator = deciding.decisions.comparator(Measure.AGREEMENT)
    assert comparator.fidelity(outputs, outputs[::-1]).tolist() == [0, 0]
    assert comparator.fidelity(outputs, 2 * outputs).tolist() == [1, 1]
    # The classifier of the database is used for nothing else.
    assert deciding.decisions.labels is None
    assert deciding.decisions.comparator(Measure.COSINE).class_logits is None
    fitted = replace(deciding, classifier=signs(outputs.shape[1], bias=np.array([9, 0], np.float32)))
    own = fitted.decisions.comparator(Measure.AGREEMENT)
    assert own.fidelity(outputs, outputs[::-1]).tolist() == [1, 1]


def test_calibration_that_was_stopped_leaves_the_classifier_of_the_database(deciding):
    database = deciding.map_reuse.database
    database.keep_decisions(signs(deciding.model.hidden_size, labels=("of the", "next")))
    opened = AttentionDatabase.open(database.folder)
    assert (opened.decisions.labels, opened.verify()) == (("minus", "plus"), [])
    opened.remove_other_decisions(opened.manifest.files)
    assert len(list(database.folder.glob("decisions*"))) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "classifier.safetensors").write_bytes(b"none"),
        lambda folder: (folder / "classifier.json").write_bytes(b"{}"),
        lambda folder: (folder / "classifier.json").unlink(),
        lambda folder: (folder / "classifier.safetensors").unlink(),
        lambda folder: shutil.rmtree(folder),
        lambda folder: signs(32, labels=("of another", "database")).save(folder),
    ],
)
def test_damaged_or_changed_classifier_of_a_database_is_refused(deciding, spoil):
    spoil(next(deciding.map_reuse.database.folder.glob("decisions-*")))
    with pytest.raises(CorruptDatabase, match=r"a\.db.*decisions.* calibrate ") as refused:
        deciding.decisions.comparator(Measure.AGREEMENT)
    assert refused.value.field == "database"


def test_classifier_that_the_manifest_does_not_name_is_ignored(deciding, tiny_checkpoint, tiny_database):
    folder = deciding.map_reuse.database.folder
    AttentionDatabase.open(tiny_database).manifest.write(folder)
    engine = PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(folder), dtype="float32")
    with pytest.raises(NoClassifier):
        engine.decisions.comparator(Measure.AGREEMENT)


def test_name_of_a_model_or_a_database_is_refused_with_what_opens_it(tiny_checkpoint):
    with pytest.raises(TypeError, match=r"checkpoint must be what find_checkpoint\(model\) returns"):
        PrefillEngine.load(str(tiny_checkpoint.folder))
    with pytest.raises(TypeError, match=r"database must be what AttentionDatabase.open\(folder\) returns"):
        PrefillEngine.load(tiny_checkpoint, database="orders.db")


def test_engine_takes_a_database_or_a_strategy(tiny_checkpoint, tiny_database):
    database = AttentionDatabase.open(tiny_database)
    with pytest.raises(InvalidInput, match="a database or a strategy"):
        PrefillEngine.load(tiny_checkpoint, database=database, strategy=MapReuse(database))
