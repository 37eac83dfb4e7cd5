"""Loading, full queues, failures, and clients that leave."""

import asyncio
import threading

import pytest
from fake_engine import FakeEngine, ready, serving, starting

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
