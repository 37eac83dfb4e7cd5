"""Build a database from a corpus.

    corpus -> distinct token sequences, a tenth held out by source               sentences
      1 damage       reuse each head alone on held-out sentences; rank the heads   head_damage
      2 records      write the maps of every sentence, and the prototypes          recording, prototypes
      3 training     train the projector on the distances of records' maps         training
      4 calibration  serve held-out sentences with the training sentences' records;
                     choose mask, policy and familiarity test                      calibration.calibrate
                     and fit the weights that hits take                            refitting
                     and compare the chosen records with the best records          quality
      5 index        write the features of every record, held-out ones included    recording.features
      6 manifest     write the options, the report and the digests of the files

Stages that need the inputs of the first layer share one `FirstInputs`, which computes each input once.
`options` holds the operator's choices. `default` builds the database of a server that has none.

With `synthetic_only`, stage 2 writes the maps of the sentences to a folder that is removed in the end. The
database holds only the prototypes: stage 4 lets nothing be searched, and stage 5 writes nothing.

The build runs in a hidden folder beside the destination, under a lock. The finished folder is renamed to the
destination. A stopped build resumes with the files of its finished stages if model, corpus and options are
equal. Otherwise it is begun anew, and a warning in the log names what changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from attncache_core.build.head_damage import measure_head_damage
from attncache_core.build.options import MAX_SEED, BuildOptions, default_budget
from attncache_core.build.quality import donor_distances
from attncache_core.build.recording import Recording, smallest_form
from attncache_core.build.refitting import Refitting
from attncache_core.build.sentences import FirstInputs, split
from attncache_core.build.training import pair_groups, train_projector
from attncache_core.calibration.calibrate import Calibration, Progress, calibrate
from attncache_core.calibration.damage import damage_of_each, reuse_rank
from attncache_core.calibration.familiarity_fit import count_tokens
from attncache_core.calibration.probes import find_probes
from attncache_core.corpus import CorpusSentence, unfamiliar_texts
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import BuildFailed, CorruptDatabase, InvalidInput
from attncache_core.heads.comparator import Measure
from attncache_core.models.refitted import write_refitted
from attncache_core.models.variant import is_count
from attncache_core.native import MAPS_VERSION
from attncache_core.reuse.maps.database import AttentionDatabase, write_decisions
from attncache_core.reuse.maps.familiarity import remove_other_tests, write_familiarity
from attncache_core.reuse.maps.index import FeatureIndex
from attncache_core.reuse.maps.integrity import file_digests
from attncache_core.reuse.maps.manifest import FORMAT_VERSION, Manifest, use_of
from attncache_core.reuse.maps.policy import uniform_policy
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.mask import ReuseMask, mildest_mask, natural_rank, parse_heads
from attncache_core.reuse.storage.layout import MapForm, RecordLayout
from attncache_core.reuse.storage.seal import Seal
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.runtime.files import (
    PRIVATE,
    left_unfinished,
    locked,
    move_into_place,
    write_whole,
)
from attncache_core.version import __version__

logger = logging.getLogger(__name__)

# Training that goes on from another projector takes one of so many steps of a new projector's training.
_SHARE_OF_STEPS = 4


def build_database(
    engine: PrefillEngine,
    corpus: Iterable[CorpusSentence],
    folder: Path | str,
    options: BuildOptions | None = None,
    progress: Progress = lambda *_: None,
    *,
    keep_existing: bool = False,
    start_from: AttentionDatabase | None = None,
) -> None:
    """Build a database for the engine's model in `folder`.

    The sentences are split by source: the projector is trained on one part, and the quality is measured on
    the other part. All sentences become records, unless `options.synthetic_only` is set. keep_existing: if
    the folder exists, or another process created it while this call waited for the lock, return without
    building. start_from: a database of the same model, from whose projector the training goes on, with a
    quarter of the steps; None: a new projector is trained. Raises BuildFailed if the corpus is too small, the
    folder exists or the disk is full, DatabaseRefused if `start_from` is of another model, InvalidInput if
    options are invalid or exclude each other, and ValueError if the engine has a database.
    """
    if engine.map_reuse is not None:
        raise ValueError("the engine has a database; build with an engine that has none")
    folder, options = Path(folder), options or BuildOptions()
    if options.threshold is not None and not math.isfinite(options.threshold):
        raise InvalidInput("threshold must be a number", field="threshold")
    if not 0 <= options.seed <= MAX_SEED:
        raise InvalidInput(f"seed must be a whole number from 0 to {MAX_SEED}", field="seed")
    if options.synthetic_only and not options.prototypes:
        raise InvalidInput(
            "a database of synthetic records needs at least one of each length; set prototypes to 1 or more",
            field="prototypes",
        )
    if start_from:
        _require_continuable(start_from, engine, options)
    started = time.perf_counter()
    if folder.exists():
        if keep_existing:
            return
        raise BuildFailed(f"{folder} exists already; choose another folder or remove it", field="database")
    try:
        # Before the lock, because a build that is refused leaves no file.
        build = _Build(engine, list(corpus), folder, options, progress, start_from)
        with locked(folder, on_wait=lambda: progress("waiting for another build", 0, 1)):
            if folder.exists():
                if keep_existing:
                    return
                raise BuildFailed(
                    f"another process has built {folder} meanwhile; use it, or choose another folder",
                    field="database",
                )
            build.run(started)
    except OSError as error:
        kept = (
            f"; the finished part is kept in {partial_folder(folder)}: start the same build again to resume, "
            "or remove this folder"
        )
        raise BuildFailed(
            f"{folder} cannot be written: {error.strerror or type(error).__name__}"
            + (kept if partial_folder(folder).exists() else ""),
            field="database",
        ) from error


def _token_ids(engine: PrefillEngine, corpus: Sequence[CorpusSentence]) -> list[Sequence[int]]:
    """Return the token ids of each sentence."""
    tokenized = iter(engine.tokenize([sentence.text for sentence in corpus if sentence.token_ids is None]))
    return [next(tokenized) if sentence.token_ids is None else sentence.token_ids for sentence in corpus]


def partial_folder(folder: Path) -> Path:
    """Return the hidden folder in which `folder` is built."""
    return folder.parent / f".{folder.name}.partial"


def _require_continuable(database: AttentionDatabase, engine: PrefillEngine, options: BuildOptions) -> None:
    """Raise DatabaseRefused or InvalidInput unless the training of the database's projector can go on."""
    database.require_fingerprint(engine.checkpoint)
    dimensions = database.search.projector.dimensions
    if dimensions != options.dimensions:
        raise InvalidInput(
            f"the projector of {database.folder} has {dimensions} dimensions, and this build is to have "
            f"{options.dimensions}; set dimensions to {dimensions}, or train a new projector",
            field="dimensions",
        )


