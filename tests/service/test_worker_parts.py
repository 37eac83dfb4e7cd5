"""The parts of a server with several workers, one by one, and two workers in one process."""

import asyncio
import json
import os
import socket
import subprocess
import threading
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import pytest
from fake_engine import FakeEngine, begun, embedding_of, policy_of, starting
from raw_http import request_and_leave
from running import Clock, until

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from service.errors import InvalidSettings, StoreUnavailable
from service.observability.metrics import Metrics
from service.settings import Settings, read_settings
from service.store import LocalStore
from service.upkeep.group import Group, Worker
from service.web.listeners import Listener, bind
from service.workers import shares
from service.workers.acceptor import Acceptor
from service.workers.shares import share_of, worker_count, workers_for
from service.workers.supervisor import Supervisor, serve_with_workers

# How many workers, and what each of them may use.


@pytest.fixture
def sixteen_processors(monkeypatch):
    monkeypatch.setattr(shares, "available_processors", lambda: 16)


@pytest.mark.usefixtures("sixteen_processors")
def test_auto_is_one_worker_for_8_processors():
    assert [workers_for(processors) for processors in (1, 2, 8, 15, 16, 64)] == [1, 1, 1, 1, 2, 8]
    assert worker_count(read_settings({"workers": "auto"})) == 2
    assert worker_count(read_settings({"workers": "auto", "threads": 8})) == 1
    assert worker_count(read_settings({"workers": "auto", "threads": 64})) == 2
    assert worker_count(read_settings({"workers": "3"})) == 3


@pytest.mark.usefixtures("sixteen_processors")
def test_workers_share_threads_connections_and_bytes(caplog):
    settings = Settings(threads=8, kv_memory_bytes=900, result_memory_bytes=90, max_connections=100)
    share = share_of(settings, 3)
    assert (share.workers, share.threads, share.kv_memory_bytes, share.result_memory_bytes) == (3, 2, 300, 30)
    assert share.max_connections == 34
    assert share.max_sessions == settings.max_sessions  # of the store of all workers
    assert share.max_queue_sequences == settings.max_queue_sequences
    assert share_of(Settings(threads=2), 3).threads == 1
    # A request of the greatest size still fits.
    assert share_of(Settings(max_inflight_bytes=3 * 2**20), 3).max_inflight_bytes == 2 * 2**20
    assert share_of(Settings(kv=False), 2).kv_memory_bytes is None
    assert share_of(Settings(), 1) == share_of(Settings(workers="auto"), 1) == Settings()
    assert share_of(Settings(threads=16), 1).threads == 16
    assert not caplog.messages
    assert [share_of(Settings(threads=999), count).threads for count in (1, 2)] == [16, 8]
    lowered = "--threads 999 is lowered to 16, because this server may use 16 processors"
    assert caplog.messages == [lowered] * 2
    assert share_of(Settings(threads=17), 17).threads == 1
    assert len(caplog.messages) == 2  # 17 workers have 17 threads


@pytest.mark.parametrize("workers", ["0", -1, "many", 1.5, True, "257", ""])
def test_other_numbers_of_workers_are_refused(workers):
    with pytest.raises(InvalidSettings, match="give a number from 1 to 256, or auto"):
        read_settings({"workers": workers})


@pytest.mark.parametrize(
    ("changed", "value", "remedy"),
    [
        ("service.workers.supervisor._SERVER_BYTES", 2**60, "set TMPDIR to another folder"),
        ("tempfile.tempdir", "/proc/missing", "set TMPDIR to a folder that this user may write to"),
    ],
    ids=["no room", "no folder"],
)
def test_workers_do_not_start_without_room_or_a_folder_for_what_they_share(
    monkeypatch, changed, value, remedy
):
    monkeypatch.setattr(changed, value)
    failure = serve_with_workers(Settings(workers=2), lambda *_: pytest.fail("nothing starts"), [])
    assert isinstance(failure, InvalidSettings)
    assert remedy in str(failure)


# Who accepts.


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)


async def test_connections_that_come_at_once_are_accepted_in_one_turn_and_served_after_the_end():
    with bind("127.0.0.1", 0) as listening, ExitStack() as stack:
        acceptor = Acceptor(Listener("public", listening, ""), Echo, 5)
        clients = [stack.enter_context(socket.socket()) for _ in range(5)]
        # Without a turn of the event loop, so that nobody has accepted them yet.
        for client in clients[:3]:
            client.connect(listening.getsockname())
        acceptor._accept()
        assert acceptor.is_opening
        assert len(acceptor._opening) == 3
        for client in clients[3:]:
            client.connect(listening.getsockname())
        acceptor.close()  # accepts those that wait
        for client in clients:
            client.sendall(b"hello")
            client.settimeout(240)
            assert await asyncio.to_thread(client.recv, 5) == b"hello"
        assert not acceptor.is_opening


