"""Open and check a database of attention maps: a folder with manifest, projector, indexes and records.

    DIR/manifest.json             model, versions, reuse mask, policy and measured quality (manifest.py)
    DIR/key                       the secret key of the database's id and of all digests of texts (seal.py)
    DIR/projector.safetensors     the feature projector (projector.py)
    DIR/prototypes.safetensors    feature vectors of the synthetic records of all lengths (prototypes.py)
    DIR/familiarity-<digest>.safetensors    familiarity test and token counts of the corpus (familiarity.py)
    DIR/refitted.safetensors      the weights that hits take, if they have their own (models/refitted.py)
    DIR/index/<length>.faiss      feature vectors of the recorded sentences (index.py)
    DIR/maps/<length>.maps        records (storage/layout.py)
    DIR/decisions-<digest>/       the classifier whose decisions the budget is about, if there is one

    DIR/gain.json                 measured gain of reuse on each machine (gain.py)
    DIR/calibrated_on.json        digests of the texts of a calibration after the build
    DIR/tightened.json            findings of all servers about the policy (policy_state.py)

A folder that was renewed holds several generations, each with these files; see generations.py.

`build_database` writes the first group. `calibrate_database` writes decisions and familiarity test again, and
changes mask, policy and quality in the manifest. Nothing else changes a file of the first group.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.errors import AttnCacheError, CorruptDatabase, DatabaseRefused, InvalidInput
from attncache_core.heads.classifier import LinearClassifier
from attncache_core.heads.comparator import Measure
from attncache_core.models.refitted import REFITTED, LastProducts, read_refitted
from attncache_core.reuse.maps.familiarity import familiarity_name, read_familiarity
from attncache_core.reuse.maps.gain import Traffic
from attncache_core.reuse.maps.generations import (
    CURRENT,
    Generation,
    Result,
    current_generation,
    kept_generations,
    read_renewals,
    require_database,
    require_there,
    structural_faults,
)
from attncache_core.reuse.maps.index import FeatureIndex
from attncache_core.reuse.maps.info import DatabaseInfo
from attncache_core.reuse.maps.integrity import (
    damaged_records,
    file_digest,
    inconsistencies,
    require_unchanged,
)
from attncache_core.reuse.maps.manifest import Manifest, use_of
from attncache_core.reuse.maps.policy import ReusePolicy
from attncache_core.reuse.maps.policy_state import kept_steps
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.mask import ReuseMask, parse_heads, require_stored_heads
from attncache_core.reuse.storage.layout import RecordLayout
from attncache_core.reuse.storage.seal import Seal, key_path
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.runtime.files import refused_read, when_written, write_whole

# Begins the name of a folder. The rest is a digest, so that a calibration that is killed changes nothing. The
# folder's classifier.json holds the digest of the weights, so its own digest covers the weights too.
_DECISIONS = "decisions"
_CALIBRATED_ON = "calibrated_on.json"
_DIGESTS = TypeAdapter(set[str])


def write_decisions(folder: Path, classifier: LinearClassifier | None) -> dict[str, str]:
    """Write the classifier whose decisions the budget is about into the folder of a database.

    Returns what the manifest's `files` have of it: nothing if there is none. Raises OSError.
    """
    if classifier is None:
        return {}
    path = folder / f"{_DECISIONS}-{classifier.digest()[:16]}" / "classifier.json"
    classifier.save(path.parent)
    return {f"{path.parent.name}/{path.name}": file_digest(path)}


@dataclass(frozen=True)
class AttentionDatabase:
    """An open database. Its maps stay on disk and are mapped into memory."""

    generation: Generation
    manifest: Manifest
    search: SearchEngine
    mask: ReuseMask
    token_counts: np.ndarray  # int64 [vocabulary], number of times that each token occurs in the corpus
    refitted: Sequence[LastProducts] | None = None  # the weights that hits take; None: the model's

    @classmethod
    def open(
        cls, folder: Path | str, *, threshold: float | None = None, heads: str | None = None
    ) -> AttentionDatabase:
        """Open the generation that serves in `folder`; of a plain database, there is only one.

        threshold: θ for all lengths and kinds, instead of the manifest's policy. heads: reuse mask instead of
        the manifest's, as `parse_heads` reads it. With either of them, hits take the model's weights. Raises
        DatabaseRefused if there is no database or its format is not supported, CorruptDatabase if a file is
        missing, truncated or changed, and InvalidInput if the records cannot serve `heads` or if an option is
        invalid.
        """
        if threshold is not None and math.isnan(threshold):
            raise InvalidInput("threshold must be a number", field="threshold")
        folder = Path(folder)
        while True:
            generation = current_generation(folder)
            written = when_written(generation.folder / "manifest.json")
            try:
                require_database(folder)
                require_there(generation)
                return cls.open_generation(generation, threshold=threshold, heads=heads)
            except DatabaseRefused as error:
                now = current_generation(folder)
                if now != generation or when_written(now.folder / "manifest.json") != written:
                    continue  # a renewal has removed the generation meanwhile, or a calibration changed it
                if not isinstance(error, CorruptDatabase):
                    raise
                raise CorruptDatabase(with_remedy(error, generation), field="database") from error

    @classmethod
    def open_generation(
        cls, generation: Generation, *, threshold: float | None = None, heads: str | None = None
    ) -> AttentionDatabase:
        """Open one generation, whether it serves or not; see `open`."""
        folder = generation.folder
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
            # The policy was calibrated for another mask, so it keeps no budget with this mask.
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
        for wrong in inconsistencies(folder, search, manifest):
            raise CorruptDatabase(wrong, field="database")
        require_stored_heads(mask, manifest.stored_heads)
        # The weights were fitted to the manifest's mask, and measured with its policy.
        calibrated = heads is None and threshold is None and REFITTED in manifest.files
        refitted = read_refitted(folder / REFITTED) if calibrated else None
        return cls(generation, manifest, search, mask, token_counts, refitted)

    @property
    def folder(self) -> Path:
        """The folder with the files of this generation."""
        return self.generation.folder

    @cached_property
    def decisions(self) -> LinearClassifier | None:
        """The classifier whose decisions the budget is about; None if the budget needs no such classifier.

        Raises CorruptDatabase if the classifier is not the one that the database was calibrated for.
        """
        name = next((name for name in self.manifest.files if name.startswith(_DECISIONS)), None)
        if name is None:
            return None
        path, digest = self.folder / name, self.manifest.files[name]
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
        """Write the classifier whose decisions the budget is about; None: there is none.

        Returns the new `files` entry of the manifest. The caller writes the manifest, and then calls
        `remove_other_decisions`. Raises OSError.
        """
        files = {
            name: digest for name, digest in self.manifest.files.items() if not name.startswith(_DECISIONS)
        }
        return files | write_decisions(self.folder, classifier)

    def remove_other_decisions(self, files: Mapping[str, str]) -> None:
        """Remove the classifiers of earlier and of interrupted calibrations. files: of the manifest."""
        for path in self.folder.glob(f"{_DECISIONS}*"):
            if f"{path.name}/classifier.json" not in files:
                shutil.rmtree(path)

    def keep_calibration_texts(self, sequences: Iterable[Sequence[int]]) -> None:
        """Write the digests of the calibration texts, so that an evaluation can recognise them.

        Raises OSError.
        """
        seal = self.search.store.seal
        content = json.dumps([seal.token_digest(ids).hex() for ids in sequences])
        write_whole(self.folder / _CALIBRATED_ON, content.encode())

    def calibrated_on(self, sequences: Iterable[Sequence[int]]) -> int:
        """Return how many of these token sequences are texts of a calibration after the build.

        0 if the file with their digests cannot be read.
        """
        try:
            digests = self._calibration_texts()
        except CorruptDatabase:
            return 0
        seal = self.search.store.seal
        return sum(seal.token_digest(ids).hex() in digests for ids in sequences)

    def _calibration_texts(self) -> set[str]:
        try:
            return _DIGESTS.validate_json((self.folder / _CALIBRATED_ON).read_bytes())
        except FileNotFoundError:
            return set()
        except (OSError, ValueError) as error:
            raise CorruptDatabase(
                f"{_CALIBRATED_ON} cannot be read, so nothing warns of an evaluation with texts that the "
                "database was calibrated with; calibrate it again",
                field="database",
            ) from error

    def without(self, sequences: Iterable[Sequence[int]]) -> tuple[AttentionDatabase, int]:
        """Return the database without the records of these token sequences, and the number of records.

        The files do not change. Synthetic records do not change either: they remain means of these records
        too.
        """
        excluded: dict[int, set[int]] = {}
        for ids in sequences:
            record = self.search.store.record_of(ids)
            if record is not None:
                excluded.setdefault(len(ids), set()).add(record)
        search = replace(self.search, index=self.search.index.without(excluded), excluded=excluded)
        return replace(self, search=search), sum(map(len, excluded.values()))

    def traffic(self, policy: ReusePolicy) -> Traffic:
        """Return the traffic to expect with a policy for this database, from the calibration texts.

        The hit rates are those of the calibrated policy, an upper bound for a policy that was tightened
        since. A rate is 1 if it was not measured, and for a policy without a budget.
        """
        if policy.limit and policy.limit.is_off:
            return Traffic({}, {})
        measured = self.manifest.quality.get("groups", ())
        calibrated = policy.budget.binds
        lengths = self.manifest.quality.get("lengths") or self.manifest.records
        rates = {
            index: float(measured[index]["hit_rate"]) if calibrated and index < len(measured) else 1.0
            for index, group in enumerate(policy.groups)
            if group.approximates
        }
        seen = {policy.group_index(int(length)) for length in lengths}
        return Traffic(
            {int(length): count for length, count in lengths.items()},
            {index: rate for index, rate in rates.items() if rate > 0 and index in seen},
        )

    def require_use(self, checkpoint: Checkpoint) -> None:
        """Raise DatabaseRefused unless the budget was measured with the checkpoint's present settings."""
        known = self.manifest.use
        now = use_of(checkpoint, decides="labels" in known)
        other = [name for name, value in known.items() if now[name] != value]
        if checkpoint.task != "embed" and self.decisions is not None:
            other.append("task")  # the decisions are those of a classifier on embeddings
        if other:
            raise DatabaseRefused(
                f"database {self.folder} keeps its budget only with the {other[0]} that it was calibrated "
                f"with; start with that {other[0]}, or calibrate the database anew by `attncache calibrate`",
                field=other[0],
            )

    def require_classifier(self, classifier: LinearClassifier | None) -> None:
        """Raise DatabaseRefused if a budget of decisions was measured with another classifier."""
        if classifier is None or self.manifest.policy.budget.measure is not Measure.AGREEMENT:
            return
        if self.decisions is None:
            raise DatabaseRefused(
                f"database {self.folder} was built by an earlier version, which did not keep the labels that "
                "its budget is about; calibrate it anew by `attncache calibrate`",
                field="classifier",
            )
        if not self.decisions.decides_as(classifier):
            raise DatabaseRefused(
                f"database {self.folder} keeps its budget only with the classifier or labels that it was "
                "calibrated with; start with them, or calibrate the database anew by `attncache calibrate`",
                field="classifier",
            )

    def require_fingerprint(self, checkpoint: Checkpoint) -> None:
        """Raise DatabaseRefused unless the database was built for this model."""
        self.manifest.require_fingerprint(self.folder, checkpoint)

    def require_width(self, hidden_size: int) -> None:
        """Raise DatabaseRefused unless the projector reads hidden states with this many numbers."""
        width = self.search.projector.hidden_size
        if width != hidden_size:
            raise DatabaseRefused(
                f"the projector of database {self.folder} reads hidden states of {width} numbers, and the "
                f"model's have {hidden_size}; remove the database and build it again",
                field="database",
            )

    def info(self) -> DatabaseInfo:
        """Return what the database holds, for people and /info."""
        renewals = read_renewals(self.generation.root)
        counted = Counter(renewal.result for renewal in renewals)
        return DatabaseInfo(
            records=sum(self.manifest.records.values()),
            prototypes=sum(self.manifest.prototypes.values()),
            bytes=self.search.store.file_bytes,
            lengths=[self.manifest.lengths[0], self.manifest.lengths[-1]],
            lost_lengths=sorted(set(self.manifest.lengths) - set(self.search.store.segments)),
            dtype=self.manifest.dtype,
            reused_heads=list(self.mask.reused),
            refitted=self.refitted is not None,
            heads=self.mask.heads,
            policy=self.search.policy.info(),
            quality=self.manifest.quality,
            generation=self.generation.number,
            created=self.manifest.build.get("created"),
            renewals={result.value: counted[result] for result in Result},
            last_renewal=asdict(renewals[-1]) if renewals else None,
        )

    def verify(self) -> list[str]:
        """Return a sentence for each fault in the files of the folder; an empty list if there is no fault.

        Opens each generation of the folder again, which checks manifest, key, digests, headers, record
        tables, numbers and dimensions, and then reads every record once, and what servers and calibrations
        have found.
        """
        root = self.generation.root
        faults = [fault for generation in verify_generations(root) for fault in generation.faults]
        return [*structural_faults(root), *faults]


