"""Compare ways to answer a prompt of chunks and a query: quality, computed tokens and time.

    recomputed                   everything is computed, the reference
    prefix caching               the first chunk is given, which is exact
    ratio r                      all chunks are given, and a share r of their tokens is computed again
    ratio r, random tokens       the same number of tokens, chosen at random
    map-rerank                   each chunk alone in front of the query; the most confident answer wins
    map-reduce, mean             the same calls; the mean, maximum or log-sum-exp of their outputs

The keys and values of the chunks are stored before anything is timed. The ways alternate case by case, so a
disturbance of the machine affects all ways.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import logsumexp

from attncache_core.calibration.quality import Quality
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.engine.result import PrefillResult
from attncache_core.errors import InvalidInput
from attncache_core.evaluation.comparison import share_interval
from attncache_core.evaluation.tasks import label_names
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.heads.decisions import class_decisions, class_scores
from attncache_core.heads.vectors import require_finite
from attncache_core.reuse.blend.chunks import Recomputation
from benchmarks.measuring.stores import alternating
from benchmarks.papers.blend_cases import Case

RECOMPUTED = "recomputed"
PREFIX_CACHING = "prefix caching"
MAP_RERANK = "map-rerank"
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
RANDOM_RATIO = 0.15

_USUAL = Recomputation(RANDOM_RATIO)

_REDUCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "map-reduce, mean": lambda rows: rows.mean(axis=0),
    "map-reduce, max": lambda rows: rows.max(axis=0),
    "map-reduce, log-sum-exp": lambda rows: logsumexp(rows, axis=0),
}


class RandomTokens(Recomputation):
    """Computes any tokens again, whatever deviates: the same ones at every call with as many tokens."""

    def picked(self, deviation: np.ndarray, count: int) -> np.ndarray:
        """See Recomputation.picked."""
        return np.sort(np.random.default_rng(len(deviation)).permutation(len(deviation))[:count])


@dataclass(frozen=True)
class Answer:
    """The answer of one method to one case."""

    outputs: np.ndarray  # float32 [d]: an embedding, a last state, or class logits
    logits: np.ndarray | None  # float32 [classes]; None without classes
    tokens: int  # that were computed


# A way gives the answers of one or more methods, by name.
Way = Callable[[Case], dict[str, Answer]]


@dataclass(frozen=True, slots=True)
class MethodReport:
    """The result of one method. A figure that could not be measured is nan or None.

    Lower bounds hold with 95 % confidence, and need 20 cases.
    """

    method: str
    ratio: float | None  # the recompute ratio; None: chunks are not blended
    random: bool  # whether the tokens that are computed again were chosen at random
    cases: int
    cosine: float  # mean cosine of the outputs to the reference
    cosine_bound: float  # lower bound of the mean
    cosine_5th_percentile: float
    agreement: float  # share of the reference's decisions that are kept; nan without classes
    agreement_bound: float  # lower bound of the share
    decisions: dict[str, float] | None  # class -> share of the cases; None without classes
    accuracy: float  # nan without labels
    accuracy_difference: tuple[float, float] | None  # 95 % of the paired difference to the reference
    computed_tokens: float  # mean of a case
    seconds: float  # median time to answer
    time_ratio: float  # median of the cases' ratios of seconds to the reference


class Ways:
    """Makes the ways to answer, for one engine."""

    def __init__(self, engine: PrefillEngine) -> None:
        """Raise InvalidInput if the chunks of the engine's model cannot be blended."""
        if engine.blending.refusal and engine.key_values:
            raise InvalidInput(
                "chunks are blended only if outputs read the last token; give --pooling lasttoken or --task "
                "label-logits",
                field="pooling",
            )
        self._key_values = engine.blending.require()
        self._engine = engine

    def make(
        self,
        ratios: Sequence[float] = RATIOS,
        random_ratio: float | None = RANDOM_RATIO,
        like: Recomputation = _USUAL,
    ) -> list[Way]:
        """Return the ways: recomputing, prefix caching, each ratio, random tokens, and chunks alone.

        random_ratio: None leaves out random tokens. like: everything about the ratios' recomputation but the
        ratio.
        """
        blended = [self.blended(replace(like, ratio=ratio)) for ratio in ratios]
        if random_ratio is not None:
            blended.append(
                self.blended(RandomTokens(random_ratio, like.check_layer, like.fall, like.first_tokens))
            )
        return [self.recomputed, self.prefix_caching, *blended, self.chunks_alone]

    def store(self, case: Case) -> None:
        """Store the keys and values of a case's chunks, as far as they are not stored."""
        self.blended(Recomputation(0.0))(case)

    def recomputed(self, case: Case) -> dict[str, Answer]:
        """Compute everything. Nothing is given or stored."""
        return {RECOMPUTED: self._answer(self._run(PrefillRequest(case.sequence.ids, False)))}

    def prefix_caching(self, case: Case) -> dict[str, Answer]:
        """Take the keys and values of the first chunk, and compute everything behind it."""
        ids = case.sequence.ids
        behind = len(ids) - case.sequence.spans[0][1]
        return {PREFIX_CACHING: self._answer(self._run(self._behind_prefix(ids, behind)))}

    def blended(self, recomputation: Recomputation) -> Way:
        """Return the way that takes all chunks, and computes some of their tokens again."""
        name = method_name(recomputation.ratio, isinstance(recomputation, RandomTokens))

        def run(case: Case) -> dict[str, Answer]:
            sequence = case.sequence
            blend = self._engine.blending.blend_with(sequence, sequence.ids, b"", recomputation)
            return {name: self._answer(self._run(PrefillRequest(sequence.ids, False, blend=blend)))}

        return run

    def chunks_alone(self, case: Case) -> dict[str, Answer]:
        """Run each stored chunk alone in front of the query, and join the answers in several ways.

        Map-rerank needs classes. Each call is exact.
        """
        end = case.end
        requests = [self._behind_prefix([*chunk, *end], len(end)) for chunk in case.chunks]
        result = self._run(*requests)
        logits, tokens = self._logits(result), result.report.tokens
        answers = {
            name: Answer(reduce(result.outputs), None if logits is None else reduce(logits), tokens)
            for name, reduce in _REDUCTIONS.items()
        }
        if logits is not None:
            best = int(
                class_scores(logits, multi_label=self._engine.decisions.multi_label).max(axis=1).argmax()
            )
            answers = {MAP_RERANK: Answer(result.outputs[best], logits[best], tokens), **answers}
        return answers

    def _behind_prefix(self, ids: Sequence[int], behind: int) -> PrefillRequest:
        """Return the request of a sequence of which all but the last `behind` tokens are worth keeping."""
        prefix_key = self._key_values.prefix_key(ids, None, b"", passing=behind)
        return PrefillRequest(ids, False, prefix_key=prefix_key)

    def _run(self, *requests: PrefillRequest) -> PrefillResult:
        result = self._engine.run(requests)
        require_finite(result.finite, "data")
        return result

    def _logits(self, result: PrefillResult) -> np.ndarray | None:
        return self._engine.decisions.class_logits(result.outputs) if self._engine.decisions.labels else None

    def _answer(self, result: PrefillResult) -> Answer:
        logits = self._logits(result)
        return Answer(result.outputs[0], None if logits is None else logits[0], result.report.tokens)


