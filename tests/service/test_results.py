"""Results of equal texts: computed once, kept up to a number of bytes, and never shared across salts."""

import asyncio
import random
import threading
import time
from contextlib import asynccontextmanager
from unittest import mock

import numpy as np
import pytest
import queueing
from core_decoders import write_llama
from fake_engine import FAILING, NOT_FINITE, FakeEngine, embedding_of, serving, texts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing import LABELLED, LabelledEngine, assert_result_of, hold

from attncache_core import InputTooLong, NotFinite, Outcome, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.engine.request import PrefillBatch, PrefillPart
from attncache_core.text.prompts import Prompt, SequencePlan, Target
from service.batching.admission import Limits
from service.batching.batcher import Batcher
from service.batching.request_queue import RequestQueue
from service.batching.results import RequestResult, Results, joined
from service.batching.sources import Texts, TokenSequences
from service.errors import InternalError, QueueFull, ShuttingDown
from service.observability.metrics import Metrics

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def batching(engine, sequences=100, **more):
    """Yield a batcher that keeps results. At the end, assert that nobody computes or waits any more."""
    more = {"result_bytes": 2**20, **more}
    async with queueing.batching(engine, sequences=sequences, **more) as batcher:
        yield batcher
    await asyncio.sleep(0)  # lets the event loop call the batcher's callbacks
    assert not batcher._results._computing


def submit(batcher, *texts, salt=b"", truncate=True, **more):
    return batcher.submit(Texts(texts, truncate), **{"reuse": True, "salt": salt, **more})


def result_of(number, size=8):
    return RequestResult(np.full((1, size), number, np.float32), (Outcome.MISS,), 3, 0)


async def test_text_that_was_computed_is_not_computed_again():
    engine = FakeEngine()
    async with batching(engine) as batcher:
        first = await submit(batcher, "a", "bb")
        second = await submit(batcher, "bb", "ccc", "a")
    assert_result_of(["a", "bb"], first)
    assert_result_of(["bb", "ccc", "a"], second)
    assert engine.batches == [["a", "bb"], ["ccc"]]
    assert (first.repeated, second.repeated, second.asked_tokens) == (0, 2, 6)


async def test_request_of_kept_texts_is_answered_while_the_engine_is_busy():
    engine = FakeEngine()
    async with batching(engine) as batcher:
        first = await submit(batcher, "a", "bb")
        busy = await hold(engine, batcher)
        kept = submit(batcher, "bb", "a", "bb")
        assert kept.done()
        assert_result_of(["bb", "a", "bb"], kept.result())
        partly = submit(batcher, "a", "new")
        await asyncio.sleep(0.01)
        assert not partly.done()
        engine.may_run.set()
        assert_result_of(["a", "new"], await partly)
        await busy
    assert first.repeated == 0
    assert engine.batches == [["a", "bb"], ["busy"], ["new"]]


@pytest.mark.parametrize("begun", [False, True])
async def test_text_whose_client_left_is_computed_for_the_others_that_wait(begun):
    engine = FakeEngine()
    async with batching(engine, sequences=1) as batcher:
        engine.may_run.clear()
        # A batch has room for one text: the second text is tokenised with the first one, and waits.
        busy = [] if begun else [submit(batcher, "busy")]
        gone = submit(batcher, "first", "same")
        await asyncio.to_thread(engine.runs.acquire)
        others = [submit(batcher, "same", "same") for _ in range(3)]
        gone.cancel()
        engine.may_run.set()
        for result in await asyncio.gather(*others):
            assert_result_of(["same", "same"], result)
        await asyncio.gather(*busy)
    assert sum(batch.count("same") for batch in engine.batches) == 1


async def test_texts_of_a_request_that_was_refused_are_computed_for_others():
    engine = FakeEngine()
    async with batching(engine, queue=1) as batcher:
        await submit(batcher, "kept")
        busy = await hold(engine, batcher)
        with pytest.raises(QueueFull):
            submit(batcher, "kept", "same", "two")
        waiting = submit(batcher, "same")
        engine.may_run.set()
        assert_result_of(["same"], await asyncio.wait_for(waiting, timeout=10))
        await busy


