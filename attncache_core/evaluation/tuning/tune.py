"""Measure the ways to spend a quality budget on an operator's texts, and choose one.

    texts -> half that chooses, half that measures
      reference   answers in float32 without any way
      exact       the model in the operator's dtype: every way is compared with its speed
      ways        measured beside the exact model, one after the other    search, measuring, databases
      choice      the fastest way that keeps the budget                   search.choose

Every measured way is kept in a file at once, so a stopped tuning continues (results).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attncache_core import native
from attncache_core.calibration.calibrate import Progress
from attncache_core.calibration.quality import texts_needed
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.calibration.trial import full_outputs
from attncache_core.checkpoints.checkpoint import Checkpoint, Device, Dtype, Quantization
from attncache_core.corpus.reading import spread
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import AttnCacheError, InvalidInput, NotFinite
from attncache_core.evaluation.importance import measure_importance
from attncache_core.evaluation.tasks import label_names, require_known
from attncache_core.evaluation.tuning.databases import Built, budget_of_build, open_or_build
from attncache_core.evaluation.tuning.measuring import Judge, MeasuredWay, Subject, measure
from attncache_core.evaluation.tuning.results import Kept, Results
from attncache_core.evaluation.tuning.search import Search, choose
from attncache_core.evaluation.tuning.ways import WAYS, Way
from attncache_core.heads.classifier import LinearClassifier, fit_classifier
from attncache_core.heads.comparator import Measure
from attncache_core.models.families import is_causal
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.maps.policy import Budget
from attncache_core.runtime.devices import resolve_device, resolve_dtype
from attncache_core.runtime.memory import tensor_bytes
from attncache_core.runtime.processor import processor_name
from attncache_core.version import __version__


@dataclass(frozen=True)
class Texts:
    """Texts, and their labels if they are known."""

    texts: list[str]
    labels: list[str] | None

    def rows(self, indices: Sequence[int]) -> Texts:
        """Return the texts at these indices."""
        labels = None if self.labels is None else [self.labels[index] for index in indices]
        return Texts([self.texts[index] for index in indices], labels)


def split(texts: Texts, sequences: Sequence[Sequence[int]], needed: int, maximum: int) -> tuple[Texts, Texts]:
    """Split texts at random into those that choose and those that measure, which are at most half of them.

    sequences: the token ids of each text; a text whose tokens occurred before, and a text without tokens, are
    left out. needed: the fewest texts to measure on. maximum: the most texts to measure on; the others
    choose. Raises InvalidInput if there are too few texts.
    """
    if maximum < needed:
        raise InvalidInput(
            f"sample must be at least {needed}: fewer texts cannot prove that the budget is kept",
            field="sample",
        )
    first = {tuple(ids): index for index, ids in reversed(list(enumerate(sequences))) if ids}
    distinct = np.random.default_rng(0).permutation(sorted(first.values())).tolist()
    if len(distinct) < 2 * needed:
        fewer = " (min_text_cosine 0, or a smaller min_agreement, needs fewer)" if needed > MIN_PROBES else ""
        raise InvalidInput(
            f"texts has {len(distinct)} different texts, and at least {2 * needed} are needed: half of them "
            f"measure, and fewer than {needed} cannot prove that the budget is kept{fewer}",
            field="texts",
        )
    measuring = min(maximum, len(distinct) // 2)
    return texts.rows(distinct[measuring:]), texts.rows(distinct[:measuring])


_RANKING_TEXTS = 500  # choosing texts on which layers are ranked
_EXACT = Way()


@dataclass(frozen=True)
class TuneOptions:
    """What an operator chooses."""

    checkpoint: Checkpoint  # without a variant; with the texts to calibrate int8 with
    texts: Texts
    min_cosine: float  # budget of embeddings: mean cosine over the measuring texts
    min_text_cosine: float  # budget of embeddings: cosine of 99 of 100 texts
    min_agreement: float  # budget of decisions: share of the texts' decisions that stay
    results: Path  # the file of what was measured
    databases: Path  # the folder of the databases that are built
    dtype: Dtype = "auto"
    device: Device = "cpu"
    threads: int | None = None
    max_tokens: int | None = None
    classifier: LinearClassifier | None = None
    database: Path | None = None  # of the exact model; None: databases are built
    ways: tuple[str, ...] | None = None  # of WAYS; None: all that suit the model
    sample: int = 1000  # most texts to measure on
    rounds: int = 7
    min_gain: float = 0.05


@dataclass(frozen=True)
class TuneReport:
    """What was measured, and what was chosen."""

    budget: Budget
    inputs: dict[str, Any]  # model, machine and versions, see Results
    choosing: int  # number of texts
    measuring: int  # number of texts
    measured: list[MeasuredWay]  # the exact model first
    failed: dict[str, str]  # name of a way -> why it could not be measured
    chosen: MeasuredWay | None  # None: only float32 keeps the budget
    database: Path | None  # of the chosen way
    classifier: LinearClassifier | None  # as the chosen way serves it; None: as the operator gave it


@dataclass(frozen=True)
class TuneEvents:
    """What is called while a tuning runs."""

    progress: Progress = lambda *_: None
    begun: Callable[[Texts, Texts, Results], None] = lambda *_: None  # choosing, measuring
    measured: Callable[[MeasuredWay, bool], None] = lambda *_: None  # and whether the figures were kept
    failed: Callable[[str, str], None] = lambda *_: None  # name of a way, and why


class Tuning:
    """One tuning. Owns the exact engine and the judge of answers."""

    def __init__(self, options: TuneOptions, events: TuneEvents) -> None:
        """Load the exact model, split the texts, compute the reference, and open the results.

        Raises InvalidInput if there are too few texts, if the model scores pairs, if the results file is
        none, and as the engine and the database do.
        """
        # All ways are of the files that the exact model is read from.
        options = replace(options, checkpoint=options.checkpoint.as_it_is())
        self.options, self.events = options, events
        if options.checkpoint.is_for_pairs:
            raise InvalidInput("tune measures single texts, and the model scores pairs", field="model")
        self.database = AttentionDatabase.open(options.database) if options.database else None
        if self.database:
            self.database.require_fingerprint(options.checkpoint)
        before = tensor_bytes()
        engine = self._load(_EXACT)
        self._exact_bytes = tensor_bytes() - before
        self.budget = self._budget_of(engine)
        sequences = engine.tokenize(options.texts.texts)
        self.choosing, self.measuring = split(
            options.texts, sequences, texts_needed(self.budget), options.sample
        )
        self.exact = Subject(engine, self.measuring.texts)
        self.judge = self._judge()
        self.inputs = self._inputs()
        self.results = Results.open(options.results, self.inputs)
        self.measured: dict[Way, MeasuredWay] = {}
        self.failed: dict[str, str] = {}

    def run(self) -> TuneReport:
        """Measure all ways and choose one. Can be stopped at any time: what was measured is kept."""
        # Again, because another tuning may have measured since this one was made.
        self.results = Results.open(self.options.results, self.inputs)
        self.events.begun(self.choosing, self.measuring, self.results)
        if self._measure(_EXACT) is None:
            raise InvalidInput(f"the model cannot be measured: {self.failed['exact']}", field="model")
        search = Search(self._measure, self.budget, self.options.min_gain)
        search.try_each(self._plain_ways())
        for kind, make in (
            ("attention", lambda layers: Way(drop_attention=layers)),
            ("blocks", lambda layers: Way(drop_blocks=layers)),
        ):
            if kind in self.ways:
                search.try_dropping(make, self.results.least_important(kind, self._rank))
        search.combine()
        measured = list(self.measured.values())
        chosen = choose(measured, self.budget, self.options.min_gain)
        return TuneReport(
            self.budget,
            self.inputs,
            len(self.choosing.texts),
            len(self.measuring.texts),
            measured,
            self.failed,
            chosen,
            self._folder_of(chosen.way) if chosen and chosen.way.maps else None,
            self._classifier_of(chosen.way) if chosen and chosen.way.changes_model else None,
        )

    @property
    def ways(self) -> tuple[str, ...]:
        """The names of the ways to measure; see WAYS.

        By default, a causal model reuses no maps: they save a tenth of its time at best.
        """
        if self.options.ways is not None:
            return self.options.ways
        maps = self.database is not None or not is_causal(self.options.checkpoint)
        return tuple(name for name in WAYS if maps or name != "maps")

    def _plain_ways(self) -> Iterator[Way]:
        """Yield the ways of one part that drop no layer."""
        engine = self.exact.engine
        if "dtype" in self.ways:
            if str(engine.dtype) == "torch.bfloat16":
                yield Way(dtype="float32")
            elif resolve_dtype("auto", resolve_device(self.options.device)) != engine.dtype:
                yield Way(dtype="bfloat16")
        for quantization in Quantization:
            if quantization.value in self.ways:
                yield Way(quantization=quantization)
        if "maps" in self.ways:
            yield Way(maps=True)

    def _measure(self, way: Way) -> MeasuredWay | None:
        """Return the figures of a way, kept or measured now; None if it cannot be measured."""
        if way in self.measured:
            return self.measured[way]
        if way.maps and self.database and way.changes_model:
            return None  # the operator's database serves the exact model only
        try:
            of_maps = self._budget_of_maps(way) if way.maps and not self.database else None
            found = self.results.find(way, of_maps, self.options.databases)
            if found is None:
                with self._text_numbers(self.measuring):
                    kept = self._measure_now(way, of_maps)
        except AttnCacheError as error:
            self.failed[way.name] = str(error)
            self.events.failed(way.name, str(error))
            return None
        if found is None:
            self.results.add(kept)
        self.measured[way] = measured = found or kept.measured
        self.events.measured(measured, found is not None)
        return measured

    def _measure_now(self, way: Way, of_maps: Budget | None) -> Kept:
        timed = partial(
            measure,
            way,
            exact=self.exact,
            judge=self.judge,
            rounds=self.options.rounds,
            on_step=partial(self.events.progress, f"measuring {way.name}"),
        )
        if way == _EXACT:
            return Kept(timed(self.exact, weight_bytes=self._exact_bytes))
        database = self._database_of(way, of_maps) if way.maps else None
        built = Built.of(database.generation.root) if database and of_maps else None
        before = tensor_bytes()
        engine = self._load(way, database)
        weight_bytes = tensor_bytes() - before
        measured = timed(Subject(engine, self.measuring.texts), weight_bytes=weight_bytes)
        return Kept(measured, of_maps, built)

    def _load(self, way: Way, database: AttentionDatabase | None = None) -> PrefillEngine:
        options = self.options
        return PrefillEngine.load(
            way.variant_of(options.checkpoint),
            database=database,
            dtype=way.dtype or options.dtype,
            device=options.device,
            threads=options.threads,
            max_tokens=options.max_tokens,
            classifier=self._classifier_of(way),
        )

    def _classifier_of(self, way: Way) -> LinearClassifier | None:
        """Return the operator's classifier, bound to the variant of the model that a way runs."""
        classifier = self.options.classifier
        if classifier is None or not way.changes_model:
            return classifier
        return replace(
            classifier, fingerprint=way.variant_of(self.options.checkpoint).embedding_fingerprint()
        )

    def _budget_of(self, engine: PrefillEngine) -> Budget:
        """Return the budget of decisions if the engine decides, else the budget of embeddings."""
        options = self.options
        if engine.decisions.labels is not None or engine.checkpoint.task == "label-logits":
            return Budget(Measure.AGREEMENT, options.min_agreement)
        return Budget(Measure.COSINE, options.min_cosine, options.min_text_cosine)

    def _judge(self) -> Judge:
        """Return the judge of answers. Raises InvalidInput if a true label is no class of the model."""
        engine, truth = self.exact.engine, self.measuring.labels
        classes = (
            engine.decisions.labels_in().labels
            if engine.checkpoint.task == "label-logits"
            else engine.decisions.labels
        )
        classifier = None
        if truth is not None and classes is not None:
            labels = self.options.texts.labels or ()
            names = label_names(labels, classes)
            require_known(names, classes, "label_column")
            name_of = dict(zip(labels, names, strict=True))
            truth = [name_of[label] for label in truth]
        elif self.choosing.labels is not None:
            if len(set(self.choosing.labels)) < 2:
                raise InvalidInput(
                    "label_column: the texts that choose have one label, and accuracy needs two; give more "
                    "texts, or leave label_column out",
                    field="label_column",
                )
            with self._text_numbers(self.choosing):
                outputs = full_outputs(engine, engine.tokenize(self.choosing.texts))
            classifier = fit_classifier(
                outputs, self.choosing.labels, fingerprint="", model=engine.checkpoint.name
            )
        is_reference = engine.dtype is torch.float32
        subject = (
            self.exact if is_reference else Subject(self._load(Way(dtype="float32")), self.measuring.texts)
        )
        with self._text_numbers(self.measuring):
            reference = subject.answers(subject.run()[1])
        return Judge(self.budget.measure, reference, classes, engine.decisions.multi_label, truth, classifier)

    @contextmanager
    def _text_numbers(self, part: Texts) -> Iterator[None]:
        """Let NotFinite name a text of a part by its number among all texts."""
        try:
            yield
        except NotFinite as error:
            number = self.options.texts.texts.index(part.texts[error.index])
            raise NotFinite.of(number, "texts") from error

    def _rank(self) -> dict[str, list[int]]:
        """Rank the layers of the exact model on the choosing texts, the least important first."""
        engine = self.exact.engine
        found = measure_importance(
            engine.model,
            engine.tokenize(spread(self.choosing.texts, _RANKING_TEXTS)),
            partial(self.events.progress, "ranking layers"),
        )
        return {
            "attention": np.argsort(found.attention, kind="stable").tolist(),
            "blocks": np.argsort(found.blocks, kind="stable").tolist(),
        }

    def _budget_of_maps(self, way: Way) -> Budget:
        """Return the budget to build a way's database for. Raises InvalidInput if no budget is left."""
        without = self._measure(replace(way, maps=False))
        rest = without.quality.rest_of(self.budget) if without else None
        if rest is None:
            raise InvalidInput("the other parts leave nothing of the budget to maps", field="ways")
        return budget_of_build(rest, len(self.choosing.texts))

    def _database_of(self, way: Way, budget: Budget | None) -> AttentionDatabase:
        """Return the database of a way, without records of measuring texts. Builds it if it is missing."""
        if budget is None:
            assert self.database
            measured = self.exact.engine.tokenize(self.measuring.texts)
            return self.database.without(measured)[0]
        engine = self._load(replace(way, maps=False))
        return open_or_build(
            engine, self.choosing.texts, budget, self.options.databases, self.events.progress
        )

    def _folder_of(self, way: Way) -> Path:
        """Return the folder of a way's database, in which a server finds every later generation too."""
        database = self._database_of(way, None if self.database else self._budget_of_maps(way))
        return database.generation.root

    def _inputs(self) -> dict[str, Any]:
        """Return what the figures depend on. The texts are a digest."""
        engine, options = self.exact.engine, self.options
        texts = [[part.texts, part.labels] for part in (self.choosing, self.measuring)]
        int8 = Way(quantization=Quantization.INT8).variant_of(options.checkpoint)
        return {
            "model": options.checkpoint.name,
            "fingerprint": engine.fingerprint,
            "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
            "texts of int8": int8.variant["quantization_texts"],
            "database": self.database.manifest.id if self.database else None,
            "policy": MapReuse(self.database).policy.digest if self.database else None,
            "mask": list(self.database.mask.reused) if self.database else None,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.model.device),
            "processor": processor_name(),
            "threads": engine.threads,
            "compiled code": native.level(),
            "rounds": options.rounds,
            "attncache": __version__,
            **{package: importlib.metadata.version(package) for package in ("torch", "transformers")},
        }
