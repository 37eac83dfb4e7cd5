"""Files of every format give their exact texts, and an error names the line of a bad row, not its content."""

import csv
import io
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attncache_core.corpus.reading import neighbours, read_labelled, read_rated, read_texts
from attncache_core.corpus.tables import read_rows
from attncache_core.errors import InvalidInput

BOM = b"\xef\xbb\xbf"
SECRET = "a private text"


@pytest.fixture
def file(tmp_path):
    """A function that writes a file and returns its path as a string."""

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


@pytest.fixture
def standard_input(monkeypatch):
    def provide(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return provide


def texts(path: str, column: str = "text", file_format: str | None = None) -> list[str]:
    return [text for (text,) in read_rows(path, (column,), file_format)]


def refusal(path: str, *columns: str) -> InvalidInput:
    with pytest.raises(InvalidInput) as refused:
        list(read_rows(path, columns or ("text",)))
    assert len(str(refused.value).splitlines()) == 1
    assert SECRET not in str(refused.value)
    return refused.value


# Any character except surrogates, which UTF-8 cannot encode, and separators of the formats.
plain = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\t\0"), min_size=1, max_size=20
)
words = plain.filter(str.strip)
rows = st.lists(st.tuples(words, words), max_size=8)


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_every_text_comes_back_from_every_format(rows, newline, with_bom, ends_with_newline):
    end = newline if ends_with_newline else ""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator=newline).writerows([("label", "text"), *((b, a) for a, b in rows)])
    contents = {
        "txt": newline.join(text for text, _ in rows) + end,
        "tsv": newline.join(["label\ttext", *(f"{label}\t{text}" for text, label in rows)]) + end,
        "csv": buffer.getvalue(),
        "jsonl": newline.join(json.dumps({"label": b, "text": a, "n": 1}) for a, b in rows) + end,
    }
    with tempfile.TemporaryDirectory() as folder:
        for file_format, content in contents.items():
            path = Path(folder) / f"a.{file_format}"
            # A text that begins with a byte order mark needs another one before it.
            path.write_bytes((BOM if with_bom or content.startswith("\ufeff") else b"") + content.encode())
            assert texts(str(path)) == [text for text, _ in rows]
            if file_format != "txt":
                assert list(read_rows(str(path), ("text", "label"))) == rows


@pytest.mark.parametrize("name", ["a.txt", "a.TXT"])
def test_text_file_gives_each_line_that_is_not_blank_unchanged(file, name):
    path = file(name, 'one\n\n  two "2"\t2 \n \t\r\nthree, or more')
    assert texts(path) == ["one", '  two "2"\t2 ', "three, or more"]
    assert texts(path, column="whatever") == texts(path)


def test_quotes_have_a_meaning_in_csv_only(file):
    quoted = '"a ""b"""'
    assert texts(file("a.csv", f"text\n{quoted}\n")) == ['a "b"']
    assert texts(file("a.tsv", f'text\n{quoted}\nsay "b"\n')) == [quoted, 'say "b"']
    assert texts(file("a.txt", f"{quoted}\n")) == [quoted]
    assert texts(file("b.tsv", 'text\tlabel\n"a\tb"\nc\td\n')) == ['"a', "c"]
    assert texts(file("b.csv", 'id,text\r\n1,"a, b\r\nc"\r\n2,d\r\n')) == ["a, b\r\nc", "d"]
    long = "a text " * 30_000
    assert texts(file("c.csv", f'text\n"{long}"\n')) == [long]


@given(
    rows=st.lists(st.text(st.sampled_from('a," '), min_size=1), min_size=1, max_size=30),
    with_label=st.booleans(),
)
@example(rows=['"a" b'] * 25, with_label=False)
def test_tsv_file_with_the_quotes_of_a_csv_file_is_refused(rows, with_label, tmp_path_factory):
    """Python's csv module and pandas quote by default where a text has a quote."""
    path = tmp_path_factory.mktemp("quoted") / "a.tsv"
    with path.open("w", encoding="utf-8", newline="") as written:
        csv.writer(written, dialect="excel-tab", lineterminator="\n").writerows(
            [[row, "label"] if with_label else [row] for row in ["text", *rows]]
        )
    if any('"' in row for row in rows):
        with pytest.raises(InvalidInput, match="has quoted fields"):
            texts(str(path))
    else:
        assert texts(str(path)) == rows


