"""A database of attention maps on disk: projector, index, store and manifest, opened as one.

    DIR/manifest.json             what it is, for which model, which mask and θ, measured how well
    DIR/projector.safetensors
    DIR/index/<length>.faiss      feature vectors
    DIR/maps/<length>.maps        records

    DIR/cost.json                 the cost model on this machine, written by `cost.cost_model`

All but the last is written by `builder.build_database` and never changed afterwards.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter

from attncache_core.attention_maps.index import FeatureIndex, index_path
from attncache_core.attention_maps.mask import ReuseMask, parse_heads, within_stored
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.attention_maps.store import AttentionMapStore, RecordKind, RecordLayout
from attncache_core.errors import CorruptDatabase, DatabaseRefused, InvalidInput

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Everything a database says of itself."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fingerprint: str  # of the model, tokenizer and quantisation the maps came from
    model: str
    dtype: Literal["bfloat16", "float16"]  # of the records
    records: dict[int, int]  # length in tokens -> records
    stored_heads: tuple[int, ...]  # layer -> heads held in a record
    damage: tuple[tuple[float, ...], ...]  # [layers, heads] 1 - cosine when that head alone is reused
    head_order: tuple[tuple[int, ...], ...]  # layer -> heads, mildest first
    reused_heads: tuple[int, ...]  # layer -> heads of the reuse mask
    threshold: float  # θ
    quality: dict[str, Any]  # as measured at build
    build: dict[str, Any]  # how it was made
    files: dict[str, str] = field(default_factory=dict)  # path -> SHA-256, all but the segments
    format_version: int = FORMAT_VERSION

    @property
    def mask(self) -> ReuseMask:
        """The reuse mask."""
        return ReuseMask(self.head_order, self.reused_heads)

    def _require_consistency(self) -> None:
        """Raise ValueError if the entries do not fit each other or say nothing."""
        if not self.records or not self.damage or not math.isfinite(self.threshold):
            raise ValueError("no records, no layers or no threshold")
        if "measured" not in self.quality:
            raise ValueError("no quality")
        layers, heads = len(self.damage), len(self.damage[0])
        if {len(self.head_order), len(self.reused_heads), len(self.stored_heads)} != {layers}:
            raise ValueError("layers are counted differently")
        if any(len(row) != heads for row in self.damage):
            raise ValueError("heads are counted differently")
        if any(sorted(order) != list(range(heads)) for order in self.head_order):
            raise ValueError("a head order is no permutation")
        if any(not 0 <= count <= heads for count in (*self.reused_heads, *self.stored_heads)):
            raise ValueError("more heads than there are")

    def write(self, folder: Path) -> None:
        """Write DIR/manifest.json."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in `folder`. Raises DatabaseRefused or CorruptDatabase."""
        try:
            text = (folder / "manifest.json").read_text(encoding="utf-8")
            version = json.loads(text)["format_version"]
            if version != FORMAT_VERSION:
                raise DatabaseRefused(
                    f"database {folder} has format version {version}, and this program reads "
                    f"{FORMAT_VERSION}; build it again",
                    field="database",
                )
            manifest = TypeAdapter(cls).validate_json(text, strict=True)
            manifest._require_consistency()
            return manifest
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DatabaseRefused(
                f"there is no database in {folder}: no manifest.json", field="database"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptDatabase(f"{folder / 'manifest.json'} cannot be read", field="database") from error


@dataclass(frozen=True)
class AttentionDatabase:
    """An open database. Its maps stay on disk and are mapped into memory as they are used."""

    folder: Path
    manifest: Manifest
    search: SearchEngine
    mask: ReuseMask

    @classmethod
    def open(
        cls, folder: Path, *, threshold: float | None = None, heads: str | None = None
    ) -> AttentionDatabase:
        """Open the database in `folder`; `threshold` and `heads` override what its manifest says.

        Raises DatabaseRefused (no database, another format), CorruptDatabase (a file is missing, cut or
        changed) and InvalidInput (an override that its records cannot serve).
        """
        if threshold is not None and math.isnan(threshold):
            raise InvalidInput("threshold must be a number", field="threshold")
        try:
            return cls._open(folder, threshold, heads)
        except CorruptDatabase as error:
            raise CorruptDatabase(
                f"{error}; remove {folder} and build it again (the default one is built at the next start)",
                field="database",
            ) from error

    @classmethod
    def _open(cls, folder: Path, threshold: float | None, heads: str | None) -> AttentionDatabase:
        manifest = Manifest.read(folder)
        _check_files(folder, manifest)
        mask = parse_heads(heads, np.array(manifest.damage)) if heads else manifest.mask
        layout = RecordLayout(manifest.stored_heads, getattr(torch, manifest.dtype))
        lengths = sorted(manifest.records)
        search = SearchEngine(
            FeatureProjector.load(folder / "projector.safetensors"),
            FeatureIndex.read(folder, lengths),
            AttentionMapStore(folder, lengths, layout),
            manifest.threshold if threshold is None else threshold,
        )
        for length in lengths:
            held = {manifest.records[length], len(search.store.segments[length]), search.index.size(length)}
            if len(held) > 1:
                raise CorruptDatabase(f"index and records of length {length} in {folder} differ in number")
        return cls(folder, manifest, search, within_stored(mask, manifest.stored_heads))

    def require_fingerprint(self, fingerprint: str, model: str) -> None:
        """Raise DatabaseRefused unless the database was built for the model of this fingerprint."""
        if self.manifest.fingerprint != fingerprint:
            raise DatabaseRefused(
                f"database {self.folder} was built for {self.manifest.model} with fingerprint "
                f"{self.manifest.fingerprint[:12]}, and model {model} has {fingerprint[:12]} (other weights, "
                "tokenizer or architecture); build a database for this model",
                field="database",
            )

    def info(self) -> dict[str, Any]:
        """What the database holds, for people and /info."""
        return {
            "records": self.search.store.records,
            "bytes": self.search.store.file_bytes,
            "lengths": [min(self.manifest.records), max(self.manifest.records)],
            "dtype": self.manifest.dtype,
            "threshold": self.search.threshold,
            "reused_heads": list(self.mask.reused),
            "heads": self.mask.heads,
            "quality": self.manifest.quality,
        }

    def verify(self) -> list[str]:
        """Every invariant of the database; returns what is wrong, one sentence each, empty if nothing is.

        Reads every record once.
        """
        wrong = []
        for length, segment in self.search.store.segments.items():
            damaged = np.flatnonzero(~segment.are_sound(np.arange(len(segment))))
            if len(damaged):
                wrong.append(f"length {length}: {len(damaged)} damaged records, the first is {damaged[0]}")
            if not np.isin(segment.kinds, list(RecordKind)).all():
                wrong.append(f"length {length}: a record of an unknown kind")
        return wrong


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def small_files(folder: Path, lengths: list[int]) -> list[Path]:
    """The files of a database whose checksums stand in its manifest."""
    return [folder / "projector.safetensors", *(index_path(folder, length) for length in lengths)]


def _check_files(folder: Path, manifest: Manifest) -> None:
    for path in small_files(folder, sorted(manifest.records)):
        try:
            digest = file_digest(path)
        except OSError as error:
            raise CorruptDatabase(f"{path} is missing or cannot be read", field="database") from error
        if digest != manifest.files.get(str(path.relative_to(folder))):
            raise CorruptDatabase(f"{path} was changed since the database was built", field="database")
