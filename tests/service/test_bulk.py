"""Files of texts to files of embeddings and classes, also if the run is stopped anywhere."""

import csv
import errno
import json
import os
import sys
import threading
from itertools import count, takewhile
from pathlib import Path

import numpy as np
import pytest
from command_line import PRIVATE, model_arguments, run, succeeded
from core_models import damage_weights, random_text, write_model, write_sentence_transformer
from forked import is_killed
from full_disk import largest_file
from killed_transfers import run_until_killed

from attncache_core import LinearClassifier, PrefillEngine, class_scores, fit_classifier
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.runner import Runner
from attncache_core.errors import InvalidInput
from service.bulk import formats, rows, spool
from service.bulk.computing import Computing, embedding
from service.bulk.formats import Classes, write_output
from service.bulk.rows import ChunkReader, open_rows

ROWS_PER_CHUNK = 8


@pytest.fixture(scope="module", autouse=True)
def _small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.bulk.rows.CHUNK_ROWS", ROWS_PER_CHUNK)
        yield


@pytest.fixture(scope="module")
def texts():
    """50 texts, some of them equal."""
    random = np.random.default_rng(0)
    distinct = [random_text(random, words) for words in random.integers(1, 12, size=40)]
    return [distinct[index] for index in random.integers(0, 40, size=50)]


@pytest.fixture
def source(tmp_path, texts):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def expected(tiny_engine, texts):
    return tiny_engine.embed(texts)


def write_texts(path, texts):
    """Write texts beside another column, in the format of the path's ending."""
    rows = list(enumerate(texts))
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.table({"id": [number for number, _ in rows], "body": texts})
        parquet.write_table(table, path, row_group_size=7)
        return path
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps({"id": number, "body": text}) + "\n" for number, text in rows)
        else:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([("id", "body"), *rows])
    return path


def embed_arguments(checkpoint, source, output, *more):
    return "embed", *model_arguments(checkpoint), "--input", source, "--output", output, *more


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.npy"


@pytest.fixture
def arguments(tiny_checkpoint, source, output):
    """The command that embeds the texts of `source`."""
    return embed_arguments(tiny_checkpoint, source, output)


def one_line(result, *words, code=2):
    """Check that a command failed in one line with these words, beside lines of progress; return the line."""
    assert result.exit_code == code, result.output
    assert PRIVATE not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("attncache: ")]
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in line
    return line


def left_files(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("texts"))


def rows_of(output):
    """Return the label, the score and the scores by label of each row."""
    if output.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(output).to_pylist()
    with output.open(encoding="utf-8") as file:
        if output.suffix == ".jsonl":
            return [json.loads(line) for line in file]
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [
        {
            "label": row.pop("label"),
            "score": float(row.pop("score")),
            "scores": {label: float(score) for label, score in row.items()},
        }
        for row in rows
    ]


@pytest.mark.parametrize("ending", ["jsonl", "tsv", "csv", "parquet"])
def test_embeddings_are_in_the_order_of_the_input(tiny_checkpoint, tmp_path, texts, expected, ending):
    source, output = write_texts(tmp_path / f"texts.{ending}", texts), tmp_path / "out.npy"
    shown = succeeded(run(*embed_arguments(tiny_checkpoint, source, output, "--column", "body")))
    assert shown == f"{output}: 50 embeddings of 32 dimensions\n"
    numbers = np.load(output)
    assert numbers.dtype == np.float32
    np.testing.assert_allclose(numbers, expected, atol=1e-5)
    assert left_files(tmp_path) == ["out.npy"]


def test_standard_input_is_lines_unless_a_format_is_given(tiny_checkpoint, tmp_path, texts, expected):
    lines, kept = "\n".join(texts).encode(), os.dup(0)
    for content, *more in ((lines,), (b"body\n" + lines, "--format", "tsv", "--column", "body")):
        (tmp_path / "texts").write_bytes(content)
        with (tmp_path / "texts").open("rb") as file:
            os.dup2(file.fileno(), 0)
        try:
            succeeded(run(*embed_arguments(tiny_checkpoint, "-", tmp_path / f"{len(more)}.npy", *more)))
        finally:
            os.dup2(kept, 0)
        np.testing.assert_allclose(np.load(tmp_path / f"{len(more)}.npy"), expected, atol=1e-5)
    os.close(kept)


def test_column_of_parquet_whose_name_has_a_dot_is_no_field_of_another(
    tiny_checkpoint, tmp_path, texts, expected
):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"a": [{"text": "other"}] * len(texts), "a.text": texts}
    parquet.write_table(pyarrow.table(table), tmp_path / "texts.parquet")
    arguments = (tmp_path / "texts.parquet", tmp_path / "out.npy", "--column", "a.text")
    succeeded(run(*embed_arguments(tiny_checkpoint, *arguments)))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-5)


