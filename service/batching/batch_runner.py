"""Run one batch on the engine and answer its requests.

    shares of a batch -> engine.run -> metrics -> results and errors, handed to the event loop
                                               -> hits, offered to the verifier

If the engine fails on a batch of several requests, each request is run alone, so that only the requests that
the engine fails on fail.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from attncache_core import NotFinite, PrefillEngine, PrefillRequest, PrefillResult
from service.batching.pending_request import PendingRequest, RequestResult, Share
from service.batching.request_queue import RequestQueue
from service.errors import InternalError, log_failure
from service.observability.metrics import Metrics
from service.upkeep.verifier import Verifier

logger = logging.getLogger(__name__)


class BatchRunner:
    """Owns the engine and the verifier of its hits. Any thread may call the methods.

    Parts of one request may be computed in several threads at once; the thread that computes the last part
    answers the request.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        verifier: Verifier | None,
        queue: RequestQueue,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """queue: is told the speed of each batch. loop: the event loop that the futures belong to."""
        self._serving = engine, verifier
        self._queue = queue
        self._metrics = metrics
        self._loop = loop
        self._adding_parts = threading.Lock()

    @property
    def engine(self) -> PrefillEngine:
        """The engine that runs the next batch."""
        return self._serving[0]

    @property
    def verifier(self) -> Verifier | None:
        """The verifier of the engine's hits; None if hits are not verified."""
        return self._serving[1]

    def replace(self, engine: PrefillEngine, verifier: Verifier | None) -> None:
        """Use another engine and its verifier from the next batch on."""
        # One assignment, because another thread must not see the engine without its verifier.
        self._serving = engine, verifier

    def run(self, shares: list[Share]) -> None:
        """Run a batch and answer the requests that are complete with it. Raises nothing: requests fail."""
        try:
            self._run(shares)
        # A panic in compiled code is not an Exception.
        except BaseException as error:
            log_failure(logger, "a batch failed", error)
            self.reject([(share.request, InternalError()) for share in shares])

    def reject(self, failed: Sequence[tuple[PendingRequest, BaseException]]) -> None:
        """Let the event loop set each request's error, unless the request is done. Called in any thread."""
        self._loop.call_soon_threadsafe(_reject, failed)

    def _run(self, shares: list[Share]) -> None:
        started = time.perf_counter()
        engine, verifier = self._serving
        # Hits belong to the policy before the batch, because another thread may tighten it meanwhile.
        policy = verifier.policy if verifier else None
        requests = [
            PrefillRequest(
                request.sequences[index],
                request.reuse,
                request.prompt.sequence_plan(index),
                request.wanted[index],
                # A request without reuse shares its prefixes with itself only: the labels of a text.
                id(request) if request.salt is None else request.salt,
            )
            for request, start, stop in shares
            for index in range(start, stop)
        ]
        engine.expect(self._queue.upcoming)
        try:
            result = engine.run(requests)
        except BaseException as error:
            if len(shares) == 1:
                raise
            log_failure(logger, "a batch failed, and its requests are run one by one", error)
            result = None
        # Outside the handler, because in the handler the exception would keep the batch's tensors in memory.
        if result is None:
            for share in shares:
                if not share.request.future.done():
                    self.run([share])
            return
        parts = _parts(shares, result)
        if result.tokens:  # texts that are known whole say nothing about the texts that wait
            self._queue.note_speed(result.tokens, time.perf_counter() - started)
        # Counted before the answers leave, so that a client with an answer finds the answer in the metrics.
        # Counting afterwards would be no faster: this thread would hold the interpreter lock all the same.
        self._count(shares, parts, result, started)
        if not result.finite.all():
            failed = _not_finite(shares, result.finite)
            logger.error("%d of the %d requests of a batch came to NaN or infinity", len(failed), len(shares))
            # Rejected before the other requests are answered, so that failed requests get no result.
            self.reject(failed)
        self._deliver(shares, parts)
        if verifier and policy:
            verifier.offer(requests, result, policy)

    def _count(
        self, shares: list[Share], parts: list[RequestResult], result: PrefillResult, started: float
    ) -> None:
        """Put a batch into the metrics, and log files that were lost."""
        self._metrics.observe_queue(started - request.queued_at for request, start, _ in shares if start == 0)
        self._metrics.observe_batch(result)
        for length in result.lost_lengths:
            logger.warning(
                "records of %d tokens are no longer used: their file was cut short or cannot be read", length
            )
        for share, part in zip(shares, parts, strict=True):
            if share.request.counted:
                self._metrics.observe_outcomes(part.outcomes)

    def _deliver(self, shares: list[Share], parts: list[RequestResult]) -> None:
        finished: list[tuple[PendingRequest, RequestResult]] = []
        with self._adding_parts:
            for (request, start, _), part in zip(shares, parts, strict=True):
                if (result := request.add_part(start, part)) is not None:
                    finished.append((request, result))
        # One call for all requests, because each call wakes the event loop. A request that fails in another
        # thread has failed before its part was added there, so here its failure arrives first.
        self._loop.call_soon_threadsafe(_resolve, finished)


def _parts(shares: list[Share], result: PrefillResult) -> list[RequestResult]:
    """Return each share's part of a batch's result."""
    stops = list(accumulate(stop - start for _, start, stop in shares))
    probabilities = result.log_probabilities or ()
    return [
        RequestResult(
            result.outputs[first:last],
            result.outcomes[first:last],
            tuple(probabilities[first:last]),
            sum(map(len, share.request.sequences[share.start : share.stop])),
            int(result.cached_tokens[first:last].sum()),
        )
        for share, first, last in zip(shares, [0, *stops], stops, strict=False)
    ]


def _not_finite(shares: list[Share], finite: np.ndarray) -> list[tuple[PendingRequest, NotFinite]]:
    """Return the requests with a sequence that is not finite, each with an error that names a text.

    finite: bool [sequences] of the batch. The error names the first text of the request that is not finite.
    """
    failed, first = [], 0
    for request, start, stop in shares:
        own = finite[first : first + stop - start]
        first += stop - start
        if not own.all():
            sequence = start + int(own.argmin())
            failed.append((request, NotFinite.of(sequence // len(request.prompt.sequence_plans))))
    return failed


def _resolve(finished: Sequence[tuple[PendingRequest, RequestResult]]) -> None:
    for request, result in finished:
        if not request.future.done():
            request.future.set_result(result)


def _reject(failed: Sequence[tuple[PendingRequest, BaseException]]) -> None:
    for request, error in failed:
        if not request.future.done():
            request.future.set_exception(error)