async def test_request_that_waits_when_the_server_ends_is_answered_or_refused():
    engine = FakeEngine()
    async with batching(engine) as batcher:
        busy = await hold(engine, batcher)
        gone, waiting = submit(batcher, "same"), submit(batcher, "same")
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        while not batcher._is_closed:
            await asyncio.sleep(0.001)
        gone.cancel()
        with pytest.raises(ShuttingDown):
            await asyncio.wait_for(waiting, timeout=10)
        engine.may_run.set()
        await asyncio.gather(busy, closing)


async def test_errors_name_the_text_among_all_texts_of_the_request():
    engine = FakeEngine()
    limits = Limits(1000, 100, 1000, request_tokens=100)
    batcher = Batcher(engine, limits, Metrics(), result_bytes=2**20)
    await submit(batcher, "a" * 40)
    await submit(batcher, "b" * 40)
    for texts, truncate, error, field in [
        (("a" * 40, "fine", "x" * 65), False, InputTooLong, "inputs[2]"),
        (("a" * 40, "fine", NOT_FINITE), True, NotFinite, "inputs[2]"),
        (("a" * 40, "b" * 40, "c" * 21), True, InputTooLong, "inputs"),
        (("a" * 40, "b" * 40, "a" * 40), True, InputTooLong, "inputs"),
    ]:
        await submit(batcher, "a" * 40, truncate=truncate)
        with pytest.raises(error) as refused:
            await submit(batcher, *texts, truncate=truncate)
        assert refused.value.field == field
    await asyncio.to_thread(batcher.close)


@pytest.mark.parametrize(("failing", "error"), [(FAILING, InternalError), (NOT_FINITE, NotFinite)])
async def test_failure_reaches_all_that_wait_and_is_not_kept(failing, error):
    engine = FakeEngine()
    async with batching(engine) as batcher:
        busy = await hold(engine, batcher)
        pending = [submit(batcher, "fine", failing) for _ in range(3)]
        engine.may_run.set()
        for result in pending:
            with pytest.raises(error):
                await result
        await busy
        computed = sum(batch.count(failing) for batch in engine.batches)
        assert computed == 1 or error is InternalError
        assert_result_of(["fine"], await submit(batcher, "fine"))
        with pytest.raises(error):
            await submit(batcher, failing)


async def test_salts_share_nothing_and_reuse_off_neither_asks_nor_keeps():
    engine = FakeEngine()
    async with batching(engine) as batcher:
        for salt in (b"", b"x", b"y", b"x"):
            assert_result_of(["a"], await submit(batcher, "a", salt=salt))
        assert engine.batches == [["a"]] * 3
        assert (await submit(batcher, "a", reuse=False)).repeated == 0
        await submit(batcher, "new", reuse=False)
        assert (await submit(batcher, "new")).repeated == 0


async def test_approximate_results_are_not_kept():
    engine = FakeEngine(stored={"hits"}, damage=0.1)
    async with batching(engine) as batcher:
        for _ in range(3):
            result = await submit(batcher, "hits", "full")
            assert (result.hits, result.outcomes[1]) == (1, Outcome.MISS)
    assert [batch.count("hits") for batch in engine.batches] == [1, 1, 1]
    assert sum(batch.count("full") for batch in engine.batches) == 1


async def test_sequences_of_labels_are_kept_by_their_plans():
    engine = LabelledEngine()
    async with batching(engine) as batcher:
        first = await submit(batcher, "aa", "b", prompt=LABELLED)
        again = await submit(batcher, "b", "aa", prompt=LABELLED)
    np.testing.assert_array_equal(again.outputs, first.outputs[[3, 4, 5, 0, 1, 2]])
    assert again.repeated == 6
    assert len(engine.batches) == 1


async def test_token_ids_of_repeated_texts_are_told_as_those_of_computed_ones():
    told = []
    async with batching(FakeEngine()) as batcher:
        for texts in (["a", "bb"], ["bb", "a"], ["ccc", "a", "ccc"]):
            await submit(batcher, *texts, answered=told.append)
            await asyncio.sleep(0)
    found = [sorted(text for part in parts for text in texts_of(PrefillBatch([part]))) for parts in told]
    assert found == [["a", "bb"], ["a", "bb"], ["a", "ccc", "ccc"]]


