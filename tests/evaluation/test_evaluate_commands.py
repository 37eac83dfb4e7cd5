"""`attncache evaluate` reads files and writes tables and reports."""

import csv
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import PRIVATE, assert_one_line, model_arguments, run, succeeded
from core_models import prefill, random_text
from full_disk import largest_file
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression

from attncache_core import AttentionDatabase, BuildOptions, PrefillEngine, fit_classifier
from service.commands import evaluation


@pytest.fixture(scope="module")
def unseen(tiny_corpus) -> list[str]:
    """60 texts of 3 to 8 words that are not in the corpus."""
    random = np.random.default_rng(83)
    texts = [random_text(random, words) for words in np.repeat(np.arange(3, 9), 10)]
    assert len(set(texts) - {sentence.text for sentence in tiny_corpus}) == 60
    return texts


def label_of(text: str) -> str:
    return "card" if {"card", "account", "bank"} & set(text.split()) else "other"


def write_table(path: Path, header: str, rows) -> Path:
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tiny_corpus, unseen, tmp_path_factory) -> Path:
    """A folder with recorded texts in corpus.txt, and evaluation data in pairs, more, test and texts."""
    folder = tmp_path_factory.mktemp("evaluated")
    recorded = [sentence.text for sentence in tiny_corpus]
    (folder / "corpus.txt").write_text("\n".join(recorded) + "\n", encoding="utf-8")
    scores = np.random.default_rng(82).integers(0, 6, 40).tolist()
    # Nine recorded texts; one of them is in two rows, and one is in capitals.
    left = [recorded[0], recorded[0], *recorded[10:16], *unseen[:12]]
    right = [recorded[50].upper(), recorded[60], *unseen[20:38]]
    pairs = [(str(score), *texts) for score, *texts in zip(scores, left, right, strict=False)]
    write_table(folder / "pairs.tsv", "score\tsentence1\tsentence2", pairs)
    more = zip(unseen[40:50], unseen[50:60], map(str, scores[20:30]), strict=True)
    write_table(folder / "more.tsv", "a\tb\trating", more)
    labelled = [(text, label_of(text)) for text in [*recorded[:8], *unseen]]
    write_table(folder / "test.tsv", "text\tlabel", labelled)
    write_table(folder / "train.tsv", "text\tlabel", [(text, label_of(text)) for text in recorded])
    rows = zip([*recorded[:5], *unseen[:25]], unseen[30:], strict=True)
    lines = ["query,answer", *(",".join(row) for row in rows)]
    (folder / "texts.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def evaluate(kind: str, checkpoint, *arguments: object):
    return run("evaluate", kind, *model_arguments(checkpoint), *arguments, "--rounds", "1")


def report_of(path: Path):
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def table_of(path: Path) -> dict[str, list[str]]:
    """Return the rows of a Markdown table by their first cell."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert all(re.fullmatch("-+:?", cell) for cell in rows[1])
    return {row[0]: row[1:] for row in (rows[0], *rows[2:])}


def test_similarity_is_scored_per_file_and_evaluated_texts_are_excluded(
    tiny_checkpoint, tiny_engine, tiny_database, files, tmp_path
):
    options = (
        *("--database", tiny_database, "--corpus", files / "corpus.txt", "--data", files / "pairs.tsv"),
        *("--json", tmp_path / "a.json", "--markdown", tmp_path / "a.md"),
    )
    text = succeeded(evaluate("sts", tiny_checkpoint, *options))
    assert "9 of 240 corpus texts excluded: evaluated texts" in text
    assert "9 of 240 records excluded: records of evaluated texts" in text
    assert "build with --exclude" in " ".join(text.split())
    full, reusing = report_of(tmp_path / "a.json")["methods"]
    with (files / "pairs.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    left, right = (tiny_engine.embed([row[name] for row in rows]) for name in ("sentence1", "sentence2"))
    expected = spearmanr((left * right).sum(axis=1), [float(row["score"]) for row in rows]).statistic
    assert full["scores"] == {"pairs": pytest.approx(expected, abs=1e-6)}
    assert (full["hit_rate"], full["recorded"], full["cosine"]) == (0, 0, None)
    assert (reusing["hit_rate"], reusing["recorded"]) == (1, 0)
    assert 0 < reusing["cosine"] < 1
    table = table_of(tmp_path / "a.md")
    assert table[""] == ["full", "attncache"]
    assert table["Spearman pairs"] == [f"{each['score']:.4f}" for each in (full, reusing)]
    assert table["recorded texts"] == ["0", "0"]
    assert table["hits"] == ["0.000", "1.000"]
    assert table["cosine of the hits"] == ["", f"{reusing['cosine']:.4f}"]


def test_several_files_have_a_score_each_and_their_mean(tiny_checkpoint, files, tmp_path):
    options = ("--methods", "full", "--score-column", "rating", "--columns", "a,b")
    folder = tmp_path / "other"
    folder.mkdir()
    # Another data set with the same file name.
    lines = (files / "more.tsv").read_text(encoding="utf-8").splitlines()
    (folder / "more.tsv").write_text("\n".join([lines[0], *lines[4:]]) + "\n", encoding="utf-8")
    data = ("--data", files / "more.tsv", "--data", folder / "more.tsv", "--json", tmp_path / "a.json")
    succeeded(evaluate("sts", tiny_checkpoint, *options, *data, "--markdown", tmp_path / "a.md"))
    (full,) = report_of(tmp_path / "a.json")["methods"]
    assert set(full["scores"]) == {"more", str(folder / "more.tsv")}
    assert full["score"] == pytest.approx(np.mean(list(full["scores"].values())))
    assert table_of(tmp_path / "a.md")["Spearman, mean"] == [f"{full['score']:.4f}"]


@pytest.mark.filterwarnings("error")
def test_undefined_correlation_is_null(tiny_checkpoint, tmp_path):
    pairs = [(rating, "my card", "the bank") for rating in "1234"]
    path = write_table(tmp_path / "flat.tsv", "score\tsentence1\tsentence2", pairs)
    succeeded(
        evaluate("sts", tiny_checkpoint, "--methods", "full", "--data", path, "--json", tmp_path / "a.json")
    )
    (full,) = report_of(tmp_path / "a.json")["methods"]
    assert full["scores"] == {"flat": None}
    assert full["score"] is None
    # Cosines of equal texts are 1 but for rounding, which says nothing.
    same = [
        (rating, text, text)
        for rating, text in zip("1234", ("my card", "lost", "a bank", "the"), strict=True)
    ]
    path = write_table(tmp_path / "same.tsv", "score\tsentence1\tsentence2", same)
    assert "nan" in succeeded(evaluate("sts", tiny_checkpoint, "--methods", "full", "--data", path))


def test_texts_that_the_classifier_was_fitted_on_are_counted_and_files_are_written_before_anything_is_shown(
    tiny_checkpoint, files, tmp_path, monkeypatch
):
    test, odd = files / "test.tsv", tmp_path / "a[b]" / "c[.tsv"
    odd.parent.mkdir()
    odd.write_bytes(test.read_bytes())
    options = ("--train", test, "--data", odd, "--methods", "full", "--json", tmp_path / "a.json")
    shown = succeeded(evaluate("classification", tiny_checkpoint, *options))
    assert "evaluated texts are among the texts of --train" in shown
    assert "accuracy c[" in shown
    assert report_of(tmp_path / "a.json")["methods"][0]["scores"].keys() == {"c["}
    (tmp_path / "a.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "show_machine", lambda _: (_ for _ in ()).throw(BrokenPipeError()))
        evaluate("classification", tiny_checkpoint, *options)
    assert report_of(tmp_path / "a.json")["methods"]
    with largest_file(10):
        ended = evaluate("classification", tiny_checkpoint, *options)
    assert ended.exit_code == 2
    assert "File too large" in ended.stderr
    assert "accuracy c[" in ended.stdout


def test_accuracy_with_train_is_the_accuracy_of_a_newly_fitted_classifier(
    tiny_checkpoint, tiny_engine, tiny_database, files, tmp_path
):
    options = ("--database", tiny_database, "--train", files / "train.tsv", "--data", files / "test.tsv")
    text = succeeded(evaluate("classification", tiny_checkpoint, *options, "--json", tmp_path / "a.json"))
    assert "8 of 240 records excluded: records of evaluated texts" in text
    report = report_of(tmp_path / "a.json")
    train, test = (
        [line.split("\t") for line in (files / name).read_text(encoding="utf-8").splitlines()[1:]]
        for name in ("train.tsv", "test.tsv")
    )
    oracle = LogisticRegression(C=30.0, max_iter=2000)
    oracle.fit(tiny_engine.embed([text for text, _ in train]), [label for _, label in train])
    decided = oracle.predict(tiny_engine.embed([text for text, _ in test]))
    full, reusing = report["methods"]
    assert report["metric"] == "accuracy"
    assert full["scores"] == {"test": pytest.approx(np.mean(decided == [label for _, label in test]))}
    assert reusing["recorded"] == 0
    assert 0 <= reusing["agreement"] <= 1
    for method in (full, reusing):
        assert f"{method['score']:.4f}" in text
    low, high = reusing["difference_interval"]
    assert low <= reusing["score"] - full["score"] <= high


def test_saved_classifier_has_the_accuracy_of_a_newly_fitted_one(tiny_checkpoint, files, tmp_path):
    succeeded(
        run(
            *("fit-classifier", *model_arguments(tiny_checkpoint)),
            *("--data", files / "train.tsv", "--output", tmp_path / "classifier"),
        )
    )
    scores = []
    for options in (("--train", files / "train.tsv"), ("--classifier", tmp_path / "classifier")):
        data = ("--methods", "full", "--data", files / "test.tsv", "--json", tmp_path / "a.json")
        succeeded(evaluate("classification", tiny_checkpoint, *options, *data))
        scores.append(report_of(tmp_path / "a.json")["methods"][0]["score"])
    assert scores[0] == scores[1] > 0.5


def test_labels_can_be_numbers_of_the_models_classes(tiny_classifier_checkpoint, files, tmp_path):
    engine = PrefillEngine.load(tiny_classifier_checkpoint, dtype="float32")
    texts = (files / "corpus.txt").read_text(encoding="utf-8").splitlines()[::8]
    logits = prefill(engine, engine.tokenize(texts), reuse=False).outputs
    for labels in (
        map(str, logits.argmax(axis=1)),
        (engine.decisions.labels[row.argmax()] for row in logits),
    ):
        data = write_table(tmp_path / "data.tsv", "text\tlabel", zip(texts, labels, strict=True))
        options = ("--methods", "full", "--data", data, "--json", tmp_path / "a.json")
        succeeded(evaluate("classification", tiny_classifier_checkpoint, *options))
        assert report_of(tmp_path / "a.json")["methods"][0]["scores"] == {"data": 1.0}


def test_agreement_reads_the_given_columns_and_prints_the_saved_time(
    tiny_checkpoint, tiny_database, files, tmp_path
):
    options = ("--database", tiny_database, "--data", f"{files / 'texts.csv'}:query,answer")
    outputs = ("--json", tmp_path / "a.json", "--markdown", tmp_path / "a.md")
    text = succeeded(evaluate("agreement", tiny_checkpoint, *options, *outputs))
    assert "5 of 240 records excluded: records of evaluated texts" in text
    report = report_of(tmp_path / "a.json")
    full, reusing = report["methods"]
    assert [full["method"], reusing["method"]] == ["full", "attncache"]
    assert report["metric"] == "cosine"
    assert report["machine"]["texts"] == 60
    assert report["machine"]["reused_heads"] == "12 of 12"
    assert full["score"] == pytest.approx(1)
    # All texts hit, so the score of all texts is the mean over hits.
    assert reusing["score"] == reusing["scores"]["texts"] == pytest.approx(reusing["cosine"])
    assert (reusing["recorded"], reusing["agreement"]) == (0, None)
    assert sum(reusing["hit_lengths"].values()) == pytest.approx(reusing["hit_rate"] * 60)
    assert table_of(tmp_path / "a.md")["recorded texts"] == ["0", "0"]
    shown, saved = " ".join(text.split()), 1 - 1 / reusing["speedup"]
    assert f"attncache: {saved:+.3f} of the time saved over all texts" in shown
    assert shown.count("of the time saved") == 1


def test_agreement_over_several_files_has_the_names_of_all(tiny_checkpoint, files, tmp_path):
    data = [f"{files / 'texts.csv'}:query", files / "test.tsv", f"{files / 'texts.csv'}:answer"]
    given = [each for source in data for each in ("--data", source)]
    succeeded(evaluate("agreement", tiny_checkpoint, "--methods", "full", *given, "--json", tmp_path / "a"))
    assert set(report_of(tmp_path / "a")["methods"][0]["scores"]) == {"texts, test"}


def test_heads_and_threshold_options_override_the_database_and_max_tokens_truncates_texts(
    tiny_checkpoint, tiny_database, files, tmp_path
):
    options = ("--database", tiny_database, "--data", f"{files / 'more.tsv'}:a")
    for changed, heads in (
        (("--heads", "layers:1", "--threshold", "1"), "4 of 12"),
        # The database has no records of four tokens.
        (("--max-tokens", "4"), "12 of 12"),
    ):
        outputs = ("--json", tmp_path / "a.json")
        succeeded(evaluate("agreement", tiny_checkpoint, *options, *changed, *outputs))
        report = report_of(tmp_path / "a.json")
        assert report["machine"]["reused_heads"] == heads
        assert report["methods"][1]["hit_rate"] == 0
        assert report["methods"][1]["cosine"] is None
    refused = evaluate("agreement", tiny_checkpoint, *options, "--heads", "layers:9")
    assert_one_line(refused, "layers 0 to 2")


def test_missing_database_is_built_from_the_corpus_without_the_evaluated_texts(
    tiny_checkpoint, tiny_engine, tiny_corpus, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluation, "BuildOptions", partial(BuildOptions, training_steps=20))
    folder = tmp_path / "new.db"
    data = ("--corpus", files / "corpus.txt", "--data", f"{files / 'texts.csv'}:query")
    options = ("--database", folder, "--heads", "6", *data)
    text = succeeded(evaluate("agreement", tiny_checkpoint, *options, "--json", tmp_path / "a.json"))
    assert "5 of 240 corpus texts excluded: evaluated texts" in text
    assert "0 of 235 records excluded: records of evaluated texts" in text
    assert "--exclude" not in text
    database = AttentionDatabase.open(folder)
    recorded = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])
    held = [database.search.store.record_of(ids) is not None for ids in recorded]
    assert held == [False] * 5 + [True] * 235
    assert report_of(tmp_path / "a.json")["methods"][1]["recorded"] == 0
    # The second command uses the database and does not build it again.
    before = (folder / "manifest.json").read_bytes()
    assert "0 of 235 records" in succeeded(evaluate("agreement", tiny_checkpoint, *options))
    assert (folder / "manifest.json").read_bytes() == before


SCORED = "score\tsentence1\tsentence2\n"
PAIRS = f"{SCORED}1\t{PRIVATE}\tx\n2\tx\tx\n"


@pytest.mark.parametrize(
    ("kind", "content", "options", "words"),
    [
        ("sts", f"{SCORED}1\tx\tx\n{PRIVATE}\t{PRIVATE}\tx\n", (), ("line 3", "'score' is not a number")),
        ("sts", SCORED, (), ("data.tsv has no pairs",)),
        ("sts", PAIRS, ("--methods", "fast"), ("the methods are full", "'fast'")),
        ("sts", PAIRS, ("--rounds", "0"), ("--rounds",)),
        ("sts", PAIRS, ("--columns", "sentence1"), ("--columns must be two names",)),
        ("sts", PAIRS, ("--batch-size", "x"), ("--batch-size",)),
        ("sts", PAIRS, ("--threshold", "95"), ("--threshold", "x<=1")),
        ("sts", PAIRS, ("--max-tokens", "1"), ("--max-tokens",)),
        ("sts", PAIRS, (), ("attncache needs a database",)),
        ("sts", PAIRS, ("--methods", "san"), ("the methods are full", "'san'")),
        ("sts", PAIRS, ("--database", "no.db"), ("no database in no.db", "--corpus")),
        ("sts", PAIRS, ("--data", "./data.tsv"), ("--data names a file twice",)),
        ("agreement", "text\n", (), ("the data has no texts",)),
        ("agreement", f"query\n{PRIVATE}\n", (), ("no column 'text'", "'query'")),
        ("agreement", f"text\n{PRIVATE}\n", ("--classifier", "no"), ("there is no classifier in no",)),
        ("classification", "text\tlabel\n", (), ("data.tsv has no texts",)),
        ("classification", f"text\tlabel\n{PRIVATE}\tx\n", (), ("--train", "--labels with --task")),
        ("classification", f"text\tlabel\n{PRIVATE}\tx\n", ("--train", "no.tsv"), ("no.tsv cannot be read",)),
    ],
)
def test_bad_data_or_option_is_refused_in_one_line(
    tiny_checkpoint, tmp_path, kind, content, options, words, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.tsv").write_text(content, encoding="utf-8")
    command = ("evaluate", kind, *model_arguments(tiny_checkpoint), "--data", tmp_path / "data.tsv")
    assert_one_line(run(*command, *options), *words)


def test_labels_that_are_not_classes_are_refused_in_one_line(tiny_classifier_checkpoint, tmp_path):
    data = write_table(tmp_path / "data.tsv", "text\tlabel", [("a card", PRIVATE), (PRIVATE, "card")])
    result = evaluate("classification", tiny_classifier_checkpoint, "--methods", "full", "--data", data)
    assert_one_line(result, "1 labels of the texts are none of the model's 3 classes")


@pytest.mark.parametrize("kind", ["classification", "agreement"])
def test_classifier_of_another_model_is_refused_in_one_line(tiny_checkpoint, files, tmp_path, kind):
    random = np.random.default_rng(1)
    fit_classifier(
        random.normal(size=(9, 32)).astype(np.float32), ["card", "other", "x"] * 3, fingerprint="f", model="m"
    ).save(tmp_path / "classifier")
    options = ("--methods", "full", "--data", files / "test.tsv", "--classifier", tmp_path / "classifier")
    assert_one_line(evaluate(kind, tiny_checkpoint, *options), "was fitted for m", "fit a classifier")
