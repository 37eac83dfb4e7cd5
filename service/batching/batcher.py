"""The way of a request through the threads: many small requests become few full batches.

    submit -> RequestQueue -> [engine threads: tokenise, BatchRunner] -> result of each request

There are as many engine threads as batches that the engine can run at once without sharing a pool of threads:
one per processor if compiled code runs all layers, else one (PrefillEngine.parallel_runs). An engine thread
never waits for a batch to fill: when it is free, it takes sequences that wait, flow by flow, up to a budget,
and leaves a part of them to other threads that are free. It tokenises what it takes. The sequences of one
request may be in several batches. A request crosses threads only twice (event loop to engine to event
loop), because each crossing costs as much time as a small matrix product. When no request waits and no batch
runs, an engine thread verifies some of the hits that were served (service/upkeep/verifier).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue

from attncache_core import InvalidInput, PrefillEngine, PrefillResult
from attncache_core.engine.request import PrefillPart
from attncache_core.heads.comparator import Measure
from attncache_core.text.labels import LabelTokens
from attncache_core.text.prompts import Prompt
from service.batching.admission import Limits
from service.batching.batch_runner import BatchRunner
from service.batching.pending_request import PendingRequest, Slice
from service.batching.request_queue import RequestQueue
from service.batching.results import Results
from service.batching.sources import Source, Texts
from service.errors import InternalError, ShuttingDown, log_failure
from service.observability.finished import Timing
from service.observability.metrics import Metrics
from service.upkeep.verifying import LaterVerifier

logger = logging.getLogger(__name__)

_Turn = Callable[[], object]


class Batcher:
    """Owns the queue, the results that are kept, and the threads that run the engine.

    A batcher is created on the event loop that its futures belong to. `submit` is called on that loop; the
    rest runs in the threads.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        limits: Limits,
        metrics: Metrics,
        verifier: LaterVerifier | None = None,
        *,
        result_bytes: int = 0,
        watching: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """result_bytes: most bytes of results that are kept; 0 computes equal texts again.

        watching: what surrounds each batch, the tokenising of each part of a request, and each verification,
        such as Watchdog.watching.
        """
        self._watching = watching
        self._is_closed = False
        self._closing = threading.Lock()  # held while a request is queued, so that it has a thread
        self._limits = limits
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.queue = RequestQueue(
            limits,
            self._tokenize,
            # The queue comes first, because the runner asks it what comes next.
            lambda slices: self._runner.give_up(slices),
            lambda batch, requests: self._runner.fail(batch, requests),
            engine.parallel_runs,
        )
        self._results: Results[Slice] | None = Results(result_bytes) if result_bytes else None
        self._runner = BatchRunner(
            engine, verifier, self.queue, metrics, self._loop, self._results, self._compute_again
        )
        self._threads = EngineThreads(engine.parallel_runs)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the results that are kept."""
        return self._results.bytes if self._results else 0

    @property
    def verifier(self) -> LaterVerifier | None:
        """The verifier of the engine's hits; None if hits are not verified."""
        return self._runner.verifier

    def submit(
        self,
        source: Source,
        *,
        reuse: bool,
        flow: Sequence[Hashable] = (),
        counted: bool = True,
        prompt: Prompt | None = None,
        labels: LabelTokens | None = None,
        reads: Measure | None = Measure.COSINE,
        salt: bytes = b"",
        repeats: bool = True,
        timing: Timing | None = None,
        answered: Callable[[Sequence[PrefillPart]], None] | None = None,
        seconds: float = math.inf,
    ) -> asyncio.Future[PrefillResult]:
        """Queue the texts of a source and return a future of their result.

        prompt: None for the checkpoint's prompt. labels: the labels to score, if `prompt` is the prompt of
        labels. reads: what the outputs are read for, as PrefillEngine.may_reuse. reuse: reuse results, stored
        keys and values of this salt, and attention maps if the engine allows it for this prompt. flow: who
        sends the request; flows take turns (see FairOrder). counted: whether the metrics of outcomes and of
        repeated sequences count the sequences. repeats: whether results of equal texts may be reused;
        otherwise the engine computes all texts, and stores their keys and values. timing: is told
        what happens to the request, also if the future fails. answered: called on the event loop with the
        token ids of a request that was answered and may reuse attention maps. seconds: that the request may
        take. Cancelling the future removes from the queue what still waits. Raises QueueFull at once if the
        texts do not fit into the queue, or would be computed too late, and
        ShuttingDown after `close` has begun. The future fails with InputTooLong, NotFinite (naming a text) or
        InternalError.
        """
        engine = self._runner.engine
        used = prompt or engine.tokenizer.default_prompt
        maps = reuse and engine.may_reuse(used, labels, reads)
        shares = engine.shares_prefixes(maps)
        # Where prefixes are shared, no maps are reused, also if another engine computes the request later.
        maps = maps and not shares
        future: asyncio.Future[PrefillResult] = self._loop.create_future()
        request = PendingRequest(
            source,
            used,
            maps,
            counted,
            future,
            flow,
            shares,
            salt if reuse and shares else None,
            engine.may_blend(used, labels, reads),
            salt if reuse and repeats and self._results is not None else None,
            timing or Timing(),
            answered=answered if maps else None,
            longest=engine.tokenizer.max_tokens,
            seconds=seconds,
        )
        # A request whose token ids are wanted is tokenised.
        if request.names_salt is not None and request.answered is None and isinstance(source, Texts):
            request.digest = source.digest(used, salt)
        request.timing.queued_at = time.perf_counter()
        with self._closing:
            if self._is_closed:
                raise ShuttingDown("the server is ending")
            if self._answer_at_once(request):
                return future
            self._start(self.queue.add(request))
        future.add_done_callback(lambda _: self._finished(request))
        return future

    def guess_tokens(self, source: Source) -> int:
        """Return about how many tokens the texts of a source have, before they are tokenised."""
        longest = self._runner.engine.tokenizer.max_tokens
        return min(round(source.characters / self.queue.characters_per_token), source.count * longest)

    def replace_engine(self, engine: PrefillEngine, verifier: LaterVerifier | None) -> None:
        """Use another engine of the same model from the next batch on, and verify its hits.

        Requests in the queue stay there, because both engines have the same tokens.
        """
        with self._closing:
            if not self._is_closed:
                self._threads.grow(engine.parallel_runs)
        self._runner.replace(engine, verifier)
        self.queue.allow_threads(engine.parallel_runs)

    def close(self) -> None:
        """Finish all submitted requests, then end the threads. Blocks, but not for pending verification."""
        with self._closing:
            self._is_closed = True
        if self.verifier:
            self.verifier.stop()
        self._threads.close()
        if self.verifier:
            self.verifier.close()

    def _start(self, threads: int) -> None:
        for _ in range(threads):
            self._threads.start(self._run_until_empty)

    # In an engine thread.

    def _tokenize(self, request: PendingRequest) -> Slice | None:
        """Tokenise the next part of a request. Returns the sequences that it must compute itself.

        Returns None if that fails, and the request with it, or if the request has ended meanwhile.
        """
        started = time.perf_counter()
        try:
            with self._watching():
                made = request.next_part(self._runner.engine, self._limits.request_tokens)
            seconds = time.perf_counter() - started
            timing = request.timing
            timing.tokenized_at = timing.tokenized_at or started
            timing.tokenize_seconds += seconds
            self._metrics.tokenize_seconds.observe(seconds)
            # After the end of a request, nothing more is counted for it, because nobody would be charged.
            return None if request.future.done() else self._runner.not_known(made)
        # A panic in a compiled tokenizer is not an Exception, and the client must be answered all the same.
        except BaseException as error:
            if not isinstance(error, InvalidInput):
                log_failure(logger, "tokenising failed", error)
                error = InternalError()
            self._runner.reject([(request, error)])
            return None

    def _compute_again(self, piece: Slice) -> None:
        """Compute what its request expected from another request."""
        self._start(self.queue.add_again(piece))

    def _run_until_empty(self) -> None:
        try:
            self._run_batches()
        except BaseException as error:
            self._fail_turn(error)
        else:
            self._verify_later()

    def _fail_turn(self, error: BaseException) -> None:
        log_failure(logger, "the turn of an engine thread failed", error)
        self._start(self.queue.fail_turn())

    def _run_batches(self) -> None:
        # Closed at once if this raises: the batch would count as computed, and keep others waiting.
        with contextlib.closing(self.queue.batches()) as batches:
            for batch in batches:
                try:
                    with self._watching():
                        self._start(self.queue.start_more())
                        self._runner.run(batch)
                except BaseException:
                    self._runner.fail(batch)
                    raise
                if (late := self.queue.late()) is not None:
                    self._runner.reject([late])
                verifier = self.verifier
                if verifier and verifier.is_overdue:
                    with self._watching():
                        verifier.verify_some()

    def _verify_later(self) -> None:
        verifier = self.verifier
        if verifier and verifier.has_work:
            # Verification starts from the event loop, behind the answers there, so that answers go first.
            turn = partial(self._verify_until_requests_wait, verifier)
            self._loop.call_soon_threadsafe(self._loop.call_soon, self._threads.start, turn)

    def _verify_until_requests_wait(self, verifier: LaterVerifier) -> None:
        # If another engine thread runs, the end of its turn starts verification again.
        if not self.queue.begin_idle_turn():
            return
        try:
            while verifier.has_work and self.queue.is_idle:
                with self._watching():
                    verifier.verify_some()
        finally:
            self.queue.end_idle_work()
            self._run_until_empty()

    # On the event loop.

    def _answer_at_once(self, request: PendingRequest) -> bool:
        """Answer a request if the result of an equal one is kept. It is neither tokenised nor queued."""
        if self._results is None or request.digest is None:
            return False
        kept = self._results.kept(request.digest)
        if kept is None:
            return False
        tokens = kept.all_asked_tokens
        request.timing.tokens += tokens
        request.timing.computed_at = time.perf_counter()
        if request.counted:
            self._metrics.observe_repeated("kept", tokens, len(kept))
        request.future.set_result(kept)
        return True

    def _finished(self, request: PendingRequest) -> None:
        """Drop what is not computed yet of a request that has its result, or has failed, or is cancelled."""
        self._runner.give_up(self.queue.withdraw(request))
        future = request.future
        if future.cancelled() or future.exception() is not None:
            return
        if request.answered is not None:
            request.answered(request.parts)
        result = future.result()
        # Kept from the second time on, because most texts do not come again. What others share is exact.
        if self._results is not None and request.digest is not None and result.repeated == len(result):
            self._results.settle({request.digest: result})


