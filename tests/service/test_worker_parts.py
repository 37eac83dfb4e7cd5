"""The parts of a server with several workers, one by one, and two workers in one process."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from core_decoders import write_llama
from fake_engine import FakeEngine

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from service.access.quotas import Quotas
from service.app import create_app
from service.errors import InvalidSettings, QuotaExceeded, WorkerUnavailable
from service.observability.metrics import Metrics
from service.settings import Settings, read_settings
from service.web.listeners import Listener, bind
from service.workers.acceptor import Acceptor
from service.workers.added_metrics import (
    added,
    decoded,
    encoded,
    families_of,
    read_again,
    rendered,
    write_down,
)
from service.workers.board import Board
from service.workers.messages import Message, Peer, listen
from service.workers.process import READY, REFUSED, Process
from service.workers.shared_quotas import SharedQuotaUse, forget_in_flight
from service.workers.shares import share_of, worker_count, workers_for
from service.workers.team import QUOTAS, Team


@pytest.fixture
def folder() -> Iterator[Path]:
    # A short path, because the path of a Unix socket has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    (path / QUOTAS).mkdir()
    yield path
    shutil.rmtree(path)


# How many workers, and what each of them may use.


def test_auto_is_one_worker_for_8_processors() -> None:
    assert [workers_for(processors) for processors in (1, 2, 8, 15, 16, 64)] == [1, 1, 1, 1, 2, 8]
    assert worker_count(read_settings({"workers": "auto", "threads": 16})) == 2
    assert worker_count(read_settings({"workers": "3"})) == 3


def test_workers_share_threads_connections_sessions_and_bytes() -> None:
    settings = Settings(
        threads=8, kv_memory_bytes=900, result_memory_bytes=90, max_connections=100, max_sessions=4
    )
    share = share_of(settings, 3)
    assert (share.workers, share.threads, share.kv_memory_bytes, share.result_memory_bytes) == (3, 2, 300, 30)
    assert (share.max_connections, share.max_sessions) == (34, 2)
    assert share.max_queue_sequences == settings.max_queue_sequences
    assert share_of(Settings(threads=2), 3).threads == 1
    # A request of the greatest size still fits.
    assert share_of(Settings(max_inflight_bytes=3 * 2**20), 3).max_inflight_bytes == 2 * 2**20
    assert share_of(Settings(kv=False), 2).kv_memory_bytes is None


def test_one_worker_has_the_settings_of_the_server() -> None:
    assert share_of(Settings(), 1) == Settings()
    assert share_of(Settings(workers="auto"), 1) == Settings()


@pytest.mark.parametrize("workers", ["0", -1, "many", 1.5, True, "257", ""])
def test_other_numbers_of_workers_are_refused(workers: Any) -> None:
    with pytest.raises(InvalidSettings, match="give a number from 1 to 256, or auto"):
        read_settings({"workers": workers})


# Who accepts.


def test_connection_is_left_to_workers_with_fewer_connections() -> None:
    board = Board(3)
    board.write(0, serves=True, connections=2)
    board.write(1, serves=True, connections=1)
    assert [board.others_should_accept(worker) for worker in range(3)] == [True, False, True]
    board.add_connection(1)
    assert [board.others_should_accept(worker) for worker in range(3)] == [False, False, True]
    board.write(2, serves=True, connections=0)
    assert [board.others_should_accept(worker) for worker in range(3)] == [True, True, False]


def test_worker_that_ended_or_loads_or_is_silent_gets_no_connections_while_others_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board(2)
    assert not any(board.others_should_accept(worker) for worker in range(2))  # nobody serves yet
    board.write(0, serves=True, connections=5)
    board.write(1, serves=True, connections=0)
    board.clear(1)
    assert [board.others_should_accept(worker) for worker in range(2)] == [False, True]
    board.write(1, serves=True, connections=0)
    now = time.monotonic_ns()
    monkeypatch.setattr("service.workers.board.time.monotonic_ns", lambda: now + 10**11)
    board.write(0, serves=True, connections=5)
    assert [board.others_should_accept(worker) for worker in range(2)] == [False, True]


# Who may end.


def test_worker_that_ends_alone_waits_for_what_was_passed_on_to_it(folder: Path) -> None:
    board = Board(2)
    team = Team(0, 2, board, folder, lambda: None)
    board.write(1, serves=True, connections=5)
    assert not team.is_drained(nothing_in_flight=False)
    assert team.is_drained(nothing_in_flight=True)
    team.answering = 1
    assert not team.is_drained(nothing_in_flight=True)


def test_workers_that_end_together_wait_until_all_have_answered(folder: Path) -> None:
    board = Board(3)
    board.set_all_end()
    first, second = (Team(worker, 3, board, folder, lambda: None) for worker in range(2))
    board.write(2, serves=True, connections=0)
    assert not second.is_drained(nothing_in_flight=True)
    assert not first.is_drained(nothing_in_flight=True)
    board.clear(2)  # has ended
    assert first.is_drained(nothing_in_flight=True)
    second.answering = 1
    assert not second.is_drained(nothing_in_flight=True)
    assert not first.is_drained(nothing_in_flight=True)


def test_worker_that_is_silent_keeps_no_other_from_ending(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(2)
    board.set_all_end()
    team = Team(0, 2, board, folder, lambda: None)
    board.write(1, serves=True, connections=1)
    now = time.monotonic_ns()
    monkeypatch.setattr("service.workers.board.time.monotonic_ns", lambda: now + 10**11)
    assert team.is_drained(nothing_in_flight=True)


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.mark.anyio
async def test_connection_that_was_accepted_before_the_end_is_served() -> None:
    board = Board(1)
    board.write(0, serves=True, connections=0)
    with bind("127.0.0.1", 0) as listening, socket.socket() as client:
        acceptor = Acceptor(Listener("public", listening, ""), Echo, 5, board, 0)
        # Without a turn of the event loop, so that nobody has accepted it yet.
        client.connect(listening.getsockname())
        acceptor._accept()
        assert acceptor.is_opening
        acceptor.close()
        client.sendall(b"hello")
        client.settimeout(30)
        assert await asyncio.to_thread(client.recv, 5) == b"hello"
        assert not acceptor.is_opening


@pytest.mark.anyio
async def test_connections_that_come_at_once_are_accepted_in_one_turn_of_the_event_loop() -> None:
    board = Board(1)
    with bind("127.0.0.1", 0) as listening, ExitStack() as stack:
        acceptor = Acceptor(Listener("public", listening, ""), Echo, 5, board, 0)
        clients = [stack.enter_context(socket.socket()) for _ in range(5)]
        for client in clients:
            client.connect(listening.getsockname())
        acceptor._accept()
        acceptor.close()  # nobody who still waits would be answered
        for client in clients:
            client.sendall(b"hello")
            client.settimeout(30)
            assert await asyncio.to_thread(client.recv, 5) == b"hello"


# Metrics.


def test_metrics_are_added_unless_that_would_say_something_wrong() -> None:
    first, second = Metrics(), Metrics()
    for metrics, tokens in ((first, 3), (second, 4)):
        metrics.observe_request("/embed", 200, 0.2)
        metrics.watch(lambda tokens=tokens: tokens, lambda: None)  # type: ignore[misc]
        metrics.watch_overdue(lambda tokens=tokens: float(tokens))  # type: ignore[misc]
    third = Metrics()  # is not ready
    parts = [decoded(encoded(families_of(metrics.registry))) for metrics in (first, second, third)]
    lines = rendered(added(parts)).decode().splitlines()
    for line in (
        'attncache_requests_total{route="/embed",status="200"} 2.0',
        'attncache_request_seconds_bucket{le="0.25",route="/embed"} 2.0',
        'attncache_request_seconds_count{route="/embed"} 2.0',
        'attncache_request_seconds_sum{route="/embed"} 0.4',
        "attncache_queue_sequences 7.0",
        "attncache_workers 3.0",
        "attncache_ready 0.0",
        "attncache_overdue_seconds 4.0",
    ):
        assert line in lines
    assert rendered(added(parts[:1])) == first.render()
    assert rendered(added(parts[:1]), ["attncache_queue_sequences"]) == first.render(
        ["attncache_queue_sequences"]
    )


def test_tiers_in_memory_are_added_and_the_tier_on_disk_is_shared() -> None:
    family = ("attncache_kv_bytes", "", "gauge")
    parts = [
        [(*family, [("attncache_kv_bytes", {"tier": tier}, value) for tier in ("memory", "disk")])]
        for value in (2.0, 3.0)
    ]
    (together,) = added(parts)
    assert [value for _, _, value in together[3]] == [5.0, 3.0]


def test_values_without_a_limit_survive() -> None:
    samples = [
        ("attncache_threshold", {"kind": kind}, value) for kind, value in (("a", math.inf), ("b", math.nan))
    ]
    (family,) = decoded(encoded([("attncache_threshold", "", "gauge", samples)]))
    assert family[3][0][2] == math.inf
    assert math.isnan(family[3][1][2])


def test_what_was_counted_outlives_the_worker_and_the_rest_does_not(folder: Path) -> None:
    metrics = Metrics()
    metrics.observe_request("/embed", 200, 0.2)
    assert read_again(folder / "0.counts") == []
    write_down(folder / "0.counts", families_of(metrics.registry))
    lines = rendered(added([families_of(Metrics().registry), read_again(folder / "0.counts")])).decode()
    assert 'attncache_requests_total{route="/embed",status="200"} 1.0\n' in lines
    assert "attncache_workers 1.0\n" in lines


# Quotas.


def test_quotas_hold_over_all_workers(folder: Path) -> None:
    quotas = Quotas(requests_per_minute=5, tokens_per_minute=100, in_flight=3)
    uses = [SharedQuotaUse(folder, "client", quotas, worker, 2) for worker in range(2)]
    for use in (uses[0], uses[1], uses[1]):
        use.begin()
    for use in uses:
        with pytest.raises(QuotaExceeded, match="3 requests in flight"):
            use.begin()
    uses[1].end(1)
    uses[0].begin()
    uses[0].end(1)
    uses[1].begin()
    uses[0].end(150)
    for use in uses:
        with pytest.raises(QuotaExceeded, match="5 requests per minute"):
            use.begin()
    other = SharedQuotaUse(folder, "other", quotas, 0, 2)
    other.begin()
    other.end(150)
    with pytest.raises(QuotaExceeded, match="100 tokens per minute"):
        SharedQuotaUse(folder, "other", quotas, 1, 2).begin()


def test_requests_of_a_worker_that_ended_are_not_in_flight(folder: Path) -> None:
    quotas = Quotas(in_flight=2)
    ended, other = (SharedQuotaUse(folder / QUOTAS, "client", quotas, worker, 2) for worker in range(2))
    ended.begin()
    other.begin()
    forget_in_flight(folder / QUOTAS, 0)
    other.begin()
    with pytest.raises(QuotaExceeded):
        other.begin()


def test_lock_that_a_stopped_worker_holds_blocks_nobody(folder: Path) -> None:
    quotas = Quotas(requests_per_minute=100, in_flight=2)
    use, other = (SharedQuotaUse(folder / QUOTAS, "client", quotas, worker, 2) for worker in range(2))
    use.begin()
    (path,) = (folder / QUOTAS).iterdir()
    refused: list[QuotaExceeded] = []

    def count() -> None:
        use.begin()
        try:
            other.begin()
        except QuotaExceeded as error:
            refused.append(error)
        use.end(1)
        other.begin()
        forget_in_flight(folder / QUOTAS, 1)

    with path.open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        counting = threading.Thread(target=count, daemon=True)
        counting.start()
        counting.join(30)
        assert not counting.is_alive()
    assert "2 requests in flight" in str(refused[0])
    other.begin()
    with pytest.raises(QuotaExceeded, match="2 requests in flight"):
        use.begin()


def test_quotas_without_a_file_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidSettings, match="quotas of client cannot be counted: no such file"):
        SharedQuotaUse(folder / "absent", "client", Quotas(in_flight=1), 0, 2)


# Messages.


@pytest.mark.anyio
async def test_question_is_answered_until_the_other_worker_ends(folder: Path) -> None:
    async def answering(question: Message, gone: asyncio.Event) -> Message:  # noqa: ARG001
        if question.body == b"bug":
            raise RuntimeError
        return Message({"said": question.fields["say"]}, question.body * 2)

    path = folder / "0.sock"
    path.touch()  # left over
    peer = Peer(path)
    with pytest.raises(WorkerUnavailable):
        await peer.ask(Message({"say": 1}))
    server = await listen(path, answering)
    for body in (b"", b"\0\xff", b"x" * 2**20):
        assert await peer.ask(Message({"say": "ä"}, body)) == Message({"said": "ä"}, body * 2)
    with pytest.raises(WorkerUnavailable):
        await peer.ask(Message({"say": 1}, b"bug"))
    assert (await peer.ask(Message({"say": 1}))).fields == {"said": 1}
    server.close()
    peer.close()
    with pytest.raises(WorkerUnavailable):
        await peer.ask(Message({"say": 1}))


@pytest.mark.anyio
async def test_other_worker_is_told_if_nobody_waits_any_more(folder: Path) -> None:
    told, begun = asyncio.Event(), asyncio.Event()

    async def answering(question: Message, gone: asyncio.Event) -> Message:  # noqa: ARG001
        begun.set()
        await gone.wait()
        told.set()
        return Message({})

    server = await listen(folder / "0.sock", answering)
    asking = asyncio.create_task(Peer(folder / "0.sock").ask(Message({})))
    await begun.wait()
    asking.cancel()
    await asyncio.wait_for(told.wait(), 30)
    server.close()


@pytest.mark.anyio
async def test_reset_of_a_connection_tells_that_nobody_waits(folder: Path) -> None:
    told, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def answering(question: Message, gone: asyncio.Event) -> Message:
        begun.release()
        if question.fields["waits"]:
            await gone.wait()
            told.set()
        return Message({})

    server = await listen(folder / "0.sock", answering)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "0.sock"))
        for waits in (b'{"waits":false}', b'{"waits":true}'):
            client.sendall(len(waits).to_bytes(4, "big") + bytes(4) + waits)
            await begun.acquire()
        # Who leaves without having read the first answer resets the connection.
        while not select.select([client], [], [], 0)[0]:
            await asyncio.sleep(0.001)
    await asyncio.wait_for(told.wait(), 30)
    server.close()


# Reports to the supervisor.


def test_long_report_is_read_in_parts_and_once() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    process = Process(0, reading)
    message = "ä" * 200_000
    line = json.dumps([REFUSED, message]).encode() + b"\n"

    def write() -> None:
        with open(writing, "wb", buffering=0) as pipe:
            left = line + line[: len(line) // 2]  # the second one is cut
            while left:
                left = left[pipe.write(left) :]

    writer = threading.Thread(target=write)
    writer.start()
    found: list[tuple[str, str]] = []
    while writer.is_alive():
        found += process.reports()
    found += process.reports()
    os.close(reading)
    assert found == [(REFUSED, message)]


def test_reports_that_arrive_together_are_all_read() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    process = Process(0, reading)
    assert process.reports() == []
    os.write(writing, b'["ready", ""]\n["refused", "w')
    assert process.reports() == [(READY, "")]
    os.write(writing, b'hy"]\n')
    assert process.reports() == [(REFUSED, "why")]
    os.close(writing)
    assert process.reports() == []
    os.close(reading)


# Two workers.


@asynccontextmanager
async def two_workers(
    folder: Path, engines: list[Any], **settings: Any
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Yield a client of each of two workers, which run in this process."""
    board = Board(2)
    board.set_all_started()
    clients = []
    async with AsyncExitStack() as stack:
        for worker, engine in enumerate(engines):
            team = Team(worker, 2, board, folder, lambda: None)
            app = create_app(Settings(verify_rate=0, **settings), lambda own=engine: iter([own]), None, team)  # type: ignore[misc]
            await stack.enter_async_context(app.router.lifespan_context(app))
            transport = httpx.ASGITransport(app)
            client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10)
            clients.append(await stack.enter_async_context(client))
            while (await client.get("/ready")).status_code == 503:
                await asyncio.sleep(0.001)
        yield clients


