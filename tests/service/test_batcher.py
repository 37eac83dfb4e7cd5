import asyncio
import threading
import time

import pytest
from fake_engine import FAILING, NOT_FINITE, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing import (
    LABELLED,
    LabelledEngine,
    assert_result_of,
    batching,
    held,
    hold,
    queued,
    requests_of_texts,
    submit,
    texts_of_all_kinds,
)
from running import samples

from attncache_core import InvalidInput, NotFinite, Outcome
from attncache_core.checkpoints.template import Template
from attncache_core.text.prompts import Prompt, SequencePlan
from service.batching.sources import Texts
from service.errors import InternalError, QueueFull, ShuttingDown
from service.observability.metrics import Metrics


async def test_oldest_goes_first_and_the_batch_is_filled():
    engine = FakeEngine()
    async with batching(engine, tokens=10) as batcher:
        pending = []
        async with held(engine, batcher):
            for count, texts in enumerate([["aaaa", "bbbb", "cccc"], ["dd"], ["e" * 20], ["ff"]], start=1):
                pending.append(submit(batcher, texts))
                await queued(batcher, count)
        await asyncio.gather(*pending)
    assert engine.batches[1:] == [["aaaa", "bbbb"], ["cccc", "dd"], ["e" * 20], ["ff"]]


@pytest.mark.parametrize(
    ("sharing", "tokens", "sequences", "expected"),
    [
        (False, 22, 100, [["aaaaax", "aaaaay", "aaaaaz"], ["bbbbbx", "bbbbby", "bbbbbz"]]),
        (True, 16, 100, [["aaaaax", "aaaaay", "aaaaaz", "bbbbbx", "bbbbby", "bbbbbz"]]),
        (True, 15, 100, [["aaaaax", "aaaaay", "aaaaaz", "bbbbbx", "bbbbby"], ["bbbbbz"]]),
        (True, 7, 100, [["aaaaax", "aaaaay"], ["aaaaaz"], ["bbbbbx", "bbbbby"], ["bbbbbz"]]),
        (True, 1, 100, [["aaaaax"], ["aaaaay"], ["aaaaaz"], ["bbbbbx"], ["bbbbby"], ["bbbbbz"]]),
        (True, 100, 1, [["aaaaax", "aaaaay", "aaaaaz"], ["bbbbbx", "bbbbby", "bbbbbz"]]),
    ],
)
async def test_tokens_that_sequences_share_count_once_and_sequences_of_one_text_as_one_text(
    sharing, tokens, sequences, expected
):
    engine = LabelledEngine()
    engine.sharing = sharing
    async with batching(engine, tokens, sequences) as batcher:
        await submit(batcher, ["aaaaa", "bbbbb"], prompt=LABELLED)
        assert batcher.queue.waiting_tokens == 0
    assert engine.batches == expected


@settings(max_examples=30)
@given(
    requests=requests_of_texts, tokens=st.integers(1, 60), sequences=st.integers(1, 4), sharing=st.booleans()
)
async def test_every_text_gets_the_results_of_all_its_labels_however_batches_are_cut(
    requests, tokens, sequences, sharing
):
    engine = LabelledEngine()
    engine.sharing = sharing
    async with batching(engine, tokens, sequences) as batcher:
        async with held(engine, batcher):
            pending = [submit(batcher, texts, prompt=LABELLED) for texts in requests]
            await queued(batcher, len(requests))
        for texts, result in zip(requests, await asyncio.gather(*pending), strict=True):
            assert_result_of([text + end for text in texts for end in "xyz"], result)
        assert batcher.queue.waiting_tokens == 0
    for batch in engine.batches[1:]:
        prefixes = {text[: end + 1] for text in batch for end in range(len(text))}
        computed = len(prefixes) if sharing else sum(map(len, batch))
        assert computed <= tokens or len(batch) == 1


async def test_request_whose_prefixes_are_shared_reuses_nothing():
    engine = FakeEngine(stored={"aa"})
    async with batching(engine) as batcher:
        assert (await submit(batcher, ["aa"])).outcomes == (Outcome.HIT,)
        engine.sharing = True
        assert (await submit(batcher, ["aa"])).outcomes == (Outcome.NOT_SEARCHED,)


