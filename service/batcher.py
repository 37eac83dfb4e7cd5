"""The queue between requests and the engine: many small requests become few full batches.

    submit -> [tokenize threads] -> queue of token sequences -> [engine thread] -> rows of each request

Nothing waits on purpose: when the engine is free it takes what waits, oldest first, up to a budget. A
request's sequences may go in several batches. The way crosses threads three times, event loop to tokenizer
to engine to event loop, since each crossing costs as much as a small matrix product. When nobody waits, the
engine thread verifies some of the hits it has served (service/verifier).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from attncache_core import InvalidInput, NotFinite, Outcome, PrefillEngine, PrefillResult
from attncache_core.prompts import Prompt
from service.errors import InternalError, QueueFull, log_failure
from service.metrics import Metrics
from service.verifier import Verifier

logger = logging.getLogger(__name__)

# Two, so that a request of long texts does not hold up a short one.
_TOKENIZE_THREADS = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one batch, the queue and one request may hold."""

    batch_tokens: int
    batch_sequences: int
    queue_sequences: int
    request_tokens: int


@dataclass(frozen=True, slots=True)
class Rows:
    """What the engine computed for one request, in the order of its texts, and of the prompt's readings."""

    outputs: np.ndarray  # float32 [sequences, dimensions]
    outcomes: tuple[Outcome, ...]
    log_probabilities: tuple[np.ndarray, ...] = ()  # float32 [targets] of each, if the prompt asks for any

    @property
    def hits(self) -> int:
        """Sequences some of whose heads came from a record, of either kind."""
        return sum(outcome.is_hit for outcome in self.outcomes)

    @property
    def prototype_hits(self) -> int:
        """Those of them whose record is a prototype."""
        return self.outcomes.count(Outcome.PROTOTYPE_HIT)


