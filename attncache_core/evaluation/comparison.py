"""Methods compared on one task in one run: quality, hits and time, in turn: a disturbance meets all."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attncache_core.attention_maps.search import Outcome
from attncache_core.engine import PrefillResult
from attncache_core.evaluation.gamma import gamma
from attncache_core.evaluation.tasks import Task
from attncache_core.labels import LabelTokens
from attncache_core.outputs import Judge, require_finite

# Token sequences -> their outputs, computed one way or another.
Method = Callable[[Sequence[Sequence[int]]], PrefillResult]
FULL = "full"
# These reuse a sentence's own maps: they search nothing, and change every output.
_CHANGING_ALL = ("lazyformer", "san")


@dataclass(frozen=True, slots=True)
class MethodReport:
    """One method on one task. Fractions are in [0, 1]; what could not be measured is nan or None."""

    method: str
    scores: dict[str, float]  # of each data set
    score: float  # their mean
    difference_interval: tuple[float, float] | None  # 95 %, of the score less the full model's, paired
    hit_rate: float  # hits of any kind / all sequences
    prototype_hit_rate: float
    hit_lengths: dict[int, int]  # length in tokens -> hits of any kind
    recorded: int  # hits of similarity 1: their very tokens are in the database
    cosine: float  # mean over the texts that differ: those with hits, or all where a method changes all
    cosine_5th_percentile: float
    agreement: float  # of decisions, over the same; nan without classes
    seconds: float  # median over the rounds, all sequences, search and fetch included; tokenising left out
    attention_seconds: float  # median, within it: attention up to the output projections, and the search
    search_seconds: float  # median, within both
    speedup: float  # median over the rounds of the full model's seconds / this method's
    attention_speedup: float
    gamma: float | None


@dataclass(frozen=True)
class _Run:
    """One pass over all sequences."""

    outputs: np.ndarray  # [texts, d], or [texts, labels] where the task's labels are read from sequences
    outcomes: list[Outcome]
    similarities: np.ndarray
    seconds: float
    attention_seconds: float
    search_seconds: float


def compare(
    methods: Mapping[str, Method],
    task: Task,
    judge: Judge,
    decisions: Judge | None = None,
    *,
    batch_size: int = 64,
    rounds: int = 3,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> list[MethodReport]:
    """Report on each of the methods, among which `full` must be, on batches in the order of the data.

    batch_size: sequences in a batch; one text's are never parted.
    judge: tells the cosine of outputs with reuse to those in full; decisions: tells agreement, if there are
    classes. One untimed round comes first, then `rounds` timed ones, in each all methods in turn. Raises
    NotFinite for the first text for which a method computes what is not finite.
    """
    if FULL not in methods:
        raise ValueError("there is nothing to compare with: no method 'full'")
    together = len(task.labels.prompt.readings) if task.labels else 1
    size = max(1, batch_size // together) * together
    batches = [task.sequences[at : at + size] for at in range(0, len(task.sequences), size)]
    first: dict[str, _Run] = {}
    timed: dict[str, list[_Run]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for place, (name, method) in enumerate(methods.items(), 1):
            done = _run(method, batches, task.labels)
            if number:
                timed[name].append(done)
            else:
                first[name] = done
            on_step(number * len(methods) + place, (rounds + 1) * len(methods))
    return [
        _report(name, first[name], timed[name], first[FULL], timed[FULL], task, judge, decisions)
        for name in methods
    ]


def _run(method: Method, batches: Sequence[Sequence[Sequence[int]]], labels: LabelTokens | None) -> _Run:
    started = time.perf_counter()
    results = [method(batch) for batch in batches]
    seconds = time.perf_counter() - started
    together = len(labels.prompt.readings) if labels else 1
    finite = np.concatenate([result.finite for result in results])
    require_finite(finite.reshape(-1, together), "data")
    search_seconds = sum(result.search_seconds for result in results)
    return _Run(
        np.concatenate([_outputs(result, labels) for result in results]),
        [outcome for result in results for outcome in result.outcomes],
        np.concatenate([result.similarities for result in results]),
        seconds,
        search_seconds + sum(result.attention_seconds for result in results),
        search_seconds,
    )


def _outputs(result: PrefillResult, labels: LabelTokens | None) -> np.ndarray:
    if labels is None:
        return result.outputs
    assert result.log_probabilities is not None
    return labels.logits(result.log_probabilities)


def _report(
    name: str,
    run: _Run,
    timed: Sequence[_Run],
    full: _Run,
    full_timed: Sequence[_Run],
    task: Task,
    judge: Judge,
    decisions: Judge | None,
) -> MethodReport:
    scores, full_scores = task.scores(run.outputs), task.scores(full.outputs)
    score, full_score = (statistics.fmean(each.values()) for each in (scores, full_scores))
    hits = np.array([outcome.is_hit for outcome in run.outcomes])
    changed = hits.reshape(len(run.outputs), -1).any(axis=1) | (name in _CHANGING_ALL)
    cosine = judge.fidelity(run.outputs, full.outputs)[changed]
    speedup = _ratio([each.seconds for each in full_timed], [each.seconds for each in timed])
    return MethodReport(
        method=name,
        scores=scores,
        score=score,
        difference_interval=_interval(task.items(run.outputs), task.items(full.outputs)),
        hit_rate=float(hits.mean()),
        prototype_hit_rate=float(np.mean([outcome is Outcome.PROTOTYPE_HIT for outcome in run.outcomes])),
        hit_lengths=dict(Counter(len(ids) for ids, hit in zip(task.sequences, hits, strict=True) if hit)),
        recorded=int((run.similarities == 1.0).sum()),
        cosine=float(cosine.mean()) if changed.any() else float("nan"),
        cosine_5th_percentile=float(np.percentile(cosine, 5)) if changed.any() else float("nan"),
        agreement=float(decisions.fidelity(run.outputs, full.outputs)[changed].mean())
        if decisions and changed.any()
        else float("nan"),
        seconds=statistics.median(each.seconds for each in timed),
        attention_seconds=statistics.median(each.attention_seconds for each in timed),
        search_seconds=statistics.median(each.search_seconds for each in timed),
        speedup=speedup,
        attention_speedup=_ratio(
            [each.attention_seconds for each in full_timed], [each.attention_seconds for each in timed]
        ),
        gamma=gamma(full_score, score, speedup),
    )


def _ratio(full: Sequence[float], method: Sequence[float]) -> float:
    """The median of the ratios round by round: what disturbs a round disturbs both."""
    return statistics.median(a / b for a, b in zip(full, method, strict=True))


def _interval(items: np.ndarray | None, full: np.ndarray | None) -> tuple[float, float] | None:
    """95 % interval of the mean of paired differences, by the normal distribution."""
    if items is None or full is None or len(items) < 2:
        return None
    differences = items - full
    half = 1.96 * differences.std(ddof=1) / len(differences) ** 0.5
    return float(differences.mean() - half), float(differences.mean() + half)
