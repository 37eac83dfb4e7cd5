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
from itertools import chain
from typing import Any

from attncache_core import AttnCacheError, NotFinite, Outcome, PrefillEngine, PrefillResult
from service.batching.pending_request import Batch, PendingRequest, PendingSequence
from service.batching.request_queue import RequestQueue
from service.batching.results import Lookup, RequestResult, Results
from service.errors import InternalError, log_failure
from service.observability.metrics import Metrics
from service.upkeep.verifying import LaterVerifier

logger = logging.getLogger(__name__)

Finished = list[tuple[PendingRequest, RequestResult]]


class BatchRunner:
    """Owns the engine and the verifier of its hits. Any thread may call the methods.

    Parts of one request may be computed in several threads at once; the thread that computes the last part
    answers the request.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        verifier: LaterVerifier[Any] | None,
        queue: RequestQueue,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        results: Results[PendingSequence] | None,
        compute_again: Callable[[PendingSequence], None],
    ) -> None:
        """queue: knows the sequences that wait. loop: the event loop that the futures belong to.

        results: of sequences, to be used for others; None: results are not shared. compute_again: queues a
        sequence whose result was expected from another request in vain.
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
    def verifier(self) -> LaterVerifier[Any] | None:
        """The verifier of the engine's hits; None if hits are not verified."""
        return self._serving[1]

    def replace(self, engine: PrefillEngine, verifier: LaterVerifier[Any] | None) -> None:
        """Use another engine and its verifier from the next batch on."""
        # One assignment, because another thread must not see the engine without its verifier.
        self._serving = engine, verifier
        if self._results is not None:
            self._results.clear()

    def not_known(self, request: PendingRequest, made: list[PendingSequence]) -> list[PendingSequence]:
        """Return the sequences that the request must compute itself.

        The others have a result that is kept, or wait for the result of another request.
        """
        if self._results is None or request.names is None:
            return made
        own: list[PendingSequence] = []
        try:
            self._look_up(request, made, own)
        except BaseException:
            # The caller does not get to know them, and others may wait for them already.
            self.give_up(own)
            raise
        return own

    def give_up(self, sequences: Iterable[PendingSequence]) -> None:
        """Let others compute sequences whose results they waited for, because their request does not."""
        for sequence in sequences:
            if self._results is None or sequence.name is None:
                continue
            for expected in self._results.give_up(sequence.name):
                self._instead(expected)

    def run(self, batch: Batch) -> None:
        """Run a batch and answer the requests that are complete with it. Raises nothing: requests fail."""
        try:
            self._run(batch)
        # A panic in compiled code is not an Exception.
        except BaseException as error:
            log_failure(logger, "a batch failed", error)
            self.fail(batch)

    def fail(self, batch: Batch, requests: Iterable[PendingRequest] = ()) -> None:
        """Answer the requests of a batch that will not be run, or has failed, with InternalError.

        requests: others that fail with them.
        """
        self.reject([(request, InternalError()) for request in (*(own.request for own in batch), *requests)])
        self.give_up(chain.from_iterable(own.sequences for own in batch))

    def reject(self, failed: Sequence[tuple[PendingRequest, BaseException]]) -> None:
        """Let the event loop set each request's error, unless the request is done. Called in any thread."""
        self._loop.call_soon_threadsafe(_reject, failed)

    def _run(self, batch: Batch) -> None:
        started = time.perf_counter()
        engine, verifier = self._serving
        # Hits belong to the policy before the batch, because another thread may tighten it meanwhile.
        policy = verifier.policy if verifier else None
        prefills = [sequence.prefill for own in batch for sequence in own.sequences]
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
            for own in batch:
                if own.request.future.done():
                    self.give_up(own.sequences)
                else:
                    self.run([own])
            return
        # Counted before the answers leave, so that a client with an answer finds the answer in the metrics.
        # Counting afterwards would be no faster: this thread would hold the interpreter lock all the same.
        self._count(batch, result, started)
        self._deliver(batch, result)
        if verifier and policy:
            verifier.offer(prefills, result, policy)

    def _look_up(
        self, request: PendingRequest, made: list[PendingSequence], own: list[PendingSequence]
    ) -> None:
        """Add the sequences to `own` that the request must compute itself, and answer it if all are known."""
        assert self._results is not None
        answer: RequestResult | None = None
        for sequence in made:
            found = Lookup.UNKNOWN if sequence.name is None else self._results.find(sequence.name, sequence)
            if found is Lookup.UNKNOWN:
                own.append(sequence)
                continue
            is_kept = isinstance(found, RequestResult)
            self._metrics.observe_repeated("kept" if is_kept else "in_flight", len(sequence.prefill.ids))
            if isinstance(found, RequestResult):
                answer = request.add(found, [sequence.place])
        if answer is not None:
            self._resolve([(request, answer)])

    def _count(self, batch: Batch, result: PrefillResult, started: float) -> None:
        """Put a batch into the metrics, and log files that were lost."""
        self._metrics.observe_queue(
            started - own.request.timing.queued_at for own in batch if not own.request.timing.batch_at
        )
        self._metrics.observe_batch(result)
        for length in result.lost_lengths:
            logger.warning(
                "records of %d tokens are no longer used: their file was cut short or cannot be read", length
            )
        counted: list[Outcome] = []
        first = 0
        for request, sequences in batch:
            request.timing.add_batch(started, len(result.outcomes))
            if request.counted:
                counted += result.outcomes[first : first + len(sequences)]
            first += len(sequences)
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
        for request, sequences in batch:
            rows = range(first, first + len(sequences))
            first = rows.stop
            try:
                part = RequestResult.of(result, rows, [len(own.prefill.ids) for own in sequences])
            except BaseException as error:
                self._not_delivered(request, error, failed)
                self.give_up(sequences)
                continue
            found = [(request, part, [own.place for own in sequences])]
            for index, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
                if result.finite[row]:
                    found += self._shared(sequence, part, index)
                else:
                    self._fail_not_finite(sequence, failed)
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
        self, sequence: PendingSequence, part: RequestResult, index: int
    ) -> list[tuple[PendingRequest, RequestResult, list[int]]]:
        """Return each request that waited for a sequence, with the result and the places of the result.

        The result is sequence `index` of `part`. An exact result is kept for later requests.
        """
        if self._results is None or sequence.name is None:
            return []
        try:
            if not self._is_approximate(part, index):
                shared = part.repeatable(index)
                waiters = self._results.settle(sequence.name, shared)
                return [(expected.request, shared, [expected.place]) for expected in waiters]
        except BaseException as error:
            log_failure(logger, "a result was not kept for others", error)
        # Not the one for the other, because their results will be approximate too.
        for expected in self._results.give_up(sequence.name):
            self._instead(expected._replace(name=None))
        return []

    def _not_delivered(
        self, request: PendingRequest, error: BaseException, failed: dict[PendingRequest, AttnCacheError]
    ) -> None:
        # What fails for one request, such as memory for its result, fails for no other.
        log_failure(logger, "a result was not delivered", error)
        failed.setdefault(request, InternalError())

    def _fail_not_finite(
        self, sequence: PendingSequence, failed: dict[PendingRequest, AttnCacheError]
    ) -> None:
        """Fail the request of a sequence whose result is not finite, and those that waited for the result."""
        waiters: list[PendingSequence] = []
        if self._results is not None and sequence.name is not None:
            waiters = self._results.give_up(sequence.name)
        for expected in (sequence, *waiters):
            text = expected.place // len(expected.request.prompt.sequence_plans)
            failed.setdefault(expected.request, NotFinite.of(text))

    def _instead(self, sequence: PendingSequence) -> None:
        """Let a request compute what it expected from another one in vain. Raises nothing: it fails."""
        request = sequence.request
        if request.future.done():
            return
        try:
            for own in self.not_known(request, [sequence]):
                self._compute_again(own)
        except BaseException as error:
            log_failure(logger, "a sequence was not queued again", error)
            self.reject([(request, InternalError())])

    def _is_approximate(self, result: RequestResult, index: int) -> bool:
        key_values = self.engine.key_values
        return (
            result.outcomes[index].is_hit
            or bool(result.blends and result.blends[index])
            or bool(result.cached[index] and key_values and key_values.approximation)
        )

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
