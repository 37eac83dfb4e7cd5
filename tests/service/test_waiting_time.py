"""Requests are refused at once if too much work comes before them, and only then."""

import asyncio
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from heapq import heappop, heappush

import numpy as np
import pytest
from fake_engine import OWN_PROMPT, FakeEngine, begun, serving, texts_of
from hypothesis import given
from hypothesis import strategies as st
from queueing import assert_result_of, batching, held, submit, until_waiting

from attncache_core.engine.request import PrefillBatch, PrefillPart
from service.batching.admission import Limits
from service.batching.pending_request import PendingRequest, Slice
from service.batching.request_queue import RequestQueue
from service.batching.sources import Texts
from service.errors import QueueFull

BATCH = 40  # tokens; a token of the fake engine is a character
SPEED = 8.0  # tokens per second
MAX_SECONDS = 20.0
MANY = 10**6


class SimulatedQueue:
    """A queue whose one engine thread computes 8 tokens per second of a clock that the test turns."""

    def __init__(self, max_seconds=MAX_SECONDS, sequences=MANY, tokens=MANY):
        self.now = 0.0
        limits = Limits(BATCH, MANY, sequences, MANY, tokens, max_seconds)
        self.queue = RequestQueue(
            limits, self._tokenize, lambda _: None, lambda *_: None, clock=lambda: self.now
        )
        self._engine = FakeEngine()
        self._known = set()
        self._turn = None
        self._taken = []

    def add(self, flow, *texts):
        """Queue texts of a client. Raises QueueFull."""
        request = request_of(texts, flow)
        starting = self.queue.add(request)
        if starting:
            self._turn = self.queue.batches()
            self._begin_batch()
        return request

    def flood(self, flow, *texts):
        """Queue the same texts again and again, until they are refused. Returns the error."""
        for _ in range(1000):
            try:
                self.add(flow, *texts)
            except QueueFull as error:
                return error
        raise AssertionError("nothing was refused")

    def run(self, seconds=float("inf")):
        """Compute until the queue is empty, or for so many seconds and to the end of the batch."""
        until = self.now + seconds
        while self._taken and self.now < until:
            self._end_batch()

    def run_until_begun(self, request):
        """Compute until the batch that begins holds a sequence of the request."""
        while request not in self._taken:
            self._end_batch()

    def know(self, *texts):
        """Let the results of these texts be known from now on."""
        self._known.update(texts)

    def _begin_batch(self):
        batch = next(self._turn, [])
        self._taken = [piece.request for piece in batch]
        self._tokens = sum(piece.prefill.tokens for piece in batch)

    def _end_batch(self):
        self.now += self._tokens / SPEED
        self._begin_batch()

    def _tokenize(self, request):
        made = request.next_part(self._engine, MANY)
        texts = texts_of(PrefillBatch([made.prefill]))
        return made.select([index for index, text in enumerate(texts) if text not in self._known])


def request_of(texts, flow="client"):
    """Return a request whose future is never done, and needs no event loop."""
    return PendingRequest(Texts(texts, truncate=True), OWN_PROMPT, False, True, Future(), (flow,))


def queue_of(tokens=BATCH, tokenize=lambda request: request.next_part(FakeEngine(), MANY), threads=1):
    return RequestQueue(Limits(tokens, MANY, MANY, MANY), tokenize, lambda _: None, lambda *_: None, threads)


def measured_queue(**limits):
    """A queue that has measured its speed, and the characters of a token, and is empty."""
    simulated = SimulatedQueue(**limits)
    for count in [1] * 100 + [10]:  # the queue forgets the prose that it began with
        simulated.add("earlier", *["x" * BATCH] * count)
        simulated.run()
    return simulated


clients_texts = st.lists(
    st.tuples(st.sampled_from("xyz"), st.lists(st.integers(1, 15), min_size=1, max_size=8)), max_size=60
)


@given(requests=clients_texts, client=st.sampled_from("xyzn"))
def test_admitted_request_waits_about_as_long_as_allowed_at_most(requests, client):
    simulated = measured_queue()
    for name, lengths in requests:
        with suppress(QueueFull):
            simulated.add(name, *("t" * length for length in lengths))
    try:
        request = simulated.add(client, "text")
    except QueueFull:
        return
    since = simulated.now
    simulated.run_until_begun(request)
    # Beside what is ahead: the batch that is being computed, and what a batch leaves empty, because a text
    # that does not fit waits for the next turn of its flow.
    assert simulated.now - since <= (MAX_SECONDS + BATCH / SPEED) * BATCH / (BATCH - 14)


