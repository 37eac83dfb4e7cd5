"""Read the rows of a text file, table or JSON Lines file (.txt, .tsv, .csv, .jsonl).

    read_rows("texts.tsv", ("text", "label")) -> ("my card is lost", "card"), ...

Errors name the file and the line, and never contain a text of the file.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

import orjson

from attncache_core.errors import InvalidInput

FORMATS = ("txt", "tsv", "csv", "jsonl")
_COMPRESSED = ("gz", "bz2", "xz", "zst", "zip")
# Longer fields are rather a quote that is not closed, which would read the rest of the file into memory.
_MAX_CSV_FIELD = 2**24
_SHOWN_COLUMNS = 20
_MAX_HEADER = 10_000  # characters
_COMPLETE = "complete the row, or take the line break out of its text"
_LINE_END = re.compile(rb"\r\n?|\n")
# A field of a csv file that is quoted as a whole.
_QUOTED = re.compile('"(?:[^"]|"")*"')
# After so many fields that double their quotes, and no field with other quotes, a tsv file is surely quoted.
_SURELY_QUOTED = 3


def read_rows(
    path: str, columns: tuple[str, ...], file_format: str | None = None
) -> Iterator[tuple[str, ...]]:
    """Yield the values of `columns` for each row of a file.

    path: a file name, or "-" for standard input.
    file_format: one of FORMATS; by default the ending of the file name, and "txt" for standard input, which
    is then refused if it begins like a table or JSON Lines.
    A txt file has one column, whose name does not matter: each line that is not blank. Tables start with a
    header row; a tsv file has no quoting, a csv file has. Each line of a jsonl file is a JSON object.
    Raises InvalidInput if the file cannot be read or is not UTF-8, and if the format is unknown, a column is
    missing or named twice, or a row has no value for a column, another number of fields than the header or a
    null byte. A tsv file that is surely quoted like a csv file is refused too, at the latest behind its last
    row.
    """
    return (row for _, row in numbered_rows(path, columns, file_format))


def numbered_rows(
    path: str, columns: tuple[str, ...], file_format: str | None = None, *, numbers: Sequence[str] = ()
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each row of read_rows with the number of its last line. Raises InvalidInput as read_rows does.

    numbers: those of the columns in which a jsonl file may have JSON's numbers too. They are returned as a
    table has them, such as "0" and "0.5".
    """
    known = format_of(path, file_format)
    try:
        with _open(path) as file:
            rows = parse_rows(file, path, columns, known, numbers=numbers)
            yield from _plain(rows, columns) if path == "-" and file_format is None else rows
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="corpus") from error


def format_of(path: str, file_format: str | None = None, known: Sequence[str] = FORMATS) -> str:
    """Return the format of a file: `file_format`, else the ending of its name, else "txt" for "-".

    Raises InvalidInput if the format is not one of the known formats.
    """
    file_format = file_format or ("txt" if path == "-" else Path(path).suffix.removeprefix(".").lower())
    if file_format not in known:
        wrong = (
            "is compressed; decompress it to a file whose name ends"
            if file_format in _COMPRESSED
            else "has a format that is not known; its name must end"
        )
        raise InvalidInput(
            f"{path} {wrong} in one of {', '.join('.' + name for name in known)}", field="corpus"
        )
    return file_format