def through_a_pipe(path, content, *arguments):
    """Run a command while a named pipe gives this content."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    try:
        return run(*arguments)
    finally:
        writer.join()
        path.unlink()


def test_pipe_is_an_input_and_its_run_continues(tiny_checkpoint, tmp_path, source, expected, monkeypatch):
    pipe, output = tmp_path / "texts-pipe", tmp_path / "out.npy"
    arguments = embed_arguments(tiny_checkpoint, pipe, output, "--format", "txt")
    with monkeypatch.context() as patch:
        stop_after(2, patch, KeyboardInterrupt())
        one_line(through_a_pipe(pipe, source.read_bytes(), *arguments), "16 rows are saved", code=130)
    ended = through_a_pipe(pipe, source.read_bytes(), *arguments)
    succeeded(ended)
    assert "embedding texts: 24 rows\n" in ended.stderr
    np.testing.assert_allclose(np.load(output), expected, atol=1e-5)


def test_texts_that_are_cut_are_counted_row_by_row(tiny_checkpoint, tmp_path, output, monkeypatch):
    source = tmp_path / "texts.txt"
    # Neighbours, and again in a chunk behind them, which takes the text from the output.
    long = "my card is lost where is it\n"
    source.write_text("my card\n" + long * 2 + "card\n" * 2 * ROWS_PER_CHUNK + long, encoding="utf-8")
    arguments = embed_arguments(tiny_checkpoint, source, output, "--max-tokens", 6)
    shown = run(*arguments)
    succeeded(shown)
    assert "3 texts of this run were cut, because they have more than 6 tokens" in shown.stderr
    output.unlink()
    with monkeypatch.context() as patch:
        stop_after(1, patch, KeyboardInterrupt())
        one_line(run(*arguments), "8 rows are saved", code=130)
    shown = run(*arguments)
    succeeded(shown)
    assert "1 texts of this run were cut" in shown.stderr


def test_pipe_without_a_format_or_of_parquet_is_refused(tiny_checkpoint, tmp_path):
    pytest.importorskip("pyarrow")
    pipe, output = tmp_path / "pipe", tmp_path / "out.npy"
    arguments = embed_arguments(tiny_checkpoint, pipe, output)
    one_line(run(*arguments), f"{pipe} has a format that is not known", "or give --format")
    ended = through_a_pipe(pipe, b"", *arguments, "--format", "parquet")
    one_line(ended, f"{pipe} is a pipe, and a Parquet file is read from its end; give --input a file")
    assert not list(tmp_path.iterdir())


def test_embeddings_as_parquet_and_with_fewer_dimensions(
    tiny_checkpoint, tmp_path, source, tiny_engine, texts, monkeypatch
):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(formats, "_NUMBERS_AT_ONCE", 16 * 20)
    output = tmp_path / "out.parquet"
    succeeded(run(*embed_arguments(tiny_checkpoint, source, output, "--dimensions", 16)))
    read = parquet.ParquetFile(output)
    assert [read.metadata.row_group(index).num_rows for index in range(3)] == [20, 20, 10]
    column = read.read().column("embedding").combine_chunks()
    numbers = column.flatten().to_numpy().reshape(-1, 16)
    np.testing.assert_allclose(numbers, tiny_engine.embed(texts, dimensions=16), atol=1e-5)
    assert left_files(tmp_path) == ["out.parquet"]


def test_prompt_of_the_model_is_used(tmp_path, source, texts):
    folder = write_sentence_transformer(
        tmp_path / "texts-model", prompts={"prompts": {"query": "query : "}, "default_prompt_name": None}
    )
    checkpoint, output = read_checkpoint(folder), tmp_path / "out.npy"
    succeeded(run(*embed_arguments(checkpoint, source, output, "--prompt-name", "query")))
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    np.testing.assert_allclose(np.load(output), engine.embed(texts, prompt_name="query"), atol=1e-5)


@pytest.fixture(scope="module")
def classes(tiny_classifier_checkpoint, texts):
    engine = PrefillEngine.load(tiny_classifier_checkpoint, dtype="float32")
    return class_scores(engine.run(engine.requests(engine.tokenize(texts))).outputs)


LABELS = ("transfer", "card", "help")


@pytest.mark.parametrize("ending", ["jsonl", "tsv", "parquet"])
def test_classes_are_in_the_order_of_the_input(tiny_classifier_checkpoint, tmp_path, source, classes, ending):
    output = tmp_path / f"out.{ending}"
    arguments = model_arguments(tiny_classifier_checkpoint)
    shown = succeeded(run("classify", *arguments, "--input", source, "--output", output))
    assert shown == f"{output}: 50 texts, 3 labels\n"
    rows = rows_of(output)
    scores = [[row["scores"][label] for label in LABELS] for row in rows]
    np.testing.assert_allclose(scores, classes, atol=1e-5)
    assert [row["label"] for row in rows] == [LABELS[best] for best in np.argmax(scores, axis=1)]
    assert [row["score"] for row in rows] == [max(row) for row in scores]


@pytest.mark.parametrize("ending", ["jsonl", "tsv", "parquet"])
def test_label_is_that_of_the_larger_logit_also_where_both_scores_are_1(tmp_path, ending):
    output, spooled = tmp_path / f"labels.{ending}", tmp_path / "spooled"
    logits = np.array([[18.0, 21.0], [21.0, 18.0], [-1.0, 0.0]], np.float32)
    write_output(output, spooled, logits, Classes(["a", "b"], multi_label=True))
    rows = rows_of(output)
    assert [row["label"] for row in rows] == ["b", "a", "b"]
    assert [row["score"] for row in rows] == [1.0, 1.0, 0.5]


def test_labels_are_compared_by_embedding_and_a_fitted_classifier_is_used(
    tiny_checkpoint, tmp_path, source, texts, expected
):
    fitted = fit_classifier(
        expected,
        [text.split()[0] for text in texts],
        fingerprint=tiny_checkpoint.embedding_fingerprint(),
        model=tiny_checkpoint.name,
    )
    folder = tmp_path / "texts-classifier"
    fitted.save(folder)
    engine = PrefillEngine.load(tiny_checkpoint.adapted(labels=["card", "bank"]), dtype="float32")
    for option, value, logits in (
        ("--labels", "card, bank", engine.decisions.class_logits(expected)),
        ("--classifier", folder, LinearClassifier.load(folder).logits(expected)),
    ):
        output = tmp_path / f"out{option}.jsonl"
        files = ("--input", source, "--output", output)
        succeeded(run("classify", *model_arguments(tiny_checkpoint), option, value, *files))
        found = [list(row["scores"].values()) for row in rows_of(output)]
        np.testing.assert_allclose(found, class_scores(logits), atol=1e-5)


@pytest.mark.parametrize("labels", ["a,b", "lost card,lost bank,b"], ids=["one token", "several tokens"])
def test_labels_are_scored_by_their_tokens(folder, tmp_path, source, texts, labels):
    checkpoint, output = read_checkpoint(folder), tmp_path / "out.jsonl"
    options = ("--task", "label-logits", "--labels", labels, "--batch-tokens", 64)
    files = ("--input", source, "--output", output)
    succeeded(run("classify", *model_arguments(checkpoint), *options, *files))
    names = labels.split(",")
    engine = PrefillEngine.load(checkpoint.adapted(label_logits=True, labels=names), dtype="float32")
    tokens = engine.decisions.labels_in()
    rows = rows_of(output)
    assert len(rows) == len(texts)
    for text, row in list(zip(texts, rows, strict=True))[::7]:
        requests = engine.requests(engine.tokenize([text], prompt=tokens.prompt), tokens.prompt, tokens)
        result = engine.run(requests)
        logits = engine.decisions.label_logits(tokens, result.outputs, result.log_probabilities)
        np.testing.assert_allclose(
            [row["scores"][name] for name in names], class_scores(logits)[0], atol=1e-4
        )


# Stopping and continuing.


@pytest.fixture(scope="module")
def whole(tiny_checkpoint, texts, tmp_path_factory):
    """The output of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    source, output = folder / "texts.txt", folder / "out.npy"
    source.write_text("\n".join(texts) + "\n", encoding="utf-8")
    succeeded(run(*embed_arguments(tiny_checkpoint, source, output)))
    return output.read_bytes()


