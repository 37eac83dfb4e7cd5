"""Measure an engine beside the exact model: quality, speed in batches, time of one text, memory.

    texts -> sequences -> batches as a busy server forms them -> all engine threads -> answers, seconds
                       -> some texts alone                                          -> seconds

The two engines alternate, so a disturbance of the machine affects both. Texts are tokenised before, because
every way tokenises alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from attncache_core.calibration.gain import BATCH_SEQUENCES, BATCH_TOKENS
from attncache_core.calibration.quality import Quality
from attncache_core.corpus.reading import spread
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.engine.result import PrefillResult
from attncache_core.evaluation.comparison import alternate, median_ratio
from attncache_core.evaluation.tuning.ways import Way
from attncache_core.heads.classifier import LinearClassifier
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.heads.vectors import require_finite
from attncache_core.runtime.stored import Stored
from attncache_core.text.prefix_tree import added_tokens

_ALONE = 24  # texts that are timed alone
_EXACT, _WAY = "exact", "way"


@dataclass(frozen=True)
class MeasuredWay(Stored):
    """The figures of a way on the measuring texts, in the run in which it alternated with the exact model."""

    way: Way
    quality: Quality
    accuracy: float | None  # share of texts that get their true label; None without labels
    speed: float  # of full batches: seconds of the exact model / seconds of this way
    speed_alone: float  # the same ratio of one text alone
    texts_per_second: float  # in full batches
    milliseconds_alone: float  # of one text alone
    weight_bytes: int  # all tensors that the engine keeps
    hit_rate: float  # share of sequences that took maps from a record

    @property
    def can_pay(self) -> bool:
        """Whether the way can save time: maps that no text takes only add a search."""
        return not self.way.maps or self.hit_rate > 0


class Subject:
    """An engine with the measuring texts, ready to be timed."""

    def __init__(self, engine: PrefillEngine, texts: Sequence[str]) -> None:
        """Tokenise the texts and form batches. Raises NoClassifier for task label-logits without labels."""
        self.engine = engine
        self._labels = engine.decisions.labels_in() if engine.checkpoint.task == "label-logits" else None
        prompt = self._labels.prompt if self._labels else engine.tokenizer.default_prompt
        self._plans = len(prompt.sequence_plans)
        sequences = engine.tokenize(texts, prompt=prompt)
        # What a server reads decides whether maps are taken.
        reads = Measure.AGREEMENT if engine.decisions.labels else Measure.COSINE
        requests = engine.requests(sequences, prompt, self._labels, reads=reads)
        of_texts = [requests[at : at + self._plans] for at in range(0, len(requests), self._plans)]
        self._batches = service_batches(of_texts, engine.shares_prefixes(reuse=True))
        self._alone = spread(of_texts, _ALONE)

    def answers(self, results: Sequence[PrefillResult]) -> np.ndarray:
        """Return what clients get of results, [texts, d]: embeddings, or logits if the engine decides.

        Raises NotFinite with the index of the first text whose answer is not finite.
        """
        require_finite(
            np.concatenate([result.finite for result in results]).reshape(-1, self._plans), "texts"
        )
        return np.concatenate([self._answers(result) for result in results])

    def _answers(self, result: PrefillResult) -> np.ndarray:
        if self._labels:
            return self.engine.decisions.label_logits(self._labels, result.outputs, result.log_probabilities)
        return (
            self.engine.decisions.class_logits(result.outputs)
            if self.engine.decisions.labels
            else result.outputs
        )

    def run(self) -> tuple[float, list[PrefillResult]]:
        """Run all batches on all engine threads. Returns the seconds and the results, in order."""
        threads = self.engine.parallel_runs
        with ThreadPoolExecutor(threads, thread_name_prefix="engine") as pool:
            list(pool.map(time.sleep, [0.001] * threads))  # starts the threads, so that this is not timed
            started = time.perf_counter()
            results = list(pool.map(self.engine.run, self._batches))
            return time.perf_counter() - started, results

    def run_alone(self, index: int) -> float:
        """Run one of the texts that are timed alone. Returns the seconds."""
        started = time.perf_counter()
        self.engine.run(self._alone[index])
        return time.perf_counter() - started

    @property
    def alone(self) -> range:
        """The indices of the texts that are timed alone."""
        return range(len(self._alone))


@dataclass(frozen=True)
class Judge:
    """Judges answers: how near they are to the reference, and how many labels are right."""

    measure: Measure
    reference: np.ndarray  # answers of the model in float32, without any way, [texts, d]
    classes: tuple[str, ...] | None  # what answers are logits of; None: answers are embeddings
    multi_label: bool = False
    truth: Sequence[str] | None = None  # the true label of each text
    classifier: LinearClassifier | None = None  # decides by embeddings, for accuracies

    def quality(self, answers: np.ndarray) -> Quality:
        """Return the quality of answers [texts, d]."""
        logits = None if self.classes is None else np.asarray
        comparator = OutputComparator(self.measure, logits, self.multi_label)
        return Quality.of(comparator.fidelity(answers, self.reference), self.measure)

    def accuracy(self, answers: np.ndarray) -> float | None:
        """Return the share of texts that get their true label; None if it cannot be told."""
        if self.truth is None or self.multi_label:
            return None
        if self.classes is not None:
            decided = [self.classes[row] for row in answers.argmax(axis=1)]
        elif self.classifier:
            decided = self.classifier.predict(answers)
        else:
            return None
        return float(np.mean([decision == true for decision, true in zip(decided, self.truth, strict=True)]))


def measure(
    way: Way,
    subject: Subject,
    exact: Subject,
    judge: Judge,
    *,
    rounds: int,
    weight_bytes: int,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> MeasuredWay:
    """Measure a way in alternation with the exact model.

    subject: the way's engine; `exact` itself to measure the exact model. rounds: timed rounds after a warm-up
    round. on_step: called with the number of finished steps and of all steps. Raises NotFinite.
    """
    subjects = {_EXACT: exact} if subject is exact else {_EXACT: exact, _WAY: subject}
    steps = (rounds + 1) * len(subjects), len(exact.alone)
    first, timed = alternate(
        {name: subject.run for name, subject in subjects.items()},
        rounds,
        lambda done, _: on_step(done, sum(steps)),
    )
    alone: dict[str, list[float]] = {name: [] for name in subjects}
    for index in exact.alone:
        # Text by text, because a disturbance of the machine may be shorter than all these texts together.
        _, seconds = alternate(
            {name: partial(subject.run_alone, index) for name, subject in subjects.items()}, rounds
        )
        for name, taken in seconds.items():
            alone[name] += taken
        on_step(steps[0] + index + 1, sum(steps))
    name = _EXACT if subject is exact else _WAY
    results = first[name][1]
    answers = subject.answers(results)
    in_batches = {name: [seconds for seconds, _ in runs] for name, runs in timed.items()}
    return MeasuredWay(
        way,
        judge.quality(answers),
        judge.accuracy(answers),
        speed=median_ratio(in_batches[_EXACT], in_batches[name]),
        speed_alone=median_ratio(alone[_EXACT], alone[name]),
        texts_per_second=len(answers) / statistics.median(in_batches[name]),
        milliseconds_alone=statistics.median(alone[name]) * 1e3,
        weight_bytes=weight_bytes,
        hit_rate=float(np.mean([outcome.is_hit for result in results for outcome in result.outcomes])),
    )


def service_batches(
    of_texts: Sequence[Sequence[PrefillRequest]], shares_prefixes: bool
) -> list[list[PrefillRequest]]:
    """Return batches as a busy server forms them: in order, of up to 1,024 tokens and 64 texts.

    of_texts: the requests of each text. shares_prefixes: a prefix that a sequence shares with the one before
    it counts once, and the sequences of a text count as one text.
    """
    batches: list[list[PrefillRequest]] = []
    tokens = BATCH_TOKENS
    texts = BATCH_SEQUENCES
    for requests in of_texts:
        before = batches[-1][-1:] if shares_prefixes and batches else []
        added = _tokens([*before, *requests], shares_prefixes) - _tokens(before, shares_prefixes)
        count = 1 if shares_prefixes else len(requests)
        if not batches or tokens + added > BATCH_TOKENS or texts + count > BATCH_SEQUENCES:
            batches.append([])
            tokens, texts, added = 0, 0, _tokens(requests, shares_prefixes)
        batches[-1] += requests
        tokens, texts = tokens + added, texts + count
    return batches


def _tokens(requests: Sequence[PrefillRequest], shares_prefixes: bool) -> int:
    sequences = [request.ids for request in requests]
    return sum(added_tokens(sequences) if shares_prefixes else map(len, sequences))
