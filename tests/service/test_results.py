"""Results of equal sequences: computed once, kept up to a number of bytes, and never shared across salts."""

import asyncio
import re
import threading
import tracemalloc

import numpy as np
import pytest
import queueing
from fake_engine import FAILING, NOT_FINITE, FakeEngine, embedding_of, serving
from hypothesis import given
from hypothesis import strategies as st
from queueing import LABELLED, CountingEngine, LabelledEngine, assert_result_of, held
from running import until

from attncache_core import NotFinite, Outcome, PrefillEngine, PrefillResult
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.engine.request import PrefillPart
from attncache_core.engine.result import BatchReport, joined
from attncache_core.text.pairs import PairTokens
from attncache_core.text.prompts import Prompt, SequencePlan, Target
from service.batching import batch_runner
from service.batching.request_queue import _MAX_LOOKUPS
from service.batching.results import Lookup, Results, repeatable, sequence_names
from service.batching.sources import Texts
from service.errors import InternalError, QueueFull
from service.observability.finished import Timing


def batching(engine, sequences=100, **more):
    return queueing.batching(engine, sequences=sequences, **{"result_bytes": 2**20, **more})


def submit(batcher, *texts, salt=b"", **more):
    return batcher.submit(Texts(texts, truncate=True), **{"reuse": True, "salt": salt, **more})


def result_of(outputs, outcomes=None, **more):
    count, tokens = len(outputs), np.full(len(outputs), 3)
    outcomes = outcomes or (Outcome.MISS,) * count
    return PrefillResult(outputs, np.ones(count, bool), outcomes, tokens, tokens - 1, **more)


def kept_result(number, size=8):
    return repeatable(result_of(np.full((1, size), number, np.float32)), 0)


async def test_request_that_was_answered_twice_is_answered_while_every_thread_is_busy_and_the_queue_is_full():
    engine = FakeEngine()
    async with batching(engine, queue=2) as batcher:
        first = await submit(batcher, "a", "bb")
        await submit(batcher, "a", "bb")  # from now on, its result is kept by its digest
        async with held(engine, batcher):
            waiting = submit(batcher, "new", "newer")
            timing = Timing()
            again = await asyncio.wait_for(submit(batcher, "a", "bb", timing=timing), timeout=240)
            assert_result_of(["a", "bb"], again)
            tokens = first.all_asked_tokens
            assert (again.repeated, again.all_asked_tokens, timing.tokens) == (2, tokens, tokens)
            assert not np.shares_memory(again.outputs, first.outputs)
            with pytest.raises(QueueFull):  # other salts share nothing
                submit(batcher, "a", "bb", salt=b"x")
        await waiting
    assert "a" not in [text for batch in engine.batches[1:] for text in batch]


def test_digests_of_requests_differ_with_all_that_decides_a_result():
    plan, template = SequencePlan(1), Template("a", "b")
    sources = [
        Texts(["a", "bc"], truncate=True),
        Texts(["ab", "c"], truncate=True),
        Texts(["bc", "a"], truncate=True),
        Texts([("a", "bc")], truncate=True),
        Texts(["a", "bc"], truncate=False),
        Texts(["a", "bc"], truncate=True, cut="left"),
    ]
    prompts = [
        Prompt(template, (plan,)),
        Prompt(Template("", "ab"), (plan,)),
        Prompt(template, (SequencePlan(2),)),
        Prompt(template, (plan,), cut="first"),
    ]
    names = {
        source.digest(prompt, salt)
        for source in sources
        for prompt in prompts
        for salt in (b"", b"x", b"1:x")
    }
    assert len(names) == len(sources) * len(prompts) * 3
    assert None not in names
    reading = [SequencePlan(1, (7,)), SequencePlan(1, (), (Target(0, 7),)), SequencePlan(1, states=True)]
    unnamed = [Prompt(template, (plan, plan)), *(Prompt(template, (more,)) for more in reading)]
    assert {sources[0].digest(prompt, b"") for prompt in unnamed} == {None}
    assert Texts(["a" * 20_000], truncate=True).digest(prompts[0], b"") is None