def test_killed_run_continues_with_the_same_bytes(arguments, output, tmp_path, whole):
    # Killed while the third chunk is half written.
    assert is_killed(run_until_killed, ROWS_PER_CHUNK, 3, list(map(str, arguments)))
    assert left_files(tmp_path) == ["out.npy.partial", "out.npy.progress"]
    assert (tmp_path / "out.npy.partial").stat().st_size == 128 + (16 + 4) * 32 * 4
    # What a killed run was writing beside its place is removed.
    for name in ("out.npy", "out.npy.progress"):
        (tmp_path / f".{name}.0123456789abcdef.unfinished").touch()
    succeeded(run(*arguments))
    assert output.read_bytes() == whole
    assert left_files(tmp_path) == ["out.npy"]


class Killed(BaseException):
    """Ends a run as a signal would, except that handlers run."""


def interrupted(*_):
    raise KeyboardInterrupt


def is_killed_before(step, arguments, monkeypatch):
    """Run a command until it is about to take this step on the disk; return whether there was such a step."""
    steps = count()

    def counted(original):
        def call(*values, **named):
            if next(steps) == step:
                raise Killed
            return original(*values, **named)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted(os.fsync))
        patch.setattr(os, "link", counted(os.link))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        try:
            succeeded(run(*arguments))
        except Killed:
            return True
    return False


def stop_ever_later(arguments, output, steps, monkeypatch):
    """Run a command that is killed after one of these numbers of steps, until it ends; return the stops."""
    killed = (is_killed_before(step, arguments, monkeypatch) for step in steps)
    return sum(takewhile(lambda stopped: stopped and not output.exists(), killed))


def test_run_that_is_killed_again_and_again_gives_the_same_bytes(arguments, output, whole, monkeypatch):
    assert stop_ever_later(arguments, output, count(0, 3), monkeypatch) > 3
    assert output.read_bytes() == whole


