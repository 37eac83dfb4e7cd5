"""Several engine threads: batches that run at once, and requests whose parts are computed side by side."""

import asyncio
import contextlib
import inspect
import itertools
import random
import threading
import time
import weakref
from collections import Counter
from functools import partial

import pytest
from fake_engine import FAILING, NOT_FINITE, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing import (
    LABELLED,
    UNREAD,
    LabelledEngine,
    assert_result_of,
    batching,
    queued,
    requests_of_texts,
    submit,
)
from raw_http import wait_until
from running import until
from verifying import AnyText, verifier_of

from attncache_core import NotFinite
from service.batching.batcher import EngineThreads
from service.batching.request_queue import RequestQueue
from service.errors import InternalError


@pytest.fixture(autouse=True)
def few_tokens_are_divided(monkeypatch):
    monkeypatch.setattr(RequestQueue, "min_part", 1)


class ParallelEngine(FakeEngine):
    """An engine for several threads, which counts the batches that run at once."""

    def __init__(self, threads, before=lambda _: None, **more):
        """before: called with the texts of each batch before the batch is computed."""
        super().__init__(**more)
        self.parallel_runs = threads
        self.before = before
        self.running, self.most_running = 0, 0
        self._lock = threading.Lock()

    def run(self, requests):
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            self.before(["".join(map(chr, request.ids)) for request in requests])
            return super().run(requests)
        finally:
            with self._lock:
                self.running -= 1


async def running(engine, batches):
    """Wait until this number of batches run at once."""
    await until(lambda: engine.running >= batches)


def shortly(_texts):
    time.sleep(random.uniform(0, 0.001))


@settings(max_examples=60)
@given(
    requests=requests_of_texts,
    threads=st.integers(1, 4),
    tokens=st.integers(1, 60),
    sequences=st.integers(1, 10),
)
async def test_every_request_gets_its_own_result_in_order_from_any_threads_and_no_batch_is_over_budget(
    requests, threads, tokens, sequences
):
    engine = ParallelEngine(threads, shortly)
    async with batching(engine, tokens, sequences) as batcher:
        pending = [submit(batcher, texts) for texts in requests]
        for texts, result in zip(requests, await asyncio.gather(*pending), strict=True):
            assert_result_of(texts, result)
        assert batcher.queue.waiting_tokens == 0
    assert engine.most_running <= threads
    computed = sorted(text for batch in engine.batches for text in batch)
    assert computed == sorted(text for texts in requests for text in texts)
    for batch in engine.batches:
        assert len(batch) <= sequences
        assert len(batch) == 1 or sum(map(len, batch)) <= tokens


