"""Check that the files of a database are unchanged and fit each other.

The manifest holds the digests of the other files, and the numbers of records. `AttentionDatabase.open`
refuses a database at the first failed check; `AttentionDatabase.verify` also reads every record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from attncache_core.errors import CorruptDatabase
from attncache_core.models.refitted import REFITTED
from attncache_core.reuse.maps.familiarity import familiarity_name
from attncache_core.reuse.maps.index import index_path
from attncache_core.reuse.maps.manifest import Manifest
from attncache_core.reuse.maps.prototypes import prototypes_path
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.store import AttentionMapStore


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(
    folder: Path, indexed: Collection[int], familiarity: str, store: AttentionMapStore
) -> dict[str, str]:
    """Return the digests for the manifest of a database: path relative to `folder` -> SHA-256.

    The digest of a segment covers its header and record table, not its records. indexed: the lengths that
    have an index. familiarity: the file name of the familiarity test.
    """
    paths = _small_files(folder, indexed, familiarity, refitted=(folder / REFITTED).exists())
    small = {str(path.relative_to(folder)): file_digest(path) for path in paths}
    return small | {_name(folder, segment): segment.head_digest for segment in store.segments.values()}


def require_unchanged(folder: Path, digests: Mapping[str, str], indexed: Collection[int]) -> None:
    """Raise CorruptDatabase unless the files have these digests: all but the segments."""
    for path in _small_files(folder, indexed, familiarity_name(digests), refitted=REFITTED in digests):
        try:
            digest = file_digest(path)
        except OSError as error:
            raise CorruptDatabase(f"{path} is missing or cannot be read", field="database") from error
        if digest != digests.get(str(path.relative_to(folder))):
            raise CorruptDatabase(f"{path} was changed since the database was built", field="database")


def inconsistencies(folder: Path, search: SearchEngine, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each contradiction between the parts of the database in `folder`."""
    prototypes = manifest.prototypes
    segments, dimensions = search.store.segments, search.projector.dimensions
    for segment in segments.values():
        if segment.head_digest != manifest.files.get(_name(folder, segment)):
            yield f"header or record table of {segment.path} were changed since the database was built"
    if search.prototypes.counts() != prototypes:
        yield f"{prototypes_path(folder)} and the manifest differ in the number of prototypes"
        return
    if search.prototypes.features.shape[1] != dimensions:
        yield f"projector and prototypes of {folder} differ in the dimensions of feature vectors"
    if search.projector.max_length < max(segments):
        yield f"the projector of {folder} does not take sequences of {max(segments)} tokens"
    for length, segment in segments.items():
        stored = manifest.records.get(length, 0)
        if len(segment) != stored + prototypes.get(length, 0):
            yield f"{segment.path} and the manifest differ in the number of records"
        elif not np.array_equal(segment.kinds, _kinds(search, length, stored)):
            yield f"{segment.path} has records of other kinds than the manifest and the prototypes say"
        if stored and search.index.size(length) != stored:
            yield f"{index_path(folder, length)} and the manifest differ in the number of records"
        if stored and search.index.dimensions(length) != dimensions:
            yield f"projector and {index_path(folder, length)} differ in the dimensions of feature vectors"


def damaged_records(store: AttentionMapStore) -> Iterator[str]:
    """Yield a sentence for each length with damaged or duplicate records. Reads every record once."""
    for length, segment in store.segments.items():
        damaged = np.flatnonzero(~segment.are_sound(np.arange(len(segment))))
        if len(damaged):
            yield f"length {length}: {len(damaged)} damaged records, the first is {damaged[0]}"
        texts = int((segment.kinds == RecordKind.STORED).sum())
        if segment.distinct_texts != texts:
            yield f"length {length}: {texts} records of {segment.distinct_texts} texts"


def _kinds(search: SearchEngine, length: int, stored: int) -> np.ndarray:
    """Return the RecordKind of each record of a length according to the prototypes; -1 if unknown."""
    of_length = search.prototypes.lengths == length
    kinds = np.full(stored + int(of_length.sum()), -1)
    kinds[:stored] = RecordKind.STORED
    records = search.prototypes.records[of_length]
    valid = (records >= stored) & (records < len(kinds))
    kinds[records[valid]] = search.prototypes.kinds[of_length][valid]
    return kinds


def _small_files(folder: Path, indexed: Collection[int], familiarity: str, *, refitted: bool) -> list[Path]:
    """Return the paths of all files whose whole content is covered by a digest in the manifest."""
    return [
        folder / "projector.safetensors",
        folder / familiarity,
        prototypes_path(folder),
        *(index_path(folder, length) for length in sorted(indexed)),
        *([folder / REFITTED] if refitted else []),
    ]


def _name(folder: Path, segment: Segment) -> str:
    return str(segment.path.relative_to(folder))