async def test_connection_is_left_to_other_workers_for_a_while():
    turns = [(0.05, 1), (0.0, 1)]
    with bind("127.0.0.1", 0) as listening, ExitStack() as stack:
        acceptor = Acceptor(Listener("public", listening, ""), Echo, 5, lambda: turns.pop(0))
        for _ in range(2):
            client = stack.enter_context(socket.create_connection(listening.getsockname(), 240))
            client.sendall(b"hello")
            assert await asyncio.to_thread(client.recv, 5) == b"hello"
        acceptor.close()
    assert turns == []


def test_folder_that_is_removed_before_the_first_look_at_its_files_is_missed(tmp_path):
    supervisor = Supervisor(Settings(), 2, None, [], tmp_path / "gone")
    supervisor._note_removed()
    assert "were removed; set TMPDIR to a folder that nobody cleans" in str(supervisor._failure)


# Two workers.


@asynccontextmanager
async def two_workers(folder, engines, **settings):
    """Yield a client of each of two workers, which run in this process."""
    settings = {"verify_rate": 0, **settings}
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                starting(lambda loaded=engine: loaded, worker=Worker(number, 2, folder), **settings)
            )
            for number, engine in enumerate(engines)
        ]
        # A worker is ready once all have been ready.
        while any([(await client.get("/ready")).status_code == 503 for client in clients]):
            await asyncio.sleep(0.01)
        yield clients


def tiny_decoder(folder):
    return PrefillEngine.load(
        read_checkpoint(folder), dtype="float32", key_values=KeyValueOptions(2**22, folder=None)
    )


async def test_keys_and_values_are_computed_pinned_and_dropped_in_all_workers(folder, tmp_path):
    text = "the bank was closed today. " * 4

    async def stored(client):
        (found,) = (await client.post("/cache/lookup", json={"texts": text})).json()
        return int(found["cached_tokens"])

    async with two_workers(tmp_path, [tiny_decoder(folder), tiny_decoder(folder)], admin=True) as (
        first,
        second,
    ):
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
        wide = await first.post("/cache/warm", json={"texts": "der Bank geht es schön " * 4})
        assert wide.json()["tokens"] > 0
        states = [client._transport.app.state.service for client in (first, second)]
        assert [state.bodies.taken for state in states] == [0, 0]
        # The texts that were asked for are not kept, and nothing that grows.
        store = first._transport.app.state.service.group._store
        assert await store.get("asked") == b"{}"
        assert await store.count("asked") == 1


async def test_worker_does_not_serve_another_model_than_the_first_one(tmp_path):
    other, failures = FakeEngine(), []
    other.fingerprint = "f" * 64
    async with starting(FakeEngine, worker=Worker(0, 2, tmp_path)) as client:
        await until(lambda: client._transport.app.state.service.group.is_serving)
        async with starting(lambda: other, failures.append, Worker(1, 2, tmp_path)):
            await until(lambda: failures)
    [failure] = failures
    assert isinstance(failure, InvalidSettings)
    assert "not those that the server began with" in str(failure)


async def test_worker_that_fails_to_do_what_is_asked_of_all_is_a_503(folder, tmp_path):
    engine, fails = tiny_decoder(folder), FakeEngine()
    fails.fingerprint = engine.fingerprint
    async with two_workers(tmp_path, [engine, fails], admin=True) as (first, _):
        refused = await first.delete("/cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_unavailable")
        assert refused.headers["Retry-After"] == "1"


async def test_worker_that_serves_no_more_takes_no_part(folder, tmp_path):
    engines = [tiny_decoder(folder), tiny_decoder(folder)]
    async with two_workers(tmp_path, engines, admin=True) as (first, other):
        await other._transport.app.state.service.group.close()
        dropped = await first.delete("/cache")
        assert (dropped.status_code, dropped.json()) == (200, {"blocks": 0})


