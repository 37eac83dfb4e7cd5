"""The texts of a file, row by row and in chunks: .txt, .tsv, .csv, .jsonl or .parquet.

No row is skipped silently, so that row i of the output belongs to row i of the input. A bad row is refused
with its line and a remedy, and never with its text.

A chunk is what is computed and saved at once. Where chunks end, and which of their texts came before, depends
on the rows alone, so a run that was continued computes the same chunks.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from attncache_core import InvalidInput
from attncache_core.corpus.tables import (
    FORMATS,
    format_of,
    parse_rows,
    require_one_column,
    require_text,
)
from service.bulk.formats import PYARROW_ERRORS, pyarrow_parquet

INPUT_FORMATS = (*FORMATS, "parquet")
_ROWS_AT_ONCE = 1024
CHUNK_ROWS = 4096
# Long texts take seconds per chunk, so this is what a killed run loses. Larger chunks are not faster.
CHUNK_CHARACTERS = 2**18
# So many different texts are known if they come again, in some 300 bytes each.
_MAX_KNOWN = 2**18


class Rows(Protocol):
    """An open file of texts."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield each text with its number, as `place` takes it. Reads no further than necessary."""

    def place(self, number: int) -> str:
        """Return where a row is, for errors."""

    @property
    def share(self) -> float | None:
        """The share of the file that was read, from 0 to 1; None: not known, because it is a pipe."""


@contextmanager
def open_rows(path: Path, column: str, file_format: str | None = None) -> Iterator[Rows]:
    """Open a file of texts. column: the name of the texts' column; a txt file has none.

    path: `-` is standard input. file_format: one of INPUT_FORMATS; None: the ending of the name. Raises
    InvalidInput if the file cannot be read or has no such column; iterating raises InvalidInput for a row
    without a text.
    """
    try:
        known = format_of(str(path), file_format, INPUT_FORMATS)
    except InvalidInput as error:
        raise InvalidInput(f"{error}, or give --format", field="input") from error
    try:
        binary: Any = os.fdopen(os.dup(0), "rb") if str(path) == "-" else path.open("rb")
        file = binary if known == "parquet" else io.TextIOWrapper(binary, "utf-8-sig", newline="")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="input") from error
    with file:
        if isinstance(file, io.TextIOWrapper):
            yield _LineRows(file, path, column, known)
        elif not file.seekable():
            raise InvalidInput(
                f"{path} is a pipe, and a Parquet file is read from its end; give --input a file",
                field="input",
            )
        else:
            yield ParquetRows(file, path, column)


def _state(file: Any) -> tuple[int, int] | None:
    """Return what changes when an open file is written to; None for a pipe, and for an object of a store."""
    try:
        found = os.fstat(file.fileno())
    except io.UnsupportedOperation:
        return None
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _require_unchanged(file: Any, path: Path | str, opened: tuple[int, int] | None) -> None:
    """Raise InvalidInput if a file was written to since its state was `opened`."""
    if _state(file) != opened:
        raise InvalidInput(
            f"{path} was changed while it was read; run again when nothing writes to it", field="input"
        )


class _LineRows:
    """The rows of a file of lines."""

    def __init__(self, file: io.TextIOWrapper, path: Path, column: str, file_format: str) -> None:
        self._file, self._path, self._column, self._format = file, path, column, file_format
        self._binary: Any = file.buffer  # which is ahead of the text by a buffer
        self._bytes = max(1, os.fstat(file.fileno()).st_size)
        self._opened = _state(file)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        rows = parse_rows(self._file, str(self._path), (self._column,), self._format, refuse_blank=True)
        # One row behind, because the last line is incomplete if the file was still being written.
        last: list[tuple[int, str]] = []
        for number, (text,) in rows:
            yield from last
            last = [(number, text)]
        _require_unchanged(self._file, self._path, self._opened)
        yield from last

    def place(self, number: int) -> str:
        return f"{self._path}, line {number}"

    @property
    def share(self) -> float | None:
        return min(1.0, self._binary.tell() / self._bytes) if self._file.seekable() else None


