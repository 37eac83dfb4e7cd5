"""Build a database from a corpus.

    sentences -> distinct token sequences, some held out by source
      1 damage       each head reused alone on held-out sentences     -> the rank of the heads
      2 records      the maps of every sentence, heads in that order  -> segments, with prototypes
      3 training     the distances of records' maps                   -> projector
      4 calibration  held-out sentences against the others' records   -> mask and policy
      5 index        the features of every record, held-out ones too

The work goes on in a hidden folder beside the destination, under a lock, and is renamed into place when
whole. A build that was stopped finds there what it had finished, if model, corpus and options are the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from attncache_core.attention_maps.calibration import MOST_DAMAGE_PROBES, Calibration, Progress, calibrate
from attncache_core.attention_maps.choice import FEWEST_PROBES
from attncache_core.attention_maps.damage import damage_of_each, joint_damage, model_for_damage, reuse_rank
from attncache_core.attention_maps.database import FORMAT_VERSION, Manifest, use_of
from attncache_core.attention_maps.familiarity import remove_other_tests, write_familiarity
from attncache_core.attention_maps.familiarity_fit import count_tokens
from attncache_core.attention_maps.index import FeatureIndex
from attncache_core.attention_maps.integrity import file_digests
from attncache_core.attention_maps.mask import (
    ReuseMask,
    is_count,
    mildest_mask,
    natural_rank,
    parse_heads,
)
from attncache_core.attention_maps.policy import Budget, uniform_policy
from attncache_core.attention_maps.probes import find_probes
from attncache_core.attention_maps.projector import DIMENSIONS, FeatureProjector
from attncache_core.attention_maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.attention_maps.quality import donor_distances, masked_maps
from attncache_core.attention_maps.recording import Recording, smallest_form
from attncache_core.attention_maps.seal import Seal
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.attention_maps.sentences import split
from attncache_core.attention_maps.store import AttentionMapStore, MapForm, RecordLayout
from attncache_core.attention_maps.substitution import paired
from attncache_core.attention_maps.training import TRAINING_STEPS, PairGroup, map_distances, train_projector
from attncache_core.corpus import CorpusSentence, unfamiliar_texts
from attncache_core.engine import PrefillEngine
from attncache_core.errors import BuildFailed, InvalidInput
from attncache_core.files import PRIVATE, is_whole, left_unfinished, locked, move_into_place, write_whole
from attncache_core.native import MAPS_VERSION
from attncache_core.outputs import Measure
from attncache_core.version import __version__

MIN_COSINE = 0.985
MIN_TEXT_COSINE = 0.95
MIN_AGREEMENT = 0.98
PROTOTYPES = 16
MAX_LENGTH = 64
# Records of one length whose distances train the projector: 512 give 130,000 pairs. Of long sentences fewer
# are taken, so that comparing them takes seconds: about so many numbers are compared for each length.
_MOST_TRAINING_RECORDS = 512
_MOST_COMPARISONS = 2e9


@dataclass(frozen=True)
class BuildOptions:
    """What an operator may choose about a database."""

    min_cosine: float = MIN_COSINE  # quality budget of embeddings: mean cosine over held-out hits
    min_text_cosine: float = MIN_TEXT_COSINE  # of embeddings too: 1st percentile of the hits' cosine
    min_agreement: float = MIN_AGREEMENT  # quality budget of classes: share of the hits' decisions that stay
    heads: str | None = None  # see mask.parse_heads; None: chosen by damage, inside the budget
    threshold: float | None = None  # θ; None: chosen with the mask
    prototypes: int = PROTOTYPES  # at most so many synthetic records of each length; 0: none
    form: MapForm | None = None  # of the records' maps; None: packed where the model is causal
    max_length: int = MAX_LENGTH  # tokens; longer sentences are not recorded
    dimensions: int = DIMENSIONS  # of the feature vectors
    training_steps: int = TRAINING_STEPS
    seed: int = 0


def build_database(
    engine: PrefillEngine,
    corpus: Iterable[CorpusSentence],
    folder: Path,
    options: BuildOptions | None = None,
    progress: Progress = lambda *_: None,
    *,
    keep_existing: bool = False,
) -> None:
    """Build a database for the engine's model in `folder`.

    Sentences are split by their source into those to train on and those to measure on; all become records.
    keep_existing: leave a database alone that is there already, or was built while this call waited for
    the lock. Raises BuildFailed if the corpus is too small, the folder is taken or the disk is full.
    """
    if engine.database is not None:
        raise ValueError("a database is built with an engine that has none")
    options = options or BuildOptions()
    if options.threshold is not None and not math.isfinite(options.threshold):
        raise InvalidInput("threshold must be a number", field="threshold")
    started = time.perf_counter()
    try:
        with locked(folder, on_wait=lambda: progress("waiting for another build", 0, 1)):
            if folder.exists():
                if keep_existing:
                    return
                raise BuildFailed(
                    f"{folder} exists already; choose another folder or remove it", field="database"
                )
            build = _Build(engine, list(corpus), folder, options, progress)
            build.run(started)
    except OSError as error:
        raise BuildFailed(
            f"{folder} cannot be written: {error.strerror or type(error).__name__}; what is done is kept in "
            f"{partial_folder(folder)}, for the same build to go on or for you to remove",
            field="database",
        ) from error


def partial_folder(folder: Path) -> Path:
    """Where a build of `folder` goes on until it is whole."""
    return folder.parent / f".{folder.name}.partial"


class _Build:
    """One build: the stages that the module's docstring lists, in its order."""

    def __init__(
        self,
        engine: PrefillEngine,
        corpus: Sequence[CorpusSentence],
        folder: Path,
        options: BuildOptions,
        progress: Progress,
    ) -> None:
        self.engine, self.model = engine, engine.model
        self.fingerprint = engine.checkpoint.fingerprint()
        self.folder, self.options, self.progress = folder, options, progress
        self.partial = partial_folder(folder)
        self.given = len(corpus)
        texts = [sentence.text for sentence in corpus]
        self.unfamiliar = unfamiliar_texts(texts)
        tokenized = engine.tokenize(texts)
        self.sentences = split(
            tokenized, [sentence.source for sentence in corpus], options.max_length, self._random(0)
        )
        layers, heads = len(self.model.layers), self.model.layers[0].heads
        self.rank, self.damage = natural_rank(layers, heads), np.zeros((layers, heads))
        self.budget = default_budget(
            engine, options.min_cosine, options.min_text_cosine, options.min_agreement
        )
        self.use = use_of(engine.checkpoint, decides=self.budget.measure is Measure.AGREEMENT)
        self.layout = RecordLayout(
            self._stored_heads(),
            torch.bfloat16 if engine.dtype is torch.bfloat16 else torch.float16,
            self._form(),
        )

    def run(self, started: float) -> None:
        """All stages; leaves the database in its folder."""
        self._resume_or_start()
        # A resumed build keeps its key: the segments that are there already were written with it.
        self.seal = Seal.create(self.partial, self.fingerprint)
        self.recording = Recording(
            self.model, self.sentences, self.layout, self.options.prototypes, self.seal
        )
        self._require_space()
        self._measure_damage()
        store = self.recording.write(self.partial, self.rank, partial(self.progress, "writing records"))
        projector = self._train_projector(store)
        features = self.recording.features(projector)
        prototypes = self.recording.prototype_index(projector)
        chosen = self._calibrate(projector, features, prototypes, store)
        _indexed(features).write(self.partial)
        write_whole(prototypes_path(self.partial), prototypes.to_bytes())
        self._finish(chosen, prototypes, store, time.perf_counter() - started)

    def _random(self, stage: int) -> np.random.Generator:
        """A stage's own random numbers, the same whether the stages before it ran now or earlier."""
        return np.random.default_rng([self.options.seed, stage])

    def _stored_heads(self) -> tuple[int, ...]:
        """Heads held per layer: an operator's whole layers, else all, so that the mask can still move."""
        layers, heads = self.rank.shape
        given = parse_heads(self.options.heads or "all", self.rank)
        movable = self.options.heads is None or is_count(self.options.heads)
        return (heads,) * layers if movable else given.reused

    def _form(self) -> MapForm:
        """As the operator chose, else as little as the model's maps need."""
        smallest = smallest_form(self.model)
        if self.options.form is MapForm.PACKED and smallest is MapForm.SQUARE:
            raise InvalidInput(
                "maps can be packed only of causal models; this one's tokens attend to later ones: leave "
                "--maps out or choose square",
                field="maps",
            )
        return self.options.form or smallest

    def _resume_or_start(self) -> None:
        """Keep what a stopped build of the very same database left; else begin with an empty folder."""
        inputs = json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "maps_version": MAPS_VERSION,
                "fingerprint": self.fingerprint,
                "use": self.use,
                "dtype": str(self.layout.dtype),
                "options": asdict(self.options),
                "sentences": _digest(json.dumps(self.sentences.sequences).encode()),
                "held_out": _digest(self.sentences.held_out.tobytes()),
            }
        )
        path = self.partial / "inputs.json"
        if not path.is_file() or path.read_text(encoding="utf-8") != inputs:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(mode=PRIVATE, parents=True)
            write_whole(path, inputs.encode())

    def _require_space(self) -> None:
        recording = self.recording
        needed = sum(
            recording.records(length) * recording.layout.record_bytes(length)
            for length in recording.lengths
            if not recording.is_written(self.partial, length)
        )
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise BuildFailed(
                f"the records need {needed:,} bytes and the disk has {free:,} left; give a smaller corpus, "
                "a smaller max-length or another folder",
                field="database",
            )

    def _measure_damage(self) -> None:
        """Fill `damage` and `rank`; the stand-ins stay where too little is held out to measure."""
        path = self.partial / "damage.json"
        if not is_whole(path):
            pairs = self._nearest_by_input()
            if len(pairs) < FEWEST_PROBES:
                return
            chosen = [pairs[place] for place in self._random(1).permutation(len(pairs))[:MOST_DAMAGE_PROBES]]
            model = model_for_damage(self.engine)
            joint = joint_damage(
                model,
                paired(
                    model,
                    [self.sentences.sequences[probe] for probe, _ in chosen],
                    [self.sentences.sequences[donor] for _, donor in chosen],
                ),
                self.engine.judge(self.budget.measure).comparable,
                partial(self.progress, "measuring heads"),
            )
            write_whole(path, json.dumps(joint.tolist()).encode())
        joint = np.array(json.loads(path.read_text(encoding="utf-8")))
        self.damage = damage_of_each(joint, len(self.rank))
        self.rank = reuse_rank(joint, len(self.rank))

    def _nearest_by_input(self) -> list[tuple[int, int]]:
        """(held-out sentence, the training sentence of its length with the nearest input embedding).

        Before there is a projector, the distance of the first layer's inputs is the best guess.
        """
        pairs = []
        for indices in self.recording.by_length.values():
            probes = [indices[row] for row in self.sentences.rows(indices, held_out=True)]
            donors = [indices[row] for row in self.sentences.rows(indices, held_out=False)]
            if probes and donors:
                left, right = (
                    self.sentences.inputs(self.model, side).flatten(1) for side in (probes, donors)
                )
                nearest = torch.cdist(left, right).argmin(dim=1).tolist()
                pairs += [(probe, donors[row]) for probe, row in zip(probes, nearest, strict=True)]
        return pairs

    def _train_projector(self, store: AttentionMapStore) -> FeatureProjector:
        """Leave the projector in its file."""
        path = self.partial / "projector.safetensors"
        if not is_whole(path):
            torch.manual_seed(self.options.seed)
            projector = FeatureProjector(
                self.model.hidden_size, max(self.recording.lengths), self.options.dimensions
            )
            steps = self.options.training_steps
            train_projector(
                self._pair_groups(store),
                projector,
                steps=steps,
                seed=self.options.seed,
                on_step=lambda step: self.progress("training the projector", step + 1, steps),
            )
            write_whole(path, projector.to_bytes())
        return FeatureProjector.load(path)

    def _pair_groups(self, store: AttentionMapStore) -> list[PairGroup]:
        """For each length inputs and map distances of training sentences; raises BuildFailed without any."""
        groups, mask, random = [], self._training_mask(), self._random(2)
        for done, (length, indices) in enumerate(self.recording.by_length.items(), 1):
            rows = self.sentences.rows(indices, held_out=False)
            most = min(_MOST_TRAINING_RECORDS, math.isqrt(int(_MOST_COMPARISONS / (mask.total * length**2))))
            rows = [rows[place] for place in random.permutation(len(rows))[:most]]
            if len(rows) > 1:
                maps = masked_maps(store, mask, length, rows)
                inputs = self.sentences.inputs(self.model, [indices[row] for row in rows])
                groups.append(PairGroup(inputs, map_distances(maps, maps)))
            self.progress("comparing maps", done, len(self.recording.by_length))
        if not groups:
            raise BuildFailed(
                "the corpus has no two texts of one length to train the projector on", field="corpus"
            )
        return groups

    def _training_mask(self) -> ReuseMask:
        """The heads whose maps a donor should match: the operator's, or the mildest two thirds.

        The mask is chosen with θ once donors are known; which donor is nearest hardly depends on it.
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
        """Choose mask and policy, and measure the projector; writes the familiarity test."""
        training = {
            length: rows[: len(self.sentences.rows(self.recording.by_length[length], held_out=False))]
            for length, rows in features.items()
        }
        # Held-out sentences have records too, but are not in this index.
        search = SearchEngine(
            projector, _indexed(training), prototypes, store, uniform_policy(self.budget, 1.0)
        )
        trained, held_out = (self.sentences.of_side(held_out=side) for side in (False, True))
        token_counts = count_tokens(trained, self.engine.tokenizer.vocabulary)
        probes = find_probes(self.model, search, held_out)
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
            progress=self.progress,
        )
        self.familiarity = write_familiarity(self.partial, chosen.familiarity, token_counts)
        remove_other_tests(self.partial, self.familiarity)
        distances = donor_distances(self.model, self.sentences, store, probes, self._training_mask())
        return replace(chosen, quality={**chosen.quality, "map_distance": distances})

    def _finish(
        self, chosen: Calibration, prototypes: PrototypeIndex, store: AttentionMapStore, seconds: float
    ) -> None:
        """Write the manifest and rename the folder into place."""
        records = {length: len(indices) for length, indices in self.recording.by_length.items()}
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
                "program": __version__,
                "variant": self.engine.checkpoint.variant,
                "texts": self.given,
                "held_out": int(self.sentences.held_out.sum()),
                "seconds": round(seconds, 1),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            files=file_digests(self.partial, records, self.familiarity, store),
        ).write(self.partial)
        scaffold = [self.partial / name for name in ("inputs.json", "damage.json")]
        for path in (*scaffold, *left_unfinished(self.partial)):
            path.unlink(missing_ok=True)
        move_into_place(self.partial, self.folder)


def default_budget(
    engine: PrefillEngine, min_cosine: float, min_text_cosine: float, min_agreement: float
) -> Budget:
    """In agreement of decisions where the engine has classes of its own, else in cosine."""
    if engine.labels is not None:
        return Budget(Measure.AGREEMENT, min_agreement)
    return Budget(Measure.COSINE, min_cosine, min_text_cosine)


def _indexed(features: dict[int, np.ndarray]) -> FeatureIndex:
    index = FeatureIndex()
    for length, vectors in features.items():
        if len(vectors):
            index.add(length, vectors)
    return index


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
