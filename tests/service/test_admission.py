"""What the server accepts, how long a request may take, and how long one client can delay another."""

import asyncio
import json
import math
import threading
import time
from functools import partial
from types import SimpleNamespace

import orjson
import pytest
from fake_engine import FakeEngine, begun, serving
from hypothesis import given
from hypothesis import strategies as st
from queueing import CountingEngine, batching, held, submit, until_waiting
from running import until

from attncache_core.heads.vectors import cosine_matrix
from service.batching.admission import Admission, DrainSpeed, Limits
from service.batching.fair_order import FairOrder
from service.batching.sources import Texts
from service.errors import QueueFull
from service.observability.finished import Timing
from service.routes import common


async def test_text_of_another_client_that_arrives_later_is_in_the_next_batch():
    engine = FakeEngine()
    async with batching(engine, tokens=100, sequences=64, queue=10_000) as batcher:
        many = [submit(batcher, [f"{part}-{n}" for n in range(250)], flow=("greedy",)) for part in range(20)]
        await until(lambda: len(engine.batches) >= 10)
        engine.may_run.clear()
        await asyncio.to_thread(engine.runs.acquire)
        before = len(engine.batches)
        one = submit(batcher, ["one text"], flow=("modest",))
        engine.may_run.set()
        await asyncio.gather(one, *many)
    place = next(number for number, batch in enumerate(engine.batches) if "one text" in batch)
    # The batch that runs is in the list only when it has been computed.
    assert place <= before + 1


async def test_texts_of_another_client_are_tokenised_only_as_batches_need_them():
    engine = CountingEngine()
    async with batching(engine, tokens=100, sequences=64, queue=10_000) as batcher:
        async with held(engine, batcher):
            texts = [[f"{part}-{n}" for n in range(250)] for part in range(20)]
            many = [submit(batcher, part, flow=("greedy",)) for part in texts]
            await asyncio.sleep(0.01)
            assert engine.tokenized <= 1 + 250
        await asyncio.gather(*many)


async def test_tokens_that_wait_are_limited_and_one_request_is_always_accepted():
    engine = FakeEngine()
    async with batching(engine, queue_tokens=100) as batcher:
        async with held(engine, batcher):
            waiting = submit(batcher, ["x" * 60] * 8)
            with pytest.raises(QueueFull) as refused:
                await submit(batcher, ["y" * 60])
        assert refused.value.retry_after_seconds >= 1
        await waiting
        await submit(batcher, ["y" * 60])


async def test_texts_that_are_cut_count_as_they_are_computed():
    engine = FakeEngine()
    async with batching(engine, queue_tokens=1000) as batcher:
        async with held(engine, batcher):
            cut = [submit(batcher, ["x" * 20_000] * 4) for _ in range(3)]  # 64 tokens of each text
        await asyncio.gather(*cut)
        # Nor are they a measure of other texts.
        async with held(engine, batcher):
            submit(batcher, ["z" * 60] * 20)
            assert batcher.queue.waiting_tokens >= 200


async def test_tokens_are_guessed_from_what_most_characters_became():
    """The engine makes a token of each character."""
    async with batching(FakeEngine()) as batcher:
        prose = Texts(["z" * 60] * 40, truncate=True)
        await submit(batcher, ["a"])
        await submit(batcher, ["cut " * 5000, "whole"])  # says nothing
        assert 600 <= batcher.guess_tokens(prose) <= 650
        # Only its own tokens count, although both requests of a client have one timing.
        await submit(batcher, ["b" * 60] * 10, timing=(timing := Timing()))
        timing.tokens = 10**6
        await submit(batcher, ["y" * 60] * 90, timing=timing)
        assert 1500 <= batcher.guess_tokens(prose) <= 2400


def waiting(flow, tokens, seconds=60.0, now=0.0):
    """Return a request as the queue has it: all its tokens are guessed, and wait."""
    return SimpleNamespace(
        flow=flow,
        guess=tokens,
        guessed_tokens=tokens,
        waiting_tokens=tokens,
        count=1,
        seconds=seconds,
        timing=SimpleNamespace(queued_at=now),
        deadline=now + seconds,
    )


def admission(order, speed=1000.0):
    """Return an admission to a queue that computes this number of tokens per second, 100 in a batch."""
    limits = Limits(batch_tokens=100, batch_sequences=64, queue_sequences=100, request_tokens=10**9)
    return Admission(limits, order, SimpleNamespace(tokens_per_second=speed, is_new=True))


