"""Labels of several tokens in evaluations: a text has several sequences, and its score is read from all."""

from __future__ import annotations

import numpy as np
import pytest
from command_line import assert_one_line, run, succeeded
from core_decoders import write_llama
from core_models import random_text

from attncache_core import AttentionDatabase, BuildOptions, CorpusSentence, InvalidInput, PrefillEngine
from attncache_core.attention_maps.builder import build_database
from attncache_core.checkpoint import read_checkpoint
from attncache_core.evaluation.comparison import compare
from attncache_core.evaluation.methods import Methods
from attncache_core.evaluation.tasks import ClassificationTask, labels_read, recordable
from attncache_core.outputs import Judge, Measure
from attncache_core.prompts import Template

# Three sequences a text: behind the first tokens of the labels of two, and so of all the others.
LABELS = ("bank account", "account bank", "bank", "card", "zebra lost")
TEMPLATE = Template("my card: ", "\nask:")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
    checkpoint = read_checkpoint(folder).adapted(template=TEMPLATE, label_logits=True, labels=LABELS)
    return PrefillEngine.load(checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(12)
    return sorted({random_text(random, words) for words in np.repeat([2, 3, 4, 5], 15)})


@pytest.fixture(scope="module")
def database(engine, texts, tmp_path_factory):
    """Of all texts but the first ten; every search that finds a record hits."""
    folder = tmp_path_factory.mktemp("databases") / "labels.db"
    options = BuildOptions(heads="all", threshold=-1.0, prototypes=0, training_steps=3)
    build_database(engine, [CorpusSentence(text, text) for text in texts[10:]], folder, options)
    return folder


def logits_of(engine, texts, reuse):
    """One text at a time: the summed log-probabilities as a server gets them."""
    asked = labels_read(engine)
    rows = []
    for text in texts:
        sequences = engine.tokenize([text], prompt=asked.prompt)
        result = engine.run(sequences, [reuse] * len(sequences), asked.prompt.readings)
        rows.append(engine.label_logits(asked, result.outputs, result.log_probabilities)[0])
    return np.array(rows)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_accuracy_agreement_and_hits_are_those_of_single_texts(engine, texts, database, batch_size):
    asked, truth = texts[:10], [LABELS[place % 5] for place in range(10)]
    sequences = engine.tokenize(asked, prompt=labels_read(engine).prompt)
    each = len(sequences) // len(asked)
    assert each > 1
    task = ClassificationTask("intents", engine, sequences, truth)
    methods = Methods(
        engine,
        engine.checkpoint,
        AttentionDatabase.open(database),
        (),
        dtype="float32",
        labels=task.labels,
    )
    full, reusing = compare(
        {name: methods.make(name) for name in ("full", "attncache")},
        task,
        Judge(Measure.COSINE, np.asarray),
        Judge(Measure.AGREEMENT, np.asarray),
        batch_size=batch_size,
        rounds=1,
    )
    expected = logits_of(engine, asked, reuse=False)
    changed = logits_of(methods.engines["attncache"], asked, reuse=True)
    columns = [LABELS.index(label) for label in truth]
    assert full.score == np.mean(expected.argmax(axis=1) == columns)
    assert reusing.score == np.mean(changed.argmax(axis=1) == columns)
    assert full.hit_rate == 0
    assert 0 < reusing.hit_rate <= 1
    assert sum(reusing.hit_lengths.values()) == round(reusing.hit_rate * len(sequences))
    same = expected.argmax(axis=1) == changed.argmax(axis=1)
    differ = np.abs(expected - changed).max(axis=1) > 1e-3
    assert reusing.agreement == pytest.approx(same[differ].mean())


def test_what_is_recorded_of_a_text_is_its_prompt_without_labels(engine, texts):
    sequences = engine.tokenize(texts, prompt=labels_read(engine).prompt)
    task = ClassificationTask("intents", engine, sequences, [LABELS[0]] * len(texts))
    assert recordable(task) == engine.tokenize(texts)


def test_method_that_reads_outputs_alone_is_refused(engine):
    with pytest.raises(InvalidInput, match="lazyformer reads no labels") as refusal:
        Methods(engine, engine.checkpoint, None, (), labels=labels_read(engine)).make("lazyformer")
    assert refusal.value.field == "methods"


def test_command_leaves_recorded_prompts_of_evaluated_texts_out(engine, texts, database, tmp_path):
    (tmp_path / "prompt.txt").write_text(str(TEMPLATE) + "\n", encoding="utf-8")
    rows = [f"{text}\t{LABELS[place % 5]}" for place, text in enumerate(texts[6:14])]
    (tmp_path / "data.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
    arguments = [
        *("--model", engine.checkpoint.folder, "--dtype", "float32", "--task", "label-logits"),
        *("--template", tmp_path / "prompt.txt", "--data", tmp_path / "data.tsv", "--rounds", 1),
    ]
    output = succeeded(
        run(
            *("evaluate", "classification", *arguments, "--labels", ",".join(LABELS)),
            *("--database", database),
        )
    )
    assert "4 of 50 records are of evaluated texts and left out" in output
    assert "accuracy" in output
    assert "agreement" in output
    refused = run("evaluate", "classification", *arguments, "--labels", "bank,card bank")
    assert_one_line(refused, "labels of the data are none of the model's 2 classes")
