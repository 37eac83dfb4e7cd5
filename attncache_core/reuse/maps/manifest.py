"""Read, check and write the manifest of a database, the file DIR/manifest.json.

The manifest names the model, the parts and the versions of the database, and holds what calibration chose:
the reuse mask, the policy, and the quality measured with them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.errors import CorruptDatabase, DatabaseRefused
from attncache_core.native import MAPS_VERSION
from attncache_core.reuse.maps.policy import ReusePolicy
from attncache_core.reuse.mask import ReuseMask, head_order
from attncache_core.reuse.storage.layout import MapForm, RecordKind
from attncache_core.runtime.files import write_whole
from attncache_core.runtime.stored import Stored

FORMAT_VERSION = 4
# A database of version 3 has no refitted weights, and is otherwise the same.
_READABLE = {"format_version": (3, FORMAT_VERSION), "maps_version": (MAPS_VERSION,)}


@dataclass(frozen=True)
class Manifest(Stored):
    """The content of a manifest."""

    id: str  # id of the database, made from its key: see seal.Seal
    fingerprint: str  # of the model, tokenizer and quantisation that made the maps
    model: str  # name of the model
    dtype: Literal["bfloat16", "float16"]  # dtype of the maps in records
    records: dict[int, int]  # length in tokens -> number of records of sentences; empty: only synthetic ones
    prototypes: dict[int, int]  # length in tokens -> number of synthetic records
    stored_heads: tuple[int, ...]  # layer -> number of heads in a record
    damage: tuple[tuple[float, ...], ...]  # [layers, heads] mean 1 - cosine if only this head is reused
    rank: tuple[tuple[int, ...], ...]  # [layers, heads] order in which heads join the mask, 0 first
    reused_heads: tuple[int, ...]  # layer -> number of heads in the reuse mask
    policy: ReusePolicy  # budget, thresholds and curves
    quality: dict[str, Any]  # measured when mask and policy were chosen
    build: dict[str, Any]  # options and figures of the build
    files: dict[str, str] = field(default_factory=dict)  # path -> SHA-256; of a segment, of its head only
    form: MapForm = MapForm.SQUARE  # form of the maps in records
    use: dict[str, Any] = field(default_factory=dict)  # `use_of` the model when the budget was measured
    format_version: int = FORMAT_VERSION
    maps_version: int = MAPS_VERSION  # version of the attention kernel that made the maps

    @property
    def mask(self) -> ReuseMask:
        """The reuse mask that calibration chose."""
        return ReuseMask(head_order(np.array(self.rank)), self.reused_heads)

    @property
    def lengths(self) -> list[int]:
        """The lengths that have records of any kind, in tokens, ascending."""
        return sorted({*self.records, *self.prototypes})

    def _require_consistency(self) -> None:
        """Raise ValueError if an entry is empty or invalid, or if entries contradict each other."""
        if not (self.records or self.prototypes) or not self.rank:
            raise ValueError("no records or no layers")
        if len(bytes.fromhex(self.fingerprint)) != hashlib.sha256().digest_size:
            raise ValueError("the fingerprint is not a SHA-256 digest")
        if not all(
            math.isfinite(kind.threshold) for group in self.policy.groups for kind in group.kinds.values()
        ):
            raise ValueError("a threshold is not a finite number")
        if any(set(group.kinds) != set(RecordKind) for group in self.policy.groups):
            raise ValueError("a kind of record has no policy")
        _ = self.policy.steps  # raises ValueError if a number of steps is negative
        if not isinstance(self.build.get("variant") or {}, dict):
            raise ValueError("the variant is no table")
        _require_quality(self.quality)
        layers, heads = len(self.rank), len(self.rank[0])
        if {len(self.damage), len(self.reused_heads), len(self.stored_heads)} != {layers}:
            raise ValueError("entries differ in the number of layers")
        if any(len(row) != heads for row in (*self.damage, *self.rank)):
            raise ValueError("entries differ in the number of heads")
        if not np.isfinite(self.damage).all():
            raise ValueError("a damage is not a finite number")
        if sorted(rank for row in self.rank for rank in row) != list(range(layers * heads)):
            raise ValueError("the ranks of heads are not a permutation")
        if any(not 0 <= count <= heads for count in (*self.reused_heads, *self.stored_heads)):
            raise ValueError("a layer has more reused or stored heads than heads")

    def require_fingerprint(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Raise DatabaseRefused unless the database in `folder` was built for this model."""
        fingerprint = checkpoint.fingerprint()
        if self.fingerprint != fingerprint:
            raise DatabaseRefused(
                f"database {folder} was built for {self.model} with fingerprint {self.fingerprint[:12]}, and "
                f"model {checkpoint.name} has {fingerprint[:12]} (other weights, quantisation, tokenizer, "
                "architecture or layers dropped); build a database for this model",
                field="database",
            )

    def write(self, folder: Path) -> None:
        """Write DIR/manifest.json."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        write_whole(folder / "manifest.json", (text + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest in `folder`.

        Raises DatabaseRefused if there is no manifest or if its versions are not supported, and
        CorruptDatabase if the manifest cannot be read or is not valid.
        """
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
    """Raise DatabaseRefused unless the versions in the manifest are the versions of this program."""
    for name, readable in _READABLE.items():
        held = manifest[name]
        if held not in readable:
            raise DatabaseRefused(
                f"database {folder} has {name.replace('_', ' ')} {held}, and this program reads "
                f"{' and '.join(map(str, readable))}; "
                f"remove it and build it anew: attncache build --corpus FILE --database {folder}, with the "
                "options that it was built with",
                field="database",
            )


def use_of(checkpoint: Checkpoint, *, decides: bool) -> dict[str, Any]:
    """Return the settings of a model's use that a budget depends on, for JSON: option -> value.

    decides: whether the budget is about the model's own decisions, so that the task and the labels count too.
    """
    pooling: dict[str, Any] = {
        "modes": list(checkpoint.pooling.modes),
        "include_prompt": checkpoint.pooling.include_prompt,
    }
    if behind := checkpoint.behind_pooling:
        pooling["behind"] = behind
    use = {"template": str(checkpoint.template), "pooling": pooling}
    return use | ({"task": checkpoint.task, "labels": list(checkpoint.labels)} if decides else {})


def _require_quality(quality: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError unless figures that are used or shown are finite numbers."""
    names = ["measured"]
    if quality["measured"]:
        names += ["hit_rate", "prototype_hit_rate"]
        if quality["mean"] is not None:
            names += ["mean", "mean_cosine", "cosine_5th_percentile"]
    lengths = dict(quality.get("lengths") or {})
    figures = [
        *(quality[name] for name in names),
        *dict(quality.get("map_distance") or {}).values(),
        *(group["hit_rate"] for group in quality.get("groups") or ()),
        *map(int, lengths),
        *lengths.values(),
    ]
    if left_out := dict(quality.get("unfamiliar") or {}).get("left_out"):
        figures += [left_out[name] for name in ("kinds", "hits", "harmed", "harmed_at_most")]
        if worst := left_out["worst"]:
            figures += [worst["hits"], worst["mean"]]
    if not all(map(math.isfinite, figures)):
        raise ValueError("a figure of the quality is not a finite number")
