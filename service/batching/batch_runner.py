"""Run one batch on the engine and answer its requests.

    batch -> engine.run -> metrics -> results of sequences -> their requests, and others that wait
                                   -> complete requests and errors, handed to the event loop
                                   -> hits, offered to the verifier

If the engine fails on a batch of several requests, each request is run alone, so that only the requests that
the engine fails on fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from attncache_core import AttnCacheError, NotFinite, Outcome, PrefillEngine, PrefillResult
from attncache_core.engine.request import PrefillBatch
from service.batching.pending_request import Batch, PendingRequest, Slice
from service.batching.request_queue import RequestQueue
from service.batching.results import Lookup, Results, repeatable
from service.errors import InternalError, log_failure
from service.observability.metrics import Metrics
from service.upkeep.verifying import LaterVerifier

logger = logging.getLogger(__name__)

Finished = list[tuple[PendingRequest, PrefillResult]]


class BatchRunner:
    """Owns the engine and the verifier of its hits. Any thread may call the methods.

    Parts of one request may be computed in several threads at once; the thread that computes the last part
    answers the request.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        verifier: LaterVerifier | None,
        queue: RequestQueue,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        results: Results[Slice] | None,
        compute_again: Callable[[Slice], None],
    ) -> None:
        """queue: knows the sequences that wait. loop: the event loop that the futures belong to.

        results: of sequences, to be used for others; None: results are not shared. compute_again: queues what
        was expected from another request in vain.
        """
        self._serving = engine, verifier
        self._queue = queue
        self._metrics = metrics
        self._loop = loop
        self._results = results
        self._compute_again = compute_again

    @property
    def engine(self) -> PrefillEngine:
        """The engine that runs the next batch."""
        return self._serving[0]

    @property
    def verifier(self) -> LaterVerifier | None:
        """The verifier of the engine's hits; None if hits are not verified."""
        return self._serving[1]

    def replace(self, engine: PrefillEngine, verifier: LaterVerifier | None) -> None:
        """Use another engine and its verifier from the next batch on."""
        # One assignment, because another thread must not see the engine without its verifier.
        self._serving = engine, verifier
        if self._results is not None:
            self._results.clear()

    def not_known(self, piece: Slice) -> Slice:
        """Return the sequences of a slice that their request must compute itself.

        The others have a result that is kept, or wait for the result of another request.
        """
        if self._results is None or piece.names is None:
            return piece
        found = self._results.find(piece.names, lambda index: piece.part(index, index + 1))
        try:
            unknown = [index for index, result in enumerate(found) if result is Lookup.UNKNOWN]
            if len(unknown) == len(piece):
                return piece
            computed = piece.select(unknown)
            self._answer_known(piece, found)
        except BaseException:
            # The caller does not get to know them, and others may wait for them already.
            self._give_up(
                [piece.names[index] for index in range(len(piece)) if found[index] is Lookup.UNKNOWN]
            )
            raise
        return computed

    def give_up(self, slices: Iterable[Slice]) -> None:
        """Let others compute sequences whose results they waited for, because their request does not."""
        for piece in slices:
            if piece.names is not None:
                self._give_up(piece.names)

    def _give_up(self, names: Sequence[bytes]) -> None:
        for expected in self._results.give_up(names) if self._results is not None else ():
            self._instead(expected)

    def run(self, batch: Batch) -> None:
        """Run a batch and answer the requests that are complete with it. Raises nothing: requests fail."""
        if plain := [piece for piece in batch if not piece.prefill.blends]:
            self._run_together(plain)
        # The engine blends prompt by prompt, so a request that ran with others would only wait for them.
        self._run_one_by_one([piece for piece in batch if piece.prefill.blends])

    def _run_one_by_one(self, batch: Batch) -> None:
        for piece in batch:
            self._run_together([piece])

    def _run_together(self, batch: Batch) -> None:
        try:
            if len(batch) == 1 and batch[0].request.future.done():
                self.give_up(batch)
            else:
                self._run(batch)
        # A panic in compiled code is not an Exception.
        except BaseException as error:
            log_failure(logger, "a batch failed", error)
            self.fail(batch)

    def fail(self, batch: Batch, requests: Iterable[PendingRequest] = ()) -> None:
        """Answer the requests of a batch that will not be run, or has failed, with InternalError.

        requests: others that fail with them.
        """
        self.reject(
            [(request, InternalError()) for request in (*(piece.request for piece in batch), *requests)]
        )
        self.give_up(batch)

    def reject(self, failed: Sequence[tuple[PendingRequest, BaseException]]) -> None:
        """Let the event loop set each request's error, unless the request is done. Called in any thread."""
        self._loop.call_soon_threadsafe(_reject, failed)

    def _run(self, batch: Batch) -> None:
        started = time.perf_counter()
        engine, verifier = self._serving
        # Hits belong to the policy before the batch, because another thread may tighten it meanwhile.
        policy = verifier.policy if verifier else None
        prefills = PrefillBatch([piece.prefill for piece in batch])
        if engine.key_values and engine.key_values.store.looks_ahead:
            engine.key_values.store.expect(self._queue.upcoming())
        try:
            result = engine.run(prefills)
        except BaseException as error:
            if len(batch) == 1:
                raise
            log_failure(logger, "a batch failed, and its requests are run one by one", error)
            result = None
        # Outside the handler, because in the handler the exception would keep the batch's tensors in memory.
        if result is None:
            self._run_one_by_one(batch)
            return
        # Counted before the answers leave, so that a client with an answer finds the answer in the metrics.
        # Counting afterwards would be no faster: this thread would hold the interpreter lock all the same.
        self._count(batch, result, started)
        self._deliver(batch, result)
        if verifier and policy:
            verifier.offer(prefills, result, policy)

    def _answer_known(self, piece: Slice, found: Sequence[PrefillResult | Lookup]) -> None:
        """Hand results that are kept to the request of a slice, and answer it if all are known."""
        answer: PrefillResult | None = None
        for place, result in zip(piece.places, found, strict=True):
            if isinstance(result, PrefillResult):
                self._count_repeated(piece.request, "kept", result)
                answer = piece.request.add(result, [place])
        if answer is not None:
            self._resolve([(piece.request, answer)])

    def _count_repeated(self, request: PendingRequest, source: str, result: PrefillResult) -> None:
        if request.counted:
            self._metrics.observe_repeated(source, result.all_asked_tokens)

    def _count(self, batch: Batch, result: PrefillResult, started: float) -> None:
        """Put a batch into the metrics, and log files that were lost."""
        requests = dict.fromkeys([piece.request for piece in batch])
        self._metrics.observe_queue(
            started - request.timing.queued_at for request in requests if not request.timing.batch_at
        )
        self._metrics.observe_batch(result)
        for length in result.report.lost_lengths:
            logger.warning(
                "records of %d tokens are no longer used: their file was cut short or cannot be read", length
            )
        for request in requests:
            timing = request.timing
            timing.batch_at = timing.batch_at or started
            timing.batches += 1
            timing.batch_sequences = max(timing.batch_sequences, len(result))
        counted: list[Outcome] = []
        first = 0
        for piece in batch:
            if piece.request.counted:
                counted += result.outcomes[first : first + len(piece)]
            first += len(piece)
        self._metrics.observe_outcomes(counted)

    def _deliver(self, batch: Batch, result: PrefillResult) -> None:
        """Hand the results of a batch to its requests, and to others that wait for them."""
        finished: Finished = []
        failed: dict[PendingRequest, AttnCacheError] = {}
        try:
            self._hand_over(batch, result, finished, failed)
        finally:  # what is finished is answered, whatever happens to the rest
            if not_finite := sum(isinstance(error, NotFinite) for error in failed.values()):
                logger.error("%d requests of a batch came to NaN or infinity", not_finite)
            if failed:
                # Rejected before the other requests are answered, so that failed requests get no result.
                self.reject(list(failed.items()))
            self._resolve(finished)

    def _hand_over(
        self,
        batch: Batch,
        result: PrefillResult,
        finished: Finished,
        failed: dict[PendingRequest, AttnCacheError],
    ) -> None:
        """Add the results of a batch to its requests, and to others that wait for them.

        Adds each request that is complete to `finished`, and each request that fails to `failed`.
        """
        first = 0
        for piece in batch:
            stop = first + len(piece)
            try:
                part = result.rows(first, stop)
            except BaseException as error:
                self._not_delivered(piece.request, error, failed)
                self.give_up([piece])
                continue
            finally:
                first = stop
            found = [(piece.request, part, piece.places), *self._shared(piece, part, failed)]
            for waiting, computed, places in found:
                if waiting in failed:
                    continue
                try:
                    answer = waiting.add(computed, places)
                except BaseException as error:
                    self._not_delivered(waiting, error, failed)
                else:
                    finished += [] if answer is None else [(waiting, answer)]

    def _shared(
        self, piece: Slice, part: PrefillResult, failed: dict[PendingRequest, AttnCacheError]
    ) -> list[tuple[PendingRequest, PrefillResult, Sequence[int]]]:
        """Return each request that waited for a sequence of a slice, with the result and its place.

        part: the result of the slice. Exact results are kept for later requests. What is not finite fails its
        request, and the requests that waited for it.
        """
        broken = [] if part.finite.all() else np.flatnonzero(~part.finite).tolist()
        for index in broken:
            self._fail_not_finite(piece, index, failed)
        if self._results is None or piece.names is None:
            return []
        found: list[tuple[PendingRequest, PrefillResult, Sequence[int]]] = []
        kept: dict[bytes, PrefillResult] = {}
        try:
            exact = {piece.names[index]: repeatable(part, index) for index in self._exact(part)}
            waited = self._results.settle(exact)
            kept = exact
            for expected, shared in waited:
                # Only now: what waits for an approximate result is computed after all.
                self._count_repeated(expected.request, "in_flight", shared)
                found.append((expected.request, shared, expected.places))
        except BaseException as error:
            log_failure(logger, "results were not kept for others", error)
        if len(kept) + len(broken) < len(piece):
            # Not the one for the other, because their results will be approximate too.
            left = set(piece.names) - kept.keys() - {piece.names[index] for index in broken}
            for expected in self._results.give_up(left):
                self._instead(replace(expected, names=None))
        return found

    def _exact(self, part: PrefillResult) -> Sequence[int]:
        """Return the indices of the sequences whose results are exact and finite."""
        key_values = self.engine.key_values
        is_exact = part.finite
        if key_values and key_values.approximation:
            is_exact = is_exact & (part.cached_tokens == 0)
        if is_exact.all() and not (part.hits or part.blends):
            return range(len(part))
        blends = part.blends or [None] * len(part)
        return [
            index
            for index, (outcome, blend) in enumerate(zip(part.outcomes, blends, strict=True))
            if is_exact[index] and not (outcome.is_hit or blend)
        ]

    def _not_delivered(
        self, request: PendingRequest, error: BaseException, failed: dict[PendingRequest, AttnCacheError]
    ) -> None:
        # What fails for one request, such as memory for its result, fails for no other.
        log_failure(logger, "a result was not delivered", error)
        failed.setdefault(request, InternalError())

    def _fail_not_finite(
        self, piece: Slice, index: int, failed: dict[PendingRequest, AttnCacheError]
    ) -> None:
        """Fail the request of a sequence whose result is not finite, and those that waited for the result."""
        expected = [(piece.request, piece.places[index])]
        if self._results is not None and piece.names is not None:
            waiters = self._results.give_up([piece.names[index]])
            expected += [(waiter.request, waiter.places[0]) for waiter in waiters]
        for request, place in expected:
            failed.setdefault(request, NotFinite.of(place // len(request.prompt.sequence_plans)))

    def _instead(self, piece: Slice) -> None:
        """Let a request compute what it expected from another one in vain. Raises nothing: it fails."""
        request = piece.request
        if request.future.done():
            return
        try:
            piece = self.not_known(piece)
            if len(piece):
                self._compute_again(piece)
        except BaseException as error:
            log_failure(logger, "a sequence was not queued again", error)
            self.reject([(request, InternalError())])

    def _resolve(self, finished: Finished) -> None:
        # One call for all requests, because each call wakes the event loop. A request that fails in another
        # thread has failed before its last result was added, so here its failure arrives first.
        if finished:
            self._loop.call_soon_threadsafe(_resolve, finished)


def _resolve(finished: Finished) -> None:
    for request, result in finished:
        if not request.future.done():
            request.future.set_result(result)


def _reject(failed: Sequence[tuple[PendingRequest, BaseException]]) -> None:
    for request, error in failed:
        if not request.future.done():
            request.future.set_exception(error)
