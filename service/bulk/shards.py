"""Shards of Parquet files: what is computed at once, and becomes one file of the output.

    inputs (URLs, folders)  ->  files, with their ETags  ->  shards: some rows of one row group
    shard  ->  the texts  ->  Computing  ->  OUTPUT/<digest of the shard and of the options>.parquet

The name of an output says what it was made from, and the output holds its name, so what exists and is whole
is done, whoever has made it. Shards are planned one by one, so their number has no limit.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson

from attncache_core import AttnCacheError, InvalidInput, PrefillEngine
from service.bulk.computing import Computing, Task
from service.bulk.formats import as_parquet, check_labels, holds_shard, pyarrow_parquet
from service.bulk.rows import ChunkReader, ParquetRows
from service.bulk.spool import FINGERPRINT
from service.errors import reason_of
from service.objects import ObjectFolder, StoredObject, is_url, joined, without_secrets

SHARD_ROWS = 100_000
TRIES = 3  # of a shard
_FOOTERS_AT_ONCE = 16  # that are read ahead
# Errors with which no shard can be written, and the remedies.
_NOT_WRITABLE = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space",
    errno.EROFS: "make the output writable",
}
_OUTPUT_NAME = re.compile(r"([0-9a-f]{32})\.parquet")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one row group of a Parquet file."""

    folder: str  # URL, with its secrets
    name: str  # of the file in the folder
    size: int  # of the file, in bytes
    etag: str
    group: int
    first: int  # row within the row group
    rows: int

    @property
    def told(self) -> dict[str, Any]:
        """What the manifest says about the shard."""
        file = joined(without_secrets(self.folder), self.name)
        return {"input": file, "row_group": self.group, "first_row": self.first, "rows": self.rows}

    def output(self, options: bytes) -> str:
        """Return the name of the shard's output. options: the digest of the model and the options."""
        digest = hashlib.blake2b(options, digest_size=16)
        digest.update(orjson.dumps([self.told, self.etag]))
        return f"{digest.hexdigest()}.parquet"


Due = tuple[Shard, str]  # a shard, and the name of its output


@dataclass(frozen=True, slots=True)
class Failure:
    """A shard, or a whole file, that was not computed."""

    input: str
    reason: str
    row_group: int | None = None
    first_row: int | None = None


@dataclass(frozen=True)
class Work:
    """What computes shards: made in each process from the options of the command."""

    load: Callable[[int | None], tuple[PrefillEngine, Task]]  # takes the number of threads
    column: str
    batch_tokens: int
    output: str  # URL of the folder
    begun_with: Mapping[str, Any]  # options that decide the numbers


class ShardWorker:
    """Owns an engine that computes shards in this process."""

    def __init__(self, work: Work, threads: int | None = None) -> None:
        """threads: None: as many as the processor quota allows. Raises what loading the engine raises."""
        self._work = work
        self._engine, self._task = work.load(threads)
        check_labels(Path("shard.parquet"), self._task.classes)
        self._output = ObjectFolder(work.output, "output", writes=True)

    def options(self) -> dict[str, Any]:
        """Return what decides the numbers, beside the input."""
        return {
            **self._work.begun_with,
            "--column": self._work.column,
            "--batch-tokens": self._work.batch_tokens,
            FINGERPRINT: self._engine.fingerprint,
            "dtype": str(self._engine.dtype).removeprefix("torch."),
            "device": str(self._engine.model.device),
            "labels": list(self._task.classes.labels) if self._task.classes else [],
            "dimensions": self._task.width,
        }

    def computed(self, due: Iterator[Due]) -> Iterator[tuple[Due, str | None]]:
        """Yield each shard with None or why it failed."""
        for shard, output in due:
            reason: str | None = ""
            for _ in range(TRIES):
                if (reason := self.attempt(shard, output)) is None:
                    break
            yield (shard, output), reason

    def attempt(self, shard: Shard, output: str) -> str | None:
        """Compute a shard and write its output, or return why this is not possible.

        Raises OSError if no other shard could be written either: computing them would be in vain.
        """
        try:
            content = self._compute(shard, output)
            self._output.put(output, content)
        except Exception as error:
            if isinstance(error, OSError) and (remedy := _NOT_WRITABLE.get(error.errno or 0)):
                reason = f"{error.strerror}; {remedy}, and run the same command again to continue"
                raise OSError(error.errno, reason, error.filename) from error
            return reason_of(error)
        return None

    def _compute(self, shard: Shard, output: str) -> bytes:
        """Return the content of the output of a shard."""
        folder = ObjectFolder(shard.folder, "input")
        about = StoredObject(shard.name, shard.size, shard.etag)
        with folder.open(shard.name, about) as file:
            where = folder.url_of(shard.name)
            part = ParquetRows(file, where, self._work.column, shard.group, shard.first, shard.rows)
            numbers = np.empty((shard.rows, self._task.width), np.float32)
            done = 0
            with Computing(self._engine, self._task, self._work.batch_tokens) as computing:
                for _, computed in computing.computed(ChunkReader(part).chunks(), numbers.__getitem__):
                    numbers[done : done + len(computed)] = computed
                    done += len(computed)
        return as_parquet(numbers, self._task.classes, output)


