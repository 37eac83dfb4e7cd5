"""Simulate the texts of a month of traffic, in which topics enter one after the other, and a sample of them.

    topics, each a list of distinct texts -> shares of each day -> Day: texts to sample from, texts to serve
    texts of the days that have ended     -> Reservoir          -> the texts that a renewal is built from

The texts to serve are never texts to sample from, on no day, so no database holds a text that it is measured
on. Within each of the two parts, a text may return on another day.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from attncache_core import InvalidInput

# Of the texts of a topic. The others are served.
_SAMPLED_SHARE = 2 / 3
# Of the traffic, from the day on which a topic enters until the next topic enters.
_NEWEST_SHARE = 0.5


@dataclass(frozen=True)
class Day:
    """The texts of one day, each part in random order."""

    sampled: list[str]  # stand for all traffic of the day: databases are built from these texts
    served: list[str]  # what is served and measured


def shares_of_topics(topics: int, days: int) -> np.ndarray:
    """Return the share of each topic in the traffic of each day, float64 [days, topics].

    The first topic begins alone. The others enter one after the other, at equal distances. A topic that
    enters takes half of the traffic, and the topics before it share the other half equally.
    """
    shares = np.zeros((days, topics))
    for day in range(days):
        newest = day * topics // days
        shares[day, : newest + 1] = 1.0 if newest == 0 else (1 - _NEWEST_SHARE) / newest
        if newest:
            shares[day, newest] = _NEWEST_SHARE
    return shares


def month(
    topics: Sequence[Sequence[str]], days: int, sampled: int, served: int, random: np.random.Generator
) -> list[Day]:
    """Return the days of a month, each with `sampled` texts to sample from and `served` texts to serve.

    topics: the distinct texts of each topic, in the order in which the topics enter. Raises InvalidInput if a
    topic has too few texts for a day.
    """
    parts = []
    for texts in topics:
        shuffled = [texts[index] for index in random.permutation(len(texts)).tolist()]
        end = round(len(texts) * _SAMPLED_SHARE)
        parts.append((shuffled[:end], shuffled[end:]))
    made = []
    for shares in shares_of_topics(len(topics), days):
        drawn: list[list[str]] = [[], []]
        for side, count in enumerate((sampled, served)):
            for topic, needed in enumerate(_whole_numbers(shares * count)):
                pool = parts[topic][side]
                if needed > len(pool):
                    raise InvalidInput(
                        f"a day needs {needed} of {len(pool)} texts of topic {topic + 1}, which has "
                        f"{len(topics[topic])} distinct texts; give more texts, or ask for fewer a day",
                        field="data",
                    )
                drawn[side] += [pool[index] for index in random.choice(len(pool), needed, replace=False)]
        made.append(Day(*([texts[index] for index in random.permutation(len(texts))] for texts in drawn)))
    return made


def _whole_numbers(shares: np.ndarray) -> list[int]:
    """Round numbers to whole numbers with the same sum, which is whole."""
    return np.diff(np.cumsum(shares).round(), prepend=0).astype(int).tolist()


class Reservoir:
    """A weighted sample of texts without replacement, in which older texts weigh less.

    The weight of a text halves with each half-life. Each text draws a priority when it is offered, and the
    greatest priorities stay (Efraimidis and Spirakis 2006). The weight grows with the day of the offer
    instead of falling with age (forward decay; Cormode et al. 2009), so a priority never changes. Equal texts
    count once.
    """

    def __init__(self, capacity: int, half_life_days: float, random: np.random.Generator) -> None:
        self._capacity, self._random = capacity, random
        self._decay = math.log(2) / half_life_days
        self._priorities: dict[str, float] = {}

    def offer(self, day: int, texts: Iterable[str]) -> None:
        """Let each text of a day take part in the sample."""
        for text in texts:
            # -log(-log(u)) + log(weight) orders texts as u ** (1 / weight) does, and does not overflow.
            priority = self._decay * day - math.log(self._random.exponential())
            self._priorities[text] = max(priority, self._priorities.get(text, -math.inf))
        kept = sorted(self._priorities, key=self._priorities.__getitem__, reverse=True)[: self._capacity]
        self._priorities = {text: self._priorities[text] for text in kept}

    def texts(self) -> list[str]:
        """Return the texts in the sample, in the order of the alphabet."""
        return sorted(self._priorities)
