"""The queue of requests: who is admitted, who waits, and which sequences form the next batch.

admit -> (tokenize) -> add -> take_batch, oldest first
      -> release if tokenising failed
                           -> withdraw if the client has gone
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass

from service.errors import QueueFull
from service.pending_request import PendingRequest, Share


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one batch, the queue and one request may hold."""

    batch_tokens: int
    batch_sequences: int
    queue_sequences: int
    request_tokens: int


class RequestQueue:
    """Owns the requests that wait for the engine, and counts their sequences and tokens. Thread safe.

    Also owns the flag that says whether the engine thread is running, so that adding a request and the end of
    the engine thread's turn exclude each other.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._requests: deque[PendingRequest] = deque()
        self._waiting_sequences = 0  # admitted and not yet taken, tokenised or not
        self._waiting_tokens = 0
        self._tokens_per_second = 0.0
        self._running = False  # the engine thread is running and will call take_batch again

    def __len__(self) -> int:
        """Return the number of tokenised requests that wait."""
        return len(self._requests)

    @property
    def waiting_sequences(self) -> int:
        """The number of sequences that wait for the engine."""
        return self._waiting_sequences

    def admit(self, count: int) -> None:
        """Reserve room for the sequences of a request. Raises QueueFull if they do not fit."""
        with self._lock:
            if self._waiting_sequences + count > self._limits.queue_sequences:
                raise QueueFull("too many texts are waiting", retry_after_seconds=self._seconds_to_empty())
            self._waiting_sequences += count

    def release(self, request: PendingRequest) -> None:
        """Give up the room of a request that was admitted and will not be added."""
        with self._lock:
            self._waiting_sequences -= request.count

    def add(self, request: PendingRequest) -> bool:
        """Queue a tokenised request. Returns whether the caller must start the engine thread."""
        with self._lock:
            self._waiting_tokens += sum(map(len, request.sequences))
            self._requests.append(request)
            must_start = not self._running
            self._running = True
        return must_start

    def withdraw(self, request: PendingRequest) -> None:
        """Remove what still waits of a request whose client has gone; does nothing if nothing waits."""
        with self._lock:
            if request.taken < request.count and request in self._requests:
                self._leave(request, request.count)
                self._requests.remove(request)

    def take_batch(self) -> list[Share]:
        """Take the next batch, oldest requests first.

        An empty batch means that nothing waits: the engine thread's turn is over, and the next `add` says
        that the thread must be started again.
        """
        shares: list[Share] = []
        tokens_left, sequences_left = self._limits.batch_tokens, self._limits.batch_sequences
        with self._lock:
            while self._requests:
                request = self._requests[0]
                start = request.taken
                if request.future.done():
                    self._leave(request, request.count)
                    self._requests.popleft()
                    continue
                stop = _fitting(request.sequences, start, tokens_left, sequences_left, alone=not shares)
                if stop > start:
                    shares.append(Share(request, start, stop))
                    tokens_left -= self._leave(request, stop)
                    sequences_left -= stop - start
                if stop < len(request.sequences):
                    break
                self._requests.popleft()
            self._running = bool(shares)
        return shares

    def note_speed(self, tokens: int, seconds: float) -> None:
        """Add one batch to the mean speed, from which `admit` computes when a refused client may retry."""
        speed = tokens / max(seconds, 1e-6)
        # A mean over about the last ten batches.
        weight = 0.1 if self._tokens_per_second else 1.0
        self._tokens_per_second += (speed - self._tokens_per_second) * weight

    def _seconds_to_empty(self) -> int:
        if not self._tokens_per_second:
            return 1
        return max(1, math.ceil(self._waiting_tokens / self._tokens_per_second))

    def _leave(self, request: PendingRequest, stop: int) -> int:
        """Count sequences[taken:stop] as taken and return their tokens. The caller must hold the lock."""
        tokens = sum(map(len, request.sequences[request.taken : stop]))
        self._waiting_sequences -= stop - request.taken
        self._waiting_tokens -= tokens
        request.taken = stop
        return tokens


def _fitting(sequences: list[list[int]], start: int, tokens: int, count: int, *, alone: bool) -> int:
    """Return the largest stop for which sequences[start:stop] has at most `tokens` tokens and `count` items.

    alone: whether the batch is still empty. Then the first sequence is taken even if the sequence is too
    long, because no other batch has more room.
    """
    stop = start
    for ids in sequences[start : start + count]:
        tokens -= len(ids)
        if tokens < 0 and not (alone and stop == start):
            break
        stop += 1
    return stop
