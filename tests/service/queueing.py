"""A batcher with a fake engine: texts that wait, and what they are answered."""

import asyncio
import math
from contextlib import asynccontextmanager

import numpy as np
from fake_engine import FAILING, NOT_FINITE, FakeEngine, begun, embedding_of, serving, texts_of
from hypothesis import strategies as st
from running import until, until_metric

from attncache_core.checkpoints.template import Template
from attncache_core.text.prompts import Prompt, SequencePlan
from service.batching.admission import Limits
from service.batching.batcher import Batcher
from service.batching.sources import Texts
from service.observability.metrics import Metrics

# Making all metrics takes longer than most tests of a batcher.
UNREAD = Metrics()


@asynccontextmanager
async def batching(
    engine,
    tokens=1000,
    sequences=100,
    queue=1000,
    metrics=None,
    queue_seconds=math.inf,
    queue_tokens=2**20,
    **more,
):
    """Yield a batcher for the engine. At the end, assert that nothing waits any more."""
    limits = Limits(tokens, sequences, queue, 10**6, queue_tokens, queue_seconds)
    batcher = Batcher(engine, limits, metrics or UNREAD, **more)
    try:
        yield batcher
    finally:
        engine.may_run.set()
        await asyncio.to_thread(batcher.close)
    assert (batcher.queue.waiting_sequences, batcher.queue.waiting_tokens) == (0, 0)


def submit(batcher, texts, reuse=True, **more):
    return batcher.submit(Texts(texts, truncate=True), reuse=reuse, **more)


async def hold(engine, batcher):
    """Keep the engine busy with another text, so that the next submitted requests have to wait."""
    engine.may_run.clear()
    busy = submit(batcher, ["busy"])
    await asyncio.to_thread(engine.runs.acquire)
    return busy


@asynccontextmanager
async def held(engine, batcher):
    """Keep the engine busy while the block runs, so that all requests that it submits have to wait."""
    busy = await hold(engine, batcher)
    yield
    engine.may_run.set()
    await busy


async def queued(batcher, count):
    """Wait until `count` requests have been tokenised and wait for the engine."""
    await until(lambda: batcher.queue.waiting_sequences >= count)


async def until_waiting(client, sequences):
    """Wait until this number of sequences waits in the queue of a server."""
    await until_metric(client, sequences, "attncache_queue_sequences")


@asynccontextmanager
async def full_queue(engine):
    """Yield a client of a server that computes one text, while two texts wait and no other one may."""
    limits = {"max_queue_sequences": 2, "max_request_inputs": 2, "max_batch_tokens": 1}
    async with serving(engine, **limits) as client:
        running = [await begun(engine, client.post("/embed", json={"inputs": "a"}))]
        running += [asyncio.create_task(client.post("/embed", json={"inputs": text})) for text in "bc"]
        await until_waiting(client, 2)
        yield client
        engine.may_run.set()
        await asyncio.gather(*running)


def assert_result_of(texts, result):
    expected = np.stack([embedding_of([ord(character) for character in text]) for text in texts])
    np.testing.assert_array_equal(result.outputs, expected)
    assert len(result.outcomes) == len(texts)


requests_of_texts = st.lists(
    st.lists(st.text(alphabet="abcdefgh", min_size=1, max_size=40), min_size=1, max_size=9),
    min_size=1,
    max_size=12,
)

LABELLED = Prompt(Template(), tuple(SequencePlan(0, continuation=(ord(end),)) for end in "xyz"))


class LabelledEngine(FakeEngine):
    """A fake engine that makes a sequence of each text and each label."""

    def tokenize(self, texts, truncate, prompt, *more):
        ends = ["".join(map(chr, plan.continuation)) for plan in prompt.sequence_plans]
        return super().tokenize([text + end for text in texts for end in ends], truncate, prompt, *more)


class CountingEngine(FakeEngine):
    """Notes, for each batch, how many texts were tokenised before it was computed."""

    def __init__(self):
        super().__init__()
        self.tokenized = 0
        self.tokenized_before = {}

    def tokenize(self, texts, *arguments, **more):
        self.tokenized += len(texts)
        return super().tokenize(texts, *arguments, **more)

    def run(self, requests):
        self.tokenized_before.update(dict.fromkeys(texts_of(requests), self.tokenized))
        return super().run(requests)


texts_of_all_kinds = st.one_of(
    st.text(alphabet="abcdefgh", min_size=1, max_size=40), st.sampled_from([FAILING, NOT_FINITE])
)