@pytest.mark.parametrize(
    "lines",
    [
        ['"We are lost.', 'We must go."'],
        ['"Hi," he said.', '"a ""b"" c"', '"a ""b"" c"'],
        ['"a ""b"" c"', '"a ""b"" c"', 'the 3" disk'],
        ['"All of it."'],
        ['say "hi"'] * 30,
    ],
)
def test_quotes_of_texts_stay_in_a_tsv_file(file, lines):
    assert texts(file("a.tsv", "\n".join(["text", *lines]))) == lines


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_empty_lines_of_a_table_are_skipped(file, name):
    assert texts(file(name, "text\none\n\ntwo\n\n")) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.txt"])
def test_empty_file_holds_nothing_or_no_header(file, name):
    path = file(name, "")
    if name in ("a.tsv", "a.csv"):
        assert "no header" in str(refusal(path))
    else:
        assert texts(path) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [("data", "not known; its name must"), ("data.parquet", "not known"), ("data.tsv.gz", "decompress it")],
)
def test_unknown_ending_is_refused_with_the_known_endings(file, name, words):
    error = str(refusal(file(name, "text\nhello\n")))
    assert words in error
    assert ".txt, .tsv, .csv, .jsonl" in error


@pytest.mark.parametrize(("name", "joint"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_missing_column_is_refused_with_the_existing_columns(file, name, joint):
    error = refusal(file(name, f"id{joint}query\n1{joint}{SECRET}\n"))
    assert "no column 'text'; it has 'id', 'query'" in str(error)
    assert error.field == "column"
    wide = joint.join(f"c{number}" for number in range(120))
    assert str(refusal(file(name, wide))).endswith("'c18', 'c19' and 100 more")


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_column_that_the_header_names_twice_is_refused_if_it_is_read(file, name):
    joint = "\t" if name == "a.tsv" else ","
    path = file(name, f"{joint.join(['text', 'text', 'label'])}\n{joint.join(['a', SECRET, 'b'])}\n")
    assert "has 2 columns 'text'; rename all but one of them" in str(refusal(path))
    assert texts(path, "label") == ["b"]


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("a.tsv", SECRET, "has 1 columns, and the header has 2; complete the row"),
        ("a.csv", SECRET, "has 1 columns, and the header has 2; complete the row"),
        ("a.tsv", f"1\t{SECRET}\tb", "has 3 columns, and the header has 2; replace tabs within a field"),
        ("a.csv", f"1,{SECRET}, b", "has 3 columns, and the header has 2; quote a field that holds a comma"),
        ("a.csv", f"1,{SECRET},", "has 3 columns, and the header has 2; quote a field that holds a comma"),
        ("a.csv", f'1,"{SECRET}" b', "cannot be read as CSV: ',' expected after '\"'; close the quotes"),
        ("a.csv", f'1,"{SECRET}\n2,b\n', "cannot be read as CSV: unexpected end of data; close the quotes"),
    ],
)
def test_row_that_the_header_does_not_fit_is_refused_with_its_line_number(file, name, row, words):
    joint = "\t" if name == "a.tsv" else ","
    assert f"line 4 {words}" in str(refusal(file(name, f"id{joint}text\n1{joint}one\n\n{row}\n")))


def test_row_that_ends_within_its_text_is_refused_although_it_has_a_text(file):
    for name, joint in (("a.tsv", "\t"), ("a.csv", ",")):
        path = file(name, f"text{joint}label\none{joint}a\n{SECRET}\ntwo{joint}b\n")
        assert "line 3 has 1 columns, and the header has 2; complete the row, or take" in str(refusal(path))