class _Build:
    """One build, which runs the stages of the module docstring in order."""

    def __init__(
        self,
        engine: PrefillEngine,
        corpus: Sequence[CorpusSentence],
        folder: Path,
        options: BuildOptions,
        progress: Progress,
        start_from: AttentionDatabase | None,
    ) -> None:
        self.engine, self.model, self.start_from = engine, engine.model, start_from
        self.fingerprint = engine.checkpoint.fingerprint()
        self.folder, self.options, self.progress = folder, options, progress
        self.partial = partial_folder(folder)
        self.recorded = self.partial / "recorded" if options.synthetic_only else self.partial
        self.given = len(corpus)
        texts = [sentence.text for sentence in corpus]
        self.unfamiliar = unfamiliar_texts(texts)
        tokenized = _token_ids(engine, corpus)
        self.sentences = split(
            tokenized, [sentence.source for sentence in corpus], options.max_length, self._random(0)
        )
        layers, heads = len(self.model.layers), self.model.layers[0].heads
        self.rank, self.damage = natural_rank(layers, heads), np.zeros((layers, heads))
        self.budget = default_budget(engine, options)
        decides = self.budget.measure is Measure.AGREEMENT
        self.classifier = engine.classifier if decides else None
        self.use = use_of(engine.checkpoint, decides=decides and self.classifier is None)
        self.layout = RecordLayout(
            self._stored_heads(),
            torch.bfloat16 if engine.dtype is torch.bfloat16 else torch.float16,
            self._form(),
        )

    def run(self, started: float) -> None:
        """Run all stages, and move the finished database to its folder."""
        self._resume_or_start()
        # A resumed build keeps its key, because the finished segments were written with this key.
        self.seal = Seal.create(self.partial, self.fingerprint)
        self.first_inputs = FirstInputs(self.model, self.partial)
        self.recording = Recording(
            self.model,
            self.sentences,
            self.layout,
            self.options.prototypes,
            self.seal,
            self.first_inputs,
            synthetic_only=self.options.synthetic_only,
        )
        self._require_space()
        self._measure_damage()
        recorded = self.recording.write(self.recorded, self.rank, partial(self.progress, "writing records"))
        projector = self._train_projector(recorded)
        store, features = self._served(recorded, projector)
        prototypes = self.recording.prototype_index(projector)
        chosen = self._calibrate(projector, features, prototypes, store)
        distances = donor_distances(
            self.first_inputs, self.sentences, recorded, self._projectors(projector), self._training_mask()
        )
        chosen = replace(chosen, quality={**chosen.quality, "map_distance": distances})
        _indexed(features).write(self.partial)
        write_whole(prototypes_path(self.partial), prototypes.to_bytes())
        self.first_inputs.close()
        self._finish(chosen, prototypes, store, time.perf_counter() - started)

    def _random(self, stage: int) -> np.random.Generator:
        """Return the random generator of a stage, which does not depend on the stages before."""
        return np.random.default_rng([self.options.seed, stage])

    def _stored_heads(self) -> tuple[int, ...]:
        """Return the number of heads per layer that records hold.

        Records hold the heads of the layers that the operator chose. Otherwise they hold all heads, so that
        any mask can be chosen later.
        """
        layers, heads = self.rank.shape
        mask = parse_heads(self.options.heads or "all", self.rank)
        movable = self.options.heads is None or is_count(self.options.heads)
        return (heads,) * layers if movable else mask.reused

    def _form(self) -> MapForm:
        """Return the operator's map form, or by default the smallest form that holds the model's maps.

        Raises InvalidInput if the operator chose packed maps for a model that is not causal.
        """
        smallest = smallest_form(self.model)
        if self.options.form is MapForm.PACKED and smallest is MapForm.SQUARE:
            raise InvalidInput(
                "only the maps of causal models can be packed, and the tokens of this model attend to later "
                "tokens; choose the form square, or none",
                field="form",
            )
        return self.options.form or smallest

    def _resume_or_start(self) -> None:
        """Keep the files of a stopped build with equal inputs, or start with an empty folder."""
        inputs = json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "maps_version": MAPS_VERSION,
                "fingerprint": self.fingerprint,
                "use": self.use,
                **({"classifier": self.classifier.digest()} if self.classifier else {}),
                "dtype": str(self.layout.dtype),
                "options": asdict(self.options),
                "start_from": self.start_from and self.start_from.manifest.id,
                "sentences": _digest(json.dumps(self.sentences.sequences).encode()),
                "held_out": _digest(self.sentences.held_out.tobytes()),
            }
        )
        path, damage = self.partial / "inputs.json", self.partial / "damage.json"
        kept = path.read_bytes() if path.is_file() else None
        # What is recorded is in the order of this damage, and a second measurement may come to another order.
        is_damaged = damage.exists() and _kept_damage(damage, self.rank.size) is None
        if kept != inputs.encode() or is_damaged:
            if kept is not None:
                why = f"{damage.name} is damaged" if is_damaged else _changed(kept, inputs)
                logger.warning("the stopped build in %s is begun anew, because %s", self.partial, why)
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(mode=PRIVATE, parents=True)
            write_whole(path, inputs.encode())

    def _require_space(self) -> None:
        """Raise BuildFailed if the disk has no room for the segments that are still to be written."""
        recording = self.recording
        needed = sum(
            recording.records(length) * recording.layout.record_bytes(length)
            for length in recording.lengths
            if not recording.is_written(self.recorded, length)
        )
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise BuildFailed(
                f"the records need {needed:,} bytes and the disk has {free:,} left; use a smaller corpus, "
                "a smaller max-length or another folder",
                field="database",
            )

    def _measure_damage(self) -> None:
        """Set `damage` and `rank`. Both keep their default values if too few sentences are held out."""
        path = self.partial / "damage.json"
        joint = _kept_damage(path, self.rank.size)
        if joint is None:
            joint = measure_head_damage(
                self.engine,
                self.sentences,
                self.first_inputs,
                self.budget.measure,
                self._random(1),
                self.progress,
            )
            if joint is None:
                return
            write_whole(path, json.dumps(joint.tolist()).encode())
        self.damage = damage_of_each(joint, len(self.rank))
        self.rank = reuse_rank(joint, len(self.rank))

    def _train_projector(self, store: AttentionMapStore) -> FeatureProjector:
        """Return the projector, trained and written to its file unless a stopped build has written it."""
        path = self.partial / "projector.safetensors"
        projector = None
        with suppress(CorruptDatabase):  # also if there is none yet
            projector = FeatureProjector.load(path)
        if projector is None:
            torch.manual_seed(self.options.seed)
            longest, steps = max(self.recording.by_length), self.options.training_steps
            if self.start_from:
                projector = self.start_from.search.projector.extended(longest)
                steps = max(1, steps // _SHARE_OF_STEPS)
            else:
                projector = FeatureProjector(self.model.hidden_size, longest, self.options.dimensions)
            train_projector(
                pair_groups(
                    store,
                    self.sentences,
                    self.first_inputs,
                    self._training_mask(),
                    self._random(2),
                    self.progress,
                ),
                projector,
                steps=steps,
                seed=self.options.seed,
                is_trained=self.start_from is not None,
                on_step=lambda step: self.progress("training the projector", step + 1, steps),
            )
            write_whole(path, projector.to_bytes())
            projector = FeatureProjector.load(path)
        return projector

    def _projectors(self, projector: FeatureProjector) -> dict[str, FeatureProjector]:
        """Return the projectors whose choices of records are measured, by the name of their figure."""
        if self.start_from is None:
            return {"chosen": projector}
        before = self.start_from.search.projector.extended(max(self.recording.by_length))
        return {"chosen": projector, "chosen_before": before}

    def _served(
        self, recorded: AttentionMapStore, projector: FeatureProjector
    ) -> tuple[AttentionMapStore, dict[int, np.ndarray]]:
        """Return the store of the database, and the features of its records of sentences.

        Raises BuildFailed if no record may be in the database.
        """
        if not self.options.synthetic_only:
            return recorded, self.recording.features(projector)
        store = self.recording.write_synthetic(recorded, self.partial)
        if not store.segments:
            raise BuildFailed(
                "no number of tokens has eight texts, and a synthetic record is the mean of at least eight; "
                "add texts",
                field="corpus",
            )
        return store, {}

    def _training_mask(self) -> ReuseMask:
        """Return the heads to compare maps by in training: the operator's heads, or the mildest two thirds.

        Calibration chooses the final mask and θ later, because that choice needs the donors. The nearest
        donor hardly depends on the mask.
        """
        if self.options.heads:
            return parse_heads(self.options.heads, self.rank)
        return mildest_mask(self.rank, max(1, self.rank.size * 2 // 3))

    def _calibrate(
        self,
        projector: FeatureProjector,
        features: dict[int, np.ndarray],
        prototypes: PrototypeIndex,
        store: AttentionMapStore,
    ) -> Calibration:
        """Choose mask and policy, and write the familiarity test."""
        training = {
            length: rows[: len(self.sentences.rows(self.recording.by_length[length], held_out=False))]
            for length, rows in features.items()
        }
        # This index holds only training sentences, so that the held-out sentences can be measured.
        search = SearchEngine(
            projector, _indexed(training), prototypes, store, uniform_policy(self.budget, 1.0)
        )
        trained, held_out = (self.sentences.of_side(held_out=side) for side in (False, True))
        token_counts = count_tokens(trained, self.engine.tokenizer.vocabulary)
        probes = find_probes(self.model, search, held_out, self.first_inputs.of)
        refitting = Refitting(self.engine, search, trained, self._random(3))
        chosen = calibrate(
            self.engine,
            search,
            probes,
            self.unfamiliar,
            token_counts,
            self.rank,
            self.budget,
            heads=self.options.heads,
            threshold=self.options.threshold,
            refit=refitting.products if self.options.refit else None,
            progress=self.progress,
        )
        write_refitted(self.partial, chosen.refitted)
        self.familiarity = write_familiarity(self.partial, chosen.familiarity, token_counts)
        remove_other_tests(self.partial, self.familiarity)
        return chosen

    def _finish(
        self, chosen: Calibration, prototypes: PrototypeIndex, store: AttentionMapStore, seconds: float
    ) -> None:
        """Write the manifest and rename the folder into place."""
        by_length = {} if self.options.synthetic_only else self.recording.by_length
        records = {length: len(indices) for length, indices in by_length.items()}
        Manifest(
            id=self.seal.id,
            fingerprint=self.fingerprint,
            model=self.engine.checkpoint.name,
            dtype="bfloat16" if self.layout.dtype is torch.bfloat16 else "float16",
            records=records,
            prototypes=prototypes.counts(),
            stored_heads=self.layout.stored_heads,
            form=self.layout.form,
            damage=tuple(map(tuple, self.damage.tolist())),
            rank=tuple(map(tuple, self.rank.tolist())),
            reused_heads=chosen.mask.reused,
            policy=chosen.policy,
            use=self.use,
            quality=chosen.quality,
            build={
                **asdict(self.options),
                "start_from": self.start_from and self.start_from.manifest.id,
                "program": __version__,
                "variant": self.engine.checkpoint.variant,
                "texts": self.given,
                "held_out": int(self.sentences.held_out.sum()),
                "seconds": round(seconds, 1),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            files=file_digests(self.partial, records, self.familiarity, store)
            | write_decisions(self.partial, self.classifier),
        ).write(self.partial)
        # The inputs go before the damage, without which no build must go on.
        scaffold = [self.partial / name for name in ("inputs.json", "damage.json")]
        if self.recorded != self.partial:
            scaffold.insert(0, self.recorded)
        move_into_place(self.partial, self.folder, without=[*left_unfinished(self.partial), *scaffold])


def _changed(kept: bytes, inputs: str) -> str:
    """Say which inputs differ from those that a stopped build has kept. Options are named one by one."""
    now, then = json.loads(inputs), None
    with suppress(ValueError):
        then = json.loads(kept)
    if not isinstance(then, dict) or not isinstance(then.get("options"), dict):
        return "the list of its inputs is damaged"
    now, then = ({**named.pop("options"), **named} for named in (now, then))
    names = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    return f"this changed: {', '.join(names)}"


def _kept_damage(path: Path, heads: int) -> np.ndarray | None:
    """Return the damage that a stopped build has measured, [heads, heads]; None if there is none to read."""
    with suppress(OSError, ValueError):
        joint = np.array(json.loads(path.read_bytes()), dtype=np.float64)
        if joint.shape == (heads, heads) and np.isfinite(joint).all():
            return joint
    return None


def _indexed(features: dict[int, np.ndarray]) -> FeatureIndex:
    """Return an index of the features, by length."""
    index = FeatureIndex()
    for length, vectors in features.items():
        if len(vectors):
            index.add(length, vectors)
    return index


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