async def test_requests_of_one_batch_choose_reuse_separately():
    engine = FakeEngine(stored={"a"})
    async with batching(engine) as batcher:
        async with held(engine, batcher):
            on, off = submit(batcher, ["a", "b"]), submit(batcher, ["a", "b"], reuse=False)
            await queued(batcher, 2)
        assert (await on).outcomes == (Outcome.HIT, Outcome.MISS)
        assert (await off).outcomes == (Outcome.NOT_SEARCHED, Outcome.NOT_SEARCHED)
    assert len(engine.batches) == 2


async def test_cancelled_request_is_never_computed_and_makes_room_for_the_next_at_once():
    engine = FakeEngine()
    async with batching(engine, queue=3) as batcher:
        async with held(engine, batcher):
            gone, stays = submit(batcher, ["gone", "gone too"]), submit(batcher, ["stays"])
            await queued(batcher, 2)
            gone.cancel()
            await asyncio.sleep(0)  # lets the event loop call the batcher's callback
            third = submit(batcher, ["third", "and more"])
        assert_result_of(["stays"], await stays)
        assert_result_of(["third", "and more"], await third)
    assert "gone" not in str(engine.batches)


async def test_nothing_is_counted_of_a_request_that_ends_while_it_is_tokenised():
    class Slow(FakeEngine):
        """Its tokenizer waits."""

        def tokenize(self, *arguments):
            made = super().tokenize(*arguments)
            tokenizing.release()
            may_end.wait(240)
            return made

    tokenizing, may_end, metrics = threading.Semaphore(0), threading.Event(), Metrics()
    async with batching(Slow(), metrics=metrics, result_bytes=10**6) as batcher:
        may_end.set()
        await submit(batcher, ["known", "also"])
        tokenizing.acquire()
        may_end.clear()
        before = samples(metrics.render().decode())
        gone = submit(batcher, ["known", "also", "more"])
        await asyncio.to_thread(tokenizing.acquire)
        gone.cancel()
        may_end.set()
    after = samples(metrics.render().decode())
    assert not {series for series in after if "repeated" in str(series) and after[series] != before[series]}


async def test_full_queue_refuses_at_once_and_serves_what_it_has():
    engine = FakeEngine()
    async with batching(engine, queue=4) as batcher:
        async with held(engine, batcher):
            waiting = submit(batcher, ["a", "b", "c"])
            with pytest.raises(QueueFull) as refused:
                submit(batcher, ["d", "e"])
            fits = submit(batcher, ["f"])
        assert refused.value.retry_after_seconds >= 1
        assert_result_of(["a", "b", "c"], await waiting)
        assert_result_of(["f"], await fits)
        assert_result_of(["g", "h", "i", "j"], await submit(batcher, ["g", "h", "i", "j"]))


class Panic(BaseException):
    """A panic of compiled code, which is not an Exception."""


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, Panic])
async def test_exception_of_the_engine_fails_only_the_request_that_causes_the_exception(kind):
    engine = FakeEngine(failure=kind)
    async with batching(engine, sequences=3) as batcher:
        busy = await hold(engine, batcher)
        pending = [submit(batcher, [text]) for text in ("before it", FAILING, "with it", "after it")]
        await queued(batcher, 4)
        engine.may_run.set()
        before, failing, beside, after = await asyncio.gather(*pending, return_exceptions=True)
        assert isinstance(failing, InternalError)
        for result, text in ((before, "before it"), (beside, "with it"), (after, "after it")):
            assert_result_of([text], result)
        assert_result_of(["busy"], await busy)
    assert engine.batches[1:] == [
        ["before it", FAILING, "with it"],
        ["before it"],
        [FAILING],
        ["with it"],
        ["after it"],
    ]