@pytest.mark.parametrize("clients", [2, 8, 40])
def test_large_requests_that_take_turns_are_answered_in_time_or_refused(clients):
    """Clients send one request after the other, each of 15 seconds alone, and wait as they are told."""
    order, now, running, free = FairOrder(), 0.0, {}, dict.fromkeys(range(clients), 0.0)
    deciding, answered, refused = admission(order), 0, 0
    while now < 600:
        for client, at in list(free.items()):
            if at <= now:
                request = waiting((client,), 15_000)
                try:
                    deciding.require(request, len(running), int(order.cost), now)
                except QueueFull as full:
                    refused += 1
                    free[client] = now + full.retry_after_seconds
                else:
                    running[client] = request, now
                    order.add(request, request.flow)
                    order.count(request.flow, request.guess)
                    del free[client]
        now += 0.5
        for client, (request, since) in list(running.items()):
            served = min(request.waiting_tokens, 500 // len(running))  # all get as much
            request.waiting_tokens -= served
            order.count(request.flow, -served)
            if not request.waiting_tokens:
                assert now - since <= 60
                answered += 1
                order.remove(request, request.flow)
                del running[client]
                free[client] = now
    assert answered > 500 / 15
    assert (refused > 0) == (clients > 3)


@pytest.mark.parametrize(
    ("others", "tokens", "is_admitted"),
    [
        ([], 90_000, True),  # too large for its time, though it is alone
        ([(("a",), 50)], 90_000, True),
        ([(("a",), 59_000)], 90_000, True),
        ([(("a",), 59_000)], 20_000, True),
        ([(("a",), 59_000)], 28_000, False),
        ([(("a",), 59_000)], 100, True),  # fits into a batch
        ([(("me",), 36_000)], 20_000, False),  # those of the same flow come first
        ([(("me",), 27_000)], 20_000, True),
        ([(("me", 2), 59_000)], 20_000, True),  # another connection of the same key
        ([(("a", 1), 20_000), (("a", 2), 20_000)], 28_000, False),  # one key
        ([(("a", 1), 20_000), (("a", 2), 20_000)], 23_000, True),
    ],
)
def test_work_before_the_end_of_a_large_request_follows_the_turns(others, tokens, is_admitted):
    order = FairOrder()
    for flow, size in others:
        order.add(waiting(flow, size), flow)
        order.count(flow, size)
    decide = partial(admission(order).require, waiting(("me",), tokens), len(others), int(order.cost), 0.0)
    if is_admitted:
        decide()
    else:
        with pytest.raises(QueueFull, match="take turns with others for about") as refused:
            decide()
        assert 1 <= refused.value.retry_after_seconds <= 59


@pytest.mark.parametrize(("speed_then", "answered"), [(1000.0, [0, 1, 2]), (600.0, [0, 1]), (300.0, [0])])
@pytest.mark.parametrize("speed_before", [None, 1000.0])
def test_requests_that_came_last_are_given_up_when_the_queue_becomes_slower(
    speed_before, speed_then, answered
):
    """Three clients send 15 seconds of work, and one text at times; all would be answered too late."""
    order, found, admitted = FairOrder(), [], {}
    deciding = admission(order, speed_before)

    def add(request):
        deciding.require(request, len(admitted), int(order.cost), request.timing.queued_at)
        order.add(request, request.flow)
        order.count(request.flow, request.guess)

    for client in range(3):
        admitted[client] = waiting((client,), 15_000, now=client / 10)
        add(admitted[client])
    deciding.speed.tokens_per_second = speed_then
    for half_seconds in range(1, 130):
        now = half_seconds / 2
        deciding.speed.is_new = True
        while (late := deciding.late(now)) is not None:
            request, error = late
            assert 1 <= error.retry_after_seconds <= 60  # then the others are answered, or have given up
            assert request is list(admitted.values())[-1]
            order.count(request.flow, -request.waiting_tokens)
            order.remove(admitted.popitem()[1], request.flow)
            assert deciding.late(now) is None, "asked again in the same round"
            deciding.speed.is_new = True
        for client, request in list(admitted.items()):
            served = min(request.waiting_tokens, int(speed_then / 2) // len(admitted))
            request.waiting_tokens -= served
            order.count(request.flow, -served)
            if not request.waiting_tokens:
                assert now <= request.deadline
                found.append(client)
                order.remove(request, request.flow)
                del admitted[client]
    assert sorted(found) == answered


@pytest.mark.parametrize(
    ("requests", "given_up"),
    [
        ([("a", 50_000, 60), ("b", 50_000, 60), ("c", 50_000, 60)], 2),
        ([("a", 50_000, 60), ("b", 50_000, math.inf)], None),  # the second one has time
        ([("a", 50_000, math.inf), ("b", 50_000, math.inf)], None),
        ([("a", 51_000, 60), ("b", 24_000, 60)], None),  # the second one ends in time beside the first
        ([("a", 4_000, 5), ("b", 10_000, 60)], None),
        ([("a", 4_000, 6), ("b", 4_000, 6), ("c", 20_000, 60)], 1),  # the third one has time
        ([("a", 70_000, 60), ("b", 50_000, 60)], None),  # the first one is too large even alone
        ([("a", 50_000, 60)] + [(f"{client}", 90, 60) for client in range(50)], None),
        ([("a", 58_000, 60)] + [(f"{client}", 90, 60) for client in range(50)], None),  # would help nobody
        ([("a", 15_000, 20), ("a", 30_000, 60)], None),  # one after the other
    ],
)
def test_request_is_given_up_only_if_it_and_one_before_would_be_too_late(requests, given_up):
    order = FairOrder()
    made = [
        waiting((flow,), tokens, seconds, now=place / 1000)
        for place, (flow, tokens, seconds) in enumerate(requests)
    ]
    for request in made:
        order.add(request, request.flow)
        order.count(request.flow, request.guess)
    late = admission(order).late(1.0)
    assert (None if late is None else made.index(late[0])) == given_up


async def test_request_that_is_given_up_is_told_why_and_the_others_are_answered():
    engine = FakeEngine()
    async with batching(engine, tokens=60, sequences=64, queue=10_000) as batcher:
        async with held(engine, batcher):
            first = submit(batcher, ["x" * 60] * 20, flow=("a",), seconds=60)
            last = submit(batcher, ["y" * 60] * 20, flow=("b",), seconds=60)
            speed = batcher.queue._speed
            speed.note = lambda *_, **__: setattr(speed, "is_new", True)
            speed.tokens_per_second = 20 * 60 / 45
        with pytest.raises(QueueFull, match="has become slower") as refused:
            await last
        assert 1 <= refused.value.retry_after_seconds <= 60
        await first
        speed.tokens_per_second = 1e9
        await submit(batcher, ["y" * 60] * 20, flow=("b",), seconds=60)


async def test_bytes_in_flight_are_limited_and_a_body_counts_as_its_texts_take_memory():
    """One character beyond the usual ones makes all others of a text as wide."""
    engine, wide = FakeEngine(), {"inputs": "x" * 3000 + "🙂"}
    async with serving(engine, max_inflight_bytes=10_000) as client:
        held = await begun(engine, client.post("/embed", json={"inputs": "b" * 2000}))

        async def assert_refused(body):
            refused = await client.post("/embed", content=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert refused.headers["Retry-After"] == "1"

        for body in (orjson.dumps(wide), json.dumps(wide).encode()):
            await assert_refused(body)
        narrow = asyncio.create_task(client.post("/embed", json={"inputs": "x" * 5000}))
        await until_waiting(client, 1)
        await assert_refused(orjson.dumps({"inputs": "y" * 5000}))
        engine.may_run.set()
        assert [(await each).status_code for each in (held, narrow)] == [200, 200]
        # A request beside which no other one is answered is always accepted.
        assert (await client.post("/embed", json=wide)).status_code == 200
        assert client._transport.app.state.service.bodies.taken == 0


async def test_large_answers_are_bounded_while_they_are_made_and_delay_others_by_a_part(monkeypatch):
    """Requests whose results are kept wait for nothing, so any number of answers may be made at once."""
    texts, made = ["x"] * 2048, [[0]]  # bytes of the parts that are made in each round of the event loop
    limits = {"max_request_inputs": 2048, "max_inflight_bytes": 2**20, "result_memory_bytes": 2**26}

    def dumps(content, option=None):
        written = orjson.dumps(content, option=option)
        if isinstance(content, list):
            made[-1].append(len(written))
        return written

    async def rounds():
        while True:
            made.append([])
            await asyncio.sleep(0)

    async with serving(FakeEngine(), **limits) as client:
        for _ in range(3):
            size = len((await client.post("/embed", json={"inputs": texts})).content)
        monkeypatch.setattr(common, "orjson", SimpleNamespace(**{**vars(orjson), "dumps": dumps}))
        counting = asyncio.create_task(rounds())
        answers = await asyncio.gather(*(client.post("/embed", json={"inputs": texts}) for _ in range(8)))
        counting.cancel()
        assert {answer.status_code for answer in answers} == {200, 429}
        assert client._transport.app.state.service.answers.taken == 0
    assert sum(map(sum, made)) < 5 * size
    # The first parts of answers wait for nothing.
    assert sum(len(parts) > 1 for parts in made) <= 8


async def test_scores_are_not_computed_for_an_answer_that_is_refused(monkeypatch):
    body = {"inputs": ["x"] * 512, "labels": [f"{number}" for number in range(512)]}
    scored = 0

    def cosines(*embeddings):
        nonlocal scored
        scored += 1
        return cosine_matrix(*embeddings)

    monkeypatch.setattr("service.routes.classify.cosine_matrix", cosines)
    limits = {"max_inflight_bytes": 2**24, "result_memory_bytes": 2**26}
    async with serving(FakeEngine(), **limits) as client:
        for _ in range(3):
            size = len((await client.post("/classify", json=body)).content)
        assert 2**23 < size < 2**24
        scored = 0
        answers = await asyncio.gather(*(client.post("/classify", json=body) for _ in range(8)))
        assert client._transport.app.state.service.answers.taken == 0
    statuses = [answer.status_code for answer in answers]
    assert scored <= 2  # a count before the scores does not know how long they are
    assert set(statuses) == {200, 429}


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
async def test_answer_that_is_overdue_is_not_made_to_its_end(monkeypatch, path):
    body, made, passed = {"inputs": ["x"] * 2048}, 0, 0.0

    def dumps(content, option=None):
        nonlocal made
        made += isinstance(content, list)
        return orjson.dumps(content, option=option)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed)
    async with serving(FakeEngine(), max_request_inputs=2048, result_memory_bytes=2**26) as client:
        for _ in range(3):
            await client.post(path, json=body)
        monkeypatch.setattr(common, "orjson", SimpleNamespace(**{**vars(orjson), "dumps": dumps}))
        monkeypatch.setattr("service.web.call.time", clock)
        state = client._transport.app.state.service
        async with state.writing:
            late = asyncio.create_task(client.post(path, json=body))
            await until(lambda: state.writing._waiters)  # for its second part
            passed = 60.0
        assert (await late).status_code == 504
    assert made == 1


async def test_overdue_request_is_dropped_and_the_next_one_served():
    engine = FakeEngine()
    async with serving(engine) as client:
        busy = await begun(engine, client.post("/embed", json={"inputs": "busy"}))
        late = await client.post("/embed", json={"inputs": "late"}, headers={"X-AttnCache-Timeout": "0.01"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        metrics = (await client.get("/metrics")).text
        assert "attncache_queue_sequences 0.0" in metrics
        assert 'attncache_requests_total{route="/embed",status="504"} 1.0' in metrics
        engine.may_run.set()
        assert (await busy).status_code == 200
        assert (await client.post("/embed", json={"inputs": "next"})).status_code == 200
    assert engine.batches == [["busy"], ["next"]]


async def test_explanation_that_is_overdue_when_its_turn_comes_is_not_computed(monkeypatch):
    monkeypatch.setattr("service.routes.explain.explain", lambda *_, **__: pytest.fail("computed"))
    async with serving(admin=True) as client:
        async with client._transport.app.state.service.explaining:
            late = {"X-AttnCache-Timeout": "0.01"}
            pending = asyncio.create_task(client.post("/explain", json={"input": "text"}, headers=late))
            await asyncio.sleep(0.05)
        refused = await pending
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"inputs": "text"}), ("/decode", {"ids": [97]})])
async def test_texts_are_tokenised_one_after_the_other_and_other_work_has_threads(monkeypatch, path, body):
    engine, ends, running, most = FakeEngine(), threading.Event(), 0, 0

    def translate(*_, **__):
        nonlocal running, most
        running += 1
        most = max(most, running)
        ends.wait(30)
        running -= 1
        return []

    monkeypatch.setattr(engine.tokenizer, "pieces", translate, raising=False)
    monkeypatch.setattr(engine.tokenizer, "decode", translate, raising=False)
    async with serving(engine) as client:
        many = [asyncio.create_task(client.post(path, json=body)) for _ in range(100)]
        late = {"X-AttnCache-Timeout": "0.01"}
        many.append(asyncio.create_task(client.post(path, json=body, headers=late)))
        await until(lambda: running)
        metrics = await asyncio.wait_for(client.get("/metrics"), 30)
        ends.set()
        statuses = [(await each).status_code for each in many]
    assert metrics.status_code == 200
    assert statuses == [200] * 100 + [504]
    assert most == 1


