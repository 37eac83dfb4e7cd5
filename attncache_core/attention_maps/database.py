"""A database of attention maps on disk: projector, index, store and manifest, opened as one.

    DIR/manifest.json             what it is, for which model, which mask and θ, measured how well
    DIR/projector.safetensors
    DIR/prototypes.safetensors    feature vectors of the prototypes, all lengths
    DIR/index/<length>.faiss      feature vectors of the sentences
    DIR/maps/<length>.maps        records

    DIR/cost.json                 the cost model on this machine, written by `cost.cost_model`
    DIR/decisions/                the classifier whose decisions it was calibrated to keep, if for one
    DIR/calibrated_on.json        digests of the texts it was calibrated on after its build
    DIR/tightened.json            what a server found too loose, written by `tightened.keep_tightened`

`builder.build_database` writes all but the last four. `calibration.calibrate_database` writes decisions, and
changes mask, policy and quality in the manifest; nothing else is ever changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter

from attncache_core.attention_maps.index import FeatureIndex, index_path
from attncache_core.attention_maps.mask import ReuseMask, head_order, parse_heads, within_stored
from attncache_core.attention_maps.policy import ReusePolicy
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.attention_maps.store import (
    AttentionMapStore,
    MapForm,
    RecordKind,
    RecordLayout,
    token_digest,
)
from attncache_core.attention_maps.tightened import as_tightened
from attncache_core.checkpoint import Checkpoint
from attncache_core.classifier import LinearClassifier
from attncache_core.errors import CorruptDatabase, DatabaseRefused, InvalidInput
from attncache_core.files import write_whole

FORMAT_VERSION = 2
# It holds the weights' digest, so its own is that of both.
_DECISIONS = "decisions/classifier.json"


@dataclass(frozen=True)
class Manifest:
    """Everything a database says of itself."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fingerprint: str  # of the model, tokenizer and quantisation the maps came from
    model: str
    dtype: Literal["bfloat16", "float16"]  # of the records
    records: dict[int, int]  # length in tokens -> records of sentences
    prototypes: dict[int, int]  # length in tokens -> prototypes
    stored_heads: tuple[int, ...]  # layer -> heads held in a record
    damage: tuple[tuple[float, ...], ...]  # [layers, heads] 1 - cosine when that head alone is reused
    rank: tuple[tuple[int, ...], ...]  # [layers, heads] place in which the head joins the mask, 0 first
    reused_heads: tuple[int, ...]  # layer -> heads of the reuse mask
    policy: ReusePolicy  # budget, thresholds and curves
    quality: dict[str, Any]  # as measured when mask and policy were chosen
    build: dict[str, Any]  # how it was made
    files: dict[str, str] = field(default_factory=dict)  # path -> SHA-256, all but the segments
    form: MapForm = MapForm.SQUARE  # of the records' maps
    use: dict[str, Any] = field(default_factory=dict)  # of the model when the budget was measured: `use_of`
    format_version: int = FORMAT_VERSION

    @property
    def mask(self) -> ReuseMask:
        """The reuse mask."""
        return ReuseMask(head_order(np.array(self.rank)), self.reused_heads)

    @property
    def lengths(self) -> list[int]:
        """Lengths that have records of any kind, rising."""
        return sorted({*self.records, *self.prototypes})

    def _require_consistency(self) -> None:
        """Raise ValueError if the entries do not fit each other or say nothing."""
        if not self.records or not self.rank:
            raise ValueError("no records or no layers")
        if not all(
            math.isfinite(kind.threshold) for group in self.policy.groups for kind in group.kinds.values()
        ):
            raise ValueError("a threshold that is no number")
        if any(set(group.kinds) != set(RecordKind) for group in self.policy.groups):
            raise ValueError("a kind of record without a policy")
        _require_quality(self.quality)
        layers, heads = len(self.rank), len(self.rank[0])
        if {len(self.damage), len(self.reused_heads), len(self.stored_heads)} != {layers}:
            raise ValueError("layers are counted differently")
        if any(len(row) != heads for row in (*self.damage, *self.rank)):
            raise ValueError("heads are counted differently")
        if not np.isfinite(self.damage).all():
            raise ValueError("a damage that is no number")
        if sorted(place for row in self.rank for place in row) != list(range(layers * heads)):
            raise ValueError("two heads of one rank")
        if any(not 0 <= count <= heads for count in (*self.reused_heads, *self.stored_heads)):
            raise ValueError("more heads than there are")

    def write(self, folder: Path) -> None:
        """Write DIR/manifest.json."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        write_whole(folder / "manifest.json", (text + "\n").encode())

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


def use_of(checkpoint: Checkpoint, *, decides: bool) -> dict[str, Any]:
    """What beside the maps a budget depends on, for JSON: option -> its value.

    decides: whether the budget is of decisions that the model takes as it is used, not only of its outputs.
    """
    pooling = {"modes": list(checkpoint.pooling.modes), "include_prompt": checkpoint.pooling.include_prompt}
    use = {"template": str(checkpoint.template), "pooling": pooling}
    return use | ({"task": checkpoint.task, "labels": list(checkpoint.labels)} if decides else {})


def _require_quality(quality: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError unless people can be shown what was measured."""
    names = ["measured"]
    if quality["measured"]:
        names += ["hit_rate", "prototype_hit_rate"]
        if quality["mean"] is not None:
            names += ["mean", "mean_cosine", "cosine_5th_percentile"]
    figures = [*(quality[name] for name in names), *dict(quality.get("map_distance") or {}).values()]
    if not all(map(math.isfinite, figures)):
        raise ValueError("a quality that is no number")


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
        mask = parse_heads(heads, np.array(manifest.rank)) if heads else manifest.mask
        policy = as_tightened(folder, manifest.policy)
        if threshold is not None:
            policy = manifest.policy.with_threshold(threshold)
        elif heads:
            # Calibrated for another mask: it keeps no budget for this one.
            policy = manifest.policy.without_budget()
        layout = RecordLayout(manifest.stored_heads, getattr(torch, manifest.dtype), manifest.form)
        search = SearchEngine(
            FeatureProjector.load(folder / "projector.safetensors"),
            FeatureIndex.read(folder, sorted(manifest.records)),
            PrototypeIndex.load(prototypes_path(folder)),
            AttentionMapStore(folder, manifest.lengths, layout),
            policy,
        )
        _require_equal_counts(folder, manifest, search)
        return cls(folder, manifest, search, within_stored(mask, manifest.stored_heads))

    @cached_property
    def decisions(self) -> LinearClassifier | None:
        """What decides where the budget is of decisions that the model does not take itself; None: nothing.

        Raises CorruptDatabase if it is not what the database was calibrated for.
        """
        digest = self.manifest.files.get(_DECISIONS)
        if digest is None:
            return None
        path = self.folder / _DECISIONS
        try:
            if file_digest(path) == digest:
                return LinearClassifier.load(path.parent)
        except (OSError, DatabaseRefused) as error:
            raise CorruptDatabase(
                f"{path.parent} cannot be read; calibrate the database again", field="database"
            ) from error
        raise CorruptDatabase(
            f"{path} was changed since the database was calibrated; calibrate it again", field="database"
        )

    def keep_decisions(self, classifier: LinearClassifier | None) -> dict[str, str]:
        """Keep the classifier whose decisions the database is calibrated for, or none.

        Returns what the manifest is to say of its files. Raises OSError.
        """
        path = self.folder / _DECISIONS
        files = {name: digest for name, digest in self.manifest.files.items() if name != _DECISIONS}
        if classifier:
            classifier.save(path.parent)
            files[_DECISIONS] = file_digest(path)
        elif path.parent.exists():
            shutil.rmtree(path.parent)
        return files

    def without(self, sequences: Iterable[Sequence[int]]) -> tuple[AttentionDatabase, int]:
        """The database without the records of these token sequences, and how many those are.

        The files stay as they are, and prototypes what they are: means of these records too.
        """
        gone: dict[int, set[int]] = {}
        for ids in sequences:
            record = self.search.store.record_of(ids)
            if record is not None:
                gone.setdefault(len(ids), set()).add(record)
        search = replace(self.search, index=self.search.index.without(gone), left_out=gone)
        return replace(self, search=search), sum(map(len, gone.values()))

    def require_use(self, checkpoint: Checkpoint) -> None:
        """Raise DatabaseRefused unless the budget was measured for the model as it is used now."""
        known = self.manifest.use
        now = use_of(checkpoint, decides="labels" in known)
        other = [name for name, value in known.items() if now[name] != value]
        if other:
            raise DatabaseRefused(
                f"database {self.folder} was calibrated with {other[0]} set otherwise, for which alone its "
                "budget holds; set it the same, or calibrate the database for this by `attncache calibrate`",
                field=other[0],
            )

    def require_fingerprint(self, fingerprint: str, model: str) -> None:
        """Raise DatabaseRefused unless the database was built for the model of this fingerprint."""
        if self.manifest.fingerprint != fingerprint:
            raise DatabaseRefused(
                f"database {self.folder} was built for {self.manifest.model} with fingerprint "
                f"{self.manifest.fingerprint[:12]}, and model {model} has {fingerprint[:12]} (other weights, "
                "quantisation, tokenizer, architecture or layers dropped); build a database for this model",
                field="database",
            )

    def info(self) -> dict[str, Any]:
        """What the database holds, for people and /info."""
        return {
            "records": sum(self.manifest.records.values()),
            "prototypes": sum(self.manifest.prototypes.values()),
            "bytes": self.search.store.file_bytes,
            "lengths": [self.manifest.lengths[0], self.manifest.lengths[-1]],
            "dtype": self.manifest.dtype,
            "reused_heads": list(self.mask.reused),
            "heads": self.mask.heads,
            "policy": self.search.policy.info(),
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


def keep_calibration_texts(folder: Path, sequences: Iterable[Sequence[int]]) -> None:
    """Keep digests of what the database was calibrated on, for an evaluation to know its own texts by."""
    content = json.dumps([token_digest(ids).hex() for ids in sequences])
    write_whole(folder / "calibrated_on.json", content.encode())


def calibrated_on(folder: Path, sequences: Iterable[Sequence[int]]) -> int:
    """How many of these token sequences the database was calibrated on, after its build."""
    try:
        digests = set(json.loads((folder / "calibrated_on.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return 0
    return sum(token_digest(ids).hex() in digests for ids in sequences)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def small_files(folder: Path, lengths: list[int]) -> list[Path]:
    """The files of a database whose checksums stand in its manifest."""
    return [
        folder / "projector.safetensors",
        prototypes_path(folder),
        *(index_path(folder, length) for length in lengths),
    ]


def _require_equal_counts(folder: Path, manifest: Manifest, search: SearchEngine) -> None:
    """Raise CorruptDatabase unless manifest, indices and segments hold the same numbers of records."""
    same = search.prototypes.counts() == manifest.prototypes
    for length in manifest.lengths:
        stored = manifest.records.get(length, 0)
        held = stored + manifest.prototypes.get(length, 0)
        same &= len(search.store.segments[length]) == held
        same &= not stored or search.index.size(length) == stored
    if not same:
        raise CorruptDatabase(f"manifest, index and records in {folder} differ in their numbers")


def _check_files(folder: Path, manifest: Manifest) -> None:
    for path in small_files(folder, sorted(manifest.records)):
        try:
            digest = file_digest(path)
        except OSError as error:
            raise CorruptDatabase(f"{path} is missing or cannot be read", field="database") from error
        if digest != manifest.files.get(str(path.relative_to(folder))):
            raise CorruptDatabase(f"{path} was changed since the database was built", field="database")
