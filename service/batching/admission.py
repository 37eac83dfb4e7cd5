"""Which requests the queue admits, when the clients of the others may try again, and how fast the queue is.

A request is refused if the queue has no room for its sequences and tokens, or if too many seconds of work
come before it. The work that comes before it depends on its flow: a client that floods the queue is refused,
while a request of another client, whose turn is next, is admitted. A request of many texts is also refused if
it would not be answered in time, because it takes turns with other ones that do not fit into a batch: all of
them would be computed nearly to their ends, and none would be answered. If the queue turns out to be slower
than it was when they were admitted, the one that came last is given up for the others.

How fast a queue is drained is measured in tokens per second, while requests wait:

    tokens leave the queue -> rounds: full batches of all engine threads -> the median speed of the last

A batch that nothing waits behind says little about the next ones: it is small, and small batches are slow. So
only times count in which requests wait all the time. Tokens are counted as the queue counts them. So texts
whose results are known, and guesses of tokens that are wrong, make the queue faster or slower by what they
really cost.

Refused requests are told different times: each one when the queue has room and has computed the requests that
were refused before it. If all of a crowd came back at the same time, most of them would be refused again, and
many clients give up after two tries.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from statistics import median

from service.batching.fair_order import FairOrder
from service.batching.pending_request import PendingRequest
from service.errors import QueueFull

# An odd number, so that the median is the speed of a round.
_ROUNDS = 15
# The first batches of a process are slow.
_MIN_ROUNDS = 3
# The part of a request's time that may be planned for: guesses of tokens and speeds err.
_PLANNED = 0.9
# The longest time that a request is told because of requests that were refused before it. Some never come
# back, and a client that is refused once should not wait for all requests of another client that floods.
_MAX_CROWD_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one batch, the queue and one request may hold."""

    batch_tokens: int
    batch_sequences: int
    queue_sequences: int
    request_tokens: int
    queue_tokens: int = 2**20  # guessed from characters
    queue_seconds: float = math.inf  # of work that may come before a request that is admitted


class DrainSpeed:
    """A running measure of how fast a queue is drained. Not thread safe."""

    def __init__(self, round_tokens: int) -> None:
        """round_tokens: what all engine threads together compute at a time."""
        self.round_tokens = round_tokens
        self.tokens_per_second: float | None = None  # None: too little was measured
        self.is_new = False  # whether a round has ended since the owner set this to False
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
                if len(self._rounds) >= _MIN_ROUNDS:
                    self.tokens_per_second = median(self._rounds)
                self._began, self._tokens = now, 0
                self.is_new = True
        if not others_wait:
            self._began = None
        elif self._began is None:
            self._began, self._tokens = now, 0