@given(
    requests=clients_texts, client=st.sampled_from("xyz"), lengths=st.lists(st.integers(1, 15), min_size=1)
)
def test_request_that_comes_again_after_retry_after_is_admitted(requests, client, lengths):
    simulated = measured_queue(max_seconds=1.0)
    for name, texts in requests:
        with suppress(QueueFull):
            simulated.add(name, *("t" * length for length in texts))
    refused = simulated.flood(client, *("t" * length for length in lengths))
    assert refused.retry_after_seconds >= 1
    simulated.run(refused.retry_after_seconds)
    simulated.add(client, *("t" * length for length in lengths))


def test_flood_of_one_client_is_refused_and_another_client_is_served_next():
    simulated = measured_queue()
    refused = simulated.flood("greedy", "x" * 10)
    assert "21.2 seconds of work come before this request, and --max-queue-seconds allows 20" in str(refused)
    since = simulated.now
    request = simulated.add("modest", "one text")
    simulated.run_until_begun(request)
    assert simulated.now - since <= 2 * BATCH / SPEED


def test_retry_after_is_the_time_until_enough_has_left_the_queue():
    simulated = measured_queue(max_seconds=0.0)
    simulated.add("a", "x" * BATCH)  # is computed
    simulated.add("a", *["x" * BATCH] * 9)
    with pytest.raises(QueueFull) as refused:
        simulated.add("a", "one text")
    # A full batch may wait, and 8 more are too much.
    assert refused.value.retry_after_seconds == 8 * BATCH / SPEED
    simulated.run(8 * BATCH / SPEED - 1)
    simulated.add("a", "one text")


def test_retry_after_of_a_queue_without_room_is_the_time_until_there_is_room():
    texts = measured_queue(sequences=10)
    texts.add("a", "x" * BATCH)
    texts.add("a", *["x" * 20] * 10)
    with pytest.raises(QueueFull, match="too many texts") as refused:
        texts.add("b", "x", "y")
    assert refused.value.retry_after_seconds == 2 * 20 / SPEED
    tokens = measured_queue(tokens=200)
    tokens.add("a", "x" * BATCH)
    tokens.add("a", *["x" * 20] * 10)
    with pytest.raises(QueueFull, match="too many tokens") as refused:
        tokens.add("b", "x" * 60)
    assert refused.value.retry_after_seconds == 60 / SPEED + 0.5  # rounded up


def test_a_crowd_that_comes_back_when_it_is_told_is_admitted_at_the_second_try():
    simulated, tries = measured_queue(max_seconds=5.0), Counter()
    crowd = [(simulated.now, client) for client in range(16)]  # a second of work each
    while crowd:
        told, client = heappop(crowd)
        simulated.run(told - simulated.now)
        simulated.now = max(simulated.now, told)
        tries[client] += 1
        try:
            simulated.add(client, "x" * 8)
        except QueueFull as refused:
            heappush(crowd, (simulated.now + refused.retry_after_seconds, client))
    assert max(tries.values()) == 2


def test_a_refused_client_is_not_told_to_wait_for_all_that_others_were_refused():
    simulated = measured_queue(max_seconds=5.0)
    for _ in range(100):
        refused = simulated.flood("greedy", "x" * 8)
    assert refused.retry_after_seconds == 20
    assert simulated.flood("modest", "x" * 8).retry_after_seconds <= 20


def test_nothing_is_refused_before_the_speed_is_known():
    simulated = SimulatedQueue(max_seconds=0.0)
    for _ in range(50):
        simulated.add("a", "x" * BATCH)
    simulated.run()
    simulated.add("a", "x" * BATCH)
    simulated.add("a", *["x" * BATCH] * 2)
    with pytest.raises(QueueFull):
        simulated.add("a", "x")


def test_request_of_any_size_is_admitted_to_an_empty_queue():
    simulated = measured_queue(max_seconds=0.0)
    simulated.add("a", *["x" * BATCH] * 50)
    simulated.run()
    simulated.add("a", *["x" * BATCH] * 50)


def test_texts_whose_results_are_known_make_the_queue_faster():
    simulated = measured_queue()
    simulated.know("known text")
    # Many requests, because the texts of a request are tokenised together. A quarter is computed.
    for _ in range(10):
        simulated.add("a", "x" * BATCH)
        for _ in range(4):
            simulated.add("a", "x" * 10)
            for _ in range(3):
                simulated.add("a", "known text")
        simulated.run()
    simulated.add("a", "x" * BATCH)
    added = 0
    with suppress(QueueFull):
        while True:
            simulated.add("a", "known text")
            added += 10
    assert added > 2 * MAX_SECONDS * SPEED


