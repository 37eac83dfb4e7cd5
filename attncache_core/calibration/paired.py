"""Compare two ways to compute, by pairs of passes.

    a pair      one pass each way, one directly after the other
                -> seconds of the first way / seconds of the second way - 1: the gain of the second way
    24 pairs    -> the median gain, and its bounds
    the limit to compare with lies between the bounds -> 24 pairs more, up to 96

A pair does not count if other programs used the processors meanwhile, or if the server computed a request.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from attncache_core.errors import MachineBusy
from attncache_core.runtime.processor import waited_seconds

PAIRS = 24
# A pair counts only if the threads of this process waited for a processor for at most this share of the pair.
_MAX_WAITED = 0.05
# The machine is busy if more than two of three pairs do not count.
_ATTEMPTS_PER_PAIR = 3
# How often the bounds are looked at, each time with more pairs. All looks together keep the confidence.
_MAX_LOOKS = 4
_CONFIDENCE = 1 - 0.05 / _MAX_LOOKS
_SECONDS_BETWEEN_LOOKS = 0.02
# After a request came, so that a client that sends one request after another is not measured in between.
_SECONDS_AFTER_REQUEST = 0.5

# Returns a number that changes when the server begins to compute, or None while it computes.
IdleMark = Callable[[], int | None]
# One batch: a pass the first way, and a pass the second way.
Passes = tuple[Callable[[], object], Callable[[], object]]


@dataclass(frozen=True)
class PairedGain:
    """The gain of the second way: median over pairs of (seconds of the first way / of the second way - 1)."""

    median: float
    lower: float  # with 95 % confidence, the median of all possible pairs is not below this
    upper: float  # nor, with 95 % confidence, above this
    saved_seconds: float = 0.0  # median over pairs of the time that the second way saves

    def leaves_open(self, limit: float) -> bool:
        """Return whether the true median may be below this limit, and may be above it."""
        return self.lower < limit <= self.upper


def always_idle() -> int | None:
    """Return the mark of a process that computes nothing but the passes."""
    return 0


def compare(
    batches: Sequence[Passes], limit: float, idle_mark: IdleMark = always_idle, pairs: int = PAIRS
) -> PairedGain:
    """Measure how much faster the second way is, over the batches in turn, in alternating order.

    limit: the gain that decides. As long as the bounds leave open whether the gain reaches it, more pairs are
    measured, up to four times as many. Waits while the server computes.

    Raises MachineBusy if too few pairs count. (The processor quota of a container also keeps threads waiting,
    if the container has more threads than its quota can run.)
    """
    for passes in batches:  # the first passes read files and fill caches
        for run in passes:
            run()
    gains: list[float] = []
    saved: list[float] = []
    attempts, needed = 0, pairs
    while True:
        if len(gains) == needed:
            measured = replace(_with_bounds(gains), saved_seconds=statistics.median(saved))
            if needed == _MAX_LOOKS * pairs or not measured.leaves_open(limit):
                return measured
            needed += pairs
        if attempts == _ATTEMPTS_PER_PAIR * needed:
            raise MachineBusy(
                "nothing could be measured, because the processors were busy or limited by a quota"
            )
        index, second_first = len(gains) % len(batches), len(gains) // len(batches) % 2 == 1
        mark = _wait_until_idle(idle_mark)
        seconds, waited = _pair(batches[index], second_first=second_first)
        if idle_mark() != mark:
            time.sleep(_SECONDS_AFTER_REQUEST)
            continue
        attempts += 1
        if waited <= _MAX_WAITED:
            gains.append(seconds[0] / seconds[1] - 1)
            saved.append(seconds[0] - seconds[1])


def _wait_until_idle(idle_mark: IdleMark) -> int:
    while (mark := idle_mark()) is None:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return mark


def _pair(passes: Passes, *, second_first: bool) -> tuple[list[float], float]:
    """Return the seconds of both ways, and the share of the time in which the processors were missing."""
    seconds = [0.0, 0.0]
    waited, started = waited_seconds(), time.perf_counter()
    for way in (1, 0) if second_first else (0, 1):
        before = time.perf_counter()
        passes[way]()
        seconds[way] = time.perf_counter() - before
    share = (waited_seconds() - waited) / (time.perf_counter() - started)
    return seconds, share


def _with_bounds(gains: Sequence[float]) -> PairedGain:
    """Return median and bounds by the sign test.

    The number of gains below the true median is binomial, whatever the noise looks like. So a bound is one of
    the gains (Conover 1999, Practical Nonparametric Statistics, 3.2). With very few gains, it is infinite.
    """
    ordered = np.sort(gains)
    count = len(gains)
    at_most = scipy.special.bdtr(np.arange(count + 1), count, 0.5)
    below = int(np.searchsorted(at_most, 1 - _CONFIDENCE)) - 1
    if below < 0:
        return PairedGain(float(np.median(ordered)), float("-inf"), float("inf"))
    return PairedGain(float(np.median(ordered)), float(ordered[below]), float(ordered[-1 - below]))