class EngineThreads:
    """Threads that run turns, one after the other.

    ThreadPoolExecutor makes a future of each turn: a tenth of what a request costs the event loop. Threads do
    not wait at one queue, because a thread that gets something from a queue wakes the next one for nothing,
    and both then compete for the interpreter lock.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._turns: deque[_Turn | None] = deque()  # for which no thread was free; None ends a thread
        self._free: list[SimpleQueue[_Turn | None]] = []  # of each free thread, where it waits for a turn
        self._threads: list[threading.Thread] = []
        self.grow(count)

    def grow(self, count: int) -> None:
        """Have at least this number of threads."""
        for number in range(len(self._threads), count):
            self._threads.append(
                threading.Thread(target=self._run_turns, name=f"engine_{number}", daemon=True)
            )
            self._threads[-1].start()

    def start(self, turn: _Turn | None) -> None:
        """Let a free thread run a turn. After `close` has begun, the turn may not be run."""
        with self._lock:
            if not self._free:
                self._turns.append(turn)
                return
            free = self._free.pop()  # the last one, whose data are in the processor's cache
        free.put(turn)

    def close(self) -> None:
        """Run the turns that were started, and end the threads. Blocks."""
        for _ in self._threads:
            self.start(None)
        for thread in self._threads:
            thread.join()

    def _run_turns(self) -> None:
        waiting: SimpleQueue[_Turn | None] = SimpleQueue()
        while True:
            with self._lock:
                if self._turns:
                    waiting.put(self._turns.popleft())
                else:
                    self._free.append(waiting)
            turn = waiting.get()
            if turn is None:
                return
            try:
                turn()
            except BaseException as error:
                log_failure(logger, "a turn of an engine thread failed", error)
            del turn  # while the thread waits, it must not keep an engine in memory