@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_run_that_is_killed_while_it_makes_the_output_gives_the_same_bytes(
    tiny_checkpoint, tmp_path, source, monkeypatch, ending
):
    whole, output = tmp_path / f"texts-whole.{ending}", tmp_path / f"out.{ending}"
    succeeded(run(*embed_arguments(tiny_checkpoint, source, whole)))
    arguments = embed_arguments(tiny_checkpoint, source, output)
    with monkeypatch.context() as patch:
        patch.setattr(spool.Spool, "finish", interrupted)
        one_line(run(*arguments), "50 rows are saved", code=130)
    assert stop_ever_later(arguments, output, count(), monkeypatch) >= 2
    assert output.read_bytes() == whole.read_bytes()


def stop_after(chunk, monkeypatch, error):
    """Let saving fail at this chunk, once."""
    saved, append = count(), spool.Spool.append

    def failing(*values):
        if next(saved) == chunk:
            raise error
        append(*values)

    monkeypatch.setattr(spool.Spool, "append", failing)


@pytest.mark.parametrize(
    ("chunk", "error", "words", "code"),
    [
        (0, KeyboardInterrupt(), ("stopped; no row is saved; run the same command again",), 130),
        # Continued with smaller chunks.
        (2, KeyboardInterrupt(), ("stopped; 16 rows are saved in", "run the same command again"), 130),
        (3, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ("out.npy: No space", "24 rows are saved"), 2),
    ],
    ids=["interrupted at once", "interrupted", "disk full"],
)
def test_stopped_run_says_how_to_continue(
    arguments, output, tmp_path, whole, monkeypatch, chunk, error, words, code
):
    stop_after(chunk, monkeypatch, error)
    one_line(run(*arguments), *words, code=code)
    assert left_files(tmp_path) == (["out.npy.partial", "out.npy.progress"] if chunk else [])
    if chunk:
        with spool.partial(output).open("ab") as torn:
            torn.write(bytes(99_999))
    if chunk == 2:
        monkeypatch.setattr("service.bulk.rows.CHUNK_CHARACTERS", 40)
    succeeded(run(*arguments))
    assert output.read_bytes() == whole


def test_rows_whose_state_was_not_written_do_not_count_as_saved(arguments, output, whole, monkeypatch):
    write, written = spool.write_whole, count()

    def failing(*values):
        if next(written) == 3:  # the first one begins, before any row
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(*values)

    monkeypatch.setattr(spool, "write_whole", failing)
    one_line(run(*arguments), "16 rows are saved")
    succeeded(run(*arguments))
    assert output.read_bytes() == whole


def test_output_is_complete_if_only_what_was_saved_cannot_be_removed(arguments, output, whole, monkeypatch):
    def refused(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    one_line(run(*arguments), "out.npy.partial", f"{output} is complete, so this file can be removed")
    assert output.read_bytes() == whole


@pytest.mark.parametrize("size", [0, 64])
def test_file_that_cannot_be_begun_is_named_and_does_not_stay(tmp_path, size):
    def begin():
        with spool.open_spool(tmp_path / "out.npy", 3, {}):
            pass

    with largest_file(size), pytest.raises(OSError, match="large") as failed:
        begin()
    assert failed.value.filename == str(tmp_path / "out.npy.partial")
    assert not list(tmp_path.iterdir())
    begin()


def test_bad_row_keeps_the_rows_before_it_and_can_be_corrected(arguments, output, source, texts, whole):
    good = source.read_bytes()
    source.write_text("\n".join([*texts[:29], "", *texts[30:]]) + "\n", encoding="utf-8")
    line = one_line(run(*arguments), f"{source}, line 30: the text is empty; remove the row")
    assert "24 rows are saved" in line
    assert line.endswith("correct the input and run the same command again to continue")
    source.write_bytes(good)
    succeeded(run(*arguments))
    assert output.read_bytes() == whole


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "zanzibar"', ["a.jsonl, line 2 is not JSON"]),
        ("a.jsonl", '{"text": "a"}\n{"body": "zanzibar"}\n', ["line 2 has no text in 'text'"]),
        ("a.jsonl", '{"text": 1}\n', ["line 1 has a value that is no string in 'text'"]),
        ("a.jsonl", '{"text": ""}\n', ["line 1: the text is empty"]),
        ("a.jsonl", '{"text": "zanzibar"}\n \n{"text": "b"}\n', ["line 2: the text is empty"]),
        ("a.jsonl", '{"text": "zan\\u0000zibar"}\n', ["line 1: the text holds a null byte"]),
        ("a.tsv", "id\ttext\n1\tzanzibar\n2\n", ["line 3 has 1 columns, and the header has 2"]),
        ("a.tsv", "text\nzanzibar\n\nb\n", ["line 3: the text is empty"]),
        ("a.csv", 'text\n"a\nb"\n""\n', ["line 4: the text is empty"]),
        ("a.csv", "body\nzanzibar\n", ["a.csv has no column 'text'; it has 'body'"]),
        ("a.csv", "text,label\nzanzibar, b,card\n", ["line 2 has 3 columns, and the header has 2; quote"]),
        ("a.txt", "zanzibar\n\n", ["line 2: the text is empty"]),
        ("a.txt", b"zanzibar\n\xff\n", ["a.txt, line 2 is not UTF-8; save the file as UTF-8"]),
        ("a.txt", "", ["a.txt has no texts"]),
        ("a.xml", "", ["a.xml has a format that is not known"]),
        ("a.tsv.gz", "", ["a.tsv.gz is compressed; decompress it", ".txt, .tsv, .csv, .jsonl, .parquet"]),
        ("a.parquet", "zanzibar", ["a.parquet is not a Parquet file"]),
    ],
)
def test_bad_rows_and_files_are_refused_in_one_line(tiny_checkpoint, tmp_path, name, content, words):
    source = tmp_path / name
    source.write_bytes(content.encode() if isinstance(content, str) else content)
    one_line(run(*embed_arguments(tiny_checkpoint, source, tmp_path / "out.npy")), *words)
    assert list(tmp_path.iterdir()) == [source]


