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
    file_format = file_format or ("txt" if path == "-" else Path(path).suffix.removeprefix(".").lower())
    if file_format not in FORMATS:
        raise InvalidInput(
            f"{path}: unknown format; the file name must end in one of "
            f"{', '.join('.' + name for name in FORMATS)}",
            field="corpus",
        )
    if file_format == "txt" and len(columns) > 1:
        raise InvalidInput(f"{path}: a .txt file has no columns", field="corpus")
    try:
        with _open(path) as file:
            yield from _parse(file, path, columns, file_format)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="corpus") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 (at byte {error.start})", field="corpus") from error


def _open(path: str) -> TextIO:
    if path == "-":
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="")
    return Path(path).open(encoding="utf-8-sig", newline="")


def _parse(file: TextIO, path: str, columns: tuple[str, ...], file_format: str) -> Iterator[tuple[str, ...]]:
    if file_format == "txt":
        for line in file:
            if line.strip():
                yield (line.rstrip("\r\n"),)
    elif file_format == "jsonl":
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _fields(line, path, number, columns)
    elif file_format == "csv":
        yield from _columns(_csv_rows(file, path), path, columns)
    else:
        split = (line.rstrip("\r\n").split("\t") for line in file)
        yield from _columns(enumerate(split, 1), path, columns)


def _csv_rows(file: TextIO, path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the number of its last line; a quoted field may span several lines."""
    reader = csv.reader(file, strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise InvalidInput(f"{path}, line {reader.line_num}: not CSV ({error})", field="corpus") from error


def _columns(
    rows: Iterator[tuple[int, list[str]]], path: str, columns: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield the columns of a table, whose first row is the header; empty rows are skipped."""
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
            continue
        if len(row) <= max(indices):
            raise InvalidInput(
                f"{path}, line {number}: {len(row)} columns instead of {len(header)}", field="corpus"
            )
        yield tuple(row[index] for index in indices)


def _fields(line: str, path: str, number: int, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of some keys of a JSON object; raises InvalidInput unless all values are texts."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"{path}, line {number}: not JSON", field="corpus") from error
    values = [row.get(column) for column in columns] if isinstance(row, dict) else []
    texts = tuple(value for value in values if isinstance(value, str))
    if len(texts) < len(columns):
        raise InvalidInput(
            f"{path}, line {number}: no text in {' or '.join(map(repr, columns))}", field="column"
        )
    return texts
