"""Read the rows of a text file, table or JSON Lines file (.txt, .tsv, .csv, .jsonl).

    read_rows("texts.tsv", ("text", "label")) -> ("my card is lost", "card"), ...

Errors name the file and the line, and never contain a text of the file.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import orjson

from attncache_core.errors import InvalidInput

FORMATS = ("txt", "tsv", "csv", "jsonl")


def read_rows(
    path: str, columns: tuple[str, ...], file_format: str | None = None
) -> Iterator[tuple[str, ...]]:
    """Yield the values of `columns` for each row of a file.

    path: a file name, or "-" for standard input.
    file_format: one of FORMATS; by default the ending of the file name, and "txt" for standard input.
    A txt file has one column, whose name does not matter: each line that is not blank. Tables start with a
    header row; a tsv file has no quoting, a csv file has. Each line of a jsonl file is a JSON object.
    Raises InvalidInput if the file cannot be read or is not UTF-8, and if the format is unknown, a column is
    missing, or a row has no value for a column.
    """
    file_format = format_of(path, file_format)
    try:
        with _open(path) as file:
            yield from (row for _, row in parse_rows(file, path, columns, file_format))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="corpus") from error


def format_of(path: str, file_format: str | None = None) -> str:
    """Return the format of a file: `file_format`, else the ending of its name, else "txt" for "-".

    Raises InvalidInput if the format is unknown.
    """
    file_format = file_format or ("txt" if path == "-" else Path(path).suffix.removeprefix(".").lower())
    if file_format not in FORMATS:
        raise InvalidInput(
            f"{path} has a format that is not known; its name must end in one of "
            f"{', '.join('.' + name for name in FORMATS)}",
            field="corpus",
        )
    return file_format


def parse_rows(
    file: TextIO, path: str, columns: tuple[str, ...], file_format: str, *, keep_blank: bool = False
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each row of an open file with the number of its last line. Reads no further than necessary.

    path: for errors. keep_blank: yield blank lines of txt files and tables as rows of empty texts; otherwise
    they are skipped. Raises InvalidInput as read_rows does, and OSError.
    """
    if file_format == "txt" and len(columns) > 1:
        raise InvalidInput(
            f"{path} is a .txt file, which has no columns; leave the column out", field="corpus"
        )
    lines = _Lines(file)
    try:
        if file_format == "txt":
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, (line.rstrip("\r\n"),)
                elif keep_blank:
                    yield number, ("",)
        elif file_format == "jsonl":
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _fields(line, path, number, columns)
        elif file_format == "csv":
            yield from _columns(_csv_rows(lines, path), path, columns, keep_blank)
        else:
            split = (line.rstrip("\r\n").split("\t") for line in lines)
            yield from _columns(enumerate(split, 1), path, columns, keep_blank)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 (after line {lines.read})", field="corpus") from error


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
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="")
    return Path(path).open(encoding="utf-8-sig", newline="")


def _csv_rows(lines: Iterator[str], path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the number of its last line; a quoted field may span several lines."""
    reader = csv.reader(lines, strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise InvalidInput(
            f"{path}, line {reader.line_num} cannot be read as CSV: {error}", field="corpus"
        ) from error


def _columns(
    rows: Iterator[tuple[int, list[str]]], path: str, columns: tuple[str, ...], keep_blank: bool
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the columns of a table, whose first row is the header; see parse_rows."""
    _, header = next(rows, (0, []))
    missing = [column for column in columns if column not in header]
    if missing:
        raise InvalidInput(
            f"{path} has no column {missing[0]!r}; it has {', '.join(map(repr, header)) or 'no header'}",
            field="column",
        )
    indices = [header.index(column) for column in columns]
    for number, row in rows:
        if not row or row == [""]:
            if keep_blank:
                yield number, ("",) * len(columns)
            continue
        if len(row) <= max(indices):
            raise InvalidInput(
                f"{path}, line {number} has {len(row)} columns, and the header has {len(header)}",
                field="corpus",
            )
        yield number, tuple(row[index] for index in indices)


def _fields(line: str, path: str, number: int, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of some keys of a JSON object; raises InvalidInput unless all values are texts."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{path}, line {number} is not JSON", field="corpus") from error
    values = [row.get(column) for column in columns] if isinstance(row, dict) else []
    texts = tuple(value for value in values if isinstance(value, str))
    if len(texts) < len(columns):
        raise InvalidInput(
            f"{path}, line {number} has no text in {' or '.join(map(repr, columns))}", field="column"
        )
    return texts