async def test_servers_deadline_holds_without_a_header_and_a_header_cannot_extend_it():
    engine = FakeEngine()
    async with serving(engine, request_seconds=0.05) as client:
        engine.may_run.clear()
        for headers in ({}, {"X-AttnCache-Timeout": "1000"}):
            response = await client.post("/embed", json={"inputs": "text"}, headers=headers)
            assert response.status_code == 504


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "text"}),
        ("/embed", {"session_id": "s", "transcript": "text"}),
        ("/classify", {"inputs": "text", "labels": ["a", "b"]}),
        ("/v1/embeddings", {"input": "text"}),
        ("/similarity", {"inputs": {"source_sentence": "text", "sentences": ["a"]}}),
    ],
)
async def test_wrong_timeout_is_refused_by_its_name_before_anything_is_computed(path, body):
    engine = FakeEngine()
    async with serving(engine) as client:
        for value in ("0", "-1", "nan", "inf", "soon", "", "1_0"):
            refused = await client.post(path, json=body, headers={"X-AttnCache-Timeout": value})
            assert refused.status_code == 400, value
            assert "X-AttnCache-Timeout must be a number" in refused.text
            if path in ("/embed", "/classify"):
                assert refused.headers["X-AttnCache-Model"] == engine.fingerprint
                error = refused.json()["error"]
                assert (error["code"], error["field"]) == ("invalid_input", "X-AttnCache-Timeout")
        metrics = (await client.get("/metrics")).text
    assert engine.batches == []
    assert "attncache_tokenize_seconds_count 0.0" in metrics