async def test_headers_and_metrics_tell_what_was_repeated():
    async with serving(FakeEngine(), result_memory_bytes=2**20) as client:
        await client.post("/embed", json={"inputs": ["a", "bb"]})
        response = await client.post("/embed", json={"inputs": ["bb", "ccc", "a"]})
        off = await client.post("/embed", json={"inputs": "a"}, headers={"X-AttnCache-Reuse": "off"})
        metrics = (await client.get("/metrics")).text
    assert response.headers["X-AttnCache-Repeated"] == "2/3"
    assert off.headers["X-AttnCache-Repeated"] == "0/1"
    np.testing.assert_allclose(response.json()[1], unit(embedding_of(b"ccc")), rtol=1e-6)
    assert 'attncache_repeated_sequences_total{source="kept"} 2.0' in metrics
    assert 'attncache_tokens_total{state="repeated"} 3.0' in metrics


def unit(vector):
    return vector / np.linalg.norm(vector)


async def test_kept_result_of_a_real_model_equals_the_computed_one(tmp_path):
    engine = PrefillEngine.load(read_checkpoint(write_llama(tmp_path)), dtype="float32")

    async def ask(client, **headers):
        return await client.post("/embed", json={"inputs": "my bank account"}, headers=headers)

    async with serving(engine, result_memory_bytes=2**20) as client:
        first, kept = await ask(client), await ask(client)
        computed = await ask(client, **{"X-AttnCache-Reuse": "off"})
    assert kept.headers["X-AttnCache-Repeated"] == "1/1"
    assert kept.content == first.content
    np.testing.assert_allclose(kept.json(), computed.json(), rtol=1e-5, atol=1e-6)


def found(results, request, *names):
    """Return the places of the names whose results are kept, and of those that the request must compute."""
    kept, unknown = results.find(request, enumerate(names))
    return [index for index, _ in kept], unknown


def test_least_recently_used_results_leave():
    each = result_of(0).bytes
    results = Results(3 * each)
    for number, name in enumerate([b"a", b"b", b"c"]):
        assert found(results, "one", name) == ([], [0])
        results.settle({name: result_of(number)})
    assert found(results, "one", b"a") == ([0], [])
    results.settle({b"d": result_of(3)})
    assert found(results, "one", b"b", b"a", b"c", b"d") == ([1, 2, 3], [0])
    assert (len(results), results.bytes) == (3, 3 * each)


def test_kept_result_holds_no_other_rows_of_its_batch():
    batch = RequestResult(np.zeros((64, 8), np.float32), (Outcome.MISS,) * 64, 3 * 64, 0)
    part = PrefillPart.of([[0] * 5] * 64)
    kept = batch.repeatable(3, 5, part, sampled=True)
    assert kept.outputs.base is None
    assert kept.outputs.shape == (2, 8)
    assert (kept.asked_tokens, kept.cached_tokens, kept.repeated) == (10, 0, 2)
    assert (kept.parts[0].ids.base, list(kept.parts[0].offsets)) == (None, [0, 5, 10])


def test_names_end_with_their_result_or_with_the_request_that_computes_them():
    results, result = Results(2**20), result_of(2)
    assert found(results, "one", b"a", b"b", b"a") == ([], [0, 1])
    assert found(results, "two", b"b", b"c", b"a") == ([], [1])
    assert results.release("two", [b"a", b"b"]) == []
    assert results.settle({b"a": result}) == [("one", 2, result), ("two", 2, result)]
    assert results.release("one", [b"a", b"b"]) == [("two", 0)]
    assert found(results, "two", b"a", b"b") == ([0], [1])


@given(st.integers(1, 9).flatmap(lambda count: st.permutations(range(count))), st.data())
def test_parts_that_are_joined_are_the_whole_result(places, data):
    count = len(places)
    whole = RequestResult(
        np.arange(2.0 * count, dtype=np.float32).reshape(count, 2),
        tuple(data.draw(st.sampled_from(Outcome)) for _ in places),
        3 * count,
        2 * count,
        log_probabilities=tuple(np.full(place + 1, place, np.float32) for place in range(count)),
    )
    cut = data.draw(st.integers(0, count))
    parts = []
    for chosen in filter(None, (places[:cut], places[cut:])):  # one part, if the cut is at an end
        part = RequestResult(
            whole.outputs[list(chosen)],
            tuple(whole.outcomes[place] for place in chosen),
            3 * len(chosen),
            2 * len(chosen),
            log_probabilities=tuple(whole.log_probabilities[place] for place in chosen),
        )
        parts.append((chosen, part))
    found = joined(parts)
    np.testing.assert_array_equal(found.outputs, whole.outputs)
    assert found[1:4] == whole[1:4]
    for log_probability, expected in zip(found.log_probabilities, whole.log_probabilities, strict=True):
        np.testing.assert_array_equal(log_probability, expected)
    assert (found.token_states, found.blends) == ((), ())