def parse_rows(
    file: TextIO,
    path: str,
    columns: tuple[str, ...],
    file_format: str,
    *,
    numbers: Sequence[str] = (),
    refuse_blank: bool = False,
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each row of an open file with the number of its last line. Reads no further than necessary.

    path: for errors. numbers: see numbered_rows. refuse_blank: refuse empty lines, as rows without a text; by
    default blank lines of txt and jsonl files and empty lines of tables are skipped. Raises InvalidInput as
    read_rows does, and OSError.
    """
    if file_format == "txt" and len(columns) > 1:
        of_stdin = "--format, if the command has it, or " if path == "-" else ""
        raise InvalidInput(
            f"{path} is read as lines of text, which have no columns {', '.join(map(repr, columns))}; give "
            f"{of_stdin}a file that ends in .tsv, .csv or .jsonl",
            field="corpus",
        )
    lines = _Lines(file)
    try:
        for number, row in _rows(lines, path, columns, file_format, numbers):
            is_blank = row is None or (file_format == "txt" and not row[0].strip())
            if is_blank and not refuse_blank:
                continue
            fields = row or ("",)
            for column, text in zip(columns, fields, strict=False):
                of_column = f", column {column!r}" if len(columns) > 1 else ""
                require_text(text, f"{path}, line {number}{of_column}")
            yield number, fields
    except UnicodeDecodeError as error:
        # Every line break before the bytes of the error has ended a line that was read.
        line = lines.read + 1 + len(_LINE_END.findall(error.object[: error.start]))
        raise InvalidInput(
            f"{path}, line {line} is not UTF-8; save the file as UTF-8", field="corpus"
        ) from error


def require_text(text: str, place: str) -> None:
    """Raise InvalidInput, which names the place, for a text that the server would refuse too."""
    if not text:
        raise InvalidInput(f"{place}: the text is empty; remove the row or give it a text", field="input")
    if "\0" in text:
        raise InvalidInput(f"{place}: the text holds a null byte; remove the byte", field="input")


def require_one_column(path: Path | str, column: str, header: Sequence[str]) -> None:
    """Raise InvalidInput, which names the file, unless exactly one column of a header has this name."""
    if column not in header:
        shown = ", ".join(map(repr, header[:_SHOWN_COLUMNS])) or "no header"
        more = f" and {len(header) - _SHOWN_COLUMNS} more" if len(header) > _SHOWN_COLUMNS else ""
        raise InvalidInput(f"{path} has no column {column!r}; it has {shown}{more}", field="column")
    if (count := header.count(column)) > 1:
        raise InvalidInput(
            f"{path} has {count} columns {column!r}; rename all but one of them", field="column"
        )


def _plain(
    rows: Iterator[tuple[int, tuple[str, ...]]], columns: tuple[str, ...]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the lines of standard input. Raises InvalidInput if the first one has a tab, a header or JSON."""
    for number, (line,) in islice(rows, 1):
        header = next(csv.reader([line[:_MAX_HEADER]]))
        if "\t" in line or columns[0] in header or line.lstrip().startswith(("{", "[{")):
            raise InvalidInput(
                "standard input (-) begins like a table or JSON Lines, and would be read as lines of text; "
                "give --format, if the command has it, or a file that ends in .txt, .tsv, .csv or .jsonl",
                field="corpus",
            )
        yield number, (line,)
    yield from rows


def _rows(
    lines: Iterator[str], path: str, columns: tuple[str, ...], file_format: str, numbers: Sequence[str]
) -> Iterator[tuple[int, tuple[str, ...] | None]]:
    """Yield each row with the number of its last line; an empty line of a jsonl file or a table is None."""
    if file_format == "txt":
        yield from ((number, (line.rstrip("\r\n"),)) for number, line in enumerate(lines, 1))
    elif file_format == "jsonl":
        for number, line in enumerate(lines, 1):
            yield number, _fields(line, path, number, columns, numbers) if line.strip() else None
    elif file_format == "csv":
        yield from _columns(_csv_rows(lines, path), path, columns, "quote a field that holds a comma")
    else:
        split = (line.rstrip("\r\n").split("\t") for line in lines)
        rows = _without_surplus_tabs(_not_quoted(split, path))
        yield from _columns(rows, path, columns, "replace tabs within a field by spaces")


class _Lines(Iterator[str]):
    """The lines of a file, counted: a UnicodeDecodeError gives only a position in a buffer."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.read = file, 0

    def __next__(self) -> str:
        line = next(self._file)
        self.read += 1
        return line


def _open(path: str) -> TextIO:
    if path == "-":
        if sys.stdin.buffer.closed:
            raise InvalidInput("standard input (-) was read already; give it once", field="corpus")
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="")
    return Path(path).open(encoding="utf-8-sig", newline="")


def _csv_rows(lines: Iterator[str], path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the number of its last line; a quoted field may span several lines."""
    csv.field_size_limit(_MAX_CSV_FIELD)
    reader = csv.reader(lines, strict=True)
    first = 1
    try:
        for row in reader:
            yield reader.line_num, row
            first = reader.line_num + 1
    except csv.Error as error:
        raise InvalidInput(
            f"{path}, line {first} cannot be read as CSV: {error}; close the quotes of each field, and double"
            " each quote within a field",
            field="corpus",
        ) from error


def _not_quoted(rows: Iterator[list[str]], path: str) -> Iterator[list[str]]:
    """Yield each row of a tsv file. Raises InvalidInput if it is surely quoted like a csv file.

    In such a file, some fields double their quotes, and every field with a quote is quoted as a whole. A
    single field with other quotes shows that quotes belong to the texts.
    """
    refusal = InvalidInput(
        f"{path} has quoted fields with doubled quotes, as a .csv file, and in a .tsv file quotes belong to "
        "the texts; write it as .csv or .jsonl",
        field="corpus",
    )
    may_be_quoted, doubled = True, 0
    for row in rows:
        for field in row if may_be_quoted else ():
            if '"' in field:
                may_be_quoted = _QUOTED.fullmatch(field) is not None
                doubled += '""' in field[1:-1]
            if not may_be_quoted:
                break
        if may_be_quoted and doubled >= _SURELY_QUOTED:
            raise refusal
        yield row
    if may_be_quoted and doubled:
        raise refusal


def _without_surplus_tabs(rows: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Yield each row of a tsv file with its number, without empty fields behind those of the header."""
    columns = None
    for number, row in enumerate(rows, 1):
        columns = columns or len(row)
        yield number, row[:columns] if not any(row[columns:]) else row


def _columns(
    rows: Iterator[tuple[int, list[str]]], path: str, columns: tuple[str, ...], remedy: str
) -> Iterator[tuple[int, tuple[str, ...] | None]]:
    """Yield the columns of a table, whose first row is the header; see _rows.

    remedy: for a row with more fields than the header. Raises InvalidInput as read_rows does.
    """
    _, header = next(rows, (0, []))
    for column in columns:
        require_one_column(path, column, header)
    indices = [header.index(column) for column in columns]
    for number, row in rows:
        if not row or row == [""]:
            yield number, None
            continue
        if len(row) != len(header):
            raise InvalidInput(
                f"{path}, line {number} has {len(row)} columns, and the header has {len(header)}; "
                f"{remedy if len(row) > len(header) else _COMPLETE}",
                field="corpus",
            )
        yield number, tuple(row[index] for index in indices)


def _fields(
    line: str, path: str, number: int, columns: tuple[str, ...], numbers: Sequence[str]
) -> tuple[str, ...]:
    """Return the values of some keys of a JSON object.

    numbers: the keys whose values may be numbers too. Raises InvalidInput for other values that are no texts.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        wrong = (
            "holds an escaped half of a surrogate pair, which is no character; remove it"
            if "surrogate" in error.msg
            else "is not JSON"
        )
        raise InvalidInput(f"{path}, line {number} {wrong}", field="corpus") from error
    values = row if isinstance(row, dict) else {}
    found = []
    for column in columns:
        value = values.get(column)
        # Of larger numbers, digits were lost.
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
        if not isinstance(value, str) and (column not in numbers or not is_number):
            accepted = "neither a string nor a number below 2^53" if column in numbers else "no string"
            why = "has no text" if value is None else f"has a value that is {accepted}"
            raise InvalidInput(f"{path}, line {number} {why} in {column!r}", field="column")
        found.append(str(value))
    return tuple(found)
