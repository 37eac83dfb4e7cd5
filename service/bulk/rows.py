"""The texts of a file, row by row: .txt, .tsv, .csv, .jsonl or .parquet.

No row is skipped silently, so that row i of the output belongs to row i of the input. A bad row is refused
with its line and a remedy, and never with its text.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from attncache_core import InvalidInput
from attncache_core.corpus.tables import FORMATS, format_of, parse_rows
from service.bulk.formats import pyarrow_parquet

INPUT_FORMATS = (*FORMATS, "parquet")
_ROWS_AT_ONCE = 1024


class Rows(Protocol):
    """An open file of texts."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield each text with its number, as `place` takes it. Reads no further than necessary."""

    def place(self, number: int) -> str:
        """Return where a row is, for errors."""

    @property
    def share(self) -> float:
        """The share of the file that was read, from 0 to 1."""


@contextmanager
def open_rows(path: Path, column: str, file_format: str | None = None) -> Iterator[Rows]:
    """Open a file of texts. column: the name of the texts' column; a txt file has none.

    file_format: one of INPUT_FORMATS; None: the ending of the name. Raises InvalidInput if the file cannot be
    read or has no such column; iterating raises InvalidInput for a row without a text.
    """
    is_parquet = "parquet" in (file_format or path.suffix.lower())
    known = "parquet" if is_parquet else format_of(str(path), file_format)
    try:
        file = path.open("rb") if is_parquet else path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="input") from error
    with file:
        if isinstance(file, io.TextIOWrapper):
            yield _LineRows(file, path, column, known)
        else:
            yield ParquetRows(file, path, column)


class _LineRows:
    """The rows of a file of lines."""

    def __init__(self, file: io.TextIOWrapper, path: Path, column: str, file_format: str) -> None:
        self._file, self._path, self._column, self._format = file, path, column, file_format
        self._binary: Any = file.buffer  # which is ahead of the text by a buffer
        self._bytes = max(1, path.stat().st_size)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        rows = parse_rows(self._file, str(self._path), (self._column,), self._format, keep_blank=True)
        for number, (text,) in rows:
            yield number, _checked(text, self.place(number))

    def place(self, number: int) -> str:
        return f"{self._path}, line {number}"

    @property
    def share(self) -> float:
        return min(1.0, self._binary.tell() / self._bytes)


class ParquetRows:
    """The rows of one column of a Parquet file, or of one of its row groups."""

    def __init__(
        self, file: Any, path: Path | str, column: str, group: int | None = None, first: int = 0
    ) -> None:
        """path: for errors. group: the number of a row group; None: all. first: the rows before are skipped.

        Raises InvalidInput if it is no Parquet file, or does not have exactly one such column.
        """
        self._path, self._column, self._read = path, column, 0
        self._groups, self._first = None if group is None else [group], first
        parquet = pyarrow_parquet()
        try:
            # A buffer, because without one pyarrow reads the column of a whole row group at once.
            self._file = parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        except ValueError as error:  # pyarrow's ArrowInvalid
            raise InvalidInput(f"{path} is not a Parquet file", field="input") from error
        names = self._file.schema_arrow.names
        if column not in names:
            has = ", ".join(map(repr, names)) or "no column"
            raise InvalidInput(f"{path} has no column {column!r}; it has {has}", field="column")
        if (count := names.count(column)) > 1:
            raise InvalidInput(
                f"{path} has {count} columns {column!r}; rename all but one of them", field="column"
            )

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for batch in self._file.iter_batches(_ROWS_AT_ONCE, row_groups=self._groups, columns=[self._column]):
            skipped = min(len(batch), max(0, self._first - self._read))
            self._read += skipped
            for value in batch.column(0).slice(skipped).to_pylist():
                self._read += 1
                if not isinstance(value, str):
                    raise InvalidInput(
                        f"{self.place(self._read)}: no text in {self._column!r}; give the row a text",
                        field="column",
                    )
                yield self._read, _checked(value, self.place(self._read))

    def place(self, number: int) -> str:
        """Return where a row is, for errors."""
        of_group = f" of row group {self._groups[0]}" if self._groups else ""
        return f"{self._path}, row {number}{of_group}"

    @property
    def group_rows(self) -> Iterator[int]:
        """The number of rows of each row group."""
        metadata = self._file.metadata
        return (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))

    @property
    def share(self) -> float:
        """The share of the file that was read, from 0 to 1."""
        return self._read / max(1, self._file.metadata.num_rows)


def _checked(text: str, place: str) -> str:
    """Return a text that the server would accept too. Raises InvalidInput for another one."""
    if not text:
        raise InvalidInput(f"{place}: the text is empty; remove the row or give it a text", field="input")
    if "\0" in text:
        raise InvalidInput(f"{place}: the text holds a null byte; remove the byte", field="input")
    return text