def test_tabs_behind_the_fields_of_a_tsv_row_are_no_fields(file):
    assert texts(file("a.tsv", "id\ttext\n1\tone\t\t\n2\ttwo\n")) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "words"), [("", "the text is empty; remove"), ("a\0b", "the text holds a null byte; remove")]
)
def test_text_that_the_server_refuses_is_refused_with_its_line_and_column(file, text, words):
    table = f"text\tlabel\na\tx\n{text}\tx\n"
    assert f"line 3: {words}" in str(refusal(file("a.tsv", table)))
    assert f"line 3, column 'text': {words}" in str(refusal(file("a.tsv", table), "label", "text"))
    assert f"line 3: {words}" in str(refusal(file("a.csv", table.replace("\t", ","))))
    line = json.dumps({"text": text})
    assert f"line 1: {words}" in str(refusal(file("a.jsonl", line)))
    if text:
        assert f"line 1: {words}" in str(refusal(file("a.txt", text)))
    # A text of spaces is a text for the server too.
    assert texts(file("b.tsv", "text\tlabel\n \tx\n")) == [" "]


def test_line_number_of_a_csv_row_is_the_line_in_the_file(file):
    assert "line 5" in str(refusal(file("a.csv", 'id,text\n1,"one\ntwo\nthree"\nfour\n')))


@pytest.mark.parametrize(
    "line",
    [
        f'{{"text": "{SECRET}"',
        f'["{SECRET}"]',
        f'"{SECRET}"',
        f'{{"query": "{SECRET}"}}',
        '{"text": 7}',
        '{"text": null}',
        '{"text": ["a"]}',
        "null",
    ],
)
def test_bad_json_line_is_refused_with_its_number(file, line):
    error = refusal(file("a.jsonl", f'{{"text": "one"}}\n\n{line}\n{{"text": "two"}}\n'))
    assert "line 3 " in str(error)


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ud83d\u0041", r"\ud83d\n"])
def test_half_of_a_surrogate_pair_is_said_to_be_one(file, half):
    error = refusal(file("a.jsonl", f'{{"text": "one"}}\n{{"text": "{SECRET} {half}"}}\n'))
    assert "line 2 holds an escaped half of a surrogate pair" in str(error)
    assert texts(file("b.jsonl", r'{"text": "\ud83d\ude00"}')) == ["\N{GRINNING FACE}"]


def test_rows_before_a_bad_row_are_yielded(file):
    read = read_rows(file("a.jsonl", '{"text": "one"}\nbad\n'), ("text",))
    assert next(read) == ("one",)
    with pytest.raises(InvalidInput):
        next(read)


@pytest.mark.parametrize("name", ["a.txt", "a.tsv", "a.csv", "a.jsonl"])
def test_file_that_is_not_utf_8_is_refused(file, name):
    good, bad = (
        (b'{"text": "a"}\n', b'{"text": "caf\xe9"}\n') if name == "a.jsonl" else (b"text\n", b"caf\xe9\n")
    )
    for lines, end in ((0, b"\n"), (2, b"\n"), (5000, b"\n"), (3, b"\r\n"), (3, b"\r")):
        error = refusal(file(name, (BOM + good * lines + bad + good).replace(b"\n", end)))
        assert f"{name}, line {lines + 1} is not UTF-8; save the file as UTF-8" in str(error)


