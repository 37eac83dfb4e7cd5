"""Evaluation with labels of several tokens, where each text has several sequences."""

from __future__ import annotations

import numpy as np
import pytest
from command_line import assert_one_line, run, succeeded
from core_decoders import write_llama
from core_models import prefill, random_text

from attncache_core import AttentionDatabase, BuildOptions, CorpusSentence, InvalidInput, PrefillEngine
from attncache_core.build.builder import build_database
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.evaluation.comparison import compare
from attncache_core.evaluation.tasks import ClassificationTask, multi_token_labels, recordable_sequences
from attncache_core.evaluation.tuning.measuring import Judge, Subject, measure
from attncache_core.evaluation.tuning.ways import Way
from attncache_core.heads.comparator import Measure, OutputComparator
from benchmarks.papers.methods import PaperMethods

# A text has three sequences, one per first token of the labels of two tokens. The sequences also score the
# labels of one token.
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
    """A database of all texts except the first ten, in which every text with a record of its length hits."""
    folder = tmp_path_factory.mktemp("databases") / "labels.db"
    options = BuildOptions(heads="all", threshold=-1.0, prototypes=0, training_steps=3)
    build_database(engine, [CorpusSentence(text, text) for text in texts[10:]], folder, options)
    return folder


def logits_of(engine, texts, reuse):
    """Return the sums of log-probabilities for each label, one text at a time."""
    asked = multi_token_labels(engine)
    rows = []
    for text in texts:
        sequences = engine.tokenize([text], prompt=asked.prompt)
        result = prefill(engine, sequences, reuse=reuse, plans=asked.prompt.sequence_plans)
        rows.append(engine.decisions.label_logits(asked, result.outputs, result.log_probabilities)[0])
    return np.array(rows)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_accuracy_agreement_and_hits_equal_those_of_single_texts(engine, texts, database, batch_size):
    asked, truth = texts[:10], [LABELS[index % 5] for index in range(10)]
    sequences = engine.tokenize(asked, prompt=multi_token_labels(engine).prompt)
    each = len(sequences) // len(asked)
    assert each > 1
    task = ClassificationTask("intents", engine, sequences, truth)
    methods = PaperMethods(
        engine, engine.checkpoint, AttentionDatabase.open(database), (), dtype="float32", labels=task.labels
    )
    full, reusing = compare(
        {name: methods.make(name) for name in ("full", "attncache")},
        task,
        OutputComparator(Measure.COSINE, np.asarray),
        OutputComparator(Measure.AGREEMENT, np.asarray),
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


def test_recordable_sequence_of_a_text_is_its_prompt_without_labels(engine, texts):
    sequences = engine.tokenize(texts, prompt=multi_token_labels(engine).prompt)
    task = ClassificationTask("intents", engine, sequences, [LABELS[0]] * len(texts))
    assert recordable_sequences(task) == engine.tokenize(texts)


def test_method_without_log_probabilities_is_refused(engine):
    with pytest.raises(InvalidInput, match="lazyformer reads no labels") as refusal:
        PaperMethods(engine, engine.checkpoint, None, (), labels=multi_token_labels(engine)).make(
            "lazyformer"
        )
    assert refusal.value.field == "methods"


def test_command_excludes_recorded_prompts_of_evaluated_texts(engine, texts, database, tmp_path):
    (tmp_path / "prompt.txt").write_text(str(TEMPLATE) + "\n", encoding="utf-8")
    rows = [f"{text}\t{LABELS[index % 5]}" for index, text in enumerate(texts[6:14])]
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
    assert "4 of 50 records excluded: records of evaluated texts" in output
    assert "accuracy" in output
    assert "agreement" in output
    refused = run("evaluate", "classification", *arguments, "--labels", "bank,card bank")
    assert_one_line(refused, "labels of the texts are none of the model's 2 classes")


def test_tuning_judges_the_decisions_among_labels_of_several_tokens(engine, texts):
    subject = Subject(engine, texts)
    answers = subject.answers(subject.run()[1])
    expected = logits_of(engine, texts, reuse=False)
    np.testing.assert_allclose(answers, expected, atol=1e-3)
    others = expected.copy()
    others[:3] = -others[:3]  # a reference that decides otherwise about three texts
    truth = [LABELS[row] for row in expected.argmax(axis=1)]
    judge = Judge(Measure.AGREEMENT, others, LABELS, truth=["bank", *truth[1:]])
    measured = measure(Way(), subject, subject, judge, rounds=1, weight_bytes=0)
    assert measured.quality.mean == pytest.approx(1 - 3 / len(texts))
    assert measured.accuracy == pytest.approx(1 - (truth[0] != "bank") / len(texts))
    assert (measured.speed, measured.speed_alone, measured.hit_rate) == (1.0, 1.0, 0.0)
