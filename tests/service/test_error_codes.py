"""Every error code is in the table of docs/api.md, and every one can be met: each is provoked here."""

import asyncio
import itertools
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import anyio.to_thread
import numpy as np
import orjson
import pytest
from fake_engine import FAILING, NOT_FINITE, FakeEngine, serving, starting
from queueing import batching, full_queue, submit
from raw_http import HEALTH, Response, post, read_response, served

import attncache_core.errors
import service.errors
from attncache_core import AttnCacheError
from attncache_core.calibration.paired import compare
from attncache_core.checkpoints.description import find_checkpoint, read_checkpoint
from attncache_core.heads.classifier import fit_classifier
from attncache_core.reuse.maps.database import AttentionDatabase
from service.errors import error_response
from service.routes.cache import Dropped, _of_other_workers
from service.routes.openai.models import check_model_name
from service.settings import Settings, read_settings
from service.settings.cluster import SharedAddress
from service.shared.store import SharedStores
from service.store import SqliteStore
from service.web.call import Call, Client
from service.web.listeners import bind

pytestmark = pytest.mark.anyio

API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"
# These end the start of a server, or a command, and one is only in the metrics: none is a response.
NO_RESPONSES = {
    "address_unavailable",
    "build_failed",
    "client_gone",
    "corrupt_database",
    "database_refused",
    "invalid_settings",
    "machine_busy",
    "model_not_found",
    "unsupported_model",
}

PROVOCATIONS = {}