async def test_requests_of_a_failed_batch_are_counted_once():
    engine, metrics = FakeEngine(stored={"hit"}), Metrics()
    async with batching(engine, metrics=metrics) as batcher:
        async with held(engine, batcher):
            pending = [submit(batcher, texts) for texts in (["hit", "miss"], ["miss", FAILING], ["hit"])]
            await queued(batcher, 3)
        await asyncio.gather(*pending, return_exceptions=True)
    shown = metrics.render().decode()
    assert 'attncache_sequences_total{outcome="hit"} 2.0' in shown
    assert 'attncache_sequences_total{outcome="miss"} 2.0' in shown  # one of the two is "busy"
    assert "attncache_queue_seconds_count 3.0" in shown
    assert "attncache_batch_sequences_count 3.0" in shown


async def test_cancelled_request_is_not_run_again():
    engine = FakeEngine()
    async with batching(engine) as batcher:
        await hold(engine, batcher)
        pending = [submit(batcher, [text]) for text in (FAILING, "gone", "stays")]
        await queued(batcher, 3)

        # Cancels the request while its batch is running.
        def give_up():
            batcher._loop.call_soon_threadsafe(pending[1].cancel)
            while not pending[1].done():
                time.sleep(0.0005)

        engine.before_failing = give_up
        engine.may_run.set()
        failing, _, stays = await asyncio.gather(*pending, return_exceptions=True)
    assert isinstance(failing, InternalError)
    assert_result_of(["stays"], stays)
    assert engine.batches[1:] == [[FAILING, "gone", "stays"], [FAILING], ["stays"]]


@given(
    requests=st.lists(st.lists(texts_of_all_kinds, min_size=1, max_size=5), min_size=1, max_size=9),
    tokens=st.integers(1, 200),
    sequences=st.integers(1, 10),
)
async def test_requests_get_their_own_result_or_their_own_error_whatever_they_were_batched_with(
    requests, tokens, sequences
):
    engine = FakeEngine()
    async with batching(engine, tokens, sequences) as batcher:
        async with held(engine, batcher):
            pending = [submit(batcher, texts) for texts in requests]
            await queued(batcher, len(requests))
        answers = await asyncio.gather(*pending, return_exceptions=True)
    for texts, answer in zip(requests, answers, strict=True):
        if isinstance(answer, NotFinite):
            assert answer.field == f"inputs[{texts.index(NOT_FINITE)}]"
        elif isinstance(answer, InternalError):
            assert FAILING in texts
        else:
            assert not {FAILING, NOT_FINITE} & set(texts)
            assert_result_of(texts, answer)


async def test_request_after_the_end_is_refused():
    async with batching(FakeEngine()) as batcher:
        pass
    with pytest.raises(ShuttingDown) as refused:
        submit(batcher, ["late"])
    assert refused.value.retry_after_seconds >= 1


async def test_request_that_comes_while_the_end_begins_is_answered():
    class Ending(Texts):
        @property
        def characters(self):
            # Read while the request is queued. Long enough to end the threads of a batcher without requests.
            if closing.ident is None:
                closing.start()
            closing.join(0.2)
            return super().characters

    async with batching(FakeEngine()) as batcher:
        closing = threading.Thread(target=batcher.close)
        assert_result_of(["a"], await batcher.submit(Ending(["a"], truncate=True), reuse=True))
        await asyncio.to_thread(closing.join)


@pytest.mark.parametrize("plans", [1, 3])
async def test_text_without_a_token_is_refused_and_named(plans):
    class Forgetting(FakeEngine):
        """Its tokenizer knows no token of the text "unknown"."""

        def tokenize(self, texts, *arguments):
            made = super().tokenize([text for text in texts for _ in range(plans)], *arguments)
            return [[] if "".join(map(chr, ids)) == "unknown" else ids for ids in made]

    engine = Forgetting()
    prompt = Prompt(Template(), (SequencePlan(0),) * plans)
    async with batching(engine) as batcher:
        with pytest.raises(InvalidInput, match="no token that the model knows") as refused:
            await submit(batcher, ["known", "unknown"], prompt=prompt)
        assert refused.value.field == "inputs[1]"
        following = await submit(batcher, ["next"], prompt=prompt)
        assert_result_of(["next"] * plans, following)
    assert all("unknown" not in batch for batch in engine.batches)
