"""Requests that were answered, on their way to the access log and the traces.

    Front, on the event loop: add -> a thread, a few times a second -> each consumer, many at a time

The event loop only appends to a queue, because a log line and the spans of a request take longer than a
request of one text may wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from service.errors import log_failure

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_TURNS = 0.2
# Beyond it, requests are dropped: whoever reads the log is too slow.
_MAX_WAITING = 100_000
_MAX_AT_A_TIME = 1000


@dataclass(slots=True)
class Timing:
    """When a request reached its stages, in seconds of perf_counter; 0.0 if it did not."""

    queued_at: float = 0.0
    tokenized_at: float = 0.0  # the first part of its texts began to be tokenised
    tokenize_seconds: float = 0.0  # of all parts
    batch_at: float = 0.0  # the first batch with a sequence of it began
    computed_at: float = 0.0  # its last result was added
    batches: int = 0
    batch_sequences: int = 0  # of the largest of them, with the sequences of other requests
    tokens: int = 0  # of its sequences until now: they are tokenised part by part, when their turn comes


class FinishedRequest(NamedTuple):
    """What is told of a request. It holds no text, no key, no path of a client's choice and no query."""

    request_id: str
    method: str
    route: str  # one of metrics.ROUTES, or metrics.OTHER_ROUTE
    status: int  # 499 if the client left before the response
    started: float  # seconds, perf_counter
    ended: float  # seconds, perf_counter
    ended_at: float  # seconds since 1970
    key: str | None  # the name of the API key
    sequences: int
    tokens: int
    cached_tokens: int
    repeated: int
    timings: Sequence[Timing]
    trace: dict[str, str]  # headers of the trace that the client takes part in


Consumer = Callable[[Sequence[FinishedRequest]], None]


class FinishedRequests:
    """Hands requests to consumers, in a thread of its own."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self._consumers = list(consumers)
        self._waiting: deque[FinishedRequest] = deque()
        self._dropped = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="finished requests", daemon=True)
        self._thread.start()

    def add(self, request: FinishedRequest) -> None:
        """Hand a request over. Called on the event loop."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(request)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Hand over what waits, and end the thread. Blocks."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # The thread is not woken for each request: a thread that wakes up takes the interpreter lock.
        while not self._closing.wait(_SECONDS_BETWEEN_TURNS):
            self._hand_over()
        self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting:
            requests = [self._waiting.popleft() for _ in range(min(_MAX_AT_A_TIME, len(self._waiting)))]
            for consume in self._consumers:
                try:
                    consume(requests)
                except Exception as error:
                    log_failure(logger, "requests could not be logged or traced", error)
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            logger.warning("%d requests are missing in the access log and the traces", dropped)