def kinds_below(base):
    """Yield the classes of errors, without those of the benchmarks."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith(("attncache_core.", "service.")):
            yield kind
            yield from kinds_below(kind)


KINDS = sorted(
    {kind for kind in kinds_below(AttnCacheError) if "code" in vars(kind)}, key=lambda kind: kind.code
)


def provokes(code):
    def register(provocation):
        assert code not in PROVOCATIONS
        PROVOCATIONS[code] = provocation
        return provocation

    return register


def provoked_by(code, path, body, engine=None, headers=None, **settings):
    """Register a POST request with this body, in JSON unless it is bytes, to a server with these settings."""

    @provokes(code)
    async def answer(_folder):
        async with serving(FakeEngine(**(engine or {})), **settings) as client:
            content = body if isinstance(body, bytes) else orjson.dumps(body)
            return await client.post(path, content=content, headers=headers)


def provoked_by_bytes(code, request, **settings):
    """Register these bytes, sent to a server with these settings."""

    @provokes(code)
    async def answer(_folder):
        def ask():
            with served(**settings) as server:
                return server.ask(request)

        return await anyio.to_thread.run_sync(ask)


def raised_by(code, call):
    """Register a call that raises the error; it takes an empty folder."""

    @provokes(code)
    async def raises(folder):
        call(folder)
        raise AssertionError


def documented():
    """Return the status of each code in the table of the page; "" for errors that are no response."""
    section = API_PAGE.read_text(encoding="utf-8").split("\n## Errors\n", 1)[1].split("\n## ", 1)[0]
    found = {}
    for row in re.findall(r"^\| ([\d, ]*) ?\| (`.*?`) \| ", section, re.MULTILINE):
        codes = re.findall(r"`(\w+)`", row[1])
        statuses = row[0].strip().split(", ")
        for code, status in zip(codes, statuses if len(statuses) > 1 else statuses * len(codes), strict=True):
            assert code not in found, f"{code} is in the table twice"
            found[code] = status
    return found


def test_table_has_every_code_with_its_status_and_no_other():
    expected = {kind.code: "" if kind.code in NO_RESPONSES else str(kind.status) for kind in KINDS}
    assert documented() == expected


def test_every_class_has_a_code_of_its_own_and_stands_in_the_two_modules_of_errors():
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    assert {kind.__module__ for kind in KINDS} == {attncache_core.errors.__name__, service.errors.__name__}


def test_every_code_is_provoked():
    assert set(PROVOCATIONS) == {kind.code for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
async def test_code_and_status_are_met(kind, tmp_path):
    async with asyncio.timeout(60):
        try:
            response = await PROVOCATIONS[kind.code](tmp_path)
        except AttnCacheError as error:
            answered = error_response(error)
            status, content = answered.status_code, bytes(answered.body)
        else:
            status, content = (
                (response.status, response.body)
                if isinstance(response, Response)
                else (response.status_code, response.content)
            )
    assert (orjson.loads(content)["error"]["code"], status) == (kind.code, kind.status)


LABELS = {"task": "classify", "labels": ("a", "b")}
provoked_by("malformed_body", "/embed", b"{")
provoked_by("invalid_input", "/embed", {"inputs": ""})
provoked_by("no_classifier", "/classify", {"inputs": "a"})
provoked_by("no_embedding", "/embed", {"inputs": "a"}, LABELS)
provoked_by("input_too_long", "/embed", {"inputs": "a" * 100, "truncate": False})
provoked_by("too_many_inputs", "/embed", {"inputs": ["a", "b"]}, max_request_inputs=1)
provoked_by("body_too_large", "/embed", {"inputs": "a" * 99}, max_body_bytes=50)
provoked_by("not_finite", "/embed", {"inputs": NOT_FINITE})
provoked_by("internal_error", "/embed", {"inputs": FAILING})
provoked_by("unknown_session", "/embed", {"session_id": "s", "append": "a"})
provoked_by("not_found", "/nowhere", {})
provoked_by("method_not_allowed", "/health", {})
provoked_by("no_key_values", "/cache/lookup", {"texts": "a"}, admin=True)
KEY = {"X-API-Key": "a-key-0123456789abc"}
OTHER_MODEL = {"X-AttnCache-Require-Model": "f" * 64}
provoked_by("unauthorized", "/embed", {"inputs": "a"}, api_key=KEY["X-API-Key"])
provoked_by("forbidden", "/explain", {}, headers=KEY, api_key=f"client {KEY['X-API-Key']}", admin=True)
provoked_by("model_mismatch", "/embed", {"inputs": "a"}, headers=OTHER_MODEL)
provoked_by_bytes("malformed_request", b"nonsense\r\n\r\n")
provoked_by_bytes("headers_too_large", HEALTH[:-2] + b"X: y\r\n" * 20_000)
provoked_by_bytes("request_timeout", post(b"{}")[:-1], body_seconds=0.2)


# The routes that raise it answer with the codes of OpenAI.
raised_by("unknown_model", lambda _: check_model_name("another", Settings()))
raised_by("store_unavailable", lambda folder: SqliteStore(folder / "no folder" / "store.sqlite"))
raised_by("invalid_settings", lambda _: read_settings({"port": "many"}))
raised_by("model_not_found", lambda folder: find_checkpoint(str(folder / "absent")))
raised_by("database_refused", lambda folder: AttentionDatabase.open(folder / "absent"))
raised_by("build_failed", lambda _: fit_classifier(np.ones((2, 4)), ["a", "a"], fingerprint="", model=""))


@provokes("quota_exceeded")
async def _(_folder):
    async with serving(api_key=f"client {KEY['X-API-Key']} requests_per_minute=1") as client:
        for _ in range(2):
            response = await client.post("/embed", json={"inputs": "a"}, headers=KEY)
        return response


@provokes("deadline_exceeded")
async def _(_folder):
    engine = FakeEngine()
    async with serving(engine) as client:
        engine.may_run.clear()
        return await client.post("/embed", json={"inputs": "a"}, headers={"X-AttnCache-Timeout": "0.01"})


@provokes("queue_full")
async def _(_folder):
    async with full_queue(FakeEngine()) as client:
        return await client.post("/embed", json={"inputs": "refused"})


@provokes("not_ready")
async def _(_folder):
    may_load = threading.Event()

    def load_engine():
        assert may_load.wait(60)
        return FakeEngine()

    async with starting(load_engine) as client:
        try:
            return await client.post("/embed", json={"inputs": "a"})
        finally:
            may_load.set()


@provokes("stuck")
async def _(_folder):
    async with serving(stuck_seconds=3600) as client:
        watchdog = client._transport.app.state.service.watchdog
        watchdog.begin()
        watchdog._began[threading.get_ident()] -= 5000
        try:
            return await client.get("/ready")
        finally:
            watchdog.end()


@provokes("shutting_down")
async def _(_folder):
    async with batching(FakeEngine(), result_bytes=2**20) as batcher:
        pass
    await submit(batcher, ["a"])
    raise AssertionError


@provokes("worker_unavailable")
async def _(_folder):
    group = mock.AsyncMock(ask=mock.AsyncMock(return_value=[b""]))
    state = SimpleNamespace(group=group)
    await _of_other_workers(Call({}, mock.AsyncMock(), state, {}, Client(()), "1"), "drop", Dropped)
    raise AssertionError


@provokes("shared_unavailable")
async def _(_folder):
    # A port of the machine on which nobody listens.
    stores = SharedStores(SharedAddress.parse("valkey://127.0.0.1:1"), lambda _use: None)
    await stores.store("sessions").get("s")
    raise AssertionError


@provokes("client_gone")
async def _(_folder):
    async def receive():
        return {"type": "http.disconnect"}

    state = SimpleNamespace(settings=Settings())
    await Call({"type": "http"}, receive, state, {}, Client(()), "1").content()
    raise AssertionError


@provokes("too_many_connections")
async def _(_folder):
    def ask():
        with served(max_connections=1) as server, server.connect() as only:
            only.sendall(HEALTH)
            read_response(only)
            return server.ask(post(b'{"inputs": "a"}'))

    return await anyio.to_thread.run_sync(ask)


@provokes("address_unavailable")
async def _(_folder):
    with bind("127.0.0.1", 0) as taken:
        bind("127.0.0.1", taken.getsockname()[1])
    raise AssertionError


@provokes("unsupported_model")
async def _(folder):
    (folder / "config.json").write_text('{"model_type": "sundial"}')
    read_checkpoint(folder)
    raise AssertionError


@provokes("corrupt_database")
async def _(folder):
    (folder / "manifest.json").write_text("{")
    AttentionDatabase.open(folder)
    raise AssertionError


@provokes("machine_busy")
async def _(_folder):
    seconds = itertools.count()  # every pair of passes waited for the processors
    with mock.patch("attncache_core.calibration.paired.waited_seconds", seconds.__next__):
        compare([(lambda: None, lambda: None)], limit=0.0)
    raise AssertionError
