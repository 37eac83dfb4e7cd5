"""Conversations as a trace of turns: Poisson arrivals, and numbers and lengths of turns as in conversations.

    seed -> draw_turns -> Turn, by arrival -> waiting -> Job -> replay    the store alone, without a model
                                           -> sessions.py                 a real store and a real model

The arrivals do not depend on the answers, so every store gets the same trace (CachedAttention, section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.measuring.replay import Job, replay
from benchmarks.papers.eviction import EVICTION

# Of the logarithm of a turn's length: most turns are short, a few are long.
_SPREAD = 0.8


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: the history and new tokens behind it."""

    session: int
    arrival: float  # seconds since the start
    history: int  # tokens of the turns before
    new: int  # tokens of this turn

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.history + self.new


@dataclass(frozen=True, slots=True)
class Conversations:
    """What conversations are drawn from."""

    sessions: int
    rate: float  # sessions that begin per second, on average
    turns: float  # of a session, on average
    turn_tokens: float  # on average
    think_seconds: float  # between two turns of a session, on average
    context: int  # a session ends before its prompt is longer, tokens
    uniform: bool = False  # every session has `turns` turns of `turn_tokens` tokens
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a store without a model did with a trace. Rates are of the turns that have a history."""

    policy: str
    disk: bool
    memory_hit_rate: float
    disk_hit_rate: float
    misses: int  # first turns among them
    fetches: int
    demotions: int
    drops: int


def draw_turns(conversations: Conversations) -> list[Turn]:
    """Return the turns of all sessions by arrival. The same conversations give the same turns.

    The draws of a session do not depend on the rate, so that rates can be compared.
    """
    starts = np.cumsum(np.random.default_rng(conversations.seed).exponential(1, conversations.sessions))
    turns = [
        turn
        for session, start in enumerate(starts / conversations.rate)
        for turn in _session(conversations, session, float(start))
    ]
    return sorted(turns, key=lambda turn: (turn.arrival, turn.session))


def waiting(turns: Sequence[Turn], tokens_per_second: float) -> list[int]:
    """Return how many turns wait when each turn starts, if a turn takes the time of its new tokens alone.

    One turn runs at a time, in the order of their arrival.
    """
    counts, free_at, arrived = [], 0.0, 0
    for index, turn in enumerate(turns):
        start = max(turn.arrival, free_at)
        arrived = arrived_until(turns, start, max(arrived, index + 1))
        counts.append(arrived - index - 1)
        free_at = start + turn.new / tokens_per_second
    return counts


def arrived_until(turns: Sequence[Turn], time: float, known: int = 0) -> int:
    """Return how many turns have arrived at a time. known: a number that have."""
    while known < len(turns) and turns[known].arrival <= time:
        known += 1
    return known


def max_at_once(turns: Sequence[Turn], size: Callable[[int], int]) -> int:
    """Return the largest sum of the sizes of sessions between their first and last turns.

    size: of a session with this many tokens at its end.
    """
    ends = {turn.session: turn for turn in turns}
    begun: set[int] = set()
    maximum = now = 0
    for turn in turns:
        if turn.session not in begun:
            begun.add(turn.session)
            now += size(ends[turn.session].tokens)
            maximum = max(maximum, now)
        if turn is ends[turn.session]:
            now -= size(turn.tokens)
    return maximum


def simulate(
    turns: Sequence[Turn], queue: Sequence[int], memory_sessions: int, disk_sessions: int, policy: str
) -> Simulated:
    """Return what a store for whole sessions of equal size does with a trace.

    queue: how many turns wait when each turn starts.
    """
    jobs = [Job(turn.session, count) for turn, count in zip(turns, queue, strict=True)]
    found = replay(
        jobs,
        memory_sessions,
        disk_sessions,
        EVICTION[policy],
        prefetch_window=memory_sessions,
        eviction_window=memory_sessions + disk_sessions,
    )
    later = max(1, sum(turn.history > 0 for turn in turns))
    actions = [event.action.value for event in found.events]
    return Simulated(
        policy,
        disk_sessions > 0,
        found.memory_hits / later,
        found.disk_hits / later,
        found.misses,
        *(actions.count(action) for action in ("fetch", "demote", "drop")),
    )


def _session(conversations: Conversations, session: int, start: float) -> list[Turn]:
    random = np.random.default_rng((conversations.seed, session))
    if conversations.uniform:
        lengths = np.full(round(conversations.turns), round(conversations.turn_tokens))
    else:
        count = random.geometric(1 / conversations.turns)
        mean = np.log(conversations.turn_tokens) - _SPREAD**2 / 2
        lengths = np.maximum(1, np.rint(random.lognormal(mean, _SPREAD, count))).astype(np.int64)
    gaps = random.exponential(conversations.think_seconds, len(lengths))
    gaps[0] = 0.0
    ends = np.cumsum(lengths)
    arrivals = start + np.cumsum(gaps)
    # The first turn is cut rather than left out.
    return [
        Turn(session, float(arrival), int(end - new) if number else 0, min(int(new), conversations.context))
        for number, (arrival, end, new) in enumerate(zip(arrivals, ends, lengths, strict=True))
        if end <= conversations.context or not number
    ]