def check_input(given: str) -> None:
    """Raise InvalidInput if an input is a path, and neither a .parquet file nor in a folder that exists."""
    if is_url(given):
        return
    base = Path(_split(given)[0])
    if base.is_file():
        raise InvalidInput(f"input: {given} is not a .parquet file; give it by --input", field="input")
    if not base.is_dir():
        raise InvalidInput(f"input: there is no file or folder {base}; correct the path", field="input")


def plan(inputs: Sequence[str], column: str, output: str | None = None) -> Iterator[Shard | Failure]:
    """Return the shards of all inputs, and files that cannot be read. The order depends on the inputs alone.

    inputs: URLs or paths of files and folders; a name may hold *. output: URL of a folder, whose files are
    left out, so it may be below an input. Before anything is returned, raises InvalidInput if an input has
    no file, if there is no row, if the first file that can be read has no such column, or if pyarrow is not
    installed, and OSError if a folder cannot be listed.
    """
    pyarrow_parquet()
    left_out = None if output is None else joined(without_secrets(output), "")
    for given in inputs:
        next(_files_of(given, left_out))
    planned = _planned(inputs, column, left_out)
    first = next(planned, None)
    if first is None:
        raise InvalidInput("no row in the files of the input", field="input")
    return chain([first], planned)


def _planned(inputs: Sequence[str], column: str, left_out: str | None) -> Iterator[Shard | Failure]:
    planned = False
    for file, groups in read_ahead(_files(inputs, left_out), partial(_group_rows, column)):
        folder, stored = file
        try:
            counts = groups.result()
        except (AttnCacheError, OSError) as error:
            if not planned and isinstance(error, InvalidInput) and error.field == "column":
                raise
            yield Failure(joined(without_secrets(folder), stored.name), reason_of(error))
            continue
        planned = True
        for group, rows in enumerate(counts):
            for first in range(0, rows, SHARD_ROWS):
                count = min(SHARD_ROWS, rows - first)
                yield Shard(folder, stored.name, stored.bytes, stored.etag, group, first, count)


def outputs_in(folder: ObjectFolder) -> set[bytes]:
    """Return the outputs that exist and are not empty, as digests. Raises OSError."""
    found = (_OUTPUT_NAME.fullmatch(stored.name) for stored in folder.list() if stored.bytes)
    return {bytes.fromhex(name[1]) for name in found if name}


def is_whole(folder: ObjectFolder, output: str, shard: Shard) -> bool:
    """Return whether an output that exists is of this shard. Reads its end. Raises OSError."""
    with folder.open(output, folder.about(output)) as file:
        return holds_shard(file, output, shard.rows)


def digest_of(output: str) -> bytes:
    """Return the digest in the name of an output."""
    return bytes.fromhex(output.partition(".")[0])


_Item = TypeVar("_Item")
_Read = TypeVar("_Read")
_File = tuple[str, StoredObject]  # the URL of the folder, and the object below it