async def test_text_whose_client_left_is_computed_for_the_others_that_wait():
    engine = FakeEngine()
    async with batching(engine) as batcher:
        async with held(engine, batcher):
            gone = submit(batcher, "same")
            others = [submit(batcher, "same") for _ in range(3)]
            # The queue tokenises when it forms a batch, so the first of them is the one that computes.
            gone.cancel()
        for result in await asyncio.gather(*others):
            assert_result_of(["same"], result)
    assert sum(batch.count("same") for batch in engine.batches) == 1


async def test_text_whose_client_left_while_it_was_tokenised_is_computed_for_later_requests():
    engine = TokenisingSlowly()
    async with batching(engine) as batcher:
        gone = submit(batcher, "same")
        await asyncio.to_thread(engine.tokenising.wait)
        gone.cancel()
        await asyncio.sleep(0)  # the batcher withdraws the request
        engine.may_tokenise.set()
        assert_result_of(["same"], await asyncio.wait_for(submit(batcher, "same"), timeout=240))


class TokenisingSlowly(FakeEngine):
    """Begins to tokenise, and ends when it may."""

    def __init__(self):
        super().__init__()
        self.tokenising, self.may_tokenise = threading.Event(), threading.Event()

    def tokenize(self, *arguments, **more):
        self.tokenising.set()
        assert self.may_tokenise.wait(timeout=240)
        return super().tokenize(*arguments, **more)


async def test_client_that_leaves_between_tokenising_and_its_batch_is_replaced_by_one_that_waits():
    engine = FakeEngine()
    async with batching(engine, sequences=1) as batcher:
        engine.may_run.clear()
        # The first batch has room for one text: the second text is tokenised with it, and waits.
        gone = submit(batcher, "first", "same")
        await asyncio.to_thread(engine.runs.acquire)
        other = submit(batcher, "same")
        await until(lambda: any(request is not None for request in batcher.queue._order))
        engine.runs = type(engine.runs)(0)
        gone.cancel()
        engine.may_run.set()
        assert_result_of(["same"], await other)
    assert ["same"] in engine.batches


@pytest.mark.parametrize(("failing", "error"), [(FAILING, InternalError), (NOT_FINITE, NotFinite)])
async def test_failure_reaches_all_that_wait_and_is_not_kept(failing, error):
    engine = FakeEngine()
    async with batching(engine) as batcher:
        async with held(engine, batcher):
            pending = [submit(batcher, "fine", failing) for _ in range(3)]
        for result in pending:
            with pytest.raises(error):
                await result
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


async def test_sequences_of_labels_are_kept_by_their_plans():
    engine = LabelledEngine()
    async with batching(engine) as batcher:
        first = await submit(batcher, "aa", "b", prompt=LABELLED)
        again = await submit(batcher, "b", "aa", prompt=LABELLED)
    np.testing.assert_array_equal(again.outputs, first.outputs[[3, 4, 5, 0, 1, 2]])
    assert again.repeated == 6
    assert len(engine.batches) == 1


async def test_text_that_was_computed_is_not_computed_again_and_headers_and_metrics_tell_so():
    engine = FakeEngine()
    async with serving(engine, result_memory_bytes=2**20) as client:
        first = await client.post("/embed", json={"inputs": ["a", "bb"]})
        response = await client.post("/embed", json={"inputs": ["bb", "ccc", "a"]})
        off = await client.post("/embed", json={"inputs": "a"}, headers={"X-AttnCache-Reuse": "off"})
        metrics = (await client.get("/metrics")).text
    assert first.headers["X-AttnCache-Repeated"] == "0/2"
    assert response.headers["X-AttnCache-Repeated"] == "2/3"
    assert off.headers["X-AttnCache-Repeated"] == "0/1"
    assert engine.batches == [["a", "bb"], ["ccc"], ["a"]]
    expected = [unit(embedding_of(text)) for text in (b"bb", b"ccc", b"a")]
    np.testing.assert_allclose(response.json(), expected, rtol=1e-6)
    assert re.search(r"^attncache_results_bytes [1-9]", metrics, re.MULTILINE)
    assert "attncache_queue_tokens 0.0" in metrics
    assert 'attncache_repeated_sequences_total{source="kept"} 2.0' in metrics
    assert 'attncache_tokens_total{state="repeated"} 3.0' in metrics


