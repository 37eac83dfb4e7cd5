"""Templates, pooling and labels, from the command line to the results."""

import json
import shutil

import numpy as np
import pytest
from command_line import assert_one_line, run, succeeded
from core_decoders import write_llama
from core_models import prefill, random_text

from attncache_core import AttentionDatabase, DatabaseRefused, LinearClassifier, PrefillEngine
from attncache_core.calibration.database import calibrate_database
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.storage.layout import MapForm

WRITTEN = 'This "{}" means:'
pytestmark = pytest.mark.usefixtures("fixed_costs", "few_steps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with model (a tiny decoder), template.txt and texts.tsv (60 labelled texts)."""
    folder = tmp_path_factory.mktemp("used")
    write_llama(folder / "model")
    (folder / "template.txt").write_text(WRITTEN + "\n", encoding="utf-8")
    random = np.random.default_rng(1)
    texts = sorted({random_text(random, words) for words in np.repeat([3, 4, 5], 20)})
    rows = [f"{text}\t{'card' if 'card' in text else 'other'}" for text in texts]
    (folder / "texts.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
    return folder


def options(folder):
    used = ("--template", folder / "template.txt", "--pooling", "lasttoken")
    return "--model", folder / "model", "--dtype", "float32", *used


@pytest.fixture(scope="module")
def engine(folder):
    adapted = read_checkpoint(folder / "model").adapted(template=Template.parse(WRITTEN), pooling="lasttoken")
    return PrefillEngine.load(adapted, dtype="float32")


def texts_of(folder):
    return [line.split("\t")[0] for line in (folder / "texts.tsv").read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def built(folder, few_steps, fixed_costs):  # noqa: ARG001 - patch the build
    """A database in the template with a budget of cosines, and what its build printed. Do not change it."""
    corpus = ("--corpus", folder / "texts.tsv", "--database", folder / "a.db", "--heads", "4")
    return folder / "a.db", succeeded(run("build", *options(folder), *corpus, "--prototypes", "0"))


def test_database_records_texts_in_the_template_as_lower_triangles(folder, engine, built):
    path, shown = built
    database = AttentionDatabase.open(path)
    sequences = engine.tokenize(texts_of(folder))
    assert all(database.search.store.record_of(ids) is not None for ids in sequences)
    assert database.search.store.records == len(sequences)
    assert database.manifest.form is MapForm.PACKED
    assert "packed maps" in shown


@pytest.mark.parametrize(
    ("used", "field"),
    [
        ({"template": Template.parse('That "{}" means:')}, "template"),
        ({"pooling": "mean"}, "pooling"),
        ({"label_logits": True, "labels": ["card", "bank"]}, None),
    ],
    ids=["template", "pooling", "labels"],
)
def test_database_serves_only_uses_that_its_budget_covers(folder, built, tmp_path, used, field):
    """A cosine budget also covers labels in the same template, but no other template and no other pooling."""
    shutil.copytree(built[0], tmp_path / "a.db")
    adapted = {"template": Template.parse(WRITTEN), "pooling": "lasttoken"} | used
    if used.get("label_logits"):
        del adapted["pooling"]
    checkpoint = read_checkpoint(folder / "model").adapted(**adapted)
    database = AttentionDatabase.open(tmp_path / "a.db")
    if field is None:
        PrefillEngine.load(checkpoint, dtype="float32", database=database)
        return
    with pytest.raises(DatabaseRefused, match=f"only with the {field} that it was.*calibrate") as refusal:
        PrefillEngine.load(checkpoint, dtype="float32", database=database)
    assert refusal.value.field == field
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    random = np.random.default_rng(2)
    others = engine.tokenize([random_text(random, words) for words in np.repeat([3, 4, 5], 40)])
    calibrate_database(engine, database, others, (), Budget(Measure.COSINE, 0.9))
    PrefillEngine.load(checkpoint, dtype="float32", database=AttentionDatabase.open(tmp_path / "a.db"))


def test_budget_of_decisions_covers_the_labels_of_the_build_only(folder, tmp_path):
    corpus = ("--corpus", folder / "texts.tsv", "--database", tmp_path / "a.db", "--heads", "4")
    succeeded(run("build", *labelled(folder, "card,bank"), *corpus))
    data = ("--data", folder / "texts.tsv", "--database", tmp_path / "a.db", "--rounds", 1)
    refused = run("evaluate", "agreement", *labelled(folder, "card,lost"), *data)
    assert refused.exit_code == 2
    assert "only with the labels that it was calibrated with" in refused.stderr


def test_classifier_is_fitted_and_evaluated_on_the_embeddings_of_the_template(folder, engine, tmp_path):
    """A classifier fitted on other embeddings of the same texts would have another accuracy."""
    data = ("--data", folder / "texts.tsv")
    succeeded(run("fit-classifier", *options(folder), *data, "--output", tmp_path / "c"))
    fitted = LinearClassifier.load(tmp_path / "c")
    fitted.require_fingerprint(engine.checkpoint.embedding_fingerprint(), "it")
    plain = read_checkpoint(folder / "model").embedding_fingerprint()
    assert fitted.fingerprint != plain
    report = tmp_path / "report.json"
    methods = ("--train", folder / "texts.tsv", "--methods", "full", "--rounds", 1, "--json", report)
    succeeded(run("evaluate", "classification", *options(folder), *data, *methods))
    accuracy = json.loads(report.read_text())["methods"][0]["score"]
    truth = ["card" if "card" in text else "other" for text in texts_of(folder)]
    predicted = fitted.predict(engine.embed(texts_of(folder)))
    assert accuracy == pytest.approx(np.mean([a == b for a, b in zip(predicted, truth, strict=True)]))


def labelled(folder, labels="card, bank,lost"):
    used = ("--template", folder / "template.txt", "--task", "label-logits", "--labels", labels)
    return "--model", folder / "model", "--dtype", "float32", *used


def test_build_evaluation_calibration_and_server_use_decisions_among_labels(folder, tmp_path):
    path = tmp_path / "l.db"
    built = ("--corpus", folder / "texts.tsv", "--database", path, "--min-agreement", "0.5")
    text = succeeded(run("build", *labelled(folder), *built, "--prototypes", "2"))
    assert "mean agreement of the hits at least 0.5" in text
    report = tmp_path / "labels.json"
    data = ("--data", folder / "texts.tsv:text", "--methods", "full", "--rounds", 1, "--json", report)
    succeeded(run("evaluate", "agreement", *labelled(folder), *data))
    assert json.loads(report.read_text())["methods"][0]["score"] == 1
    random = np.random.default_rng(9)
    unseen = tmp_path / "unseen.txt"
    unseen.write_text("\n".join(random_text(random, 4) for _ in range(25)), encoding="utf-8")
    options = ("--database", path, "--texts", unseen, "--min-agreement", "0.4")
    assert "mean agreement of the hits at least 0.4" in succeeded(
        run("calibrate", *labelled(folder), *options)
    )
    adapted = read_checkpoint(folder / "model").adapted(
        template=Template.parse(WRITTEN), label_logits=True, labels=["card", "bank", "lost"]
    )
    engine = PrefillEngine.load(adapted, database=AttentionDatabase.open(path), dtype="float32")
    comparator = engine.decisions.comparator(engine.map_reuse.policy.budget.measure)
    sequences = engine.tokenize(texts_of(folder))
    outputs = prefill(engine, sequences).outputs
    full = prefill(engine, sequences, reuse=False).outputs
    decided = [engine.decisions.class_logits(rows).argmax(axis=1) for rows in (outputs, full)]
    assert comparator.fidelity(outputs, full).tolist() == (decided[0] == decided[1]).tolist()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--template", "absent.txt"), ("template absent.txt cannot be read",)),
        (("--template", "empty.txt"), ("template must hold {}", "exactly once")),
        (("--pooling", "median"), ("--pooling", "weightedmean")),
        (("--task", "guess"), ("--task", "label-logits")),
        (("--task", "label-logits", "--labels", "card"), ("labels must be two or more different names",)),
        (("--task", "label-logits", "--pooling", "mean"), ("pooling is for embeddings",)),
    ],
)
@pytest.mark.parametrize("command", ["build", "serve"])
def test_bad_option_for_the_use_of_the_model_is_one_line(
    folder, tmp_path, monkeypatch, command, given, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    corpus = ("--corpus", folder / "texts.tsv", "--database", tmp_path / "b.db") if command == "build" else ()
    assert_one_line(run(command, "--model", folder / "model", *given, *corpus), *words)


def test_served_model_is_used_as_the_options_say(folder, engine, loaded):
    succeeded(run("serve", *options(folder), "--port", "0"))
    used = loaded[0].checkpoint
    assert (used.template, used.pooling) == (engine.checkpoint.template, engine.checkpoint.pooling)
