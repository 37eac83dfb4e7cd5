"""Read texts, labelled texts and rated pairs of texts from the rows of a file (see tables.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from attncache_core.corpus.tables import numbered_rows, read_rows
from attncache_core.errors import InvalidInput

T = TypeVar("T")


def read_texts(source: str, column: str = "text", file_format: str | None = None) -> list[str]:
    """Return the texts of a file, row by row.

    source: "FILE", of which `column` is read, or "FILE:column,column".
    Raises InvalidInput if read_rows raises it.
    """
    path, columns = path_and_columns(source, column)
    return [text for row in read_rows(path, columns, file_format) for text in row]


def read_labelled(
    source: str, text_column: str, label_column: str, file_format: str | None = None
) -> tuple[list[str], list[str]]:
    """Return the texts and the labels of a file.

    source: "FILE", of which `text_column` is read, or "FILE:column".
    Raises InvalidInput if read_rows raises it, if several columns are named, if a label has spaces around it,
    and if the file has no rows.
    """
    path, columns = path_and_columns(source, text_column)
    if len(columns) > 1:
        raise InvalidInput(
            f"{path}: name one column for the texts, because their labels are read too", field="data"
        )
    texts, labels = [], []
    names = (columns[0], label_column)
    for number, (text, label) in numbered_rows(path, names, file_format, numbers=[label_column]):
        if label != label.strip():
            raise InvalidInput(
                f"{path}, line {number}: the label in {label_column!r} begins or ends with a space; remove "
                "the space, because it makes another label",
                field="data",
            )
        texts.append(text)
        labels.append(label)
    if not texts:
        raise InvalidInput(f"{path} has no texts", field="data")
    return texts, labels


def read_rated(path: str, first: str, second: str, rating: str) -> tuple[list[str], list[str], list[float]]:
    """Return the first texts, the second texts and the ratings of pairs of texts.

    first, second, rating: names of columns.
    Raises InvalidInput if read_rows raises it, if a rating is not a finite number, if the file has no rows,
    and if all ratings are equal.
    """
    left, right, ratings = [], [], []
    for number, row in numbered_rows(path, (first, second, rating), numbers=[rating]):
        try:
            # Python reads 1_0 as 10, and no file means that.
            ratings.append(math.nan if "_" in row[2] else float(row[2]))
        except ValueError:
            ratings.append(math.nan)
        if not math.isfinite(ratings[-1]):
            raise InvalidInput(f"{path}, line {number}: {rating!r} is not a number", field="data")
        left.append(row[0])
        right.append(row[1])
    if not ratings:
        raise InvalidInput(f"{path} has no pairs", field="data")
    if len(set(ratings)) == 1:
        raise InvalidInput(
            f"{path}: all pairs have the same {rating!r}, so no correlation can be computed; give pairs with "
            f"different values in {rating!r}",
            field="data",
        )
    return left, right, ratings


def path_and_columns(source: str, column: str) -> tuple[str, tuple[str, ...]]:
    """Split "FILE:column,column". A source without columns, or the full name of a file, gets `column`."""
    path, colon, columns = source.rpartition(":")
    if not colon or Path(source).exists():
        return source, (column,)
    return path, tuple(columns.split(","))


def spread(items: Sequence[T], maximum: int) -> list[T]:
    """Return at most `maximum` items, equally spaced, because neighbours in a file are often alike."""
    indices = np.linspace(0, len(items) - 1, min(maximum, len(items))).round().astype(int)
    return [items[index] for index in indices]


def neighbours(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield neighbouring items in lists with a total size of at most `most`; a larger item stands alone."""
    found: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if found and total + size > most:
            yield found
            found, total = [], 0
        found.append(item)
        total += size
    if found:
        yield found