def method_name(ratio: float, random: bool = False) -> str:
    """Return the name of the method that computes a share of the reused tokens again."""
    return f"ratio {ratio:g}{', random tokens' if random else ''}"


def compare_blending(
    engine: PrefillEngine,
    cases: Sequence[Case],
    *,
    ratios: Sequence[float] = RATIOS,
    random_ratio: float | None = RANDOM_RATIO,
    like: Recomputation = _USUAL,
    rounds: int = 3,
    on_case: Callable[[int, int], None] = lambda *_: None,
) -> list[MethodReport]:
    """Answer all cases with all methods, and return a report on each method, the reference first.

    random_ratio: of the method with random tokens; None leaves the method out. like: everything about the
    ratios' recomputation but the ratio. rounds: how often each case is
    timed with each way; the median counts. on_case: called with the number of finished cases and of all
    cases. Raises InvalidInput if chunks cannot be blended with the engine's model, if there is no case, or
    for a label that is none of the model's. Raises NotFinite if a number is not finite.
    """
    if not cases:
        raise InvalidInput("the data has no questions", field="data")
    ways = Ways(engine)
    made = ways.make(ratios, random_ratio, like)
    truth = _truth(engine, cases)
    answers: dict[str, list[Answer]] = {}
    seconds: dict[str, list[float]] = {}
    for number, case in enumerate(cases):
        ways.store(case)
        found, durations = _timed(case, made, rounds, number)
        for name, answer in found.items():
            answers.setdefault(name, []).append(answer)
            seconds.setdefault(name, []).append(durations[name])
        on_case(number + 1, len(cases))
    comparing = _Comparing(engine, answers[RECOMPUTED], seconds[RECOMPUTED], truth)
    kinds: dict[str, tuple[float, bool]] = {method_name(ratio): (ratio, False) for ratio in ratios}
    if random_ratio is not None:
        kinds[method_name(random_ratio, random=True)] = (random_ratio, True)
    return [
        comparing.report(name, kinds.get(name, (None, False)), answers[name], seconds[name])
        for name in answers
    ]