async def test_texts_that_wait_for_a_hit_are_no_repeated_texts():
    """They are computed after all, because a hit is approximate, and each text is counted once."""
    engine = FakeEngine(stored={"hits"}, damage=0.1)
    async with serving(engine, result_memory_bytes=2**20) as client:
        response = await client.post("/embed", json={"inputs": ["hits"] * 3})
        metrics = (await client.get("/metrics")).text
    assert response.headers["X-AttnCache-Repeated"] == "0/3"
    assert response.headers["X-AttnCache-Hits"] == "3/3"
    counted = re.findall(r"^attncache_(?:repeated_)?sequences_total\S* ([0-9.]+)", metrics, re.MULTILINE)
    assert sum(map(float, counted)) == 3
    assert 'attncache_tokens_total{state="repeated"} 0.0' in metrics


def unit(vector):
    return vector / np.linalg.norm(vector)


async def test_kept_result_of_a_real_model_equals_the_computed_one(folder):
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")

    async def ask(client, **headers):
        return await client.post("/embed", json={"inputs": "my bank account"}, headers=headers)

    async with serving(engine, result_memory_bytes=2**20) as client:
        first, kept = await ask(client), await ask(client)
        computed = await ask(client, **{"X-AttnCache-Reuse": "off"})
    assert kept.headers["X-AttnCache-Repeated"] == "1/1"
    assert kept.content == first.content
    np.testing.assert_allclose(kept.json(), computed.json(), rtol=1e-5, atol=1e-6)


def test_least_recently_used_results_leave():
    one = Results(2**20)
    one.settle({b"a": kept_result(0)})
    results = Results(3 * one.bytes)
    for number, name in enumerate([b"a", b"b", b"c"]):
        assert results.find([name], str) == [Lookup.UNKNOWN]
        results.settle({name: kept_result(number)})
    assert isinstance(*results.find([b"a"], str), PrefillResult)
    assert results.find([b"d"], str) == [Lookup.UNKNOWN]
    results.settle({b"d": kept_result(3)})
    assert results.find([b"b"], str) == [Lookup.UNKNOWN]
    assert all(isinstance(result, PrefillResult) for result in results.find([b"a", b"c", b"d"], str))
    # One that is larger than all of them drives none out.
    results.settle({b"large": kept_result(4, size=4096)})
    assert results.kept(b"large") is None
    assert (len(results), results.bytes) == (3, 3 * one.bytes)


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize(
    ("width", "listed"), [(384, {}), (2, {}), (2, {"log_probabilities": 3}), (32, {"token_states": 500})]
)
def test_bytes_are_those_that_results_take(rows, width, listed):
    def made(number):
        arrays = {
            name: [np.full(size, number, np.float32) for _ in range(rows)] for name, size in listed.items()
        }
        whole = result_of(np.full((rows, width), number, np.float32), **arrays)
        return joined([repeatable(whole, row) for row in range(rows)], [[row] for row in range(rows)])

    results = Results(2**30)
    tracemalloc.start()
    try:
        results.settle({b"%16d" % number: made(number) for number in range(40 if rows == 1 else 10)})
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 <= results.bytes / taken <= 1.4


def test_kept_result_holds_no_other_rows_of_its_batch():
    batch = result_of(np.zeros((64, 8), np.float32))
    results = Results(2**20)
    results.find([b"a"], str)
    results.settle({b"a": repeatable(batch, 3)})
    (kept,) = results.find([b"a"], str)
    assert kept.outputs.base is None
    assert kept.asked_tokens.base is None
    assert kept.outputs.shape == (1, 8)
    assert (kept.all_asked_tokens, kept.all_cached_tokens, kept.repeated) == (3, 0, 1)