def test_text_of_spaces_is_a_text_in_every_format(tiny_checkpoint, tmp_path):
    outputs = []
    for name, content in (
        ("a.txt", "  \ncard\n"),
        ("a.tsv", "text\n  \ncard\n"),
        ("a.jsonl", '{"text": "  "}\n'),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        outputs.append(tmp_path / f"{name}.npy")
        succeeded(run(*embed_arguments(tiny_checkpoint, tmp_path / name, outputs[-1])))
    first, *others = (np.load(output)[0] for output in outputs)
    assert all((other == first).all() for other in others)


@pytest.mark.parametrize(
    ("second", "damaged", "words"),
    [
        (b"zanzibar \xff", None, "row 2: the text is not UTF-8; write the file again"),
        (b"zanzibar", -10, "row 1 cannot be read; the file is damaged"),
        (b"zanzibar", -4, "row 1 cannot be read; the file is damaged"),
    ],
    ids=["not UTF-8", "compression", "page"],
)
def test_damage_of_a_parquet_file_is_refused_with_the_row(tiny_checkpoint, tmp_path, second, damaged, words):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source, texts = tmp_path / "a.parquet", pyarrow.array([b"card", second])
    parquet.write_table(pyarrow.table({"text": texts.view(pyarrow.string())}), source)
    content = bytearray(source.read_bytes())
    if damaged is not None:
        first = content.index(b"card") + damaged
        content[first : first + 4] = b"\xff" * 4
    source.write_bytes(content)
    one_line(run(*embed_arguments(tiny_checkpoint, source, tmp_path / "out.npy")), f"{source}, {words}")
    assert list(tmp_path.iterdir()) == [source]


def test_text_that_comes_to_nan_is_named_by_its_line(tmp_path, texts):
    folder = damage_weights(write_sentence_transformer(tmp_path / "texts-model"), [-1])  # "##ing"
    source, output = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.write_text("\n".join([*texts[:20], "carding zanzibar", *texts[20:]]), encoding="utf-8")
    arguments = embed_arguments(read_checkpoint(folder), source, output)
    one_line(
        run(*arguments), f"the model computes NaN or infinity for {source}, line 21", "16 rows are saved"
    )


def test_text_with_too_few_tokens_for_its_length_is_named_by_its_line(arguments, source, texts):
    # The equal text before it is computed once, so the line is not the index among the distinct texts.
    source.write_text(
        "\n".join([*texts[:20], texts[0], f"card{' ' * 2**21}card", texts[21]]), encoding="utf-8"
    )
    one_line(run(*arguments), f"{source}, line 22 has more than", "16 rows are saved")


def test_unfinished_output_is_continued_only_with_the_same_model_options_and_input(
    arguments, output, tmp_path, source, texts, monkeypatch
):
    stop_after(2, monkeypatch, KeyboardInterrupt())
    assert run(*arguments).exit_code == 130
    other = read_checkpoint(write_sentence_transformer(tmp_path / "texts-other", seed=1))
    for options, words in (
        (embed_arguments(other, source, output), "(another model, or options that change its answers)"),
        (
            (*arguments, "--batch-tokens", 99),
            "was begun with --batch-tokens 1024, not with --batch-tokens 99",
        ),
        ((*arguments, "--dimensions", 8), "was begun without --dimensions, not with --dimensions 8"),
    ):
        one_line(run(*options), words, "remove this file to begin again")
    good = source.read_bytes()
    for changed in (["card", *texts[1:]], texts[:9]):
        source.write_text("\n".join(changed), encoding="utf-8")
        one_line(run(*arguments), "does not begin with the 16 rows that are saved in")
    source.write_bytes(good)
    state = spool.progress(output)
    kept = state.read_text(encoding="utf-8")
    state.write_text(kept.replace('"begun_with":{', '"begun_with":{"--later":1,'), encoding="utf-8")
    one_line(run(*arguments), "was begun with --later 1, not without --later", "the same version")
    state.write_text(kept, encoding="utf-8")
    # More rows behind the ones that are done are welcome.
    source.write_bytes(good + b"one more card\n")
    succeeded(run(*arguments))
    assert len(np.load(output)) == 51


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_other_threads_continue_only_an_output_whose_bits_do_not_depend_on_them(
    arguments, output, monkeypatch, quantization
):
    monkeypatch.setattr("attncache_core.runtime.threads.available_processors", lambda: 2)
    arguments = (*arguments, "--quantize", quantization)
    stop_after(2, monkeypatch, KeyboardInterrupt())
    assert run(*arguments, "--threads", 1).exit_code == 130
    if quantization == "int8":
        one_line(run(*arguments), "was begun with --threads 1, not with --threads 2", "use the same options")
        succeeded(run(*arguments, "--threads", 1))
    else:
        succeeded(run(*arguments))
    assert len(np.load(output)) == 50


def test_killed_run_that_saved_no_row_binds_nobody_to_its_options(arguments, output, whole):
    numbers, state = spool.partial(output), spool.progress(output)
    with spool.open_spool(output, 3, {"--later": 1}):
        begun = numbers.read_bytes(), state.read_bytes()
    numbers.write_bytes(begun[0] + bytes(99_999))  # a torn row
    state.write_bytes(begun[1])
    succeeded(run(*arguments))
    assert output.read_bytes() == whole


def test_damaged_and_foreign_files_are_refused(arguments, output, tmp_path, monkeypatch):
    stop_after(2, monkeypatch, KeyboardInterrupt())
    assert run(*arguments).exit_code == 130
    numbers, state = spool.partial(output), spool.progress(output)
    with spool.open_spool(tmp_path / "other.npy", 1, {}):
        os.link(tmp_path / "other.npy.partial", tmp_path / "texts-link")
        kept = numbers.read_bytes()
        numbers.unlink()
        os.link(tmp_path / "texts-link", numbers)
        one_line(run(*arguments), "another process writes to")
        numbers.unlink()
        numbers.write_bytes(kept)
    numbers.write_bytes(kept[:-1])
    one_line(run(*arguments), "is damaged: it has fewer than the 16 rows that were saved")
    for damaged in ("{", '{"begun_with": {}, "done": {"rows": null, "digest": "0"}}'):
        state.write_text(damaged, encoding="utf-8")
        one_line(run(*arguments), f"{state} is damaged; remove {numbers} to begin again")
    numbers.unlink()
    succeeded(run(*arguments))
    one_line(run(*arguments), f"{output} exists; remove the file or choose another name")
    output.unlink()
    output.symlink_to("nowhere.npy")
    one_line(run(*arguments), f"{output} exists; remove the file or choose another name")


@pytest.mark.parametrize("name", ["out.npy", "out.npy.partial", "out.npy.progress"])
@pytest.mark.parametrize("is_link", [False, True])
def test_output_that_would_write_to_the_input_is_refused(tiny_checkpoint, tmp_path, source, name, is_link):
    content, written = source.read_bytes(), tmp_path / name
    if is_link:
        written.symlink_to(source)
    else:
        source = source.rename(written)
    arguments = embed_arguments(tiny_checkpoint, source, tmp_path / "out.npy", "--format", "txt")
    one_line(run(*arguments), f"would write to {written}, which is the input; choose another name")
    assert source.read_bytes() == content
    assert left_files(tmp_path) == [name]


@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_output_that_appears_during_the_run_stays(tiny_checkpoint, tmp_path, source, monkeypatch, ending):
    output, finish = tmp_path / f"out.{ending}", spool.Spool.finish

    def appears(self):
        output.write_text("another's")
        return finish(self)

    arguments = embed_arguments(tiny_checkpoint, source, output)
    with monkeypatch.context() as patch:
        patch.setattr(spool.Spool, "finish", appears)
        one_line(run(*arguments), "was made by another process", "50 rows are saved", f"rename {output}, and")
    assert output.read_text() == "another's"
    output.unlink()
    succeeded(run(*arguments))
    assert left_files(tmp_path) == [output.name]


@pytest.mark.parametrize("state", ['{"a": 1}', "[]", '{"begun_with": {}, "done": {"rows": 1, "b": 2}}', None])
def test_numbers_without_a_state_are_not_thrown_away(arguments, tmp_path, state):
    numbers, progress = (tmp_path / f"out.npy.{part}" for part in ("partial", "progress"))
    numbers.write_text("somebody's notes")
    if state is not None:
        progress.write_text(state)
    shown = one_line(run(*arguments), "to begin again")
    assert ("without out.npy.progress" in shown) == (state is None)
    assert numbers.read_text() == "somebody's notes"


def test_rows_of_a_file_that_was_removed_are_not_said_to_be_saved(arguments, tmp_path, monkeypatch):
    append = spool.Spool.append

    def removed_before(self, *values):
        if self.done.rows:
            (tmp_path / "out.npy.partial").unlink()
        append(self, *values)

    monkeypatch.setattr(spool.Spool, "append", removed_before)
    one_line(run(*arguments), "was removed while it was written", "no row is saved")


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("embed", "out.csv", ["out.csv: the file name must end in .npy or .parquet"]),
        ("classify", "out.npy", ["must end in .jsonl or .tsv or .parquet"]),
        ("embed", "absent/out.npy", ["the folder of --output", "absent/out.npy does not exist"]),
    ],
)
def test_output_that_cannot_be_written_is_refused(tiny_checkpoint, tmp_path, source, command, name, words):
    options = ("--input", source, "--output", tmp_path / name)
    one_line(run(command, *model_arguments(tiny_checkpoint), *options), *words)