def test_missing_file_and_folder_are_refused(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    for name, words in (("absent.tsv", "No such file"), ("folder.txt", "Is a directory")):
        path = str(tmp_path / name)
        assert f"{name} cannot be read: {words}" in str(refusal(path))
        for source in (path, f"{path}:text"):
            with pytest.raises(InvalidInput, match=f"{name} cannot be read: {words}"):
                read_texts(source)


def test_standard_input_is_lines_by_default_and_is_read_once(standard_input, file):
    standard_input("ä\r\n\nb".encode())
    assert texts("-") == ["ä", "b"]
    assert "give it once" in str(refusal("-"))
    standard_input(b"one\n\ntwo\n")
    assert read_texts("-") == ["one", "two"]
    for file_format, content in (("txt", b"hello\n"), ("tsv", b"label\ttext\nx\thello\n")):
        for mark in (b"", BOM):
            standard_input(mark + content)
            assert texts("-", file_format=file_format) == ["hello"]
    standard_input(b'{"query": "hello"}\n')
    assert texts("-", "query", file_format="jsonl") == ["hello"]
    standard_input(b"caf\xe9\n")
    assert "not UTF-8" in str(refusal("-"))
    rows = (b"label\ttext", b"label,text", b'"a","text"', b"text")
    for first in (*rows, b'{"text": "hello"}', b' [{"text": 1}]'):
        standard_input(b"\n" + first + b"\nhello\n")
        assert "give --format, if the command has it" in str(refusal("-"))
        standard_input(b"\n" + first + b"\nhello\n")
        assert "give --format, if the command has it" in str(refusal("-", "text", "label"))
        standard_input(first + b"\nhello\n")
        assert texts("-", file_format="txt") == [first.decode(), "hello"]
    standard_input(b"hello, text\na\ttab\ntext\n{\n")
    assert texts("-") == ["hello, text", "a\ttab", "text", "{"]
    assert texts(file("a.txt", "text\nlabel\ttext\n")) == ["text", "label\ttext"]


@pytest.mark.parametrize("label", ["", " x", "x ", " "])
def test_label_that_is_empty_or_has_spaces_around_it_is_refused_with_its_line(file, label):
    path = file("a.tsv", f"text\tlabel\n{SECRET}\tx\n{SECRET}\t{label}\n")
    words = "begins or ends with a space" if label else "the text is empty"
    with pytest.raises(InvalidInput, match=f"line 3.*{words}") as refused:
        read_labelled(path, "text", "label")
    assert SECRET not in str(refused.value)


def test_columns_of_a_source_are_read_row_by_row_in_the_given_order(file):
    path = file("a.csv", "text,b,c\n1,2,3\n4,5,6\n")
    assert read_texts(path) == ["1", "4"]
    assert read_texts(path, "b") == ["2", "5"]
    assert read_texts(f"{path}:c") == ["3", "6"]
    assert read_texts(f"{path}:c,text", "b") == ["3", "1", "6", "4"]
    assert list(read_rows(path, ("c", "b", "b"))) == [("3", "2", "2"), ("6", "5", "5")]
    named = file("a.log", "a\tb\n1\t2\n")
    assert read_texts(f"{named}:b", file_format="tsv") == ["2"]
    assert read_texts(file("a.txt", "one\n\ntwo\n"), "query") == ["one", "two"]
    assert "no columns 'text', 'label'; give a file" in str(
        refusal(file("a.txt", "hello\n"), "text", "label")
    )


def test_name_of_an_existing_file_may_hold_a_colon(file):
    path = file("a:b.tsv", "text\tb\none\t1\n")
    assert read_texts(path) == ["one"]
    assert read_texts(f"{path}:b,text") == ["1", "one"]
    file("a.tsv", "b.tsv\nno\n")
    assert read_texts(file("a.tsv:b.tsv", "text\nyes\n")) == ["yes"]


@pytest.mark.parametrize(
    ("columns", "missing"), [("tex", "tex"), ("query,answer", "answer"), ("", ""), ("text,", "")]
)
def test_missing_column_of_a_source_is_refused_with_the_existing_columns(file, columns, missing):
    path = file("a.tsv", f"text\tquery\n{SECRET}\t1\n")
    with pytest.raises(InvalidInput, match=f"no column '{missing}'; it has 'text', 'query'") as refused:
        read_texts(f"{path}:{columns}")
    assert refused.value.field == "column"
    assert SECRET not in str(refused.value)


def test_rated_pairs_are_three_lists_of_equal_length(file):
    path = file("a.tsv", "id\tscore\tone\ttwo\n1\t4.5\ta\tb\n2\t-1e-1\tc\td\n3\t 3 \te\tf\n")
    assert read_rated(path, "two", "one", "score") == (["b", "d", "f"], ["a", "c", "e"], [4.5, -0.1, 3.0])
    with pytest.raises(InvalidInput, match="no column 'rating'"):
        read_rated(path, "one", "two", "rating")
    with pytest.raises(InvalidInput, match="has no pairs"):
        read_rated(file("b.tsv", "one\ttwo\tscore\n"), "one", "two", "score")


@pytest.mark.parametrize("ratings", [["3"], ["3", "3.0", "3"]])
def test_ratings_that_are_all_equal_are_refused(file, ratings):
    rows = "".join(f"{SECRET}\tb\t{rating}\n" for rating in ratings)
    with pytest.raises(InvalidInput, match="all pairs have the same 'score'") as refused:
        read_rated(file("a.tsv", f"one\ttwo\tscore\n{rows}"), "one", "two", "score")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("rating", ["four", "1,5", "1_0", "nan", "-inf", "1e999", SECRET])
def test_rating_that_is_not_a_number_is_refused_with_its_line_and_column(file, rating):
    path = file("a.tsv", f"one\ttwo\tscore\na\tb\t1\n\n{SECRET}\t{SECRET}\t{rating}\nc\td\t2\n")
    with pytest.raises(InvalidInput, match="line 4: 'score' is not a number") as refused:
        read_rated(path, "one", "two", "score")
    assert refused.value.field == "data"
    assert SECRET not in str(refused.value)


def test_labels_and_ratings_of_json_lines_may_be_numbers_as_in_a_table(file):
    table = file("a.tsv", "one\ttwo\tscore\na\tb\t1\nc\td\t0.5\ne\tf\t-2.0\n")
    rows = [("a", "b", 1), ("c", "d", 0.5), ("e", "f", -2.0)]
    lines = [json.dumps(dict(zip(("one", "two", "score"), row, strict=True))) for row in rows]
    numbers = file("a.jsonl", "\n".join(lines))
    assert read_labelled(numbers, "one", "score") == read_labelled(table, "one", "score")
    assert read_rated(numbers, "one", "two", "score") == read_rated(table, "one", "two", "score")


@pytest.mark.parametrize("value", ["true", "[1]", "{}", "null", "9007199254740992", "18446744073709551617"])
def test_other_json_values_are_neither_labels_nor_ratings(file, value):
    path = file("a.jsonl", f'{{"text": "a", "other": "b", "label": {value}}}')
    wrong = "has a value that is neither a string nor a number below 2^53"
    said = "has no text" if value == "null" else wrong
    for read in (
        lambda: read_labelled(path, "text", "label"),
        lambda: read_rated(path, "text", "other", "label"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(f"line 1 {said} in 'label'")):
            read()


def test_number_is_no_text_of_a_label(file):
    path = file("a.jsonl", '{"text": 1, "label": 1}')
    with pytest.raises(InvalidInput, match="line 1 has a value that is no string in 'text'"):
        read_labelled(path, "text", "label")


def test_labelled_texts_are_two_lists_of_equal_length(file):
    path = file("asked.csv", 'text,asked,label\none,yes,x\n"two, three",again,y\n')
    assert read_labelled(path, "text", "label") == (["one", "two, three"], ["x", "y"])
    assert read_labelled(f"{path}:asked", "text", "label") == (["yes", "again"], ["x", "y"])
    with pytest.raises(InvalidInput, match="name one column for the texts"):
        read_labelled(f"{path}:text,asked", "text", "label")
    for name, content in (("a.tsv", "text\tlabel\n"), ("b.jsonl", "\n")):
        with pytest.raises(InvalidInput, match="has no texts"):
            read_labelled(file(name, content), "text", "label")


def test_neighbours_are_as_many_as_the_total_size_allows():
    assert list(neighbours([3, 1, 2, 9, 1], int, 4)) == [[3, 1], [2], [9], [1]]