texts = st.text(st.characters(), max_size=20)
PLAN = SequencePlan(0)


@given(texts, texts, texts)
def test_names_differ_if_texts_or_kinds_or_options_or_salts_differ(first, second, third):
    prompt = Prompt(Template(), (PLAN,))
    written = [first, second, first + second, (first, second), (second, third), (first, second + third)]
    named = Texts(written, truncate=True).names(prompt, b"")
    assert [[one == other for other in named] for one in named] == [
        [one == other for other in written] for one in written
    ]
    ids = [[*map(ord, text)] for text in (first, second)]
    others = [
        Texts([first], truncate=True).names(prompt, b"x"),
        Texts([first], truncate=False).names(prompt, b""),
        Texts([first], truncate=True, cut="left").names(prompt, b""),
        Texts([repr(ids[0])], truncate=True).names(prompt, b""),
        TokenSequences([ids[0]], truncate=True).names(prompt, b""),
        Texts([first], truncate=True).select([0]).names(Prompt(Template("a"), (PLAN,)), b""),
    ]
    if repr(ids[0]) != first:
        assert len({named[0], *(name for [name] in others)}) == 1 + len(others)
    sequences = TokenSequences(ids, truncate=True)
    assert sequences.select([1]).names(prompt, b"") == sequences.names(prompt, b"")[1:]


def plan_of(token, targets=()):
    return SequencePlan(0, (token,), targets)


def test_prompts_of_equal_digests_are_equal():
    around = [("", "", None), ("a", "", None), ("", "a", None), ("", "", "a"), ("", "", "")]
    plans = [
        (PLAN,),
        (plan_of(1),),
        (plan_of(2),),
        (plan_of(1), plan_of(2)),
        (plan_of(1), plan_of(1)),
        (SequencePlan(0, (1, 2)),),
        (SequencePlan(1, (1,)),),
        (SequencePlan(0, (1,), states=True),),
        (plan_of(1, (Target(0, 1),)),),
        (plan_of(1, (Target(1, 0),)),),
        (SequencePlan(0, (), (Target(1, 0),)),),
    ]
    prompts = [
        Prompt(Template(*parts), several, cut)
        for parts in around
        for several in plans
        for cut in ("longest", "first")
    ]
    assert len({prompt.digest for prompt in prompts}) == len(prompts)
    assert Prompt(Template(), (plan_of(1),)).digest == Prompt(Template(), (plan_of(1),)).digest


class NotedTokens(tuple[int, ...]):
    """Tokens that note which threads read them."""

    readers: set[str] = set()  # noqa: RUF012

    def __len__(self):
        self.readers.add(threading.current_thread().name)
        return super().__len__()

    def __iter__(self):
        self.readers.add(threading.current_thread().name)
        return super().__iter__()


async def test_event_loop_does_not_read_the_tokens_of_labels():
    tokens = NotedTokens([ord("x")])
    prompt = Prompt(Template(), (SequencePlan(0, tokens), SequencePlan(0, (ord("y"),))))
    async with batching(LabelledEngine()) as batcher:
        tokens.readers.clear()
        await submit(batcher, "a", prompt=prompt)
    assert tokens.readers
    assert all(name.startswith("engine") for name in tokens.readers)


# Results that are not as expected.


async def test_hits_that_were_asked_for_together_are_computed_for_each_request():
    engine = FakeEngine(stored={"hits"}, damage=0.1)
    async with batching(engine) as batcher:
        busy = await hold(engine, batcher)
        pending = [submit(batcher, "hits", str(number)) for number in range(3)]
        engine.may_run.set()
        for result in await asyncio.gather(*pending):
            assert (result.hits, result.repeated) == (1, 0)
        await busy
    # The others are not computed one after the other, in the hope for an exact result.
    assert engine.batches[1:] == [["hits", "0", "1", "2"], ["hits", "hits"]]


async def test_sequence_that_is_computed_behind_others_of_its_request_keeps_its_place():
    engine = FakeEngine(stored={"hits"}, damage=0.1)
    async with batching(engine, tokens=8) as batcher:
        busy = await hold(engine, batcher)
        # The second request waits for the hit of the first one, which is approximate, and computes its own.
        first, second = submit(batcher, "hits", "zz"), submit(batcher, "hits", "full")
        engine.may_run.set()
        result = await second
        await asyncio.gather(first, busy)
    assert engine.batches[1:] == [["hits", "zz"], ["full", "hits"]]
    assert result.outcomes == (Outcome.HIT, Outcome.MISS)
    np.testing.assert_array_equal(result.outputs[1], embedding_of([ord(letter) for letter in "full"]))