def test_model_without_the_task_is_refused(tiny_checkpoint, tiny_classifier_checkpoint, tmp_path, source):
    arguments = embed_arguments(tiny_classifier_checkpoint, source, tmp_path / "out.npy")
    one_line(run(*arguments), "the model is a classifier and gives no embeddings")
    options = ("--input", source, "--output", tmp_path / "out.jsonl")
    one_line(run("classify", *model_arguments(tiny_checkpoint), *options), "give --labels or --classifier")


def test_labels_that_no_table_can_hold_are_refused(tmp_path, source):
    checkpoint = read_checkpoint(write_model(tmp_path / "texts-model", labels=["a\tb", "c"]))
    options = ("--input", source, "--output", tmp_path / "out.tsv")
    one_line(run("classify", *model_arguments(checkpoint), *options), "a label holds a tab", ".jsonl")
    checkpoint = read_checkpoint(write_model(tmp_path / "scores-model", labels=["score", "c"]))
    one_line(run("classify", *model_arguments(checkpoint), *options), "called label and score", ".jsonl")


def test_missing_pyarrow_is_named(tiny_checkpoint, tmp_path, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for options in (
        embed_arguments(tiny_checkpoint, source, tmp_path / "out.parquet"),
        embed_arguments(tiny_checkpoint, source, tmp_path / "out.npy", "--format", "parquet"),
    ):
        one_line(run(*options), "Parquet files need pyarrow: pip install 'attncache[parquet]'")


# Memory and work.


class Endless:
    """Rows without an end, which counts how many were read."""

    share = 0.0

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for number in count(1):
            self.read = number
            yield number, f"card {'bank ' * (number % 5)}"

    def place(self, number):
        return str(number)


def test_at_most_one_chunk_is_read_ahead(tiny_engine):
    rows = Endless()
    task = embedding(tiny_engine, None, None)
    with Computing(tiny_engine, task, 64) as computing:
        yielded = []
        computed = computing.computed(ChunkReader(rows).chunks(), lambda rows: np.array(yielded)[rows])
        for done in range(1, 6):
            chunk, numbers = next(computed)
            yielded.extend(numbers)
            assert len(numbers) == len(chunk.texts) == ROWS_PER_CHUNK
            assert rows.read == (done + 1) * ROWS_PER_CHUNK
        computed.close()


def test_run_of_long_texts_is_saved_every_few_hundred_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("service.bulk.rows.CHUNK_ROWS", 4096)
    source = write_texts(tmp_path / "texts.tsv", ["my card is lost " * 60] * 1000)
    with open_rows(source, "body") as rows:
        sizes = [len(chunk.texts) for chunk in ChunkReader(rows).chunks()]
    assert max(sizes) < 300


@pytest.mark.parametrize("ending", ["txt", "tsv", "csv", "jsonl", "parquet"])
def test_files_are_read_no_further_than_necessary(tmp_path, ending):
    source = write_texts(tmp_path / f"texts.{ending}", ["my card is lost " * 4] * 20_000)
    with open_rows(source, "body") as rows:
        texts = iter(rows)
        shares = []
        for _ in range(20):
            for _ in range(1000):
                next(texts)
            shares.append(rows.share)
    # A buffer ahead at most.
    assert all(share <= (index + 1) / 20 + 0.02 for index, share in enumerate(shares))
    assert shares[-1] > 0.95


def test_file_that_grows_while_it_is_read_is_refused(tmp_path):
    """Its last line may have been incomplete when it was read."""
    source = write_texts(tmp_path / "texts.txt", ["my card is lost"] * 3)
    with open_rows(source, "body") as rows:
        texts = iter(rows)
        read = [next(texts)]
        with source.open("a", encoding="utf-8") as written:
            written.write("what is the ra")
        with pytest.raises(InvalidInput, match=r"texts\.txt was changed while it was read"):
            read.extend(texts)
    assert [text for _, text in read] == ["id,body", *(f"{number},my card is lost" for number in range(3))]


def test_parquet_file_that_is_replaced_while_it_is_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_ROWS_AT_ONCE", 2)
    source = write_texts(tmp_path / "texts.parquet", ["my card is lost"] * 8)
    other = write_texts(tmp_path / "other.parquet", ["where is my pin"] * 8)
    with open_rows(source, "body") as opened:
        texts = iter(opened)
        next(texts)
        source.write_bytes(other.read_bytes())
        with pytest.raises(InvalidInput, match=r"texts\.parquet was changed while it was read"):
            list(texts)


def test_other_rows_of_the_same_characters_are_not_skipped(tmp_path):
    source = write_texts(tmp_path / "texts.csv", ["a:b", "c"])
    with open_rows(source, "body") as rows:
        (chunk,) = ChunkReader(rows).chunks()
    for texts in (["a:b", "c"], ["a", "b:c"], ["a:", "bc"]):
        with open_rows(write_texts(source, texts), "body") as rows:
            assert ChunkReader(rows).skip(chunk.done) == (texts == chunk.texts)


@pytest.fixture
def batches(monkeypatch):
    """The numbers of tokens of the texts of each batch that is run."""
    noted, run = [], Runner.run

    def noting(runner, requests):
        noted.append([len(request.ids) for request in requests])
        return run(runner, requests)

    monkeypatch.setattr(Runner, "run", noting)
    return noted


def test_equal_texts_are_computed_once_also_in_a_run_that_continues(
    tiny_checkpoint, tiny_engine, tmp_path, batches, monkeypatch
):
    source, output = tmp_path / "texts.txt", tmp_path / "out.npy"
    # The first chunk has two texts. One more is new in the second chunk, and none in the third one.
    order = [0, 1] * 4 + [2, 1] * 4 + [0] * ROWS_PER_CHUNK
    texts = ["my card", "bank", "lost"]
    source.write_text("\n".join(texts[index] for index in order) + "\n", encoding="utf-8")
    arguments = embed_arguments(tiny_checkpoint, source, output)
    assert stop_ever_later(arguments, output, [8], monkeypatch) == 1
    assert json.loads(spool.progress(output).read_bytes())["done"]["rows"] == ROWS_PER_CHUNK
    batches.clear()
    succeeded(run(*arguments))
    assert [len(batch) for batch in batches] == [1]
    assert (np.load(output) == tiny_engine.embed(texts)[order]).all()


def test_text_that_was_not_read_lately_is_computed_again(
    tiny_checkpoint, tiny_engine, tmp_path, batches, monkeypatch
):
    """So memory is bounded."""
    monkeypatch.setattr(rows, "_MAX_KNOWN", 2)
    source, output = tmp_path / "texts.txt", tmp_path / "out.npy"
    # "card" is in each chunk, with one other text in between. Two are between "bank" and "bank".
    several = [*["card"] * 8, *["bank", "card"] * 4, *["lost", "card"] * 4, *["bank"] * 8]
    source.write_text("\n".join(several) + "\n", encoding="utf-8")
    succeeded(run(*embed_arguments(tiny_checkpoint, source, output)))
    assert [len(batch) for batch in batches] == [1, 1, 1, 1]
    assert (np.load(output) == tiny_engine.embed(several)).all()


def test_numbers_are_on_the_disk_before_their_rows_count_as_done(tmp_path, monkeypatch):
    steps = []
    with spool.open_spool(tmp_path / "out.npy", 1, {}) as opened:
        monkeypatch.setattr(os, "fsync", lambda _: steps.append("numbers"))
        monkeypatch.setattr(spool, "write_whole", lambda *_: steps.append("state"))
        opened.append(np.ones((3, 1)), rows.Done(3, ""))
    assert steps == ["numbers", "state"]


def test_output_that_was_cut_by_others_is_read_no_further(tmp_path):
    with spool.open_spool(tmp_path / "out.npy", 4, {}) as opened:
        opened.append(np.ones((3, 4)), rows.Done(3, ""))
        assert opened.numbers([2, 0]).tolist() == [[1.0] * 4] * 2
        os.truncate(spool.partial(tmp_path / "out.npy"), 140)
        with pytest.raises(OSError, match="was cut while it was written"):
            opened.numbers([2])


def test_batches_hold_texts_of_like_lengths_and_at_most_the_given_tokens(
    tiny_checkpoint, tmp_path, texts, batches, monkeypatch
):
    monkeypatch.setattr(rows, "CHUNK_ROWS", 4096)
    source = write_texts(tmp_path / "texts.tsv", [*texts, "card " * 100])
    arguments = embed_arguments(tiny_checkpoint, source, tmp_path / "out.npy", "--column", "body")
    succeeded(run(*arguments, "--batch-tokens", 64))
    batches.sort(key=max, reverse=True)
    assert batches[0] == [102]
    assert all(sum(lengths) <= 64 for lengths in batches[1:])
    lengths = [length for batch in batches for length in sorted(batch, reverse=True)]
    assert lengths == sorted(lengths, reverse=True)


def test_shared_prefix_counts_once_in_a_batch(folder):
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    assert engine.shares_prefixes(reuse=False)
    front = "my card is lost and my bank is closed " * 4
    texts = [f"{front}{word}" for word in ("today", "tomorrow", "online", "abroad")]
    tokens = [len(ids) for ids in engine.tokenize(texts)]
    with Computing(engine, embedding(engine, None, None), max(tokens) + 40) as computing:
        (batch,) = computing._batches([[ids] for ids in engine.tokenize(texts)])
    assert sorted(batch) == [0, 1, 2, 3]