def _files(inputs: Iterable[str], left_out: str | None) -> Iterator[_File]:
    """Yield the files of all inputs, each once, also if several inputs name it."""
    yielded: set[bytes] = set()  # digests, because there may be a million of files
    for given in inputs:
        for folder, stored in _files_of(given, left_out):
            file = joined(without_secrets(folder), stored.name)
            digest = hashlib.blake2b(file.encode(), digest_size=16).digest()
            if digest not in yielded:
                yielded.add(digest)
                yield folder, stored


def _files_of(given: str, left_out: str | None) -> Iterator[_File]:
    """Yield the files of an input that are not in the output. Raises InvalidInput if there is none."""
    shown = without_secrets(given) if is_url(given) else given
    has_files = found = False
    for folder, stored in _listed(given):
        has_files = True
        file = joined(without_secrets(folder), stored.name)
        if left_out is not None and file.startswith(left_out):
            continue
        found = True
        if not stored.etag:
            raise InvalidInput(
                f"{file} has no ETag, so a change is not seen; copy it to a local folder or an object store",
                field="input",
            )
        yield folder, stored
    if has_files and not found:
        raise InvalidInput(
            f"output: all .parquet files of the input {shown} are in this folder, whose files are no inputs; "
            "choose another folder",
            field="output",
        )
    if not found:
        raise InvalidInput(f"there is no .parquet file in {shown}; correct the path", field="input")


def _split(path: str) -> tuple[str, str]:
    """Return the folder of an input, and the pattern of its names."""
    # Programs that write in parts make a folder of this name.
    if "*" in path or (path.endswith(".parquet") and not Path(path.removeprefix("file://")).is_dir()):
        base = path.partition("*")[0].rpartition("/")[0] or "."
        return base, path.removeprefix(f"{base}/")
    return path.rstrip("/"), "*.parquet"


def _listed(given: str) -> Iterator[_File]:
    path, _, query = given.partition("?") if is_url(given) else (given, "", "")
    base, pattern = _split(path)
    folder = ObjectFolder(f"{base}?{query}" if query else base, "input")
    # A local folder is absolute, because other processes may run elsewhere.
    url = folder.url if folder.is_local else f"{base}?{query}"
    if "*" not in pattern:
        try:
            yield url, folder.about(pattern)
        except FileNotFoundError:
            if not given.startswith(("s3://", "gs://", "az://")):
                raise
            # Programs that write in parts make a folder of this name.
            yield from _listed(f"{path}/?{query}")
        return
    listed: Iterable[StoredObject] = folder.list()
    if folder.is_local:
        # Object stores list by name, and folders in any order.
        listed = sorted(chain(listed, folder.broken_links()), key=lambda stored: stored.name)
    for stored in listed:
        if fnmatchcase(stored.name, pattern):
            yield url, stored


def read_ahead(
    items: Iterable[_Item], read: Callable[[_Item], _Read]
) -> Iterator[tuple[_Item, Future[_Read]]]:
    """Yield each item with what `read` returns for it. Threads read ahead of the caller."""
    waiting: deque[tuple[_Item, Future[_Read]]] = deque()
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE, thread_name_prefix="footers") as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(read, item)))
                if len(waiting) > _FOOTERS_AT_ONCE:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _group_rows(column: str, file_of_input: _File) -> Sequence[int]:
    folder, stored = file_of_input
    opened = ObjectFolder(folder, "input")
    with opened.open(stored.name, stored) as file:
        return list(ParquetRows(file, opened.url_of(stored.name), column).group_rows)


def options_digest(options: Mapping[str, Any]) -> bytes:
    """Return the digest of what decides the numbers."""
    return hashlib.blake2b(orjson.dumps(options, option=orjson.OPT_SORT_KEYS), digest_size=32).digest()


def as_line(value: Shard | Failure, **more: Any) -> bytes:
    """Return a line of the manifest, or of the file of failures."""
    shown = value.told if isinstance(value, Shard) else asdict(value)
    return orjson.dumps({**shown, **more}, option=orjson.OPT_APPEND_NEWLINE)