def with_remedy(error: AttnCacheError, generation: Generation) -> str:
    """Return the message of an error about a generation that is damaged, and what to do."""
    root = generation.root
    others = [other.number for other in kept_generations(root) if other != generation]
    if reason := refused_read(error):
        remedy = f"the system says: {reason.strerror}; make the file readable for this process, and try again"
    elif _another_serves(generation):
        remedy = f"generation {generation.number} does not serve, and the next one published replaces it"
    elif others and min(others) < generation.number:
        remedy = f"go back to the generation before by `attncache renew {root} --rollback`"
    elif others:
        current = root / CURRENT
        remedy = f"to let generation {others[-1]} serve, write this number and a line feed into {current}"
    else:
        remedy = f"remove {root} and build it again (a server replaces its default one by itself)"
    return f"{error}; {remedy}"


def _another_serves(generation: Generation) -> bool:
    """Return whether the folder says that another generation serves."""
    with suppress(CorruptDatabase):
        return current_generation(generation.root) != generation
    return False


class VerifiedGeneration(NamedTuple):
    """What was found in the files of one generation."""

    number: int
    records: int  # that were read
    faults: list[str]  # a sentence for each


def verify_generations(root: Path) -> Iterator[VerifiedGeneration]:
    """Open each generation of the database in `root`, and read every record and all findings once."""
    for generation in kept_generations(root):
        try:
            database = AttentionDatabase.open_generation(generation)
            _ = database.decisions
        except AttnCacheError as error:
            is_damaged = isinstance(error, CorruptDatabase)
            fault = with_remedy(error, generation) if is_damaged else str(error)
            yield VerifiedGeneration(generation.number, 0, [fault])
            continue
        store = database.search.store
        of_which = f"generation {generation.number}, " if generation.number else ""
        faults = [f"{of_which}{fault}" for fault in (*damaged_records(store), *_damaged_findings(database))]
        yield VerifiedGeneration(generation.number, store.records, faults)


def _damaged_findings(database: AttentionDatabase) -> Iterator[str]:
    """Yield a sentence for each file about the time after the build that cannot be read."""
    findings = (
        lambda: kept_steps(database.folder, database.search.policy),
        database._calibration_texts,
    )
    for read in findings:
        try:
            read()
        except CorruptDatabase as error:
            yield str(error)