async def test_few_tokens_of_one_request_are_one_batch(monkeypatch):
    monkeypatch.undo()
    engine = ParallelEngine(2)
    texts = ["x" * (RequestQueue.min_part // 50)] * 50
    async with batching(engine, tokens=10**6) as batcher:
        await submit(batcher, texts)
    assert engine.batches == [texts]


async def test_few_tokens_wait_for_the_batch_that_is_computed(monkeypatch):
    monkeypatch.undo()
    engine = ParallelEngine(2)
    async with batching(engine, tokens=10**6) as batcher:
        engine.may_run.clear()
        first = submit(batcher, ["first"])
        await running(engine, 1)
        few = [submit(batcher, [text]) for text in ("a", "b", "c")]
        await queued(batcher, 3)
        await asyncio.sleep(0.05)
        assert engine.running == 1
        many = submit(batcher, ["x" * 32] * (RequestQueue.min_part // 8))  # guessed as 8 tokens each
        await running(engine, 2)
        engine.may_run.set()
        await asyncio.gather(first, many, *few)
    assert engine.most_running == 2


async def test_texts_of_one_request_are_divided_among_the_free_threads():
    meeting = threading.Barrier(2)
    engine = ParallelEngine(2, lambda _: meeting.wait(timeout=240))
    texts = [f"text {number:02}" for number in range(40)]
    async with batching(engine) as batcher:
        assert_result_of(texts, await submit(batcher, texts))
    assert sorted(engine.batches) == [texts[:20], texts[20:]]


async def test_last_free_thread_takes_everything_that_waits():
    may_end = {text: threading.Event() for text in ("first", "second")}
    engine = ParallelEngine(2, lambda texts: may_end[texts[0]].wait(240) if texts[0] in may_end else 0)
    texts = [f"text {number:02}" for number in range(40)]
    async with batching(engine) as batcher:
        busy = [submit(batcher, [text]) for text in may_end]
        await running(engine, 2)
        waiting = submit(batcher, texts)
        await queued(batcher, 1)
        may_end["first"].set()
        assert_result_of(texts, await waiting)
        may_end["second"].set()
        await asyncio.gather(*busy)
    assert texts in engine.batches


async def test_labels_of_one_text_that_share_a_prefix_stay_in_one_batch():
    engine = LabelledEngine()
    engine.sharing, engine.parallel_runs = True, 4
    async with batching(engine) as batcher:
        await submit(batcher, ["aaaaa", "bbbbb"], prompt=LABELLED)
    assert sorted(engine.batches) == [["aaaaax", "aaaaay", "aaaaaz"], ["bbbbbx", "bbbbby", "bbbbbz"]]


@pytest.mark.parametrize("failure", [FAILING, NOT_FINITE])
@pytest.mark.parametrize("failing_first", [True, False])
async def test_request_that_fails_in_one_thread_gets_no_result_from_another(failure, failing_first):
    meeting, first_done = threading.Barrier(2), threading.Event()

    def ordered(texts):
        if texts != ["next"]:
            meeting.wait(timeout=240)
            if (texts == [failure]) is not failing_first:
                assert first_done.wait(timeout=240)

    engine = ParallelEngine(2, ordered)
    async with batching(engine, sequences=1) as batcher:
        pending = submit(batcher, ["fine", failure])
        await until(lambda: engine.batches)
        await asyncio.sleep(0.01)  # the first part is finished
        first_done.set()
        with pytest.raises(InternalError if failure == FAILING else NotFinite):
            await pending
        assert_result_of(["next"], await submit(batcher, ["next"]))
    assert ["fine"] in engine.batches
    assert [failure] in engine.batches


async def test_rest_of_a_request_cancelled_in_two_threads_is_not_computed():
    engine = ParallelEngine(2)
    async with batching(engine, sequences=1) as batcher:
        engine.may_run.clear()
        gone = submit(batcher, ["first", "second", "third", "fourth"])
        await running(engine, 2)
        gone.cancel()
        engine.may_run.set()
        assert_result_of(["next"], await submit(batcher, ["next"]))
    assert sorted(engine.batches[:2]) == [["first"], ["second"]]
    assert engine.batches[2:] == [["next"]]


async def test_closing_finishes_what_all_threads_have_queued():
    engine = ParallelEngine(3, shortly)
    async with batching(engine, sequences=1) as batcher:
        pending = [submit(batcher, [text, text]) for text in "abcdefgh"]
    for text, result in zip("abcdefgh", pending, strict=True):
        assert_result_of([text, text], await result)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2)])
async def test_as_many_batches_run_at_once_as_the_engine_allows_also_if_it_is_replaced(before, after):
    # So many characters in each text that the queue guesses more than 0 tokens.
    first, second = ParallelEngine(before), ParallelEngine(after)
    async with batching(first) as batcher:
        first.may_run.clear()
        pending = [submit(batcher, [text]) for text in ("a" * 8, "b" * 8, "c" * 8)[:before]]
        await running(first, before)
        waiting = [submit(batcher, [text]) for text in "defgh"]
        await queued(batcher, 5)
        batcher.replace_engine(second, None)
        first.may_run.set()
        await asyncio.gather(*pending, *waiting)
        await until(lambda: not batcher.queue._running)  # a thread that has just answered still counts
        second.may_run.clear()
        texts = [letter * 8 for letter in "mnopq"]
        pending = [submit(batcher, [text]) for text in texts]
        await running(second, after)
        await asyncio.sleep(0.05)
        second.may_run.set()
        for text, result in zip(texts, await asyncio.gather(*pending), strict=True):
            assert_result_of([text], result)
    assert first.most_running == before
    assert second.most_running == after


async def test_nothing_is_verified_while_a_batch_runs_and_by_one_thread_at_a_time():
    engine = ParallelEngine(3, shortly, stored=AnyText())
    verifying = []
    run = engine.run

    def noting(requests):
        if not any(request.reuse for request in requests):
            verifying.append(engine.running)
        return run(requests)

    engine.run = noting
    verifier = verifier_of(engine, UNREAD)
    async with batching(engine, verifier=verifier) as batcher:
        for _ in range(10):
            await asyncio.gather(*(submit(batcher, [text]) for text in "abcde"))
        await until(lambda: not verifier.has_work)
    assert sum(map(len, engine.verified)) == 50
    # A verification begins when no batch runs. A batch may begin during a verification.
    assert set(verifying) == {0}


async def test_tokenising_computing_and_verifying_are_watched_each_by_itself():
    engine, here, found, numbers = FakeEngine(stored=AnyText()), threading.local(), [], itertools.count()

    @contextlib.contextmanager
    def watching():
        here.watch = next(numbers)
        yield
        here.watch = None

    def noting(name, method):
        def noted(*arguments, **more):
            found.append((name(*arguments), getattr(here, "watch", None)))
            return method(*arguments, **more)

        return noted

    def kind(requests):
        return "batch" if any(request.reuse for request in requests) else "verification"

    engine.tokenize = noting(lambda *_: "tokenising", engine.tokenize)
    engine.run = noting(kind, engine.run)
    verifier = verifier_of(engine, UNREAD)
    async with batching(engine, verifier=verifier, watching=watching) as batcher:
        await asyncio.gather(submit(batcher, ["a"]), submit(batcher, ["b"]))
        await until(lambda: not verifier.has_work and not batcher.queue._running)
    assert {name for name, _ in found} == {"tokenising", "batch", "verification"}
    watches = [watch for _, watch in found]
    assert None not in watches
    assert len(set(watches)) == len(watches)


class Fault(BaseException):
    """An error that nobody expects."""


# What a request passes on an engine thread.
FAULTY = ("service/batching/", "service/upkeep/verif", "service/observability/metrics", "fake_engine")
# The loop of a thread and the first call of a turn, which catch what the others raise, the last one of an
# idle turn, and the way of an answer to the event loop.
FAULTLESS = {"_run_turns", "_run_until_empty", "end_idle_work", "_resolve", "reject"}


def test_turns_that_follow_each_other_run_in_one_thread_and_close_runs_what_was_started():
    threads, ran, may_end = EngineThreads(2), [], threading.Event()

    def all_free():
        wait_until(lambda: len(threads._free) == 2)

    for _ in range(5):
        all_free()
        threads.start(lambda: ran.append(threading.current_thread()))
    all_free()
    assert len(ran) == 5
    held = Counter()
    is_held = weakref.ref(held)
    threads.start(partial(id, held))
    del held
    wait_until(lambda: is_held() is None)  # a free thread keeps nothing of its last turn
    assert len(set(ran)) == 1
    for _ in range(2):
        threads.start(may_end.wait)
    for number in range(3):  # no thread is free
        threads.start(lambda number=number: ran.append(number))
    may_end.set()
    threads.close()
    assert sorted(ran[5:]) == [0, 1, 2]


class FaultyCalls:
    """Raises at one call of one function on an engine thread."""

    def __init__(self, function, call=1):
        """function: its qualified name; None: none raises. call: which of its calls, from 1."""
        self._function, self._call = function, call
        self.calls = Counter()
        self.is_over = False  # nothing raises any more

    def __call__(self, frame, event, _argument):
        code = frame.f_code
        if self.is_over or event != "call" or not any(part in code.co_filename for part in FAULTY):
            return
        # Generators are called each time that they go on, also by whoever closes them.
        is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
        on_engine_thread = threading.current_thread().name.startswith("engine")
        # What the fake engine calls itself fails like the call of the engine.
        is_inner = "fake_engine" in code.co_filename == frame.f_back.f_code.co_filename
        if is_generator or is_inner or code.co_name in FAULTLESS or not on_engine_thread:
            return
        self.calls[code.co_qualname] += 1
        if code.co_qualname == self._function and self.calls[self._function] == self._call:
            self.is_over = True
            raise Fault


async def ask_despite(faults, engine, requests, answers):
    """Append the answers to these requests, and to one more after all faults."""
    verifier = verifier_of(engine, UNREAD)
    async with batching(engine, sequences=3, verifier=verifier, result_bytes=2**20) as batcher:
        pending = [submit(batcher, texts) for texts in requests]
        answers += await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 240)
        await until(lambda: not batcher.queue._running and (faults.is_over or not verifier.has_work))
        faults.is_over = True
        answers.append(await asyncio.wait_for(submit(batcher, ["next"]), 240))
        await until(lambda: not verifier.has_work)
    assert (batcher.queue._running, batcher.queue._computing, batcher.queue._idle_work) == (0, 0, 0)
    assert not verifier._verifying.locked()


def test_whatever_raises_on_an_engine_thread_each_request_is_answered_and_the_next_one_served():
    requests = [["a", "same", "hits", "b"], ["same"], ["hits"]]

    def answers_of(faults):
        engine, answers = FakeEngine(stored={"hits"}), []
        threading.setprofile(faults)
        try:
            # At its end, asyncio.run describes the result of what it runs, which takes long for arrays.
            asyncio.run(ask_despite(faults, engine, requests, answers))
        finally:
            threading.setprofile(None)
        return answers

    without_faults = FaultyCalls(None)
    for texts, answer in zip([*requests, ["next"]], answers_of(without_faults), strict=True):
        assert_result_of(texts, answer)
    expected = {"Results.settle", "RequestQueue._take", "BatchRunner._deliver", "LaterVerifier._take"}
    assert expected | {"FakeEngine.tokenize", "FakeEngine.run"} <= set(without_faults.calls)
    for function, count in without_faults.calls.items():
        for call in {1, count}:
            *answers, after = answers_of(FaultyCalls(function, call))
            assert_result_of(["next"], after)
            for texts, answer in zip(requests, answers, strict=True):
                if not isinstance(answer, InternalError):
                    assert_result_of(texts, answer)
