"""How fast a queue is drained: tokens per second, measured while requests wait.

    tokens leave the queue -> rounds: full batches of all engine threads -> the median speed of the last

A batch that nothing waits behind says little about the next ones: it is small, and small batches are slow. So
only times count in which requests wait all the time. Tokens are counted as the queue counts them. So texts
whose results are known, and guesses of tokens that are wrong, make the queue faster or slower by what they
really cost.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# An odd number, so that the median is the speed of a round.
_ROUNDS = 15
# The first batches of a process are slow.
_LEAST_ROUNDS = 3


class DrainSpeed:
    """A running measure of how fast a queue is drained. Not thread safe."""

    def __init__(self, round_tokens: int) -> None:
        """round_tokens: what all engine threads together compute at a time."""
        self.round_tokens = round_tokens
        self.tokens_per_second: float | None = None  # None: too little was measured
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)
        self._began: float | None = None  # when the current round began; None: nothing waits
        self._tokens = 0  # of the current round

    def note(self, tokens: int, now: float, *, others_wait: bool) -> None:
        """Note that tokens have left the queue and are computed, and whether others still wait.

        tokens: 0 notes only whether others wait. now: seconds, of any clock that does not go back.
        """
        if self._began is not None:
            self._tokens += tokens
            if self._tokens >= self.round_tokens and now > self._began:
                self._rounds.append(self._tokens / (now - self._began))
                if len(self._rounds) >= _LEAST_ROUNDS:
                    self.tokens_per_second = median(self._rounds)
                self._began, self._tokens = now, 0
        if not others_wait:
            self._began = None
        elif self._began is None:
            self._began, self._tokens = now, 0