async def test_refusal_says_when_to_come_again_and_names_the_option():
    engine, body = FakeEngine(), {"inputs": "x"}
    async with serving(engine, max_queue_seconds=0, max_batch_tokens=10) as client:
        assert (await client.post("/embed", json={"inputs": ["x" * 10] * 50})).status_code == 200
        busy = await begun(engine, client.post("/embed", json={"inputs": "busy"}))
        waiting = asyncio.create_task(client.post("/embed", json={"inputs": ["x" * 10] * 8}))
        await until_waiting(client, 8)
        refused = await client.post("/embed", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["Retry-After"]) >= 1
        assert "--max-queue-seconds allows 0" in refused.text
        assert (await client.get("/info")).json()["settings"]["max_queue_seconds"] == 0
        engine.may_run.set()
        assert [(await task).status_code for task in (busy, waiting)] == [200, 200]
        assert (await client.post("/embed", json=body)).status_code == 200


def test_sequences_that_leave_while_their_keys_are_looked_up_fail_nothing(monkeypatch):
    queue = queue_of()
    queue.add(request_of(["a", "b"]))

    def leave(piece):
        piece.request.waiting.clear()  # as another thread does, if the client disconnects
        return iter(["key"])

    monkeypatch.setattr(Slice, "stored_as", property(leave))
    assert queue.upcoming() == ["key"]


@given(data=st.data(), texts=st.integers(1, 5), plans=st.integers(1, 4))
def test_sequences_of_a_text_count_as_one_text_whichever_are_left_out(data, texts, plans):
    numbers = [text for text in range(texts) for _ in range(plans)]
    indices = sorted(data.draw(st.sets(st.sampled_from(range(len(numbers))), min_size=1)))
    offsets = range(len(numbers) + 1)  # each sequence is one token
    whole = Slice(
        None, PrefillPart(np.zeros(len(numbers), np.int64), offsets), offsets[:-1], offsets, numbers
    )
    chosen = whole.select(indices)
    for count in range(1, len(indices) + 1):
        assert chosen.first(count).texts == len({numbers[index] for index in indices[:count]})


@pytest.mark.parametrize(("shared", "is_divided"), [(50, False), (2, True)])
async def test_texts_that_share_much_are_not_divided_among_batches(monkeypatch, shared, is_divided):
    monkeypatch.setattr("service.batching.sources._PART_TEXTS", 2)
    engine = FakeEngine()
    engine.sharing = True
    requests = [[letter * shared + end for end in "12345678"] for letter in "abcd"]
    tokens = shared + 8
    async with batching(engine, tokens=tokens * 3 // 2) as batcher:
        async with held(engine, batcher):
            pending = [submit(batcher, texts, reuse=False, flow=(texts[0],)) for texts in requests]
        for texts, result in zip(requests, await asyncio.gather(*pending), strict=True):
            assert_result_of(texts, result)
    assert (sorted(engine.batches) != sorted([["busy"], *requests])) == is_divided


async def test_known_texts_are_charged_as_guessed_before_the_guess_for_the_others_fell(monkeypatch):
    monkeypatch.setattr("service.batching.sources._PART_TEXTS", 2)
    charged = []
    engine = FakeEngine()
    engine.sharing = True
    texts = ["x" * 50 + chr(ord("a") + index) for index in range(20)]
    async with batching(engine, result_bytes=2**20) as batcher:
        order = batcher.queue._order
        async with held(engine, batcher):
            charge = order.charge
            monkeypatch.setattr(
                order, "charge", lambda cost, left=0: (charged.append(cost), charge(cost, left=left))
            )
            pending = [
                submit(batcher, part, flow=(name,)) for name, part in (("first", texts[:2]), ("all", texts))
            ]
        await asyncio.gather(*pending)
    assert max(charged) <= 2 * 51  # two texts


def test_more_threads_start_once_the_tokens_are_known():
    queue = queue_of(1024, threads=2)
    assert queue.add(request_of(["a" * 60] * 60)) == 1  # guessed as 900 tokens, and 3,600
    assert next(queue.batches())
    assert [queue.start_more(), queue.start_more()] == [1, 0]


def test_thread_goes_on_if_the_other_one_fails_while_fewer_may_run(monkeypatch):
    queue = queue_of(threads=2)
    queue.add(request_of(["a"]))
    queue._running = 2
    queue.allow_threads(1)

    def fail_the_other(_tokens):  # between the two looks at the number of threads
        monkeypatch.undo()
        queue._running -= 1

    monkeypatch.setattr(queue, "_note_speed", fail_the_other)
    assert [len(piece) for piece in next(queue.batches())] == [1]


def test_request_that_cannot_be_tokenised_is_looked_up_once_before_its_client_is_told():
    looked_at = []

    def failing(request):
        looked_at.append(request)
        assert len(looked_at) < 10
        # The event loop will tell the client, so the future is not done yet.

    queue, request = queue_of(tokenize=failing), request_of(["a", "b"])
    queue.add(request)
    assert queue.upcoming() == []
    assert looked_at == [request]
    assert queue.waiting_sequences == 0