@dataclass(eq=False, slots=True)
class _Job:
    """One request on its way. If its future is done before its rows are there, nobody waits any more."""

    texts: list[str]
    prompt: Prompt
    truncate: bool
    reuse: bool
    counted: bool
    future: asyncio.Future[Rows]
    sequences: list[list[int]] = field(default_factory=list)
    queued_at: float = 0.0  # seconds, perf_counter
    taken: int = 0  # sequences[:taken] have gone into batches
    parts: list[Rows] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Sequences that the texts become."""
        return len(self.texts) * len(self.prompt.readings)


class _Share(NamedTuple):
    """The part of a batch that is sequences[start:stop] of a job."""

    job: _Job
    start: int
    stop: int


class Batcher:
    """Owns the queue, the tokenize threads and the one thread that runs the engine.

    Made on the event loop that its futures belong to. `submit` is called on that loop, all else happens in
    the threads; `_lock` guards the queue and the numbers about it.
    """

    def __init__(
        self, engine: PrefillEngine, limits: Limits, metrics: Metrics, verifier: Verifier | None = None
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._verifier = verifier
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queue: deque[_Job] = deque()
        self._waiting_sequences = 0  # admitted and not yet taken, tokenised or not
        self._waiting_tokens = 0
        self._tokens_per_second = 0.0
        self._running = False  # the engine thread is at work and will look at the queue again
        self._tokenize_threads = ThreadPoolExecutor(_TOKENIZE_THREADS, thread_name_prefix="tokenize")
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @property
    def waiting_sequences(self) -> int:
        """Sequences that wait for the engine."""
        return self._waiting_sequences

    def submit(
        self,
        texts: list[str],
        *,
        truncate: bool,
        reuse: bool,
        counted: bool = True,
        prompt: Prompt | None = None,
    ) -> asyncio.Future[Rows]:
        """Rows for these texts, some time later; raises QueueFull at once if they do not fit into the queue.

        The prompt is the checkpoint's own, unless another is given. Cancelling the future takes what still
        waits out of the queue. It fails with InputTooLong, NotFinite (naming a text) or InternalError. With
        `counted` off the sequences are left out of the metric of outcomes.
        """
        own = prompt or self._engine.default_prompt
        job = _Job(texts, own, truncate, reuse, counted, self._loop.create_future())
        self._admit(job.count)
        job.future.add_done_callback(lambda _: self._withdraw(job))
        self._tokenize_threads.submit(self._tokenize, job)
        return job.future

    def replace_engine(self, engine: PrefillEngine, verifier: Verifier | None) -> None:
        """Run another engine of the same model from the next batch on, and verify its hits.

        What waits stays in the queue: tokens of one engine are those of the other.
        """
        self._engine, self._verifier = engine, verifier

    def close(self) -> None:
        """Finish all that was submitted, then end the threads. Blocks, but not for what is to be verified."""
        if self._verifier:
            self._verifier.stop()
        self._tokenize_threads.shutdown()
        self._engine_thread.shutdown()
        if self._verifier:
            self._verifier.close()

    def _admit(self, count: int) -> None:
        with self._lock:
            if self._waiting_sequences + count > self._limits.queue_sequences:
                raise QueueFull("too many texts are waiting", retry_after_seconds=self._seconds_to_empty())
            self._waiting_sequences += count

    def _withdraw(self, job: _Job) -> None:
        """Give back the places of a job that nobody waits for any more; nothing if all of it was taken."""
        with self._lock:
            if job.taken < job.count and job in self._queue:
                self._leave_queue(job, job.count)
                self._queue.remove(job)

    def _seconds_to_empty(self) -> int:
        if not self._tokens_per_second:
            return 1
        return max(1, math.ceil(self._waiting_tokens / self._tokens_per_second))

    def _start_verifying(self, verifier: Verifier) -> None:
        # Once closed, the thread takes nothing more, and nothing more need be verified.
        with contextlib.suppress(RuntimeError):
            self._engine_thread.submit(self._verify_until_somebody_waits, verifier)

    # In a tokenize thread.

    def _tokenize(self, job: _Job) -> None:
        started = time.perf_counter()
        try:
            if not job.future.done():
                job.sequences = self._engine.tokenize(
                    job.texts, job.truncate, job.prompt, self._limits.request_tokens
                )
        # A panic in a compiled tokenizer is no Exception, and the client must hear of it all the same.
        except BaseException as error:
            with self._lock:
                self._waiting_sequences -= job.count
            if not isinstance(error, InvalidInput):
                log_failure(logger, "tokenising failed", error)
                error = InternalError()
            self._loop.call_soon_threadsafe(_reject, [(job, error)])
            return
        job.queued_at = time.perf_counter()
        self._metrics.observe_tokenize(job.queued_at - started)
        self._enqueue(job)

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            self._waiting_tokens += sum(map(len, job.sequences))
            self._queue.append(job)
            if self._running:
                return
            self._running = True
        self._engine_thread.submit(self._run_until_empty)

    # In the engine thread.

    def _run_until_empty(self) -> None:
        while shares := self._take():
            self._run_or_fail(shares)
            if self._verifier and self._verifier.is_overdue:
                self._verifier.verify_some()
        if self._verifier and self._verifier.has_work:
            # Round by the event loop, where this stands behind the answers: they are sent first.
            verify = partial(self._start_verifying, self._verifier)
            self._loop.call_soon_threadsafe(self._loop.call_soon, verify)

    def _verify_until_somebody_waits(self, verifier: Verifier) -> None:
        # Whoever waits has a turn of this thread coming, and at its end this begins again.
        while verifier.has_work and not self._queue:
            verifier.verify_some()

    def _take(self) -> list[_Share]:
        """The next batch, oldest first; empty when nothing waits, and then this thread's turn is over."""
        shares: list[_Share] = []
        tokens_left, sequences_left = self._limits.batch_tokens, self._limits.batch_sequences
        with self._lock:
            while self._queue:
                job = self._queue[0]
                start = job.taken
                if job.future.done():
                    self._leave_queue(job, job.count)
                    self._queue.popleft()
                    continue
                stop = _fitting(job.sequences, start, tokens_left, sequences_left, alone=not shares)
                if stop > start:
                    shares.append(_Share(job, start, stop))
                    tokens_left -= self._leave_queue(job, stop)
                    sequences_left -= stop - start
                if stop < len(job.sequences):
                    break
                self._queue.popleft()
            self._running = bool(shares)
        return shares

    def _leave_queue(self, job: _Job, stop: int) -> int:
        """Count sequences[taken:stop] as no longer waiting; answers their tokens."""
        tokens = sum(map(len, job.sequences[job.taken : stop]))
        self._waiting_sequences -= stop - job.taken
        self._waiting_tokens -= tokens
        job.taken = stop
        return tokens

    def _run_or_fail(self, shares: list[_Share]) -> None:
        """Run a batch; whatever is raised, its requests fail and the thread goes on."""
        try:
            self._run(shares)
        # A panic in compiled code is no Exception.
        except BaseException as error:
            log_failure(logger, "a batch failed", error)
            failed = [(share.job, InternalError()) for share in shares]
            self._loop.call_soon_threadsafe(_reject, failed)

    def _run(self, shares: list[_Share]) -> None:
        """Compute a batch and answer the requests that are whole with it.

        Where the engine fails on several requests, each is run alone: only those that it fails on then fail.
        """
        started = time.perf_counter()
        sequences = [ids for job, start, stop in shares for ids in job.sequences[start:stop]]
        reuse = [job.reuse for job, start, stop in shares for _ in range(start, stop)]
        readings = [job.prompt.reading_of(at) for job, start, stop in shares for at in range(start, stop)]
        try:
            result = self._engine.run(sequences, reuse, readings)
        except BaseException as error:
            if len(shares) == 1:
                raise
            log_failure(logger, "a batch failed, and its requests are run one by one", error)
            result = None
        # Not in the handler, where the exception would keep the batch's tensors in memory.
        if result is None:
            for share in shares:
                if not share.job.future.done():
                    self._run_or_fail([share])
            return
        parts = _parts(shares, result)
        self._note_speed(result.tokens, time.perf_counter() - started)
        # Before the answers leave: who has one finds it counted. (Afterwards would be no faster, since this
        # thread would hold the interpreter lock all the same.)
        self._metrics.observe_queue(started - job.queued_at for job, start, _ in shares if start == 0)
        self._metrics.observe_batch(result)
        for length in result.lost_lengths:
            logger.warning(
                "records of %d tokens are no longer used: their file was cut short or cannot be read", length
            )
        for (job, _, _), part in zip(shares, parts, strict=True):
            if job.counted:
                self._metrics.observe_outcomes(part.outcomes)
        if not result.finite.all():
            failed = _not_finite(shares, result.finite)
            logger.error("%d of the %d requests of a batch came to NaN or infinity", len(failed), len(shares))
            # Before the others are answered: then these are done and get no rows.
            self._loop.call_soon_threadsafe(_reject, failed)
        self._deliver(shares, parts)
        if self._verifier:
            self._verifier.offer(sequences, readings, result)

    def _deliver(self, shares: list[_Share], parts: list[Rows]) -> None:
        finished: list[tuple[_Job, Rows]] = []
        for (job, _, stop), part in zip(shares, parts, strict=True):
            job.parts.append(part)
            if stop == len(job.sequences):
                finished.append((job, _joined(job.parts)))
        # One call for all: each wakes the event loop.
        self._loop.call_soon_threadsafe(_resolve, finished)

    def _note_speed(self, tokens: int, seconds: float) -> None:
        speed = tokens / max(seconds, 1e-6)
        # A mean over about the last ten batches.
        weight = 0.1 if self._tokens_per_second else 1.0
        self._tokens_per_second += (speed - self._tokens_per_second) * weight


