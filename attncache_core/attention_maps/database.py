"""A database of attention maps on disk: projector, index, store and manifest, opened as one.

    DIR/manifest.json             what it is, for which model, which mask and θ, measured how well
    DIR/key                       secret: its id and the digests of texts come from it (seal.py)
    DIR/projector.safetensors
    DIR/prototypes.safetensors    feature vectors of the prototypes, all lengths
    DIR/familiarity-<digest>.safetensors    the familiarity test, and the counts of the corpus' tokens
    DIR/index/<length>.faiss      feature vectors of the sentences
    DIR/maps/<length>.maps        records

    DIR/gain.json                 where reuse saves time on each machine, written by `gain.measure_gain`
    DIR/decisions/                the classifier whose decisions it was calibrated to keep, if for one
    DIR/calibrated_on.json        digests of the texts it was calibrated on after its build
    DIR/tightened.json            what servers found out about the policy, written by `tightened.ServedPolicy`

`builder.build_database` writes all but the last four. `calibration.calibrate_database` writes decisions and
familiarity, and changes mask, policy and quality in the manifest; nothing else is ever changed.
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

from attncache_core.attention_maps.familiarity import familiarity_name, read_familiarity
from attncache_core.attention_maps.gain import Traffic
from attncache_core.attention_maps.index import FeatureIndex
from attncache_core.attention_maps.integrity import (
    damaged_records,
    disagreements,
    file_digest,
    require_unchanged,
)
from attncache_core.attention_maps.mask import ReuseMask, head_order, parse_heads, within_stored
from attncache_core.attention_maps.policy import ReusePolicy
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.attention_maps.seal import Seal, key_path
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.attention_maps.store import AttentionMapStore, MapForm, RecordKind, RecordLayout
from attncache_core.checkpoint import Checkpoint
from attncache_core.classifier import LinearClassifier
from attncache_core.errors import AttnCacheError, CorruptDatabase, DatabaseRefused, InvalidInput
from attncache_core.files import write_whole
from attncache_core.native import MAPS_VERSION

FORMAT_VERSION = 3
# It holds the weights' digest, so its own is that of both.
_DECISIONS = "decisions/classifier.json"
_CALIBRATED_ON = "calibrated_on.json"


@dataclass(frozen=True)
class Manifest:
    """Everything a database says of itself."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    id: str  # of the database, as its key has it: see seal.Seal
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
    files: dict[str, str] = field(default_factory=dict)  # path -> SHA-256, of a segment without its records
    form: MapForm = MapForm.SQUARE  # of the records' maps
    use: dict[str, Any] = field(default_factory=dict)  # of the model when the budget was measured: `use_of`
    format_version: int = FORMAT_VERSION
    maps_version: int = MAPS_VERSION  # of the attention kernel when the maps were recorded

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
        if len(bytes.fromhex(self.fingerprint)) != hashlib.sha256().digest_size:
            raise ValueError("a fingerprint that is none")
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
            _require_versions(folder, json.loads(text))
            manifest = TypeAdapter(cls).validate_json(text, strict=True)
            manifest._require_consistency()
            return manifest
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DatabaseRefused(
                f"there is no database in {folder}: no manifest.json", field="database"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptDatabase(f"{folder / 'manifest.json'} cannot be read", field="database") from error


def _require_versions(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise DatabaseRefused unless this program builds databases with the versions of this manifest."""
    for name, own in (("format_version", FORMAT_VERSION), ("maps_version", MAPS_VERSION)):
        held = manifest[name]
        if held != own:
            raise DatabaseRefused(
                f"database {folder} has {name.replace('_', ' ')} {held}, and this program reads {own}; "
                f"remove it and build it anew: attncache build --corpus FILE --database {folder}, with the "
                "options that it was built with",
                field="database",
            )


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
    token_counts: np.ndarray  # int64 [vocabulary], how often each token occurs in the corpus

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
                f"{error}; remove {folder} and build it again (a server replaces its default one by itself)",
                field="database",
            ) from error

    @classmethod
    def _open(cls, folder: Path, threshold: float | None, heads: str | None) -> AttentionDatabase:
        manifest = Manifest.read(folder)
        require_unchanged(folder, manifest.files, manifest.records)
        seal = Seal.read(folder, manifest.fingerprint)
        if seal.id != manifest.id:
            raise CorruptDatabase(
                f"manifest.json and {key_path(folder)} are of two databases", field="database"
            )
        mask = parse_heads(heads, np.array(manifest.rank)) if heads else manifest.mask
        policy = manifest.policy
        if threshold is not None:
            policy = manifest.policy.with_threshold(threshold)
        elif heads:
            # Calibrated for another mask: it keeps no budget for this one.
            policy = manifest.policy.without_budget()
        layout = RecordLayout(manifest.stored_heads, getattr(torch, manifest.dtype), manifest.form)
        familiarity, token_counts = read_familiarity(folder / familiarity_name(manifest.files))
        search = SearchEngine(
            FeatureProjector.load(folder / "projector.safetensors"),
            FeatureIndex.read(folder, sorted(manifest.records)),
            PrototypeIndex.load(prototypes_path(folder)),
            AttentionMapStore(folder, manifest.lengths, layout, seal),
            policy,
            familiarity,
        )
        for wrong in disagreements(folder, search, manifest.records, manifest.prototypes, manifest.files):
            raise CorruptDatabase(wrong, field="database")
        return cls(folder, manifest, search, within_stored(mask, manifest.stored_heads), token_counts)

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

    def keep_calibration_texts(self, sequences: Iterable[Sequence[int]]) -> None:
        """Keep digests of what the database was calibrated on, for an evaluation to know its own texts by.

        Raises OSError.
        """
        seal = self.search.store.seal
        content = json.dumps([seal.token_digest(ids).hex() for ids in sequences])
        write_whole(self.folder / _CALIBRATED_ON, content.encode())

    def calibrated_on(self, sequences: Iterable[Sequence[int]]) -> int:
        """How many of these token sequences the database was calibrated on, after its build."""
        try:
            digests = set(json.loads((self.folder / _CALIBRATED_ON).read_bytes()))
        except (OSError, ValueError, TypeError):
            return 0
        seal = self.search.store.seal
        return sum(seal.token_digest(ids).hex() in digests for ids in sequences)

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

    def traffic(self, policy: ReusePolicy) -> Traffic:
        """Return what calibration saw of the texts that a policy for this database will serve.

        A policy that was tightened since lets as many hit as calibration saw, at most. An operator's own
        thresholds are taken to let all hit.
        """
        if policy.limit and policy.limit.is_off:
            return Traffic({}, {})
        measured = self.manifest.quality.get("groups", ())
        calibrated = policy.budget.binds
        lengths = self.manifest.quality.get("lengths") or self.manifest.records
        rates = {
            place: float(measured[place]["hit_rate"]) if calibrated and measured else 1.0
            for place, group in enumerate(policy.groups)
            if group.approximates
        }
        seen = {policy.place_of(int(length)) for length in lengths}
        return Traffic(
            {int(length): count for length, count in lengths.items()},
            {place: rate for place, rate in rates.items() if rate > 0 and place in seen},
        )

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

    def require_width(self, hidden_size: int) -> None:
        """Raise DatabaseRefused unless the projector reads hidden states of a model of this width."""
        width = self.search.projector.hidden_size
        if width != hidden_size:
            raise DatabaseRefused(
                f"the projector of database {self.folder} reads hidden states of {width} numbers, and the "
                f"model's have {hidden_size}; remove the database and build it again",
                field="database",
            )

    def info(self) -> dict[str, Any]:
        """What the database holds, for people and /info."""
        return {
            "records": sum(self.manifest.records.values()),
            "prototypes": sum(self.manifest.prototypes.values()),
            "bytes": self.search.store.file_bytes,
            "lengths": [self.manifest.lengths[0], self.manifest.lengths[-1]],
            "lost_lengths": sorted(set(self.manifest.lengths) - set(self.search.store.segments)),
            "dtype": self.manifest.dtype,
            "reused_heads": list(self.mask.reused),
            "heads": self.mask.heads,
            "policy": self.search.policy.info(),
            "quality": self.manifest.quality,
        }

    def verify(self) -> list[str]:
        """Return what is wrong with the database's files, one sentence each; an empty list if nothing is.

        Opens the folder again, which checks manifest, key, digests, headers, record tables, numbers and
        dimensions, and then reads every record once.
        """
        try:
            database = self._open(self.folder, None, None)
            _ = database.decisions
        except AttnCacheError as error:
            return [str(error)]
        return list(damaged_records(database.search.store))
