"""The way of a request through the threads: many small requests become few full batches.

    submit -> [tokenize threads] -> RequestQueue -> [engine threads] -> BatchRunner -> result of each request

There are as many engine threads as batches that the engine can run at once without sharing a pool of threads:
one per processor if compiled code runs all layers, else one (PrefillEngine.parallel_runs). An engine thread
never waits for a batch to fill: when it is free, it takes sequences that wait, oldest first, up to a budget,
and leaves a part of them to other threads that are free. The sequences of one request may be in several
batches. A request crosses threads only three times (event loop to tokenizer to engine to event loop), because
each crossing costs as much time as a small matrix product. When no request waits and no batch runs, an engine
thread verifies some of the hits that were served (service/upkeep/verifier).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from attncache_core import InvalidInput, PrefillEngine
from attncache_core.text.labels import LabelTokens
from attncache_core.text.prompts import Prompt
from service.batching.batch_runner import BatchRunner
from service.batching.pending_request import PendingRequest, RequestResult
from service.batching.request_queue import Limits, RequestQueue
from service.batching.sources import Source
from service.errors import InternalError, log_failure
from service.observability.metrics import Metrics
from service.upkeep.verifier import Verifier

logger = logging.getLogger(__name__)

# Two threads, so that a request with long texts does not delay a request with short ones.
_TOKENIZE_THREADS = 2


class Batcher:
    """Owns the queue, the tokenize threads and the threads that run the engine.

    A batcher is created on the event loop that its futures belong to. `submit` is called on that loop; the
    rest runs in the threads.
    """

    def __init__(
        self, engine: PrefillEngine, limits: Limits, metrics: Metrics, verifier: Verifier | None = None
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._queue = RequestQueue(limits, engine.parallel_runs)
        self._runner = BatchRunner(engine, verifier, self._queue, metrics, self._loop)
        self._tokenize_threads = ThreadPoolExecutor(_TOKENIZE_THREADS, thread_name_prefix="tokenize")
        # The last pool runs new turns; the others finish their turns.
        self._engine_pools = [_engine_pool(engine.parallel_runs)]

    @property
    def waiting_sequences(self) -> int:
        """The number of sequences that wait for the engine."""
        return self._queue.waiting_sequences

    @property
    def waiting_requests(self) -> int:
        """The number of tokenised requests that wait for the engine."""
        return len(self._queue)

    @property
    def verifier(self) -> Verifier | None:
        """The verifier of the engine's hits; None if hits are not verified."""
        return self._runner.verifier

    def submit(
        self,
        source: Source,
        *,
        reuse: bool,
        counted: bool = True,
        prompt: Prompt | None = None,
        labels: LabelTokens | None = None,
        salt: bytes = b"",
    ) -> asyncio.Future[RequestResult]:
        """Queue the texts of a source and return a future of their result.

        prompt: None for the checkpoint's prompt. labels: the labels to score, if `prompt` is the prompt of
        labels. reuse: reuse stored keys and values of this salt, and attention maps if the engine allows it
        for this prompt. counted: whether the metric of outcomes counts the sequences. Cancelling the future
        removes from the queue what still waits. Raises QueueFull at once if the texts do not fit into the
        queue. The future fails with InputTooLong, NotFinite (naming a text) or InternalError.
        """
        engine = self._runner.engine
        own = prompt or engine.default_prompt
        maps = reuse and engine.may_reuse(own, labels)
        shares = engine.shares_prefixes(maps)
        # Where prefixes are shared, no maps are reused, also if another engine computes the request later.
        maps = maps and not shares
        future: asyncio.Future[RequestResult] = self._loop.create_future()
        stored = salt if reuse and shares else None
        request = PendingRequest(source, own, maps, counted, future, shares, stored)
        self._queue.admit(request.count)
        request.future.add_done_callback(lambda _: self._queue.withdraw(request))
        self._tokenize_threads.submit(self._tokenize, request)
        return request.future

    def replace_engine(self, engine: PrefillEngine, verifier: Verifier | None) -> None:
        """Use another engine of the same model from the next batch on, and verify its hits.

        Requests in the queue stay there, because both engines have the same tokens.
        """
        if engine.parallel_runs > self._runner.engine.parallel_runs:
            self._engine_pools.append(_engine_pool(engine.parallel_runs))
        self._runner.replace(engine, verifier)
        self._queue.allow_threads(engine.parallel_runs)

    def close(self) -> None:
        """Finish all submitted requests, then end the threads. Blocks, but not for pending verification."""
        if self.verifier:
            self.verifier.stop()
        self._tokenize_threads.shutdown()
        for pool in self._engine_pools:
            pool.shutdown()
        if self.verifier:
            self.verifier.close()

    # In a tokenize thread.

    def _tokenize(self, request: PendingRequest) -> None:
        started = time.perf_counter()
        try:
            if not request.future.done():
                request.tokenize(self._runner.engine, self._limits.request_tokens)
        # A panic in a compiled tokenizer is not an Exception, and the client must be answered all the same.
        except BaseException as error:
            self._queue.release(request)
            if not isinstance(error, InvalidInput):
                log_failure(logger, "tokenising failed", error)
                error = InternalError()
            self._runner.reject([(request, error)])
            return
        request.queued_at = time.perf_counter()
        self._metrics.observe_tokenize(request.queued_at - started)
        for _ in range(self._queue.add(request)):
            self._engine_pools[-1].submit(self._run_until_empty)

    # In an engine thread.

    def _run_until_empty(self) -> None:
        for shares in self._queue.batches():
            self._runner.run(shares)
            verifier = self.verifier
            if verifier and verifier.is_overdue:
                verifier.verify_some()
        verifier = self.verifier
        if verifier and verifier.has_work:
            # Verification starts from the event loop, behind the answers there, so that answers go first.
            verify = partial(self._start_verifying, verifier)
            self._loop.call_soon_threadsafe(self._loop.call_soon, verify)

    def _verify_until_requests_wait(self, verifier: Verifier) -> None:
        # If another engine thread runs, the end of its turn starts verification again.
        if self._queue.begin_idle_turn():
            while verifier.has_work and self._queue.is_idle:
                verifier.verify_some()
            self._queue.end_idle_work()
            self._run_until_empty()

    # On the event loop.

    def _start_verifying(self, verifier: Verifier) -> None:
        # After `close`, the thread accepts no work, and no hit has to be verified any more.
        with contextlib.suppress(RuntimeError):
            self._engine_pools[-1].submit(self._verify_until_requests_wait, verifier)


def _engine_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="engine")