# How fast a queue is drained.

ROUND = 100
batches = st.lists(st.integers(ROUND, 300), min_size=3, max_size=30)


def measured(sizes, seconds, threads=1):
    """Let threads compute batches of these sizes, each in these seconds, while others wait all the time."""
    speed = DrainSpeed(ROUND * threads)
    free_at = [0.0] * threads
    ends = []
    speed.note(0, 0.0, others_wait=True)
    for size, took in zip(sizes, seconds, strict=True):
        thread = free_at.index(min(free_at))
        free_at[thread] += took
        ends.append((free_at[thread], size))
    for now, size in sorted(ends):
        speed.note(size, now, others_wait=True)
    return speed.tokens_per_second


@given(sizes=batches)
def test_speed_of_batches_of_any_size_is_the_speed_of_their_tokens(sizes):
    assert measured(sizes, [size / 5 for size in sizes]) == pytest.approx(5)


def test_small_batches_make_a_round_together():
    assert measured([30] * 40, [6.0] * 40) == pytest.approx(5)


@given(threads=st.integers(1, 8))
def test_threads_that_compute_at_the_same_time_add_up(threads):
    found = measured([ROUND] * 20 * threads, [2.0] * 20 * threads, threads)
    assert found == pytest.approx(threads * ROUND / 2.0)


def test_nothing_is_known_after_a_few_batches():
    assert measured([ROUND] * 2, [9.0] * 2) is None
    assert measured([ROUND] * 3, [9.0] * 3) is not None


def test_one_stall_changes_nothing():
    assert measured([ROUND] * 9, [1.0] * 4 + [1000.0] + [1.0] * 4) == ROUND


def test_speed_follows_the_last_batches():
    assert measured([ROUND] * 40, [1.0] * 20 + [4.0] * 20) == ROUND / 4


def test_batches_that_nothing_waits_behind_do_not_count():
    speed = DrainSpeed(ROUND)
    now = 0.0
    for _ in range(10):
        speed.note(0, now, others_wait=True)
        now += 1
        speed.note(ROUND, now, others_wait=False)
        now += 50  # nothing waits
        speed.note(0, now, others_wait=False)  # a small batch begins
        now += 50
        speed.note(1, now, others_wait=False)
    assert speed.tokens_per_second == ROUND