@dataclass(slots=True)
class Admission:
    """Decides on requests by the limits, the order of what waits, and how fast the queue is drained."""

    limits: Limits
    order: FairOrder[PendingRequest]
    speed: DrainSpeed
    # When the requests that were refused so far will be computed, if they come back when they were told.
    _refused_until: float = -math.inf

    def require(
        self, request: PendingRequest, waiting_sequences: int, waiting_tokens: int, now: float
    ) -> None:
        """Raise QueueFull unless a request is admitted beside the sequences and tokens that wait.

        now: seconds, of any clock that does not go back.
        """
        if not waiting_tokens:
            self._refused_until = -math.inf  # whoever was refused has not come back
        try:
            self._require_room(request, waiting_sequences, waiting_tokens)
            self._require_short_wait(request)
            self._require_in_time(request)
        except _Full as full:
            raise QueueFull(
                f"{full}; send the request again after the seconds in Retry-After",
                retry_after_seconds=self._retry_after(request, full.leaving, now),
            ) from None

    def _require_room(self, request: PendingRequest, waiting_sequences: int, waiting_tokens: int) -> None:
        more = waiting_sequences + request.count - self.limits.queue_sequences
        if more > 0:
            # Sequences of mean length must leave the queue.
            leaving = waiting_tokens * min(1.0, more / max(1, waiting_sequences))
            raise _Full("too many texts are waiting", leaving)
        more = waiting_tokens + request.guessed_tokens - self.limits.queue_tokens
        if waiting_tokens and more > 0:
            raise _Full("too many tokens are waiting", min(more, waiting_tokens))

    def _require_short_wait(self, request: PendingRequest) -> None:
        """Raise _Full if too many seconds of work come before a request.

        What fits into a batch may always wait. Otherwise the engine could wait for requests that are refused.
        """
        speed, seconds = self.speed.tokens_per_second, self.limits.queue_seconds
        if speed is None:
            return
        allowed = max(self.limits.batch_tokens, speed * seconds)
        if self.order.cost <= allowed:  # known at once, also if thousands of flows wait
            return
        ahead = self.order.ahead(request.flow, allowed)
        if (more := ahead - allowed) > 0:
            raise _Full(
                f"about {ahead / speed:.1f} seconds of work come before this request, and "
                f"--max-queue-seconds allows {seconds:g}",
                more,
            )

    def _require_in_time(self, request: PendingRequest) -> None:
        """Raise _Full if a request of several batches would be answered too late beside others that wait.

        Flows take turns, so each of them gets as much as the request until the request is computed. All count
        as they were at first, because a request that is admitted later slows down those that are there.
        """
        own, speed = request.guess, self.speed.tokens_per_second
        if speed is None or own <= self.limits.batch_tokens:
            return
        allowed = speed * request.seconds * _PLANNED
        within, others = self._turns(request, attrgetter("guess"))
        needed = within + sum(min(first, within) for first, _ in others)
        if not own <= allowed < needed:
            return  # or it is too large even if it were alone, which its deadline tells
        reason = (
            f"this request would take turns with others for about {needed / speed:.0f} seconds, and may take "
            f"{request.seconds:.0f}: send fewer texts at once, or allow more time"
        )
        waiting = sorted(others, key=itemgetter(1))
        for first, now in waiting:
            needed -= min(first, within)
            if needed <= allowed:
                raise _Full(reason, sum(min(each, now) for _, each in waiting))
        raise _Full(reason, self.order.cost)

    def late(self, now: float) -> tuple[PendingRequest, QueueFull] | None:
        """Return a request of several batches to give up, so that another one is answered in time, and why.

        The speed was not known, or was higher, when they were admitted. If two or more would be too late
        beside each other, the one of them that came last is given up, because least of it is computed. A
        request that is too late alone is left to its deadline. Looks once in a round.
        """
        speed, batch = self.speed.tokens_per_second, self.limits.batch_tokens
        if speed is None or not self.speed.is_new:
            return None
        self.speed.is_new = False

        def is_late(request: PendingRequest) -> bool:
            within, others = self._turns(request, attrgetter("waiting_tokens"))
            needed = within + sum(min(waiting, within) for waiting, _ in others)
            return request.waiting_tokens <= speed * (request.deadline - now) < needed

        large = [request for request in self.order if request.waiting_tokens > batch]
        large.sort(key=attrgetter("timing.queued_at"), reverse=True)
        late = list(islice(filter(is_late, large), 2))
        if len(late) < 2:
            return None
        last = late[0]
        # Whatever others do not get by their deadlines, they will not wait for any longer.
        seconds = max(request.deadline for request in large if request is not last) - now
        leaving = min(self.order.cost - last.waiting_tokens, speed * seconds)
        return last, QueueFull(
            "this request was given up, because the server has become slower than it was, and neither it nor "
            "one before it would be answered in time; send it again after the seconds in Retry-After",
            retry_after_seconds=self._retry_after(last, leaving, now),
        )

    def _turns(
        self, request: PendingRequest, tokens: Callable[[PendingRequest], int]
    ) -> tuple[int, list[list[int]]]:
        """Return the tokens of a request's client that come before its end, and those of each other client.

        tokens: counts the tokens of a request. Those of other clients are counted so, and as they wait now.
        """
        own = within = tokens(request)
        others = dict[Hashable, list[int]]()
        for other in self.order:
            if other is request:
                continue
            if other.flow == request.flow:
                within += tokens(other) if other.timing.queued_at <= request.timing.queued_at else 0
            elif other.flow[:1] == request.flow[:1]:
                within += min(tokens(other), own)
            else:
                counted = others.setdefault(other.flow[:1], [0, 0])
                counted[0] += tokens(other)
                counted[1] += other.waiting_tokens
        return within, list(others.values())

    def _retry_after(self, request: PendingRequest, leaving: float, now: float) -> int:
        """Return the seconds after which a refused request is likely to be admitted, at least 1.

        leaving: tokens that must leave the queue first.
        """
        speed = self.speed.tokens_per_second
        if speed is None:
            return 1
        seconds = max(leaving / speed, min(self._refused_until - now, _MAX_CROWD_SECONDS))
        self._refused_until = now + seconds + request.guessed_tokens / speed
        return max(1, math.ceil(seconds))


class _Full(Exception):
    """A request is refused until so many tokens have left the queue."""

    def __init__(self, reason: str, leaving: float) -> None:
        super().__init__(reason)
        self.leaving = leaving