async def test_worker_that_hangs_is_waited_for_and_one_that_was_killed_is_not(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("service.upkeep.group._ALIVE_SECONDS", 0.1)
    engines = [tiny_decoder(folder), tiny_decoder(folder)]
    async with two_workers(tmp_path, engines, admin=True) as (first, other):
        group = other._transport.app.state.service.group
        for task in group._tasks:
            task.cancel()
        await asyncio.sleep(0.2)
        late = await first.delete("/cache", headers={"X-AttnCache-Timeout": "0.3"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        with subprocess.Popen(["true"]) as ended:
            pass
        await group._store.put("serving/1", b"%d" % ended.pid)
        assert (await first.delete("/cache")).status_code == 200


async def test_what_verification_finds_in_one_worker_holds_in_all(tmp_path):
    bad, other = FakeEngine(stored={"short"}, damage=0.1), FakeEngine(stored={"short"}, damage=0.1)
    async with two_workers(tmp_path, [bad, other], verify_rate=1) as (first, _):
        while bad.map_reuse.policy == policy_of():
            await first.post("/embed", json={"inputs": ["short"] * 8})
        await until(lambda: other.map_reuse.policy == bad.map_reuse.policy)
    assert other.map_reuse.policy.steps.groups[0] >= 1
    assert other.verified == []


@asynccontextmanager
async def running_in_the_first(clients, engine):
    """While the block runs, a turn `b` of session `s` runs in the first of two workers, after a turn `a`."""
    first, other = clients
    await turn(other, transcript="a")
    running = await begun(engine, turn(first, append="b"))
    yield
    engine.may_run.set()
    assert await running == embedding_of(b"ab").tolist()


async def turn(client, **body):
    answer = await client.post("/embed", json={"session_id": "s", "normalize": False, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()[0]


async def test_client_that_leaves_while_it_waits_does_not_unlock_the_session_for_another_worker(tmp_path):
    engine, leave = FakeEngine(), asyncio.Event()
    async with two_workers(tmp_path, [engine, FakeEngine()]) as clients:
        app = clients[0]._transport.app
        async with running_in_the_first(clients, engine):
            gone = asyncio.create_task(request_and_leave(app, {"session_id": "s", "append": "gone"}, leave))
            await until(lambda: app.state.service.sessions._waiting)
            leave.set()
            await gone
            following = asyncio.create_task(turn(clients[1], append="c"))
            # Long enough for the other worker to compute, if it does not wait.
            assert await asyncio.wait([following], timeout=0.3) == (set(), {following})
        assert await following == embedding_of(b"abc").tolist()


async def test_client_that_leaves_while_another_worker_has_locked_its_session_gives_up_its_turn(tmp_path):
    engine, leave = FakeEngine(), asyncio.Event()
    async with two_workers(tmp_path, [engine, FakeEngine()]) as clients:
        app = clients[1]._transport.app
        async with running_in_the_first(clients, engine):
            leave.set()
            await request_and_leave(app, {"session_id": "s", "append": "gone"}, leave)
            assert app.state.service.sessions._turns == {}


class BrokenStore(LocalStore):
    """A store whose disk is full."""

    async def put(self, *_arguments):
        raise StoreUnavailable("the disk is full", retry_after_seconds=1)


async def test_worker_is_ready_though_the_store_fails(tmp_path):
    group = Group(Worker(0, 2, tmp_path), BrokenStore(), Metrics())
    group.is_serving = True
    with pytest.raises(StoreUnavailable):
        await group._look()
    assert group.worker.ready.exists()


async def no_answer(_):
    return b""


async def test_worker_keeps_its_locks_until_it_has_not_looked_for_some_seconds(tmp_path):
    clock = Clock()
    store = LocalStore(clock=clock)
    group = Group(Worker(0, 2, tmp_path), store, Metrics())
    await group._look()
    clock.seconds = 4.9
    assert await store.get(f"alive/{group.process}") is not None
    clock.seconds = 5.1
    assert await store.get(f"alive/{group.process}") is None


async def test_worker_keeps_its_locks_while_it_waits_for_its_own_verification(tmp_path, monkeypatch):
    monkeypatch.setattr("service.upkeep.group._LOOK_SECONDS", 0.01)
    store, waits, may_follow = LocalStore(), threading.Event(), threading.Event()

    class Verifying:
        """A verifier that is verifying when another worker has tightened the policy."""

        subject = "policy"

        def steps(self):
            return [0]

        def follow(self, _):
            waits.set()
            may_follow.wait()

    group = Group(Worker(0, 2, tmp_path), store, Metrics())
    await store.put("findings/Verifying/policy", b"[1]")
    await group.start(no_answer)
    group.verifier = Verifying()
    try:
        await until(waits.is_set)
        await store.put(f"alive/{group.process}", None)  # as if it had expired
        await until(lambda: store.count(f"alive/{group.process}"))
    finally:
        may_follow.set()
        await group.close()


async def test_worker_that_is_not_ready_yet_does_later_what_a_running_worker_asks_of_all(
    tmp_path, monkeypatch
):
    clock, done = Clock(), []
    store = LocalStore(clock=clock)
    look_for = os.kill

    def of_another_user(process, signal):
        if not process:
            raise PermissionError
        look_for(process, signal)

    monkeypatch.setattr(os, "kill", of_another_user)

    async def obey(command):
        done.append(command["what"])
        return b"answer"

    group = Group(Worker(1, 2, tmp_path), store, Metrics())
    killed = subprocess.Popen(["true"])
    killed.wait()
    commands = {
        "name": {"what": "warm", "from": "another", "process": os.getpid()},
        "old": {"what": "drop", "from": "killed", "process": killed.pid},
        "older": {"what": "drop", "from": "killed before", "process": 0},
    }
    of_itself = {"itself": {"what": "pin", "from": group.process, "process": os.getpid()}}
    await store.put("asked", json.dumps(commands | of_itself).encode())
    await group._do(obey)
    assert done == []
    group.is_serving = True
    for _ in range(2):
        await group._do(obey)
    assert done == ["warm"]
    assert await store.get("done/name/1") == b"answer"
    # What a worker has asked that was killed is not kept by those that ask later.
    await group._change_commands(lambda kept: kept)
    assert json.loads(await store.get("asked")) == {"name": commands["name"]} | of_itself
    # Who asked may be gone, so the answers do not stay, whatever they hold.
    clock.seconds += 601
    assert await store.count() == 0