def tiny_decoder(folder: Path) -> PrefillEngine:
    return PrefillEngine.load(
        read_checkpoint(folder), dtype="float32", key_values=KeyValueOptions(2**22, folder=None)
    )


@pytest.mark.anyio
async def test_keys_and_values_are_computed_pinned_and_dropped_in_all_workers(
    folder: Path, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "tiny-llama")
    text = "the bank was closed today. " * 4

    async def stored(client: httpx.AsyncClient) -> int:
        (found,) = (await client.post("/cache/lookup", json={"texts": text})).json()
        return int(found["cached_tokens"])

    async with two_workers(folder, [tiny_decoder(model), tiny_decoder(model)], admin=True) as (first, second):
        warmed = (await first.post("/cache/warm", json={"texts": text})).json()
        assert warmed["stored_tokens"] == warmed["tokens"] > 0
        assert [await stored(first), await stored(second)] == [warmed["tokens"]] * 2
        pinned = (await second.post("/cache/pin", json={"texts": text})).json()
        assert pinned["tokens"] > 0
        dropped = (await second.delete("/cache")).json()
        assert dropped["blocks"] % 2 == 0
        assert dropped["blocks"] > 0
        assert [await stored(first), await stored(second)] == [0, 0]
        refused = await first.post("/cache/warm", json={"texts": []})
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, "texts")


