"""Databases of attention maps for ways that reuse maps, built from the choosing texts.

    FOLDER/<digest of model, texts, dtype and budget>       built once, and opened again by a later tuning

A database serves only the variant of the model that it was built with, and keeps what the variant leaves of
the budget.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions, bounds_of
from attncache_core.calibration.calibrate import Progress
from attncache_core.calibration.policy_selection import could_prove
from attncache_core.calibration.quality import texts_needed
from attncache_core.corpus import CorpusSentence
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import DatabaseRefused, InvalidInput
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.generations import current_generation
from attncache_core.reuse.maps.integrity import file_digest
from attncache_core.reuse.maps.manifest import Manifest
from attncache_core.reuse.maps.policy import Budget, Steps
from attncache_core.reuse.maps.policy_state import kept_steps
from attncache_core.runtime.stored import Stored

_HELD_OUT = 10  # a build holds out one of so many texts


@dataclass(frozen=True)
class Built(Stored):
    """A database that was built."""

    folder: str  # its name
    manifest: str  # SHA-256 of manifest.json, which changes with policy, mask and generation
    steps: Steps | None = None  # by which servers tightened the policy; None: of an earlier version

    @classmethod
    def of(cls, root: Path) -> Self:
        """Describe the database in `root`. Raises DatabaseRefused and OSError."""
        folder = current_generation(root).folder
        steps = kept_steps(folder, Manifest.read(folder).policy)
        return cls(root.name, file_digest(folder / "manifest.json"), steps)

    def is_in(self, parent: Path) -> bool:
        """Return whether the folder of databases still holds this one, unchanged."""
        try:
            return Built.of(parent / self.folder) == self
        except (DatabaseRefused, OSError):
            return False


def budget_of_build(rest: Budget, texts: int) -> Budget:
    """Return the budget to build a database for, from what is left of the operator's budget.

    texts: number of choosing texts. The floor is left to the measurement on the measuring texts if a build
    holds out too few texts to prove the floor, because then only recorded texts would hit. Raises
    InvalidInput if a build holds out too few texts to prove a budget of decisions.
    """
    held_out = texts // _HELD_OUT
    if could_prove(rest, held_out):
        return rest
    if rest.measure is Measure.COSINE:
        return replace(rest, floor=0.0)
    raise InvalidInput(
        f"a build holds out {held_out} of the {texts} texts that choose, and at least {texts_needed(rest)} "
        "are needed to show that the decisions are kept; give more texts",
        field="texts",
    )


def open_or_build(
    engine: PrefillEngine, texts: Sequence[str], budget: Budget, parent: Path, progress: Progress
) -> AttentionDatabase:
    """Return the database of an engine's model, these texts and this budget; build it if it is missing.

    engine: without a database. A build that was stopped continues, and one of another process is waited for.
    Raises BuildFailed.
    """
    identity = [engine.fingerprint, str(engine.dtype), list(texts), asdict(budget)]
    if budget.measure is Measure.AGREEMENT:
        identity.append("with its decisions")  # earlier versions did not keep them
    folder = parent / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    if not folder.exists():
        corpus = [CorpusSentence(text, text) for text in texts]
        options = BuildOptions(**bounds_of(budget))
        build_database(engine, corpus, folder, options, progress, keep_existing=True)
    return AttentionDatabase.open(folder)