async def test_result_that_cannot_be_delivered_fails_its_request_only(monkeypatch):
    of = RequestResult.of

    def failing(result, rows, tokens):
        if tokens == len("too much"):
            raise MemoryError
        return of(result, rows, tokens)

    monkeypatch.setattr(RequestResult, "of", failing)
    engine = FakeEngine()
    async with batching(engine) as batcher:
        busy = await hold(engine, batcher)
        texts = [("first", "same"), ("too much",), ("same",), ("last",)]
        pending = [submit(batcher, *text) for text in texts]
        engine.may_run.set()
        async with asyncio.timeout(10):
            first, failed, waiting, last = await asyncio.gather(*pending, return_exceptions=True)
        await busy
    assert isinstance(failed, InternalError)
    for result, text in ((first, texts[0]), (waiting, texts[2]), (last, texts[3])):
        assert_result_of(list(text), result)
    assert engine.batches[1:] == [["first", "same", "too much", "last"]]


async def test_result_that_cannot_be_kept_is_computed_for_those_that_wait(monkeypatch):
    def failing(*_arguments, **_more):
        raise MemoryError

    monkeypatch.setattr(RequestResult, "repeatable", failing)
    engine = FakeEngine()
    async with batching(engine) as batcher, asyncio.timeout(10):
        for result in await asyncio.gather(*(submit(batcher, "same") for _ in range(3))):
            assert_result_of(["same"], result)
    assert sum(batch.count("same") for batch in engine.batches) == 3


class UnreliableEngine(LabelledEngine):
    """Fails on some batches, and takes its time."""

    parallel_runs = 2

    def may_reuse(self, *_):
        return True

    def __init__(self, seed):
        super().__init__(stored={"hits", "hitsx"}, damage=0.0)
        self.random = random.Random(seed)

    def tokenize(self, texts, truncate, prompt, *more):
        time.sleep(self.random.random() / 1000)
        if len(prompt.sequence_plans) == 1:
            return FakeEngine.tokenize(self, texts, truncate, prompt, *more)
        return super().tokenize(texts, truncate, prompt, *more)

    def run(self, requests):
        time.sleep(self.random.random() / 1000)
        if self.random.random() < 0.1:
            raise RuntimeError
        return super().run(requests)


requests_with_equal_texts = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["hits", "a", "bb", "ccc", NOT_FINITE]), min_size=1, max_size=5),
        st.booleans(),  # with labels
        st.sampled_from(["", "", "", "cancelled", "cancelled later"]),
        st.integers(0, 2),  # turns of the event loop until the next request
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(requests_with_equal_texts, st.integers(1, 30), st.integers(1, 4), st.integers(0, 10**6))
def test_requests_with_equal_texts_get_their_own_rows_whatever_happens_to_the_others(
    requests, tokens, sequences, seed
):
    @mock.patch.object(RequestQueue, "min_part", 1)
    async def scenario():
        async with batching(UnreliableEngine(seed), sequences, tokens=tokens) as batcher, asyncio.timeout(30):
            pending = []
            for several, labelled, fate, turns in requests:
                more = {"prompt": LABELLED} if labelled else {}
                pending.append(submit(batcher, *several, **more))
                if fate == "cancelled":
                    pending[-1].cancel()
                elif fate:
                    asyncio.get_running_loop().call_later(0.001, pending[-1].cancel)
                for _ in range(turns):
                    await asyncio.sleep(0)
            return await asyncio.gather(*pending, return_exceptions=True)

    for (several, labelled, fate, _), answer in zip(requests, asyncio.run(scenario()), strict=True):
        rows = [text + end for text in several for end in ("xyz" if labelled else [""])]
        if isinstance(answer, NotFinite):
            assert answer.field in [f"inputs[{place}]" for place, row in enumerate(rows) if row == NOT_FINITE]
        elif isinstance(answer, BaseException):
            assert isinstance(answer, (InternalError, asyncio.CancelledError if fate else InternalError))
        else:
            assert NOT_FINITE not in rows
            assert_result_of(rows, answer)