class ParquetRows:
    """The rows of one column of a Parquet file, or of one of its row groups."""

    def __init__(
        self,
        file: Any,
        path: Path | str,
        column: str,
        group: int | None = None,
        first: int = 0,
        rows: int | None = None,
    ) -> None:
        """path: for errors. group: the number of a row group; None: all. first: the rows before are skipped.

        rows: the number of rows; None: all. Raises InvalidInput if it is no Parquet file, or does not have
        exactly one such column.
        """
        self._path, self._column, self._read = path, column, 0
        self._groups, self._first, self._rows = None if group is None else [group], first, rows
        self._source, self._opened = file, _state(file)
        parquet = pyarrow_parquet()
        try:
            # A buffer, because without one pyarrow reads the column of a whole row group at once.
            self._file = parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        except PYARROW_ERRORS as error:
            self._raise_of_storage(error)
            raise InvalidInput(f"{path} is not a Parquet file, or is damaged", field="input") from error
        require_one_column(path, column, self._file.schema_arrow.names)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for value in islice(self._values(), self._rows):
            self._read += 1
            place = self.place(self._read)
            if not isinstance(value, str):
                problem = f"no text in {self._column!r}; give the row a text"
                if value is not None:
                    kind = self._file.schema_arrow.field(self._column).type
                    problem = f"{self._column!r} holds values of type {kind}; write a column of strings"
                raise InvalidInput(f"{place}: {problem}", field="column")
            require_text(value, place)
            yield self._read, value

    def _values(self) -> Iterator[Any]:
        """Yield the values of the column. Raises InvalidInput if the file is damaged, and OSError."""
        try:
            for batch in self._file.iter_batches(
                _ROWS_AT_ONCE, row_groups=self._groups, columns=[self._column]
            ):
                _require_unchanged(self._source, self._path, self._opened)
                skipped = min(len(batch), max(0, self._first - self._read))
                self._read += skipped
                # By name, because a column `a.b` is selected together with a field b of a column a.
                for value in batch.column(self._column).slice(skipped):
                    yield value.as_py()
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{self.place(self._read + 1)}: the text is not UTF-8; write the file again in UTF-8",
                field="input",
            ) from error
        except PYARROW_ERRORS as error:
            self._raise_of_storage(error)
            raise InvalidInput(
                f"{self.place(self._read + 1)} cannot be read; the file is damaged, so write it again",
                field="input",
            ) from error

    def _raise_of_storage(self, error: Exception) -> None:
        """Raise an error of the storage, which has a number, again with the file's name."""
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = error.filename or str(self._path)
            raise error

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


@dataclass(frozen=True, slots=True)
class Done:
    """The rows that were read from the beginning of a file."""

    rows: int
    digest: str  # of their texts, in hexadecimal


@dataclass(slots=True)
class Known:
    """What is known of a text that was read."""

    row: int  # the first one with this text since it is known, from 0
    is_cut: bool | None = None  # whether the text was too long, and was cut; None: not known yet


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring rows."""

    texts: list[str]
    distinct: dict[str, Known]  # the texts, each once
    numbers: list[int]  # of the rows, as Rows.place takes them
    done: Done  # with this chunk
    share: float | None  # of the file that is read with this chunk, as Rows.share
    rows: Rows

    @property
    def new(self) -> list[str]:
        """The texts that are known from no chunk before, each once."""
        first = self.done.rows - len(self.texts)
        return [text for text, known in self.distinct.items() if known.row >= first]

    def place_of(self, text: str) -> str:
        """Return where the first row with this text is, for errors."""
        return self.rows.place(self.numbers[self.texts.index(text)])


NOTHING = Done(0, hashlib.blake2b(digest_size=16).hexdigest())


class ChunkReader:
    """Reads rows in chunks."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._numbered = rows, iter(rows)
        self._digest, self._count = hashlib.blake2b(digest_size=16), 0
        self._known = OrderedDict[bytes, Known]()  # by the digest of the text, in the order of the last row

    def skip(self, done: Done) -> bool:
        """Skip the rows that are done. Returns whether the file begins with these rows.

        Called before any chunk is read. Raises InvalidInput as iterating the rows does.
        """
        for _, text in islice(self._numbered, done.rows):
            self._add(text)
        return self._done == done

    def chunks(self) -> Iterator[Chunk]:
        """Yield the next chunks. Raises InvalidInput as iterating the rows does."""
        texts: list[str] = []
        distinct: dict[str, Known] = {}
        numbers: list[int] = []
        characters = 0
        for number, text in self._numbered:
            distinct[text] = self._add(text)
            texts.append(text)
            numbers.append(number)
            characters += len(text)
            if len(texts) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                yield Chunk(texts, distinct, numbers, self._done, self._rows.share, self._rows)
                texts, distinct, numbers, characters = [], {}, [], 0
        if texts:
            yield Chunk(texts, distinct, numbers, self._done, self._rows.share, self._rows)

    @property
    def _done(self) -> Done:
        return Done(self._count, self._digest.hexdigest())

    def _add(self, text: str) -> Known:
        content = text.encode()
        # The length keeps "ab", "c" and "a", "bc" apart.
        self._digest.update(b"%d:" % len(content))
        self._digest.update(content)
        name = hashlib.blake2b(content, digest_size=16).digest()
        known = self._known.setdefault(name, Known(self._count))
        self._known.move_to_end(name)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        self._count += 1
        return known
