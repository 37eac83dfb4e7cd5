"""Compare methods on one task: quality, hits and time.

The methods alternate in each round, so a disturbance of the machine affects all methods.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from scipy.optimize import brentq

from attncache_core.engine.result import PrefillResult
from attncache_core.evaluation.tasks import Task
from attncache_core.heads.comparator import OutputComparator
from attncache_core.heads.vectors import require_finite
from attncache_core.reuse.plan import Outcome
from attncache_core.text.labels import LabelTokens

# Repeated measurements differ by about this much, so below this speed-up γ would divide by noise.
MIN_SPEEDUP = 1.02
# 95 % of a normal distribution lie within so many standard deviations.
_DEVIATIONS = 1.96


def gamma(full_metric: float, metric: float, speedup: float) -> float | None:
    """Return γ = (full_metric - metric) / (speedup - 1); None for a speed-up below 1.02.

    A smaller γ is better; γ is negative if the method is better than the full model. full_metric, metric:
    quality of the full model and of the method as fractions, not in percent. speedup: the full model's time /
    the method's time. AttnCache, Eq. 6, after He et al. 2024, with 1 as the full model's own speed-up.
    """
    if speedup < MIN_SPEEDUP:
        return None
    return (full_metric - metric) / (speedup - 1)


T = TypeVar("T")
# A method computes the outputs of token sequences.
Method = Callable[[Sequence[Sequence[int]]], PrefillResult]
FULL = "full"


@dataclass(frozen=True, slots=True)
class MethodReport:
    """The result of one method on one task. A figure that could not be measured is nan or None.

    A text counts as changed if it has hits; every text is changed by a method that changes all outputs.
    """

    method: str
    scores: dict[str, float]  # data set -> score, in [0, 1]
    score: float  # mean of the scores
    # 95 % interval of the paired difference to the full model's score: see share_interval and mean_interval.
    difference_interval: tuple[float, float] | None
    hit_rate: float  # hits of any kind / all sequences
    prototype_hit_rate: float  # hits of synthetic records / all sequences
    hit_lengths: dict[int, int]  # length in tokens -> hits of any kind
    recorded: int  # self-hits: hits of similarity 1, on a record of exactly the same tokens
    cosine: float  # mean over changed texts
    cosine_5th_percentile: float  # over changed texts
    agreement: float  # share of changed texts with the full model's decision; nan without classes
    seconds: float  # median over rounds for all sequences, with search and fetch, without tokenising
    attention_seconds: float  # part of `seconds`: search, and attention without the output projections
    search_seconds: float  # part of `attention_seconds`: search
    speedup: float  # median over rounds of the full model's seconds / this method's seconds
    attention_speedup: float  # the same ratio of attention_seconds
    gamma: float | None  # loss of quality per unit of speed-up


@dataclass(frozen=True)
class _Run:
    """The result of one pass over all sequences."""

    outputs: np.ndarray  # [texts, d], or [texts, labels] if the task has labels of several tokens
    outcomes: list[Outcome]
    similarities: np.ndarray
    seconds: float
    attention_seconds: float
    search_seconds: float


def compare(
    methods: Mapping[str, Method],
    task: Task,
    comparator: OutputComparator,
    decisions: OutputComparator | None = None,
    *,
    changing_all: Collection[str] = (),
    batch_size: int = 64,
    rounds: int = 3,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> list[MethodReport]:
    """Run all methods on a task, and return a report on each method.

    methods: name -> method; must contain `full`. comparator: gives the cosine of outputs to the full model's.
    decisions: gives the agreement of decisions with the full model's, if there are classes. changing_all:
    names of methods that search nothing and change every output. batch_size: sequences per batch, in the
    order of the data; the sequences of one text stay in one batch. rounds: number of timed rounds, after one
    untimed round; the methods alternate in each round. on_step: called with the number of finished steps and
    of all steps.

    Raises ValueError if there is no method `full`, and NotFinite with the index of the first text for which a
    method computes a number that is not finite.
    """
    if FULL not in methods:
        raise ValueError("there is nothing to compare with: no method 'full'")
    together = len(task.labels.prompt.sequence_plans) if task.labels else 1
    size = max(1, batch_size // together) * together
    batches = [task.sequences[at : at + size] for at in range(0, len(task.sequences), size)]
    passes = {name: partial(_run, method, batches, task.labels) for name, method in methods.items()}
    first, timed = alternate(passes, rounds, on_step)
    return [
        _report(
            name,
            first[name],
            timed[name],
            first[FULL],
            timed[FULL],
            task,
            comparator,
            decisions,
            name in changing_all,
        )
        for name in methods
    ]


def alternate(
    passes: Mapping[str, Callable[[], T]],
    rounds: int,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> tuple[dict[str, T], dict[str, list[T]]]:
    """Run each pass once as a warm-up, and then `rounds` times; the passes alternate in each round.

    on_step: called with the number of finished steps and of all steps. Returns the results of the warm-up,
    and of the rounds, by name.
    """
    first: dict[str, T] = {}
    timed: dict[str, list[T]] = {name: [] for name in passes}
    for round_number in range(rounds + 1):
        for step, (name, run) in enumerate(passes.items(), 1):
            done = run()
            if round_number:
                timed[name].append(done)
            else:
                first[name] = done
            on_step(round_number * len(passes) + step, (rounds + 1) * len(passes))
    return first, timed


def median_ratio(full: Sequence[float], method: Sequence[float]) -> float:
    """Return the median over rounds of full / method. A disturbance of a round affects both durations."""
    return statistics.median(a / b for a, b in zip(full, method, strict=True))


def _run(method: Method, batches: Sequence[Sequence[Sequence[int]]], labels: LabelTokens | None) -> _Run:
    started = time.perf_counter()
    results = [method(batch) for batch in batches]
    seconds = time.perf_counter() - started
    outputs = np.concatenate([_outputs(result, labels) for result in results])
    finite = np.concatenate([result.finite for result in results])
    require_finite(finite.reshape(len(outputs), -1), "data")
    search_seconds = sum(result.report.search_seconds for result in results)
    return _Run(
        outputs,
        [outcome for result in results for outcome in result.outcomes],
        np.concatenate([result.similarities for result in results]),
        seconds,
        search_seconds + sum(result.report.attention_seconds for result in results),
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
    comparator: OutputComparator,
    decisions: OutputComparator | None,
    changes_all: bool,
) -> MethodReport:
    scores, full_scores = task.scores(run.outputs), task.scores(full.outputs)
    score, full_score = (statistics.fmean(each.values()) for each in (scores, full_scores))
    hits = np.array([outcome.is_hit for outcome in run.outcomes])
    changed = hits.reshape(len(run.outputs), -1).any(axis=1) | changes_all
    cosine = comparator.fidelity(run.outputs, full.outputs)[changed]
    speedup = median_ratio([each.seconds for each in full_timed], [each.seconds for each in timed])
    return MethodReport(
        method=name,
        scores=scores,
        score=score,
        difference_interval=_difference_interval(task, run, full),
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
        attention_speedup=median_ratio(
            [each.attention_seconds for each in full_timed], [each.attention_seconds for each in timed]
        ),
        gamma=gamma(full_score, score, speedup),
    )


def _difference_interval(task: Task, run: _Run, full: _Run) -> tuple[float, float] | None:
    items, full_items = task.items(run.outputs), task.items(full.outputs)
    if items is None or full_items is None:
        return None
    if run is full:
        return 0.0, 0.0
    return share_interval(items, full_items) if task.decides else mean_interval(items - full_items)


def share_interval(items: np.ndarray, full_items: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares of the same texts: items' - full_items'.

    items, full_items: 1 for each text that counts, else 0. The interval is the score interval of Tango
    (1998). It holds for few texts too, and it is wider than 0 also if no text differs.
    """
    lost, won = int((items < full_items).sum()), int((items > full_items).sum())
    return -_largest_difference(won, lost, len(items)), _largest_difference(lost, won, len(items))


def _largest_difference(lost: int, won: int, texts: int) -> float:
    """Return the largest difference of the shares at which the score test does not refuse lost and won."""
    surplus = won - lost
    if surplus == texts:
        return 1.0

    def refused(difference: float) -> float:
        # The most likely share of lost texts, given the difference of the shares of won and lost texts.
        linear = (2 * texts - surplus) * difference - lost - won
        constant = -lost * difference * (1 - difference)
        root = max(0.0, linear**2 - 8 * texts * constant) ** 0.5
        share_lost = (root - linear) / (4 * texts)
        variance = texts * (2 * share_lost + difference * (1 - difference))
        return (surplus - texts * difference) ** 2 - _DEVIATIONS**2 * variance

    # The measured difference itself is another root if no text differs.
    return float(brentq(refused, surplus / texts + 1e-9, 1.0))


def mean_interval(differences: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of paired differences, by the normal distribution.

    Returns None for fewer than two differences.
    """
    if len(differences) < 2:
        return None
    half = _DEVIATIONS * differences.std(ddof=1) / len(differences) ** 0.5
    return float(differences.mean() - half), float(differences.mean() + half)