def smallest_ratio(reports: Sequence[MethodReport], least: float, *, confident: bool = False) -> float | None:
    """Return the smallest ratio from which on every ratio keeps this share of the reference's decisions.

    confident: the share is kept with 95 % confidence. Returns None if no ratio keeps it.
    """
    kept = None
    blended = [report for report in reports if report.ratio is not None and not report.random]
    for report in sorted(blended, key=lambda report: -(report.ratio or 0.0)):
        if not (report.agreement_bound if confident else report.agreement) >= least:
            break
        kept = report.ratio
    return kept


def _timed(
    case: Case, ways: Sequence[Way], rounds: int, number: int
) -> tuple[dict[str, Answer], dict[str, float]]:
    """Return the answers to a case and the median seconds, by method. Each round begins with another way."""
    found: dict[str, Answer] = {}
    seconds: dict[str, list[float]] = {}
    for round_number in range(rounds):
        for way in alternating(ways, number * rounds + round_number):
            started = time.perf_counter()
            answers = way(case)
            passed = time.perf_counter() - started
            for name, answer in answers.items():
                found[name] = answer
                seconds.setdefault(name, []).append(passed)
    return found, {name: statistics.median(taken) for name, taken in seconds.items()}


def _truth(engine: PrefillEngine, cases: Sequence[Case]) -> np.ndarray | None:
    """Return the index of each case's label among the classes, int64 [cases]; None without labels."""
    labels = [case.label for case in cases if case.label is not None]
    if engine.decisions.labels is None or engine.decisions.multi_label or len(labels) < len(cases):
        return None
    known = list(engine.decisions.labels)
    names = label_names(labels, known)
    if unknown := set(names) - set(known):
        raise InvalidInput(
            f"{len(unknown)} labels of the data are none of the model's {len(known)} classes", field="data"
        )
    return np.array([known.index(name) for name in names])


class _Comparing:
    """Compares the answers of methods with those of the reference."""

    def __init__(
        self,
        engine: PrefillEngine,
        reference: Sequence[Answer],
        seconds: Sequence[float],
        truth: np.ndarray | None,
    ) -> None:
        self._outputs, self._logits = _rows(reference)
        self._seconds, self._truth, self._engine = seconds, truth, engine
        self._cosine = engine.decisions.comparator(Measure.COSINE)
        self._agreement = OutputComparator(Measure.AGREEMENT, np.asarray, engine.decisions.multi_label)

    def report(
        self,
        name: str,
        kind: tuple[float | None, bool],
        answers: Sequence[Answer],
        seconds: Sequence[float],
    ) -> MethodReport:
        """Return the report on one method. kind: its ratio, and whether tokens are chosen at random."""
        outputs, logits = _rows(answers)
        cosine = self._cosine.fidelity(outputs, self._outputs)
        kept = None
        if logits is not None and self._logits is not None:
            kept = self._agreement.fidelity(logits, self._logits)
        right, right_before = self._right(logits), self._right(self._logits)
        return MethodReport(
            method=name,
            ratio=kind[0],
            random=kind[1],
            cases=len(answers),
            cosine=float(cosine.mean()),
            cosine_bound=_bound(cosine, Measure.COSINE),
            cosine_5th_percentile=float(np.percentile(cosine, 5)),
            agreement=float("nan") if kept is None else float(kept.mean()),
            agreement_bound=float("nan") if kept is None else _bound(kept, Measure.AGREEMENT),
            decisions=self._decisions(logits),
            accuracy=float("nan") if right is None else float(right.mean()),
            accuracy_difference=None
            if right is None or right_before is None
            else share_interval(right, right_before),
            computed_tokens=statistics.fmean(answer.tokens for answer in answers),
            seconds=statistics.median(seconds),
            time_ratio=statistics.median(
                taken / full for taken, full in zip(seconds, self._seconds, strict=True)
            ),
        )

    def _decisions(self, logits: np.ndarray | None) -> dict[str, float] | None:
        classes = self._engine.decisions.labels
        if logits is None or classes is None or self._engine.decisions.multi_label:
            return None
        decided = class_decisions(logits)[:, 0]
        return {name: float((decided == index).mean()) for index, name in enumerate(classes)}

    def _right(self, logits: np.ndarray | None) -> np.ndarray | None:
        """Return 1 for each decision that is true, else 0: float64 [cases]; None without labels."""
        if logits is None or self._truth is None:
            return None
        return np.equal(class_decisions(logits)[:, 0], self._truth).astype(np.float64)


def _rows(answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the outputs [cases, d] and the logits [cases, classes] of answers; None without classes."""
    outputs = np.stack([answer.outputs for answer in answers])
    logits = [answer.logits for answer in answers if answer.logits is not None]
    return outputs, np.stack(logits) if logits else None


def _bound(fidelity: np.ndarray, measure: Measure) -> float:
    if len(fidelity) < MIN_PROBES:
        return float("nan")
    return Quality.of(fidelity, measure).lower_bound
