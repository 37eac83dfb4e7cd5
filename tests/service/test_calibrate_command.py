"""`attncache calibrate`, from files to the new policy of a database, or to a server that blends."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import PRIVATE, assert_one_line, model_arguments, run, succeeded, without_progress
from core_models import prefill, random_text

from attncache_core import (
    AttentionDatabase,
    DatabaseRefused,
    LinearClassifier,
    PrefillEngine,
    fit_classifier,
    normalize,
)
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.blend.gate import read_gate
from attncache_core.reuse.maps.policy import Budget
from service.commands.database import _left_out
from service.loading.checkpoints import checkpoint_of
from service.loading.engines import load_engine
from service.settings import read_settings

pytestmark = pytest.mark.usefixtures("fixed_costs")


@pytest.fixture
def database(tiny_prototypes_database, tmp_path):
    return Path(shutil.copytree(tiny_prototypes_database, tmp_path / "a.db"))


@pytest.fixture(scope="module")
def unseen(tiny_corpus):
    """90 texts of 3 to 8 words that are not recorded."""
    random = np.random.default_rng(93)
    texts = [random_text(random, words) for words in np.repeat(np.arange(3, 9), 15)]
    assert len(set(texts) - {sentence.text for sentence in tiny_corpus}) == 90
    return texts


@pytest.fixture(scope="module")
def files(tiny_corpus, unseen, tmp_path_factory):
    """texts.txt: 90 unseen and 30 recorded texts. some.csv: 10 of the unseen texts, in two columns."""
    folder = tmp_path_factory.mktemp("calibration")
    recorded = [sentence.text for sentence in tiny_corpus[::8]]
    (folder / "texts.txt").write_text("\n".join([*recorded, *unseen]) + "\n", encoding="utf-8")
    pairs = [f"{left},{right.upper()}" for left, right in zip(unseen[:5], unseen[40:45], strict=True)]
    (folder / "some.csv").write_text("\n".join(["query,answer", *pairs]) + "\n", encoding="utf-8")
    return folder


# A budget that the tiny model keeps with reuse.
BUDGET = ("--min-cosine", "0.8", "--min-text-cosine", "0")


def calibrate(checkpoint, database, *arguments):
    return run("calibrate", *model_arguments(checkpoint), "--database", database, *arguments)


@pytest.fixture(scope="module")
def calibrated(tiny_checkpoint, tiny_prototypes_database, files, tmp_path_factory, fixed_costs):  # noqa: ARG001
    """A calibrated database, and the result of the command. Tests must not change the database."""
    database = tmp_path_factory.mktemp("databases") / "calibrated.db"
    shutil.copytree(tiny_prototypes_database, database)
    return database, calibrate(tiny_checkpoint, database, "--texts", files / "texts.txt", *BUDGET)


def test_policy_and_mask_are_chosen_on_texts_that_are_not_recorded(tiny_prototypes_database, calibrated):
    database, result = calibrated
    text = succeeded(result)
    folders = (tiny_prototypes_database, database)
    before, after = (AttentionDatabase.open(folder).manifest for folder in folders)
    assert after.policy != before.policy
    assert after.policy.budget == Budget(Measure.COSINE, 0.8)
    assert (after.quality["measured"], after.quality["left_out"]) == (90, 30)
    assert after.quality["mean"] >= after.quality["lower_bound"] >= 0.8
    changed = dict(before.files.items() ^ after.files.items())
    assert {name.partition("-")[0] for name in changed} == {"familiarity"}
    assert (after.records, after.build) == (before.records, before.build)
    assert text == succeeded(run("inspect", database))
    assert without_progress(result.stderr)[-1].endswith("once they are started again")
    assert "mean cosine of the hits at least 0.8" in text
    # Without a floor, no hit can be below it.
    hits = after.quality["unfamiliar"]["left_out"]["hits"]
    shown = " ".join(text.split())
    assert f"each left out of the fit: {hits} hits" in shown
    assert "of them below" not in shown


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (Budget(Measure.COSINE, 0.985, 0.95), "40 hits, 2 of them below 0.95 (by 95 % bounds over hits"),
        (Budget(Measure.AGREEMENT, 0.98), "40 hits, 2 of them with another decision (by 95 % bounds"),
        (Budget(Measure.COSINE, 0.985), "out of the fit: 40 hits; the worst mean of a kind is 0.99"),
    ],
    ids=["floor", "decisions", "no-floor"],
)
def test_harmed_hits_of_other_texts_are_shown_if_the_budget_limits_them(budget, said):
    worst = {"kind": "numbers", "hits": 20, "mean": 0.99}
    figures = {"kinds": 5, "hits": 40, "harmed": 2, "harmed_at_most": 0.033, "worst": worst}
    assert said in _left_out(figures, budget)


def test_excluded_texts_are_not_measured_whatever_their_spelling(tiny_checkpoint, database, files):
    """Exclude ten texts. Five texts are in capitals, which have the same tokens as small letters."""
    some = files / "some.csv"
    # --without is the former name of --exclude.
    excluded = ("--exclude", f"{some}:query", "--without", f"{some}:answer", "--min-text-cosine", "0")
    succeeded(calibrate(tiny_checkpoint, database, "--texts", files / "texts.txt", *excluded))
    assert AttentionDatabase.open(database).manifest.quality["measured"] == 80


def test_budget_may_be_the_decisions_among_labels(tiny_checkpoint, tiny_engine, database, files, unseen):
    options = ("--texts", files / "texts.txt", "--labels", "my card, the bank,help", "--min-agreement", "0.3")
    text = succeeded(calibrate(tiny_checkpoint, database, *options))
    manifest = AttentionDatabase.open(database).manifest
    assert manifest.policy.budget == Budget(Measure.AGREEMENT, 0.3)
    assert manifest.quality["lower_bound"] >= 0.3
    assert "mean agreement of the hits at least 0.3" in text
    kept = AttentionDatabase.open(database).decisions
    assert kept.labels == ("my card", "the bank", "help")
    for labels, accepted in ((kept.labels, True), (("the bank", "my card", "help"), False)):
        with nullcontext() if accepted else pytest.raises(DatabaseRefused, match="only with the classifier"):
            PrefillEngine.load(
                replace(tiny_checkpoint, labels=labels),
                database=AttentionDatabase.open(database),
                dtype="bfloat16",
            )
    # The measured decision is the nearest label.
    engine = PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(database), dtype="float32")
    labels = tiny_engine.embed(["my card", "the bank", "help"])
    sequences = engine.tokenize(unseen)
    found = prefill(engine, sequences)
    hits = np.array([outcome.is_hit for outcome in found.outcomes])
    full = (tiny_engine.embed(unseen) @ labels.T).argmax(axis=1)
    reusing = (normalize(found.outputs) @ labels.T).argmax(axis=1)
    # No budget is for embeddings.
    np.testing.assert_allclose(engine.embed(unseen), tiny_engine.embed(unseen), atol=1e-6)
    # The means serve all texts but strange ones. Calibration scores a text with a fit that leaves the text
    # out, and the server with the fit to all texts.
    strangeness = AttentionDatabase.open(database).search.familiarity.strangeness(
        np.concatenate(sequences), np.array([len(sequence) for sequence in sequences])
    )
    np.testing.assert_array_equal(hits, strangeness <= manifest.policy.limit.strangest)
    assert hits.mean() == pytest.approx(manifest.quality["hit_rate"], abs=0.03)
    assert (full == reusing)[hits].mean() == pytest.approx(manifest.quality["mean"], abs=0.03)


def fitted(engine, texts, folder):
    labels = ["card" if "card" in text else "other" for text in texts]
    fingerprint = engine.checkpoint.embedding_fingerprint()
    fit_classifier(engine.embed(texts), labels, fingerprint=fingerprint, model=engine.checkpoint.name).save(
        folder
    )
    return folder


def test_budget_may_be_the_decisions_of_a_classifier(
    tiny_checkpoint, tiny_engine, tiny_corpus, database, files, tmp_path
):
    classifier = fitted(tiny_engine, [sentence.text for sentence in tiny_corpus], tmp_path / "classifier")
    options = ("--texts", files / "texts.txt", "--classifier", classifier, "--min-agreement", "0.5")
    succeeded(calibrate(tiny_checkpoint, database, *options))
    assert AttentionDatabase.open(database).manifest.policy.budget == Budget(Measure.AGREEMENT, 0.5)
    opened = AttentionDatabase.open(database)
    same = LinearClassifier.load(classifier)
    np.testing.assert_array_equal(opened.decisions.weight, same.weight)
    engine = PrefillEngine.load(tiny_checkpoint, database=opened, dtype="float32", classifier=same)
    # The budget says nothing of another classifier's decisions.
    with pytest.raises(DatabaseRefused, match="only with the classifier") as refused:
        replace(engine, classifier=replace(same, weight=-same.weight))
    assert refused.value.field == "classifier"
    # What a server would not do is not evaluated either.
    replace(same, weight=-same.weight).save(tmp_path / "other")
    evaluate = (*model_arguments(tiny_checkpoint), "--database", database, "--data", files / "texts.txt")
    for chosen, *words in (
        (("--classifier", classifier),),
        (("--classifier", tmp_path / "other"), "only with the classifier"),
        ((), "keeps a budget of decisions", "evaluate decisions"),
    ):
        result = run("evaluate", "agreement", *evaluate, "--rounds", "1", *chosen)
        assert_one_line(result, *words) if words else succeeded(result)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("score\tsentence1\tsentence2\n1\ta\tb\n2\tb\tc\n", encoding="utf-8")
    labels = ("--labels", "my card,the bank")
    succeeded(calibrate(tiny_checkpoint, database, *options[:2], *labels, "--min-agreement", "0.5"))
    evaluate = (*model_arguments(tiny_checkpoint), "--database", database, "--data", pairs, *labels)
    assert_one_line(run("evaluate", "sts", *evaluate), "keeps a budget of decisions")
    # A budget for embeddings needs no classifier.
    succeeded(calibrate(tiny_checkpoint, database, "--texts", files / "texts.txt", "--min-text-cosine", "0"))
    assert AttentionDatabase.open(database).decisions is None
    assert not list(database.glob("decisions*"))


@pytest.fixture
def assert_refused(database):
    """Check that a command failed in one line and left the database as it was."""
    before = (database / "manifest.json").read_bytes()

    def check(result, *words):
        assert_one_line(result, *words)
        assert (database / "manifest.json").read_bytes() == before

    return check


def test_labels_and_classifiers_that_do_not_fit_are_refused(
    tiny_checkpoint, tiny_classifier_checkpoint, tiny_engine, assert_refused, database, files, tmp_path
):
    good = fitted(tiny_engine, ["my card", "the bank"], tmp_path / "classifier")
    embeddings = np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)
    fit_classifier(embeddings, ["a", "b"] * 2, fingerprint="f", model="m").save(tmp_path / "other")
    tiny, own_classes = tiny_checkpoint, tiny_classifier_checkpoint
    for checkpoint, options, *words in (
        (tiny, ("--labels", PRIVATE), "labels must be two or more different names"),
        (tiny, ("--labels", f"{PRIVATE},{PRIVATE}"), "labels must be two or more different names"),
        (tiny, ("--labels", f"{PRIVATE},,b"), "labels must be two or more different names"),
        (tiny, ("--labels", ","), "labels must be two or more different names"),
        (tiny, ("--classifier", good, "--labels", f"{PRIVATE},b"), "classifier or labels, not both"),
        (tiny, ("--classifier", tmp_path / "other"), "fitted for m", "fit a classifier"),
        (own_classes, ("--labels", "a,b"), "is a classifier and has labels of its own"),
    ):
        result = calibrate(checkpoint, database, "--texts", files / "texts.txt", *options)
        assert_refused(result, *words)


@pytest.mark.parametrize(
    ("budget", "needed"),
    [
        (("--min-text-cosine", "0"), 20),
        (("--min-cosine", "0.1", "--min-text-cosine", "0.01"), 299),
        (("--labels", "my card,the bank", "--min-agreement", "0.98"), 149),
    ],
)
def test_too_few_texts_to_prove_the_budget_are_refused_with_the_number_needed(
    tiny_checkpoint, assert_refused, database, unseen, tiny_corpus, tmp_path, budget, needed
):
    texts = tmp_path / "few.txt"
    texts.write_text("\n".join([*unseen[:19], *unseen[:5], tiny_corpus[0].text, PRIVATE]), encoding="utf-8")
    result = calibrate(tiny_checkpoint, database, "--texts", texts, *budget)
    words = ("19 of the texts", f"at least {needed} such texts are needed, so give more texts")
    assert_refused(result, *words)
    assert ("min_text_cosine 0, or a smaller min_agreement, needs fewer" in result.stderr) == (needed > 20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--texts", "absent.txt"), ("absent.txt cannot be read",)),
        (("--texts", "absent.tsv:a,b"), ("absent.tsv cannot be read",)),
        (("--min-cosine", "0.9"), ("--texts",)),
        (("--texts", "absent.txt", "--min-cosine", "1.5"), ("--min-cosine",)),
        (("--texts", "absent.txt", "--min-cosine", "nan"), ("--min-cosine", "nan is not in the range")),
        (("--texts", "absent.txt", "--min-agreement", "-1"), ("--min-agreement",)),
        (("--texts", "absent.txt", "--max-tokens", "0"), ("--max-tokens",)),
    ],
)
def test_bad_option_is_one_line(
    tiny_checkpoint, assert_refused, database, tmp_path, monkeypatch, options, words
):
    monkeypatch.chdir(tmp_path)
    assert_refused(calibrate(tiny_checkpoint, database, *options), *words)


def test_longest_text_is_what_the_option_says(tiny_checkpoint, tiny_prototypes_database, database, files):
    """Texts with the same first tokens are one text if texts are cut to five tokens."""
    texts = (files / "texts.txt").read_text(encoding="utf-8").splitlines()
    options = ("--max-tokens", "5", "--min-cosine", "0.5", "--min-text-cosine", "0")
    succeeded(calibrate(tiny_checkpoint, database, "--texts", files / "texts.txt", *options))
    quality = json.loads((database / "manifest.json").read_text(encoding="utf-8"))["quality"]
    first_words = {" ".join(text.split()[:3]) for text in texts}
    engine = PrefillEngine.load(tiny_checkpoint, dtype="float32", max_tokens=5)
    store = AttentionDatabase.open(tiny_prototypes_database).search.store
    unseen = [words for words in first_words if store.record_of(engine.tokenize([words])[0]) is None]
    assert quality["measured"] == len(unseen)
    assert {group["lengths"] for group in quality["groups"]} == {"1-"}


# Prompts of segments.


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    pool = [random_text(random, words) for words in range(5, 15)]
    lines = [
        {"segments": random.permutation(pool)[:3].tolist(), "query": random_text(random, 3)}
        for _ in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def calibrate_prompts(folder, *arguments):
    model = ("--model", folder, "--dtype", "float32", "--pooling", "lasttoken", "--threads", 2)
    return run("calibrate", *model, *arguments)


def test_calibrated_file_is_shown_written_and_served(folder, prompts, tmp_path):
    output = tmp_path / "blend.json"
    # A file that calibrate has written is replaced, also one of another version.
    output.write_text('{"format": 0, "measured": []}')
    budget = ("--min-cosine", 0.01, "--min-text-cosine", 0)
    shown = succeeded(calibrate_prompts(folder, "--segments", prompts, "--output", output, *budget))
    gate = read_gate(output)
    assert gate.prompts == 20
    assert [measured.ratio for measured in gate.measured] == [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7]
    assert "under load" in shown
    assert gate.shapes.chunks == (3, 3)
    shape = "measured: 3 chunks, each of {} to {} tokens, on".format(*gate.shapes.chunk_tokens)
    assert shape in " ".join(shown.split())
    assert str(output) in shown
    how = {"model": str(folder), "pooling": "lasttoken", "dtype": "float32", "kv_memory_bytes": 2**24}
    settings = read_settings({**how, "blend": str(output)})
    engine = load_engine(settings, checkpoint_of(settings))
    assert engine.info().blending["ratio"] == gate.ratio
    other = read_settings({**how, "blend": str(output), "segment_separator": " "})
    with pytest.raises(Exception, match="measured with the separator"):
        load_engine(other, checkpoint_of(other))


def test_options_that_do_not_fit_are_refused_in_one_line(folder, prompts, tmp_path):
    assert_one_line(calibrate_prompts(folder, "--segments", prompts), "--output")
    assert_one_line(calibrate_prompts(folder), "--segments", "--texts")
    both = calibrate_prompts(folder, "--segments", prompts, "--output", tmp_path / "a", "--texts", "b")
    assert_one_line(both, "not both")
    absent = calibrate_prompts(folder, "--segments", prompts, "--output", tmp_path / "absent" / "a")
    assert_one_line(absent, "does not exist")


def test_nothing_that_calibrate_has_not_written_is_overwritten(folder, prompts, tmp_path):
    for written, output in (("in.jsonl", "in.jsonl"), ("in.json.measured", "in.json")):
        mine = tmp_path / written
        mine.write_bytes(prompts.read_bytes())
        assert_one_line(
            calibrate_prompts(folder, "--segments", mine, "--output", tmp_path / output),
            "overwrite",
            str(mine),
        )
        assert mine.read_bytes() == prompts.read_bytes()
        mine.unlink()
    notes = tmp_path / "notes.json"
    notes.write_text('{"buy": "milk"}')
    assert_one_line(
        calibrate_prompts(folder, "--segments", prompts, "--output", notes), "overwrite", "notes.json"
    )
    assert notes.read_text() == '{"buy": "milk"}'