def test_names_that_a_failed_caller_looked_up_are_unknown_to_the_next_one():
    results = Results(2**20)
    with pytest.raises(ZeroDivisionError):
        results.find([b"a", b"b", b"a", b"b"], lambda index: 1 // (index - 3))
    assert results.find([b"a", b"b"], str) == [Lookup.UNKNOWN] * 2
    assert results.find([b"b", b"b", b"c"], str) == [Lookup.WAITS, Lookup.WAITS, Lookup.UNKNOWN]
    result = kept_result(2)
    assert results.settle({b"a": result, b"b": result}) == [("0", result), ("1", result)]


@given(st.integers(1, 9).flatmap(lambda count: st.permutations(range(count))), st.data())
def test_parts_that_are_joined_are_the_whole_result(places, data):
    count = len(places)
    outcomes = tuple(data.draw(st.sampled_from(Outcome)) for _ in places)
    numbers = [np.full(place + 1, place, np.float32) for place in range(count)]
    whole = result_of(
        np.arange(2.0 * count, dtype=np.float32).reshape(count, 2), outcomes, log_probabilities=numbers
    )
    cut = data.draw(st.integers(0, count))
    # One part, if the cut is at an end.
    chosen = [list(part) for part in (places[:cut], places[cut:]) if part]
    parts = [
        result_of(
            whole.outputs[part],
            tuple(outcomes[place] for place in part),
            log_probabilities=[numbers[place] for place in part],
            repeated=len(part),
            report=BatchReport(len(part), lost_lengths=(len(part),)),
        )
        for part in chosen
    ]
    found = joined(parts, chosen)
    for name in ("outputs", "finite", "asked_tokens", "cached_tokens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
    assert (found.outcomes, found.repeated) == (outcomes, count)
    assert found.report == BatchReport(count, lost_lengths=tuple(map(len, chosen)))
    for log_probability, expected in zip(found.log_probabilities, numbers, strict=True):
        np.testing.assert_array_equal(log_probability, expected)
    assert (found.compared, found.token_states, found.blends) == (None, None, None)


sequences = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


@given(first=sequences, second=sequences)
def test_names_differ_if_tokens_salts_or_plans_differ(first, second):
    (one, other) = sequence_names(b"", (), PrefillPart.of([first, second]), range(2))
    assert (one == other) is (first == second)
    assert (
        len(
            {
                one,
                name_of(first, salt=b"x"),
                *sequence_names(b"", [plan_of(1)] * 2, PrefillPart.of([first, first]), range(2)),
            }
        )
        == 4
    )


@given(sequences, st.integers(0, 9))
def test_name_of_a_pair_depends_on_the_types_of_its_tokens(ids, place):
    pairs = [PairTokens(ids, types) for types in (None, [0] * len(ids), [1] * len(ids))]
    assert (
        len({name_of(ids), *sequence_names(b"", [SequencePlan(0)], PrefillPart.of(pairs), [place] * 3)}) == 4
    )


def name_of(ids, plans=(), salt=b""):
    (name,) = sequence_names(salt, plans, PrefillPart.of([ids]), [0])
    return name


def plan_of(token, targets=()):
    return SequencePlan(0, (token,), targets)


def test_names_differ_if_any_number_of_a_plan_differs():
    plans = [
        (),
        (plan_of(1),),
        (plan_of(2),),
        (plan_of(3),),
        (plan_of(1), plan_of(2)),
        (SequencePlan(0, (1, 0)),),
        (SequencePlan(0, (1, 2)),),
        (SequencePlan(1, (1,)),),
        (SequencePlan(0, (1,), states=True),),
        (plan_of(1, (Target(0, 1),)),),
        (plan_of(1, (Target(1, 0),)),),
        (SequencePlan(0, (), (Target(1, 0),)),),
    ]
    every = {*plans, *((*each, plan_of(1)) for each in plans)}
    assert len({name_of([1], each) for each in every}) == len(every)
    assert all(name_of([1], each) == name_of([1], [*each]) for each in every)


class NotedTokens(tuple[int, ...]):
    """Tokens that note which threads read them."""

    readers: set[str] = set()  # noqa: RUF012

    def __len__(self):
        self.readers.add(threading.current_thread().name)
        return super().__len__()

    def __repr__(self):
        self.readers.add(threading.current_thread().name)
        return super().__repr__()


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
        async with held(engine, batcher):
            pending = [submit(batcher, "hits", str(number)) for number in range(3)]
        for result in await asyncio.gather(*pending):
            assert (result.hits, result.repeated) == (1, 0)
    # The others are not computed one after the other, in the hope for an exact result.
    assert engine.batches[1:] == [["hits", "0", "1", "2"], ["hits", "hits"]]


async def test_sequence_that_is_computed_behind_others_of_its_request_keeps_its_place():
    engine = FakeEngine(stored={"hits"}, damage=0.1)
    async with batching(engine, tokens=8) as batcher:
        async with held(engine, batcher):
            # The second request waits for the hit of the first, which is approximate, and computes its own.
            first, second = submit(batcher, "hits", "zz"), submit(batcher, "hits", "full")
        _, result = await asyncio.gather(first, second)
    assert engine.batches[1:] == [["hits", "zz"], ["full", "hits"]]
    assert result.outcomes == (Outcome.HIT, Outcome.MISS)
    np.testing.assert_array_equal(result.outputs[1], embedding_of([ord(letter) for letter in "full"]))


async def test_result_that_cannot_be_delivered_fails_its_request_only(monkeypatch):
    rows = PrefillResult.rows

    def failing(result, first, stop):
        if result.asked_tokens[first] == len("too much"):
            raise MemoryError
        return rows(result, first, stop)

    monkeypatch.setattr(PrefillResult, "rows", failing)
    engine = FakeEngine()
    async with batching(engine) as batcher:
        texts = [("first", "same"), ("too much",), ("same",), ("last",)]
        async with held(engine, batcher):
            pending = [submit(batcher, *text) for text in texts]
        async with asyncio.timeout(240):
            first, failed, waiting, last = await asyncio.gather(*pending, return_exceptions=True)
    assert isinstance(failed, InternalError)
    for result, text in ((first, texts[0]), (waiting, texts[2]), (last, texts[3])):
        assert_result_of(list(text), result)
    assert engine.batches[1:] == [["first", "same", "too much", "last"]]


async def test_result_that_cannot_be_kept_is_computed_for_those_that_wait(monkeypatch):
    def failing(_result, _index):
        raise MemoryError

    monkeypatch.setattr(batch_runner, "repeatable", failing)
    engine = FakeEngine()
    async with batching(engine) as batcher, asyncio.timeout(240):
        for result in await asyncio.gather(*(submit(batcher, "same") for _ in range(3))):
            assert_result_of(["same"], result)
    assert sum(batch.count("same") for batch in engine.batches) == 3


@pytest.mark.parametrize("first", ["known", "other"])
async def test_client_whose_texts_are_all_known_delays_another_by_a_turn(first):
    engine = CountingEngine()
    async with batching(engine, tokens=10**5, queue=10**6) as batcher:
        await submit(batcher, "known")
        async with held(engine, batcher):
            before = engine.tokenized
            other = [submit(batcher, "other", flow=("other",))] if first == "other" else []
            known = [submit(batcher, "known", flow=("known",)) for _ in range(2 * _MAX_LOOKUPS)]
            other = other or [submit(batcher, "other", flow=("other",))]
        await asyncio.gather(*other, *known)
    assert sum(batch.count("known") for batch in engine.batches) == 1
    assert engine.tokenized_before["other"] - before <= _MAX_LOOKUPS + 2


async def test_known_texts_end_the_turn_of_their_client():
    engine = CountingEngine()
    async with batching(engine, tokens=100, queue=10**6) as batcher:
        await submit(batcher, "known")
        async with held(engine, batcher):
            # The clients have the same number of requests, and those of the second one fill a batch each.
            known = [submit(batcher, "known", flow=("known",)) for _ in range(400)]
            other = [submit(batcher, f"{number:060}", flow=("other",)) for number in range(4)]
            before = engine.tokenized
        await asyncio.gather(*other, *known)
    assert engine.tokenized_before[f"{0:060}"] - before < 200
