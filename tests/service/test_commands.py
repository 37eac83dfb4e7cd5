"""Commands from files to files: build, inspect, verify and renew databases, fit classifiers, evaluate."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_line import PRIVATE, assert_one_line, model_arguments, run, succeeded, without_progress
from core_models import flip
from following import publish
from tokenizers import Tokenizer

from attncache_core import AttentionDatabase, InvalidInput, LinearClassifier, PrefillEngine
from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.corpus.reading import read_labelled
from attncache_core.reuse.maps.generations import Renewal, Result, read_renewals
from attncache_core.reuse.maps.publishing import renewing
from attncache_core.text.token_batch import pack
from service.cli import main
from service.commands import renew as renew_command
from service.commands.report import require_writable, show_table

pytestmark = pytest.mark.usefixtures("few_steps")


@pytest.fixture(scope="module")
def files(tiny_corpus, tmp_path_factory):
    """corpus.tsv, with a source (mould) of four texts each; train.tsv and test.tsv, with labels."""
    folder = tmp_path_factory.mktemp("files")
    texts = [sentence.text for sentence in tiny_corpus]
    rows = [
        f"{text}\t{'card' if 'card' in text else 'other'}\t{index // 4}" for index, text in enumerate(texts)
    ]
    for name, part in (("corpus", rows), ("train", rows[::2]), ("test", rows[1::8])):
        (folder / f"{name}.tsv").write_text("\n".join(["text\tlabel\tmould", *part]) + "\n", encoding="utf-8")
    return folder


def build(checkpoint, database, *options, **how):
    return run("build", *model_arguments(checkpoint), "--database", database, *options, **how)


@pytest.fixture(scope="module")
def built(tiny_checkpoint, files, tmp_path_factory):
    """A database that the command built from a .tsv file, and the output of the command."""
    folder = tmp_path_factory.mktemp("built") / "cards.db"
    options = ("--heads", "all", "--threshold", "0.9", "--prototypes", "4")
    return folder, succeeded(build(tiny_checkpoint, folder, "--corpus", files / "corpus.tsv", *options))


def test_build_from_a_table_makes_a_sound_database_and_shows_it(built):
    database = AttentionDatabase.open(built[0])
    assert succeeded(run("verify", built[0])) == "270 records and prototypes, all sound\n"
    assert (database.info().records, database.info().prototypes) == (240, 30)
    (group,) = database.search.policy.groups
    assert {kind.threshold for kind in group.kinds.values()} == {0.9}
    assert database.mask.total == 12
    assert database.manifest.build["texts"] == 240
    assert built[1] == succeeded(run("inspect", built[0]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "only recorded texts hit"),
        (("--threshold", "0"), "texts may hit outside the budget"),
        (("--min-cosine", "0", "--min-text-cosine", "0"), "hits at least 0.0"),
    ],
)
def test_build_of_few_texts_says_what_hits_with_an_unmeasured_threshold(
    tiny_checkpoint, files, tmp_path, options, said
):
    lines = (files / "corpus.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "few.tsv").write_text("".join(lines[:12]), encoding="utf-8")
    shown = succeeded(build(tiny_checkpoint, tmp_path / "db", "--corpus", tmp_path / "few.tsv", *options))
    assert said in " ".join(shown.split())
    assert ("θ was given" in shown) == ("--threshold" in options)


def test_options_of_build_reach_the_database(tiny_checkpoint, files, tmp_path):
    options = (
        *("--corpus", f"{files / 'corpus.tsv'}:text", "--source-column", "mould"),
        *("--min-cosine", "0.9", "--min-agreement", "0.8", "--prototypes", "2"),
        *("--heads", "layers:0-1", "--max-length", "6", "--seed", "3"),
    )
    succeeded(build(tiny_checkpoint, tmp_path / "a.db", *options))
    manifest = AttentionDatabase.open(tmp_path / "a.db").manifest
    assert manifest.build["min_cosine"] == manifest.policy.budget.least == 0.9
    assert manifest.build["min_agreement"] == 0.8
    assert manifest.prototypes == {5: 3, 6: 3}  # with the mean of each length
    assert manifest.build["seed"] == 3
    assert manifest.stored_heads == (4, 4, 0)
    assert max(manifest.records) == 6
    several = "--corpus", f"{files / 'corpus.tsv'}:text,label", "--source-column", "mould"
    refused = build(tiny_checkpoint, tmp_path / "b.db", *several)
    assert (refused.exit_code, "name one column for the texts" in refused.stderr) == (2, True)
    # The four texts of a mould are held out together.
    assert manifest.build["held_out"] % 4 == 0
    assert manifest.build["held_out"] > 0


def test_build_from_standard_input_records_its_lines(tiny_checkpoint, tmp_path):
    lines = b"where is my card\nwhere is my bank\n\nclose the account\nopen the account\n"
    succeeded(build(tiny_checkpoint, tmp_path / "a.db", "--corpus", "-", standard_input=lines))
    assert AttentionDatabase.open(tmp_path / "a.db").manifest.records == {5: 2, 6: 2}


def test_corpus_is_several_files_and_columns_without_excluded_texts_whatever_their_spelling(
    tiny_checkpoint, tiny_engine, tiny_corpus, tmp_path
):
    texts = [sentence.text for sentence in tiny_corpus]
    pairs = zip(texts[:60], texts[60:120], strict=True)
    files = {
        "pairs.csv": ["left,right", *(",".join(pair) for pair in pairs)],
        "more.txt": texts[120:200],
        "evaluated.csv": ["query,answer", f"{texts[0]},{texts[100].upper()}", f"{texts[150]},nowhere"],
        "without.txt": [texts[7], texts[0]],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    arguments = (
        *("--corpus", f"{tmp_path / 'pairs.csv'}:right,left", "--corpus", tmp_path / "more.txt"),
        *("--exclude", f"{tmp_path / 'evaluated.csv'}:query,answer"),
        # --without is the former name of --exclude.
        *("--without", tmp_path / "without.txt"),
        *("--heads", "all"),
    )
    result = build(tiny_checkpoint, tmp_path / "a.db", *arguments)
    succeeded(result)
    assert "4 of 200 texts excluded" in result.stderr.splitlines()
    store = AttentionDatabase.open(tmp_path / "a.db").search.store
    held = [store.record_of(ids) is not None for ids in tiny_engine.tokenize(texts)]
    assert held == [index < 200 and index not in (0, 7, 100, 150) for index in range(240)]
    assert AttentionDatabase.open(tmp_path / "a.db").manifest.build["texts"] == 196


def test_prototypes_dimensions_and_longest_text_are_what_the_options_say(
    tiny_checkpoint, tiny_engine, tiny_corpus, files, tmp_path
):
    options = ("--prototypes", "0", "--dimensions", "24", "--max-tokens", "7", "--heads", "all")
    succeeded(build(tiny_checkpoint, tmp_path / "a.db", "--corpus", files / "corpus.tsv", *options))
    database = AttentionDatabase.open(tmp_path / "a.db")
    manifest = database.manifest
    assert manifest.prototypes == {}
    assert (manifest.build["prototypes"], manifest.build["dimensions"]) == (0, 24)
    # Longer texts are cut, not left out.
    assert sum(manifest.records.values()) == len(
        {tuple(sentence.text.split()[:5]) for sentence in tiny_corpus}
    )
    assert max(manifest.records) == 7
    batch = pack([[2, 7, 8, 9, 3]])
    (features,) = database.search.projector.project(tiny_engine.model.embed(batch), batch.groups())
    assert features.shape == (1, 24)


def test_excluding_the_whole_corpus_is_one_line(tiny_checkpoint, files, tmp_path):
    source = f"{files / 'corpus.tsv'}:text"
    result = build(tiny_checkpoint, tmp_path / "a.db", "--corpus", source, "--exclude", source)
    assert result.exit_code == 2
    excluded, line = without_progress(result.stderr)
    assert excluded == "240 of 240 texts excluded"
    assert line.startswith("attncache: the corpus has 0 distinct texts")
    assert not (tmp_path / "a.db").exists()


def test_inspect_shows_records_and_bytes_per_length_mask_threshold_and_quality(built):
    folder, _ = built
    text = succeeded(run("inspect", folder))
    database = AttentionDatabase.open(folder)
    assert "240 and 30 prototypes in float16" in text
    assert "12 of 12 heads" in text
    # With a given θ, no budget is kept.
    assert "budget       none: θ was given" in text
    assert "held-out texts, with this θ: hit rate" in text
    assert "threshold θ  1- tokens: stored 0.9000, prototype 0.9000" in text
    assert f"hit rate {database.manifest.quality['hit_rate']:.3f}" in text
    for length, segment in database.search.store.segments.items():
        size = (folder / "maps" / f"{length:05d}.maps").stat().st_size
        row = next(line for line in text.splitlines() if f" {length} " in line and f"{size:,}" in line)
        assert str(len(segment)) in row


def test_inspect_shows_a_folder_as_it_is_named(built, tmp_path):
    folder = shutil.copytree(built[0], tmp_path / "a[" / "b]")
    assert str(folder) in "".join(succeeded(run("inspect", folder)).splitlines())


def test_inspect_as_json_is_the_manifest_on_a_terminal_without_utf_8_too(built, tmp_path):
    folder = Path(shutil.copytree(built[0], tmp_path / "a.db"))
    content = (folder / "manifest.json").read_text(encoding="utf-8")
    assert (folder / "key").read_bytes().hex() not in content
    (group,) = json.loads(content)["policy"]["groups"]
    assert group["kinds"]["0"]["threshold"] == 0.9
    replace(AttentionDatabase.open(folder).manifest, model="modèle").write(folder)
    printed = CliRunner(charset="latin-1").invoke(main, ["inspect", str(folder), "--json"])
    assert printed.stdout_bytes == (folder / "manifest.json").read_bytes()
    assert "modèle".encode() in printed.stdout_bytes


@pytest.mark.parametrize(
    ("name", "offset", "sentence"),
    [
        ("key", 0, "manifest.json and {} are of two databases"),
        ("projector.safetensors", 0, "{} was changed since the database was built"),
        ("prototypes.safetensors", -1, "{} was changed since the database was built"),
        ("index/00006.faiss", 9, "{} was changed since the database was built"),
        ("maps/00006.maps", 0, "{} is not a segment of length 6 of this database"),
        ("maps/00006.maps", 60, "{} belongs to another database"),
        ("maps/00006.maps", 4096, "the record table of {} was changed since it was written"),
        ("maps/00006.maps", 4095, "header or record table of {} were changed since the database was built"),
        ("maps/00006.maps", 2 * 4096, "length 6: 1 damaged records, the first is 0"),
    ],
)
def test_verify_ends_with_exit_code_1_and_a_sentence_for_each_kind_of_file(
    built, tmp_path, name, offset, sentence
):
    folder = Path(shutil.copytree(built[0], tmp_path / "a.db"))
    flip(folder / name, offset)
    result = run("verify", folder)
    assert (result.exit_code, result.stderr) == (1, "")
    (line,) = result.stdout.splitlines()
    remedy = f"; remove {folder} and build it again" if "{}" in sentence else ""
    assert line.startswith(f"{sentence.format(folder / name)}{remedy}")


def test_fitted_classifier_predicts_its_training_labels_and_a_fit_that_was_stopped_can_be_repeated(
    tiny_checkpoint, files, tmp_path
):
    output = tmp_path / "classifier"
    arguments = ("fit-classifier", *model_arguments(tiny_checkpoint), "--data", files / "train.tsv")
    assert succeeded(run(*arguments, "--output", output)) == f"{output}: 2 labels from 120 texts\n"
    classifier = LinearClassifier.load(output)
    engine = PrefillEngine.load(tiny_checkpoint, classifier=classifier, dtype="float32")
    texts, labels = read_labelled(str(files / "train.tsv"), "text", "label")
    decided = classifier.predict(engine.embed(texts))
    assert sum(map(str.__eq__, decided, labels)) / len(labels) > 0.9
    (output / "classifier.json").unlink()  # stopped between its files
    succeeded(run(*arguments, "--output", output))
    assert LinearClassifier.load(output).digest() == classifier.digest()


def test_text_that_cannot_be_embedded_is_named_by_its_place_in_the_data(tiny_checkpoint, tmp_path):
    folder = Path(shutil.copytree(tiny_checkpoint.folder, tmp_path / "model"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["[NEW]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = ["text\tlabel", *(f"{'[NEW]' if row == 70 else 'my'} card\t{row % 2}" for row in range(80))]
    (tmp_path / "data.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    named = ("--data", tmp_path / "data.tsv", *model_arguments(read_checkpoint(folder)))
    assert_one_line(
        run("fit-classifier", *named, "--output", tmp_path / "out" / "in"), "data[70] has a token"
    )
    assert not (tmp_path / "out").exists()
    assert_one_line(run("evaluate", "agreement", "--methods", "full", *named), "inputs[70] has a token")


def test_long_value_of_an_option_is_no_file_that_a_report_could_overwrite(tmp_path):
    report = tmp_path / "a.json"
    report.touch()

    @click.command()
    @click.option("--labels")
    def command(**_):
        require_writable(report, "--json")

    assert run("--labels", "x" * 300, program=command).exception is None
    assert isinstance(run("--labels", report, program=command).exception, InvalidInput)


def test_report_is_refused_before_the_work_where_nothing_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    program = click.command()(lambda: require_writable(tmp_path / "a.json", "--json"))
    assert "cannot be written to; choose another one" in str(run(program=program).exception)


BUILD = "build --corpus {files}/corpus.tsv --database"
EVALUATE = "evaluate classification --train {files}/train.tsv --data {files}/test.tsv --database {built}"
CALIBRATE = "calibrate --database {built} --texts {files}/test.tsv:text"


@pytest.mark.parametrize(
    ("command", "model", "words"),
    [
        (f"{BUILD} {{built}}", "tiny", ("exists already",)),
        (f"{BUILD} a.db", "absent", ("not found", "absent")),
        ("fit-classifier --data {files}/train.tsv --output out", "absent", ("not found", "absent")),
        ("fit-classifier --data one.tsv --output out", "tiny", ("two labels",)),
        ("fit-classifier --data {files}/train.tsv --output out", "classifier", ("gives no embeddings",)),
        ("fit-classifier --data {files}/train.tsv --output one.tsv", "tiny", ("one.tsv exists; remove it",)),
        ("fit-classifier --data {files}/train.tsv --output .", "tiny", (". exists; remove it or choose",)),
        ("fit-classifier --data {files}/train.tsv --output one.tsv/x/y", "tiny", ("Not a directory",)),
        ("inspect .", None, ("there is no database",)),
        ("inspect one.tsv", None, ("there is no database",)),
        ("verify .", None, ("there is no database",)),
        ("verify one.tsv", None, ("there is no database",)),
        (CALIBRATE, "classifier", ("fingerprint", "build a database")),
        (CALIBRATE, "tiny", ("0 of the texts are not in the database",)),
        (EVALUATE, "classifier", ("--train fits a classifier on embeddings", "leave out --train")),
        (f"{EVALUATE} --classifier out", "tiny", ("give --train or --classifier, not both",)),
        (f"{EVALUATE} --json absent/report.json", "tiny", ("the folder of --json", "report.json does not")),
        (f"{EVALUATE} --markdown {{files}}/test.tsv", "tiny", ("--markdown would overwrite", "--data names")),
    ],
)
def test_mistake_is_one_line(
    tiny_checkpoint, tiny_classifier_checkpoint, built, files, tmp_path, monkeypatch, command, model, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.tsv").write_text(f"text\tlabel\n{PRIVATE}\tx\ncard\tx\n", encoding="utf-8")
    known = {"tiny": tiny_checkpoint, "classifier": tiny_classifier_checkpoint}
    named = {None: (), "absent": ("--model", "absent")}
    options = model_arguments(known[model]) if model in known else named[model]
    result = run(*(word.format(built=built[0], files=files) for word in command.split()), *options)
    assert result.exit_code == 2
    line = without_progress(result.stderr)[-1]
    assert line.startswith("attncache: ")
    assert all(word in line for word in words)
    assert PRIVATE not in result.stderr
    assert "embedding texts" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one.tsv"]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (f"query\n{PRIVATE}\n", (), ("no column 'text'", "'query'")),
        (f"id\ttext\n{PRIVATE}\n", (), ("line 2",)),
        (f"id\ttext\n{PRIVATE}\t\n", (), ("line 2: the text is empty; remove the row",)),
        (f"text\n{PRIVATE}\n", (), ("1 distinct texts",)),
        (f"text\n{PRIVATE}\ncard\n", ("--heads", "layers:7"), ("layers 0 to 2",)),
        (f"text\n{PRIVATE}\ncard\n", ("--min-cosine", "2"), ("--min-cosine",)),
        (f"text\n{PRIVATE}\ncard\n", ("--format", "xml"), ("--format", "jsonl")),
        (f"text\n{PRIVATE}\ncard\n", ("--max-length", "1"), ("--max-length",)),
        (f"text\n{PRIVATE}\ncard\n", ("--dimensions", "1"), ("--dimensions",)),
        (f"text\n{PRIVATE}\ncard\n", ("--prototypes", "-1"), ("--prototypes",)),
        (f"text\n{PRIVATE}\ncard\n", ("--max-tokens", "1"), ("--max-tokens",)),
        (f"text\n{PRIVATE}\ncard\n", ("--exclude", "no.txt"), ("no.txt cannot be read",)),
        (f"text\n{PRIVATE}\ncard\n", ("--maps", "square"), ("--maps was removed", "lower triangles")),
    ],
)
def test_bad_corpus_or_option_of_build_is_one_line(tiny_checkpoint, tmp_path, content, options, words):
    (tmp_path / "a.tsv").write_text(content, encoding="utf-8")
    result = build(tiny_checkpoint, tmp_path / "a.db", "--corpus", tmp_path / "a.tsv", *options)
    assert_one_line(result, *words)
    assert not (tmp_path / "a.db").exists()


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_words_of_a_table_stay_whole_on_every_screen(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    show_table(
        "title", ["method", "mean cosine", "bound"], [["prefix caching", "0.9999", "0.9998"], ["", 1, 2]]
    )
    lines = capsys.readouterr().out.splitlines()
    shown = " ".join(lines)
    for word in ("method", "prefix", "caching", "mean", "cosine", "bound", "0.9999", "0.9998"):
        assert word in shown
    assert ("prefix caching" in shown) == ("mean cosine" in shown) == (columns > 20)
    assert lines[-1].endswith("┘")


# Renewals: what is printed, and exit codes.


@pytest.fixture
def asked(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_text(f"{PRIVATE}\n" * 300, encoding="utf-8")
    return path


def test_rollback_lets_the_generation_before_serve_again_and_needs_no_model(root, tiny_prototypes_database):
    publish(root, tiny_prototypes_database)
    printed = succeeded(run("renew", root, "--rollback", "--model", "no-such-model"))
    assert printed == "generation 0 serves again, instead of generation 1\n"
    assert AttentionDatabase.open(root).info().generation == 0
    assert_one_line(run("renew", root, "--rollback"), "no generation before generation 0")
    assert_one_line(run("renew", root, "--rollback", "--corpus", "asked.txt"), "give --corpus or --rollback")


def test_folder_without_a_sample_needs_a_corpus(tmp_path, tiny_engine, tiny_corpus, tiny_checkpoint):
    root = tmp_path / "a.db"
    options = BuildOptions(heads="3", min_cosine=0.5, min_text_cosine=0.0, prototypes=4, training_steps=10)
    build_database(tiny_engine, tiny_corpus, root, options)
    result = run("renew", root, *model_arguments(tiny_checkpoint))
    assert_one_line(result, "holds no sample of texts that were asked before now; start the server with")


def test_what_cannot_be_renewed_is_an_error_of_one_line_and_stays_as_it_is(
    root, tmp_path, tiny_checkpoint, asked
):
    empty = tmp_path / "empty"
    empty.mkdir()

    def renew(folder):
        return run("renew", folder, "--corpus", asked, *model_arguments(tiny_checkpoint))

    assert_one_line(renew(root), "keeps no quality budget")
    assert read_renewals(root) == ()
    with renewing(root):
        assert_one_line(renew(root), "process", "renews")
    assert_one_line(renew(empty), "there is no database")
    assert_one_line(run("renew", tmp_path / "none", "--rollback"), "there is no database")
    assert [*empty.iterdir()] == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("result", "code", "printed"),
    [
        (Result.PUBLISHED, 0, "generation 4 is published: why"),
        (Result.REFUSED, 3, "generation 4 is removed, and generation 3 serves on: why"),
        (Result.NO_GAIN, 3, "generation 3 serves on: why"),
    ],
)
def test_exit_code_says_whether_a_generation_was_published(
    root, tiny_checkpoint, asked, monkeypatch, result, code, printed
):
    decided = Renewal("2026-11-25T03:00:00Z", result, 3, 4, "why")
    monkeypatch.setattr(renew_command, "renew_database", lambda *_, **__: decided)
    ran = run("renew", root, "--corpus", asked, *model_arguments(tiny_checkpoint))
    assert (ran.exit_code, ran.stdout) == (code, f"{printed}\n")
    assert without_progress(ran.stderr) == []


def test_inspect_and_verify_take_a_renewed_database(root, tiny_prototypes_database):
    publish(root, tiny_prototypes_database)
    assert "generations/000001" in succeeded(run("inspect", root)).replace("\n", "")
    manifest = (tiny_prototypes_database / "manifest.json").read_text(encoding="utf-8")
    assert succeeded(run("inspect", root, "--json")) == manifest
    printed = succeeded(run("verify", root)).splitlines()
    assert [line.split(":")[0] for line in printed] == ["generation 0", "generation 1"]
    assert all(line.endswith("records and prototypes, all sound") for line in printed)
    (root / "current").write_bytes(b"\x00")
    damaged = run("verify", root)
    assert damaged.exit_code == 1
    assert "current is damaged" in damaged.stdout
    assert damaged.stdout.count("all sound") == 2