def _fitting(sequences: list[list[int]], start: int, tokens: int, count: int, *, alone: bool) -> int:
    """Where to stop, so that sequences[start:stop] has at most so many tokens and sequences.

    The first sequence of a batch (`alone`) goes in whatever its length: it fits nowhere better.
    """
    stop = start
    for ids in sequences[start : start + count]:
        tokens -= len(ids)
        if tokens < 0 and not (alone and stop == start):
            break
        stop += 1
    return stop


def _parts(shares: list[_Share], result: PrefillResult) -> list[Rows]:
    """The batch's rows, given back to the shares they came from."""
    stops = list(accumulate(stop - start for _, start, stop in shares))
    probabilities = result.log_probabilities or ()
    return [
        Rows(result.outputs[first:last], result.outcomes[first:last], tuple(probabilities[first:last]))
        for first, last in zip([0, *stops], stops, strict=False)
    ]


def _not_finite(shares: list[_Share], finite: np.ndarray) -> list[tuple[_Job, NotFinite]]:
    """The requests with a sequence that is not finite, and the error that names the first such text of each.

    finite: bool [sequences], of the batch.
    """
    failed, first = [], 0
    for job, start, stop in shares:
        own = finite[first : first + stop - start]
        first += stop - start
        if not own.all():
            sequence = start + int(own.argmin())
            failed.append((job, NotFinite.of(sequence // len(job.prompt.readings))))
    return failed


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    outcomes = tuple(outcome for part in parts for outcome in part.outcomes)
    probabilities = tuple(own for part in parts for own in part.log_probabilities)
    return Rows(np.concatenate([part.outputs for part in parts]), outcomes, probabilities)


def _resolve(finished: list[tuple[_Job, Rows]]) -> None:
    for job, rows in finished:
        if not job.future.done():
            job.future.set_result(rows)


def _reject(failed: Sequence[tuple[_Job, BaseException]]) -> None:
    for job, error in failed:
        if not job.future.done():
            job.future.set_exception(error)
