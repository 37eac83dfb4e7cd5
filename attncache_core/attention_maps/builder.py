"""Build a database from a corpus.

    sentences -> distinct token sequences, some held out by source
      1 damage    each head reused alone on held-out sentences     -> the order of the heads
      2 records   the maps of every sentence, heads in that order  -> segments
      3 training  the distances of records' maps                   -> projector
      4 quality   held-out sentences against the others' records   -> mask and θ
      5 index     the features of every record, held-out ones too

The work goes on in a hidden folder beside the destination, under a lock, and is renamed into place when
whole. A build that was stopped finds there what it had finished, if model, corpus and options are the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attncache_core.attention_maps.calibration import head_damage, token_passes, traced_forward
from attncache_core.attention_maps.database import FORMAT_VERSION, Manifest, file_digest, small_files
from attncache_core.attention_maps.index import FeatureIndex
from attncache_core.attention_maps.mask import (
    ReuseMask,
    damage_order,
    even_damage,
    is_count,
    mildest_mask,
    parse_heads,
)
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.quality import (
    FEWEST_PROBES,
    donor_distances,
    find_probes,
    masked_maps,
    measure_policy,
)
from attncache_core.attention_maps.sentences import split
from attncache_core.attention_maps.store import (
    AttentionMapStore,
    RecordKind,
    RecordLayout,
    SegmentWriter,
    is_finished,
    segment_path,
)
from attncache_core.attention_maps.training import TRAINING_STEPS, PairGroup, map_distances, train_projector
from attncache_core.corpus import CorpusSentence
from attncache_core.engine import PrefillEngine
from attncache_core.errors import BuildFailed, InvalidInput
from attncache_core.files import is_whole, locked, move_into_place, write_whole
from attncache_core.tokens import pack

# Called as work goes on: what is being done, how much of it is done, how much there is.
Progress = Callable[[str, int, int], None]

MIN_COSINE = 0.985
MAX_LENGTH = 64
# A head's damage is a mean; a few hundred sentences tell the heads apart.
_MOST_DAMAGE_PROBES = 300
# Records of one length whose distances train the projector: 512 give 130,000 pairs. Of long sentences fewer
# are taken, so that comparing them takes seconds: about so many numbers are compared for each length.
_MOST_TRAINING_RECORDS = 512
_MOST_COMPARISONS = 2e9
# Sizes of mask that are tried, spread evenly up to all heads.
_MASK_SIZES = 12


@dataclass(frozen=True)
class BuildOptions:
    """What an operator may choose about a database."""

    min_cosine: float = MIN_COSINE  # quality budget: mean cosine over held-out hits
    heads: str | None = None  # see mask.parse_heads; None: chosen by damage, inside the budget
    threshold: float | None = None  # θ; None: chosen with the mask
    max_length: int = MAX_LENGTH  # tokens; longer sentences are not recorded
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
    if options.threshold is not None and math.isnan(options.threshold):
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
        self.model, self.checkpoint = engine.model, engine.checkpoint
        self.fingerprint = engine.checkpoint.fingerprint()
        self.folder, self.options, self.progress = folder, options, progress
        self.partial = partial_folder(folder)
        self.given = len(corpus)
        tokenized = engine.tokenize([sentence.text for sentence in corpus])
        self.sentences = split(
            tokenized, [sentence.source for sentence in corpus], options.max_length, self._random(0)
        )
        self.by_length = self.sentences.by_length()
        layers, heads = len(self.model.layers), self.model.layers[0].heads
        self.damage = even_damage(layers, heads)
        self.layout = RecordLayout(
            self._stored_heads(), torch.bfloat16 if engine.dtype is torch.bfloat16 else torch.float16
        )

    def run(self, started: float) -> None:
        """All stages; leaves the database in its folder."""
        self._resume_or_start()
        self._measure_damage()
        store = self._write_records()
        features = self._train_projector(store)
        mask, quality = self._choose_policy(store, features)
        index = FeatureIndex()
        for length, vectors in features.items():
            index.add(length, vectors)
        index.write(self.partial)
        self._finish(mask, quality, time.perf_counter() - started)

    def _random(self, stage: int) -> np.random.Generator:
        """A stage's own random numbers, the same whether the stages before it ran now or earlier."""
        return np.random.default_rng([self.options.seed, stage])

    def _stored_heads(self) -> tuple[int, ...]:
        """Heads held per layer: an operator's whole layers, else all, so that the mask can still move."""
        given = parse_heads(self.options.heads or "all", self.damage)
        movable = self.options.heads is None or is_count(self.options.heads)
        return (len(self.damage[0]),) * len(self.damage) if movable else given.reused

    def _resume_or_start(self) -> None:
        """Keep what a stopped build of the very same database left; else begin with an empty folder."""
        inputs = json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "fingerprint": self.fingerprint,
                "dtype": str(self.layout.dtype),
                "options": asdict(self.options),
                "sentences": _digest(json.dumps(self.sentences.sequences).encode()),
                "held_out": _digest(self.sentences.held_out.tobytes()),
            }
        )
        path = self.partial / "inputs.json"
        if not path.is_file() or path.read_text(encoding="utf-8") != inputs:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            write_whole(path, inputs.encode())
        self._require_space()

    def _require_space(self) -> None:
        needed = sum(
            len(indices) * self.layout.record_bytes(length)
            for length, indices in self.by_length.items()
            if not self._is_written(length)
        )
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise BuildFailed(
                f"the records need {needed:,} bytes and the disk has {free:,} left; give a smaller corpus, "
                "a smaller max-length or another folder",
                field="database",
            )

    def _measure_damage(self) -> None:
        """Fill `damage` [layers, heads]; the stand-in stays where too little is held out to measure."""
        path = self.partial / "damage.json"
        if is_whole(path):
            self.damage = np.array(json.loads(path.read_text(encoding="utf-8")))
            return
        pairs = self._nearest_by_input()
        if len(pairs) < FEWEST_PROBES:
            return
        chosen = [pairs[place] for place in self._random(1).permutation(len(pairs))[:_MOST_DAMAGE_PROBES]]
        self.damage = head_damage(
            self.model,
            [self.sentences.sequences[probe] for probe, _ in chosen],
            [self.sentences.sequences[donor] for _, donor in chosen],
            partial(self.progress, "measuring heads"),
        )
        write_whole(path, json.dumps(self.damage.tolist()).encode())

    def _nearest_by_input(self) -> list[tuple[int, int]]:
        """(held-out sentence, the training sentence of its length with the nearest input embedding).

        Before there is a projector, the distance of the first layer's inputs is the best guess.
        """
        pairs = []
        for indices in self.by_length.values():
            probes = [indices[row] for row in self.sentences.rows(indices, held_out=True)]
            donors = [indices[row] for row in self.sentences.rows(indices, held_out=False)]
            if probes and donors:
                left, right = (
                    self.sentences.inputs(self.model, side).flatten(1) for side in (probes, donors)
                )
                nearest = torch.cdist(left, right).argmin(dim=1).tolist()
                pairs += [(probe, donors[row]) for probe, row in zip(probes, nearest, strict=True)]
        return pairs

    def _is_written(self, length: int) -> bool:
        records = len(self.by_length[length])
        return is_finished(segment_path(self.partial, length), length, records, self.layout)

    def _write_records(self) -> AttentionMapStore:
        done = 0
        for length, indices in self.by_length.items():
            if self._is_written(length):
                done += len(indices)
                continue
            path = segment_path(self.partial, length)
            with SegmentWriter(path, length, len(indices), self.layout) as writer:
                for ids, maps in self._maps(indices):
                    writer.append(maps, ids, RecordKind.STORED)
                    done += 1
                    self.progress("writing records", done, len(self.sentences.sequences))
        return AttentionMapStore(self.partial, list(self.by_length), self.layout)

    def _maps(self, indices: Sequence[int]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Token ids and, for each layer, the maps [stored heads, L, L] of sequences of one length."""
        sequences = [self.sentences.sequences[index] for index in indices]
        order = damage_order(self.damage)
        for places in token_passes([len(sequence) for sequence in sequences]):
            layers: list[torch.Tensor] = []

            def keep(layer: int, _: object, maps: torch.Tensor, layers: list[torch.Tensor] = layers) -> None:
                stored = list(order[layer][: self.layout.stored_heads[layer]])
                layers.append(maps[:, stored].to(self.layout.dtype))

            traced_forward(self.model, pack([sequences[place] for place in places]), keep)
            for row, place in enumerate(places):
                yield sequences[place], [maps[row] for maps in layers]

    def _train_projector(self, store: AttentionMapStore) -> dict[int, np.ndarray]:
        """Leave the projector in its file; returns the features [records, dimensions] of each length."""
        path = self.partial / "projector.safetensors"
        if not is_whole(path):
            torch.manual_seed(self.options.seed)
            projector = FeatureProjector(self.model.hidden_size, max(self.by_length))
            steps = self.options.training_steps
            train_projector(
                self._pair_groups(store),
                projector,
                steps=steps,
                seed=self.options.seed,
                on_step=lambda step: self.progress("training the projector", step + 1, steps),
            )
            write_whole(path, projector.to_bytes())
        projector = FeatureProjector.load(path)
        features = {}
        for length, indices in self.by_length.items():
            inputs = (
                self.sentences.inputs(self.model, indices[at : at + 256])
                for at in range(0, len(indices), 256)
            )
            features[length] = np.concatenate([projector(part).numpy() for part in inputs])
        return features

    def _pair_groups(self, store: AttentionMapStore) -> list[PairGroup]:
        """For each length inputs and map distances of training sentences; raises BuildFailed without any."""
        groups, mask, random = [], self._training_mask(), self._random(2)
        for done, (length, indices) in enumerate(self.by_length.items(), 1):
            rows = self.sentences.rows(indices, held_out=False)
            most = min(_MOST_TRAINING_RECORDS, math.isqrt(int(_MOST_COMPARISONS / (mask.total * length**2))))
            rows = [rows[place] for place in random.permutation(len(rows))[:most]]
            if len(rows) > 1:
                maps = masked_maps(store, mask, length, rows)
                inputs = self.sentences.inputs(self.model, [indices[row] for row in rows])
                groups.append(PairGroup(inputs, map_distances(maps, maps)))
            self.progress("comparing maps", done, len(self.by_length))
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
            return parse_heads(self.options.heads, self.damage)
        return mildest_mask(self.damage, max(1, self.damage.size * 2 // 3))

    def _choose_policy(
        self, store: AttentionMapStore, features: dict[int, np.ndarray]
    ) -> tuple[ReuseMask, dict[str, Any]]:
        """Mask and θ, and what was measured of them and of the projector."""
        probes = find_probes(self.sentences, features)
        mask, quality = measure_policy(
            self.model,
            self.sentences,
            store,
            probes,
            self._candidate_masks(),
            self.options.min_cosine,
            self.options.threshold,
            partial(self.progress, "measuring masks"),
        )
        distances = donor_distances(self.model, self.sentences, store, probes, self._training_mask())
        return mask, {**quality, "map_distance": distances}

    def _candidate_masks(self) -> list[ReuseMask]:
        if self.options.heads:
            return [parse_heads(self.options.heads, self.damage)]
        sizes = {max(1, round(self.damage.size * part / _MASK_SIZES)) for part in range(1, _MASK_SIZES + 1)}
        return [mildest_mask(self.damage, size) for size in sorted(sizes)]

    def _finish(self, mask: ReuseMask, quality: dict[str, Any], seconds: float) -> None:
        """Write the manifest and rename the folder into place."""
        files = small_files(self.partial, list(self.by_length))
        Manifest(
            fingerprint=self.fingerprint,
            model=self.checkpoint.name,
            dtype="bfloat16" if self.layout.dtype is torch.bfloat16 else "float16",
            records={length: len(indices) for length, indices in self.by_length.items()},
            stored_heads=self.layout.stored_heads,
            damage=tuple(map(tuple, self.damage.tolist())),
            head_order=mask.order,
            reused_heads=mask.reused,
            threshold=quality["threshold"],
            quality=quality,
            build={
                **asdict(self.options),
                "texts": self.given,
                "held_out": int(self.sentences.held_out.sum()),
                "seconds": round(seconds, 1),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            files={str(path.relative_to(self.partial)): file_digest(path) for path in files},
        ).write(self.partial)
        for scaffold in ("inputs.json", "damage.json"):
            (self.partial / scaffold).unlink(missing_ok=True)
        move_into_place(self.partial, self.folder)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
