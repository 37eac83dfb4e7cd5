"""Texts from a file: plain lines, a column of a table, or a field of JSON lines."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

import numpy as np
import orjson

from attncache_core.errors import InvalidInput

T = TypeVar("T")

FORMATS = ("txt", "tsv", "csv", "jsonl")


def read_rows(
    path: str, columns: tuple[str, ...], file_format: str | None = None
) -> Iterator[tuple[str, ...]]:
    """The values of `columns` in each row of a file; "-" is standard input (lines, unless told otherwise).

    .txt gives each line that is not blank, whatever its one column is called. A .tsv has no quoting; a
    .csv has CSV's. Raises InvalidInput for an unreadable file, an unknown format or column, or a row that
    lacks one, naming the row's number and never its text.
    """
    file_format = file_format or ("txt" if path == "-" else Path(path).suffix.removeprefix(".").lower())
    if file_format not in FORMATS:
        raise InvalidInput(
            f"{path}: the format is told by the ending, one of {', '.join('.' + name for name in FORMATS)}",
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


def read_texts(source: str, column: str = "text", file_format: str | None = None) -> list[str]:
    """The texts of `FILE` (in its column `column`) or of `FILE:column,column`, row by row.

    Raises InvalidInput as read_rows does.
    """
    path, columns = _with_columns(source, column)
    return [text for row in read_rows(path, columns, file_format) for text in row]


def spread(given: Sequence[T], most: int) -> list[T]:
    """At most `most` of the given, at even distances: neighbours in a file are often of one kind."""
    places = np.linspace(0, len(given) - 1, min(most, len(given))).round().astype(int)
    return [given[place] for place in places]


def _with_columns(source: str, column: str) -> tuple[str, tuple[str, ...]]:
    path, colon, columns = source.rpartition(":")
    if not colon or Path(source).exists():
        return source, (column,)
    return path, tuple(columns.split(","))


def read_labelled(
    path: str, text_column: str, label_column: str, file_format: str | None = None
) -> tuple[list[str], list[str]]:
    """The texts and the labels of a file, as read_rows reads it. Raises InvalidInput also if it is empty."""
    rows = list(read_rows(path, (text_column, label_column), file_format))
    if not rows:
        raise InvalidInput(f"{path} has no texts", field="data")
    return [text for text, _ in rows], [label for _, label in rows]


def read_rated(path: str, first: str, second: str, rating: str) -> tuple[list[str], list[str], list[float]]:
    """Pairs of texts and their ratings. Raises InvalidInput as read_rows does, and for what is no number."""
    left, right, ratings = [], [], []
    for number, row in enumerate(read_rows(path, (first, second, rating)), 1):
        try:
            ratings.append(float(row[2]))
        except ValueError:
            ratings.append(math.nan)
        if not math.isfinite(ratings[-1]):
            raise InvalidInput(f"{path}, row {number}: {rating!r} is no number", field="data")
        left.append(row[0])
        right.append(row[1])
    if not ratings:
        raise InvalidInput(f"{path} has no pairs", field="data")
    return left, right, ratings


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
    """Rows with the number of their last line: a quoted field may hold several."""
    reader = csv.reader(file, strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise InvalidInput(f"{path}, line {reader.line_num}: not CSV ({error})", field="corpus") from error


def _columns(
    rows: Iterator[tuple[int, list[str]]], path: str, columns: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    _, header = next(rows, (0, []))
    missing = [column for column in columns if column not in header]
    if missing:
        raise InvalidInput(
            f"{path} has no column {missing[0]!r}; it has {', '.join(map(repr, header)) or 'no header'}",
            field="column",
        )
    places = [header.index(column) for column in columns]
    for number, row in rows:
        if not row or row == [""]:
            continue
        if len(row) <= max(places):
            raise InvalidInput(
                f"{path}, line {number}: {len(row)} columns where {len(header)} belong", field="corpus"
            )
        yield tuple(row[place] for place in places)


def _fields(line: str, path: str, number: int, columns: tuple[str, ...]) -> tuple[str, ...]:
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
