"""Loading, failures to load, and an engine that is replaced by another one while clients notice nothing."""

import asyncio
import gc
import logging
import threading
import weakref
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine, begun, ready, serving, starting
from queueing import until_waiting
from running import until, until_metric
from verifying import VERIFIED

from attncache_core import ModelNotFound


async def test_server_lives_at_once_and_is_ready_when_loaded():
    loaded = threading.Event()

    def load_engine():
        loaded.wait()
        return FakeEngine()

    async with starting(load_engine) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        for path in ("/ready", "/info"):
            assert (await client.get(path)).status_code == 503
        for path in ("/embed", "/classify"):
            required = {"X-AttnCache-Require-Model": "f" * 64}
            response = await client.post(path, json={"inputs": "a"}, headers=required)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
            assert "X-AttnCache-Model" not in response.headers
            assert int(response.headers["Retry-After"]) >= 1
        assert "attncache_ready 0.0" in (await client.get("/metrics")).text
        loaded.set()
        await ready(client)
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert "attncache_ready 1.0" in (await client.get("/metrics")).text
        assert (await client.post("/embed", json={"inputs": "a"})).status_code == 200


@pytest.mark.parametrize("error", [ModelNotFound("there is no such model"), ValueError("broken file")])
async def test_failure_to_load_is_reported(error, caplog):
    reported = asyncio.get_running_loop().create_future()

    def load_engine():
        raise error

    async with starting(load_engine, reported.set_result) as client:
        assert await reported is error
        assert (await client.get("/ready")).status_code == 503
    # The caller reports an expected error in one line; an unexpected error has its traceback logged.
    assert ("Traceback" in caplog.text) == isinstance(error, ValueError)


async def test_info_says_what_is_served():
    async with serving(max_request_inputs=5, max_request_tokens=99, truncate=False) as client:
        info = (await client.get("/info")).json()
    assert (info["model"], info["task"], info["database"]["records"]) == ("fake", "embed", 7)
    assert info["settings"]["max_request_inputs"] == 5
    assert info["settings"]["max_request_tokens"] == 99
    assert info["settings"]["truncate"] is False
    assert info["version"]


async def test_client_that_leaves_in_the_middle_of_its_body_leaves_no_trace():
    async with serving() as client:
        app = client._transport.app

        async def receive():
            return {"type": "http.disconnect"}

        async def send(_message): ...

        scope = {"type": "http", "method": "POST", "path": "/embed", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        assert (await client.post("/embed", json={"inputs": "next"})).status_code == 200


# An engine without a database, and the next one of the same model.


class Successor:
    """Loads an engine without a database at once, and `engine` when `may_come` is set."""

    def __init__(self, engine):
        self.engine = engine
        self.may_come = threading.Event()
        self.before = FakeEngine()
        self.before.map_reuse = None

    def __call__(self):
        yield self.before
        self.may_come.wait()
        yield self.engine


async def until_info(client, holds):
    while not holds((await client.get("/info")).json()):
        await asyncio.sleep(0.001)


async def replaced(client, successor):
    successor.may_come.set()
    await until_info(client, lambda info: info["database"] is not None)


async def embed(client, *texts):
    return await client.post("/embed", json={"inputs": list(texts)})


async def test_requests_are_answered_before_and_after_metrics_continue_and_hits_are_verified_by_the_next():
    successor = Successor(FakeEngine(stored={"a"}))
    async with starting(successor, verify_rate=1) as client:
        await ready(client)
        before = await embed(client, "a")
        await replaced(client, successor)
        after = await embed(client, "a")
        metrics = await until_metric(client, 1, VERIFIED)
    assert [answer.headers["X-AttnCache-Hits"] for answer in (before, after)] == ["0/1", "1/1"]
    assert before.headers["X-AttnCache-Model"] == after.headers["X-AttnCache-Model"]
    assert successor.before.batches == successor.engine.verified == [["a"]]
    assert successor.engine.batches == [["a"]] * 2
    assert metrics["attncache_requests_total", "/embed", "200"] == 2
    assert metrics["attncache_database_records",] == 7


async def test_requests_queued_for_the_first_engine_are_answered_by_the_next():
    successor = Successor(FakeEngine(stored={"waits"}))
    async with starting(successor, verify_rate=0) as client:
        await ready(client)
        runs = await begun(successor.before, embed(client, "runs"))
        waits = asyncio.create_task(embed(client, "waits"))
        await until_waiting(client, 1)
        await replaced(client, successor)
        assert "attncache_queue_sequences 1.0" in (await client.get("/metrics")).text
        successor.before.may_run.set()
        answers = [await runs, await waits]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.headers["X-AttnCache-Hits"] for answer in answers] == ["0/1", "1/1"]
    assert (successor.before.batches, successor.engine.batches) == ([["runs"]], [["waits"]])


async def test_headers_are_those_of_the_engine_that_a_request_began_with():
    successor = Successor(FakeEngine())
    store = SimpleNamespace(looks_ahead=False)
    successor.before.key_values = SimpleNamespace(store=store, approximation=None)
    async with starting(successor, verify_rate=0) as client:
        await ready(client)
        runs = await begun(successor.before, embed(client, "runs"))
        await replaced(client, successor)
        successor.before.may_run.set()
        answers = [await runs, await embed(client, "later")]
    assert [answer.headers.get("X-AttnCache-Cached-Tokens") for answer in answers] == ["0/4", None]


async def test_memory_of_the_first_engine_is_freed():
    successor = Successor(FakeEngine())
    before = weakref.ref(successor.before)
    async with starting(successor, verify_rate=0) as client:
        await ready(client)
        await embed(client, "a")
        del successor.before
        await replaced(client, successor)
        await embed(client, "b")
        while before() is not None:
            gc.collect()
            await asyncio.sleep(0.01)


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


async def test_engine_that_comes_while_the_server_ends_starts_nothing():
    successor, loading = Successor(FakeEngine(stored={"a"})), len(threads("load"))
    scrubbing = len(threads("scrub"))
    async with starting(successor, verify_rate=0) as client:
        await ready(client)
    successor.may_come.set()
    await until(lambda: len(threads("load")) <= loading)
    await asyncio.sleep(0.01)  # what the thread has given to the event loop
    assert len(threads("scrub")) == scrubbing


async def test_first_engine_serves_on_if_the_next_cannot_be_loaded(caplog):
    failed = []

    def load_engines():
        yield FakeEngine()
        raise ValueError("broken file")

    async with starting(load_engines, failed.append) as client:
        await ready(client)
        await until(lambda: "the engine that serves could not be replaced" in caplog.text)
        assert (await embed(client, "a")).status_code == 200
    assert failed == []
    assert caplog.text.count("Traceback") == 1


async def test_info_says_what_is_prepared_behind_the_requests(caplog):
    caplog.set_level(logging.INFO)
    may_end = threading.Event()

    def load_engines():
        yield FakeEngine()
        yield "building: 10%"
        may_end.wait()

    async with starting(load_engines) as client:
        await ready(client)
        await until_info(client, lambda info: info["preparing"] == "building: 10%")
        assert (await embed(client, "a")).status_code == 200
        may_end.set()
        await until_info(client, lambda info: info["preparing"] is None)
    assert "building: 10%" in caplog.text