@pytest.mark.anyio
async def test_worker_that_does_not_run_is_a_503_for_its_sessions_only(folder: Path) -> None:
    async with two_workers(folder, [FakeEngine(), FakeEngine()], admin=True) as (first, _):
        (folder / "1.sock").unlink()
        statuses = []
        for number in range(16):
            response = await first.post("/embed", json={"session_id": str(number), "transcript": "a"})
            statuses.append(response.status_code)
            if response.status_code == 503:
                assert response.json()["error"]["code"] == "worker_unavailable"
                assert response.headers["Retry-After"] == "1"
        assert set(statuses) == {200, 503}
        metrics = (await first.get("/metrics")).text
        assert "attncache_workers 1.0\n" in metrics


@pytest.mark.anyio
async def test_sessions_of_different_salts_and_errors_are_those_of_a_single_server(folder: Path) -> None:
    async with two_workers(folder, [FakeEngine(), FakeEngine()]) as clients:
        for client in clients:
            for salt in ("a", "b"):
                body = {"session_id": "s", "cache_salt": salt}
                started = await client.post("/embed", json={**body, "transcript": salt, "normalize": False})
                assert sum(started.json()[0]) == 1
        for client in clients:
            answers = []
            for body in (
                {"session_id": "new", "append": "a"},
                {"session_id": "s", "append": ""},
                {"session_id": "s", "inputs": "a"},
                {"session_id": "s", "transcript": "a", "dimensions": 10**6},
                {"session_id": "s", "transcript": "x" * 65, "truncate": False},
            ):
                answer = await client.post("/embed", json=body)
                answers.append((answer.status_code, answer.json()["error"]["field"]))
            assert answers == [
                (404, "session_id"),
                (400, "append"),
                (400, "inputs"),
                (400, "dimensions"),
                (422, "transcript"),
            ]
