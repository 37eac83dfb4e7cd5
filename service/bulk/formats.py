"""The files that users get, made from the numbers of a spool once all rows are done.

embeddings   .npy float32 [rows, dimensions]      .parquet, column "embedding"
classes      .jsonl and .parquet: "label", "score" and "scores" of all labels      .tsv: a column per label
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import orjson

from attncache_core import InvalidInput, class_scores
from attncache_core.runtime.files import move_to_new

EMBEDDING_FORMATS = ("npy", "parquet")
CLASS_FORMATS = ("jsonl", "tsv", "parquet")
# What pyarrow raises for a damaged file. An error of the storage is an OSError with a number.
PYARROW_ERRORS = (OSError, ValueError, NotImplementedError)
_NUMBERS_AT_ONCE = 2**22
_NAME = b"attncache.name"


class Classes(NamedTuple):
    """Labels whose logits are the numbers. Logits, because the scores of large ones may all be 1."""

    labels: Sequence[str]
    multi_label: bool = False  # whether each label is decided by itself

    def scored(self, logits: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return the column of the best label of each row, and the scores, from logits [rows, labels]."""
        return logits.argmax(axis=1).tolist(), class_scores(logits, multi_label=self.multi_label)


def check_output(output: Path, formats: Sequence[str]) -> None:
    """Raise InvalidInput if the output exists, has no folder, or its ending is none of these formats."""
    if output.suffix.removeprefix(".").lower() not in formats:
        accepted = " or ".join(f".{name}" for name in formats)
        raise InvalidInput(f"{output}: the file name must end in {accepted}", field="output")
    if output.exists() or output.is_symlink():
        raise InvalidInput(f"{output} exists; remove the file or choose another name", field="output")
    if not output.parent.is_dir():
        raise InvalidInput(f"the folder of --output {output} does not exist; make it first", field="output")
    if output.suffix.lower() == ".parquet":
        pyarrow_parquet()


def write_output(output: Path, spooled: Path, numbers: np.ndarray, classes: Classes | None) -> None:
    """Make the output of a spool that is complete. The output appears at once.

    numbers: what `spooled` holds, float32 [rows, width]. classes: of the columns; None for embeddings.
    Raises FileExistsError if the output exists, and OSError.
    """
    suffix = output.suffix.lower()
    if suffix == ".npy":
        move_to_new(spooled, output)
        return
    unfinished = output.with_name(f".{output.name}.{secrets.token_hex(8)}.unfinished")
    try:
        with unfinished.open("xb") as file:
            if suffix == ".parquet":
                _parquet(file, numbers, classes)
            else:
                assert classes is not None
                (_jsonl if suffix == ".jsonl" else _tsv)(file, numbers, classes)
            file.flush()
            os.fsync(file.fileno())
        move_to_new(unfinished, output)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def as_parquet(numbers: np.ndarray, classes: Classes | None, name: str) -> bytes:
    """Return a Parquet file of numbers, float32 [rows, width], which holds its own name.

    classes: of the columns; None for embeddings.
    """
    file = io.BytesIO()
    _parquet(file, numbers, classes, name)
    return file.getvalue()


def holds_shard(file: IO[bytes], name: str, rows: int) -> bool:
    """Return whether a file of `as_parquet` has this name and number of rows. Reads its end. Raises OSError.

    A file without a name is of an earlier version: only its number of rows is compared.
    """
    try:
        metadata = pyarrow_parquet().read_metadata(file)
    except PYARROW_ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the storage
        return False
    return metadata.num_rows == rows and (metadata.metadata or {}).get(_NAME, name.encode()) == name.encode()


def pyarrow_parquet() -> Any:
    """Return the module pyarrow.parquet. Raises InvalidInput if pyarrow, an extra, is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InvalidInput(
            "Parquet files need pyarrow: pip install 'attncache[parquet]'", field="input"
        ) from error
    return parquet


def check_labels(output: Path, classes: Classes | None) -> None:
    """Raise InvalidInput if labels cannot be the names of columns."""
    labels = classes.labels if classes else ()
    if len(set(labels)) < len(labels):
        raise InvalidInput("two labels of the model have the same name", field="labels")
    is_table = output.suffix.lower() == ".tsv"
    if is_table and {"label", "score"} & {*labels}:
        raise InvalidInput(
            "a .tsv file has columns of its own that are called label and score; choose .jsonl or .parquet",
            field="output",
        )
    if is_table and any(set(label) & set("\t\r\n") for label in labels):
        raise InvalidInput(
            "a label holds a tab or a line feed, which a .tsv file cannot hold; choose .jsonl or .parquet",
            field="output",
        )


def _parts(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows in parts of one size in memory."""
    rows = max(1, _NUMBERS_AT_ONCE // numbers.shape[1])
    for first in range(0, len(numbers), rows):
        yield np.ascontiguousarray(numbers[first : first + rows])


def _jsonl(file: IO[bytes], numbers: np.ndarray, classes: Classes) -> None:
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    for part in _parts(numbers):
        for best, scores in zip(*classes.scored(part), strict=True):
            scored = dict(zip(classes.labels, scores, strict=True))
            row = {"label": classes.labels[best], "score": scores[best], "scores": scored}
            file.write(orjson.dumps(row, option=option))


def _tsv(file: IO[bytes], numbers: np.ndarray, classes: Classes) -> None:
    file.write("\t".join(("label", "score", *classes.labels)).encode() + b"\n")
    for part in _parts(numbers):
        for best, scores in zip(*classes.scored(part), strict=True):
            row = (classes.labels[best], str(scores[best]), *map(str, scores))
            file.write("\t".join(row).encode() + b"\n")


_Columns = Callable[[np.ndarray], list[Any]]  # rows -> columns, as pyarrow's arrays


def _of_embeddings(width: int) -> tuple[Any, _Columns]:
    """Return the schema of embeddings, and what makes its columns."""
    import pyarrow

    kind = pyarrow.list_(pyarrow.float32(), width)

    def columns(part: np.ndarray) -> list[Any]:
        return [pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.reshape(-1)), width)]

    return pyarrow.schema([("embedding", kind)]), columns


def _of_classes(classes: Classes) -> tuple[Any, _Columns]:
    """Return the schema of classes, and what makes its columns."""
    import pyarrow

    score = pyarrow.float32()
    scores = pyarrow.struct([(label, score) for label in classes.labels])
    schema = pyarrow.schema([("label", pyarrow.string()), ("score", score), ("scores", scores)])

    def columns(part: np.ndarray) -> list[Any]:
        best, found = classes.scored(part)
        of_labels = [np.ascontiguousarray(column) for column in found.T]
        scored = pyarrow.StructArray.from_arrays(of_labels, fields=list(scores))
        names = pyarrow.array([classes.labels[column] for column in best])
        return [names, pyarrow.array(found.max(axis=1)), scored]

    return schema, columns


def _parquet(file: IO[bytes], numbers: np.ndarray, classes: Classes | None, name: str | None = None) -> None:
    """Write one row group per part."""
    import pyarrow

    schema, columns = _of_classes(classes) if classes else _of_embeddings(numbers.shape[1])
    with pyarrow_parquet().ParquetWriter(file, schema) as writer:
        if name is not None:
            writer.add_key_value_metadata({_NAME: name.encode()})
        for part in _parts(numbers):
            writer.write_batch(pyarrow.record_batch(columns(part), schema=schema), row_group_size=len(part))
