"""What processes share: all stores against a dictionary, two processes at once, and a file that fails."""

import asyncio
import gc
import multiprocessing
import sqlite3
from array import array
from pathlib import Path

import pytest
from fake_engine import FakeEngine, embedding_of, ready, serving, starting
from forked import forked
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Clock, until
from valkey import exceptions
from valkeys import running_valkey

from service.access.quotas import Quotas, QuotaUse
from service.conversations.conversation import History
from service.conversations.sessions import Sessions
from service.errors import QuotaExceeded, StoreUnavailable
from service.settings import Settings
from service.settings.cluster import SharedAddress
from service.shared.client import Circuit
from service.shared.store import SharedStores
from service.state import ServiceState
from service.store import LocalStore, SqliteStore
from service.upkeep.group import Worker

COUNTS = 300
KEYS, VALUES = st.sampled_from(["a", "ab", "b", "é", "a%", "a_"]), st.binary(max_size=3)
SECONDS = st.sampled_from([None, 1.0, 5.0])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), KEYS, SECONDS),
        st.tuples(st.just("put"), KEYS, st.none() | VALUES, SECONDS),
        st.tuples(st.just("compare_and_set"), KEYS, st.none() | VALUES, st.none() | VALUES, SECONDS),
        st.tuples(st.just("count"), st.sampled_from(["", "a", "ab", "a%", "c"])),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 1.0, 5.0])),
        st.tuples(st.just("drop_expired")),
    ),
    max_size=40,
)


class Model:
    """The store as a dictionary: key -> (value, when it expires)."""

    def __init__(self, clock):
        self.clock = clock
        self.known = {}

    def get(self, key, seconds):
        value, expires = self.known.get(key, (None, 0.0))
        if value is None or expires <= self.clock():
            return None
        self.put(key, value, expires - self.clock() if seconds is None else seconds)
        return value

    def put(self, key, value, seconds):
        self.known.pop(key, None)
        if value is not None:
            self.known[key] = value, self.clock() + (float("inf") if seconds is None else seconds)

    def compare_and_set(self, key, expected, value, seconds):
        if self.get(key, None) != expected:
            return False
        self.put(key, value, seconds)
        return True

    def drop_expired(self):
        pass  # nobody sees it

    def count(self, prefix):
        return sum(
            key.startswith(prefix) and expires > self.clock() for key, (_, expires) in self.known.items()
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


async def compare_with_dictionary(stored, clock, steps):
    model = Model(clock)
    for name, *arguments in steps:
        if name == "wait":
            clock.seconds += arguments[0]
        else:
            found = await getattr(stored, name)(*arguments)
            assert found == getattr(model, name)(*arguments), (name, arguments)


async def test_what_another_program_has_stored_under_a_name_is_no_value_and_is_replaced(valkey):
    stores = SharedStores(SharedAddress.parse(valkey.url), pytest.fail)
    store = stores.store("use")
    for number, seconds in enumerate([None, 1000]):
        valkey.ask("RPUSH", f"attncache:use:{number}", b"an entry of a list")
        assert await store.get(f"{number}", seconds) is None
        assert await store.compare_and_set(f"{number}", None, b"value")
        assert await store.get(f"{number}", seconds) == b"value"
    valkey.ask("RPUSH", "attncache:use:lock", b"an entry of a list")
    assert await store.compare_and_set("lock", None, b"value")
    await stores.close()


@pytest.mark.parametrize("kind", ["local", "sqlite"])
@settings(max_examples=60)
@given(steps=STEPS)
def test_stores_do_what_a_dictionary_does(kind, folder, steps):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.store.time.monotonic", clock)
        path = folder / "model.sqlite"
        path.unlink(missing_ok=True)
        stored = LocalStore(clock=clock) if kind == "local" else SqliteStore(path)
        asyncio.run(compare_with_dictionary(stored, clock, steps))
        if kind == "sqlite":
            stored.close()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@settings(max_examples=60)
@given(steps=STEPS)
async def test_shared_store_does_what_a_dictionary_does(valkey, steps):
    # Its clock is the server's, so nothing expires here.
    still = [step for step in steps if step[0] not in ("wait", "drop_expired")]
    valkey.ask("FLUSHALL")
    stores = SharedStores(SharedAddress.parse(valkey.url), pytest.fail)
    await stores.store("another*").put("a", b"of another use")
    await compare_with_dictionary(stores.store("use"), Clock(), still)
    await stores.close()


async def test_shared_values_expire_and_a_large_store_is_counted_by_a_sample(valkey):
    valkey.ask("FLUSHALL")
    stores = SharedStores(SharedAddress.parse(valkey.url), pytest.fail)
    store = stores.store("use")
    for number in range(3):
        await store.put(f"{number}", b"value", 1000)
    assert await store.compare_and_set("1", b"value", b"other", 0.05)
    assert await store.get("2", 0.05) == b"value"
    while await store.get("1") is not None or await store.get("2") is not None:
        await asyncio.sleep(0.01)
    assert await store.count() == 1
    assert (
        valkey.ask("EVAL", "for i = 1, 40000 do redis.call('SET', 'attncache:many:' .. i, '') end", 0) is None
    )
    assert await stores.store("many").count() == pytest.approx(40_000, rel=0.1)
    await stores.close()


@pytest.mark.parametrize("kind", ["local", "sqlite"])
async def test_least_recently_used_values_are_dropped_beyond_the_bounds(kind, tmp_path):
    for bounds, most in (((10, float("inf")), 10), ((float("inf"), 10 * 402), 10)):
        path = tmp_path / f"{most}{bounds[0]}.sqlite"
        store = LocalStore(*bounds) if kind == "local" else SqliteStore(path, *bounds)
        for number in range(64):
            await store.get("00", 1000)
            await store.put(f"{number:02}", bytes(100), 1000)
        assert await store.count() == most
        assert await store.get("00") is not None
        assert await store.get("63") is not None
        assert await store.get("40") is None


def kept_in(store):
    """Return the number of values that are kept, expired ones too."""
    if isinstance(store, LocalStore):
        return len(store._entries)
    return store._run("SELECT COUNT(*) FROM entries").fetchone()[0]


@pytest.mark.parametrize("kind", ["local", "sqlite"])
async def test_expired_values_are_dropped_though_nothing_is_stored_and_an_older_value_stays(
    kind, tmp_path, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr("service.store.time.monotonic", clock)
    store = LocalStore(clock=clock) if kind == "local" else SqliteStore(tmp_path / "a.sqlite")
    await store.put("stays", b"value")
    for number in range(3):
        await store.put(f"{number}", b"value", 60)
    clock.seconds = 61
    assert kept_in(store) == 4
    await store.drop_expired()
    assert kept_in(store) == await store.count() == 1


@pytest.mark.parametrize("several", [False, True], ids=["one process", "workers"])
async def test_server_that_nobody_asks_forgets_histories_that_have_expired(several, tmp_path, monkeypatch):
    monkeypatch.setattr("service.state._DROP_SECONDS", 0.01)
    worker = Worker(0, 1, tmp_path) if several else None
    body = {"session_id": "s", "transcript": "a"}
    async with starting(FakeEngine, worker=worker, session_ttl_seconds=0.2) as client:
        await ready(client)
        assert (await client.post("/embed", json=body)).status_code == 200
        histories = client._transport.app.state.service.sessions._histories
        await until(lambda: kept_in(histories) == 0)


def count_up(path, both_begin):
    """Count in a file in which another process counts too. Returns the last count."""

    async def count():
        store = SqliteStore(path)
        both_begin.wait(240)
        for _ in range(COUNTS):
            is_counted = False
            while not is_counted:
                before = await store.get("n")
                is_counted = await store.compare_and_set("n", before, b"%d" % (int(before or 0) + 1))
        return await store.get("n")

    return asyncio.run(count())


def test_two_processes_that_count_at_once_lose_no_count(tmp_path):
    path, both_begin = tmp_path / "counts.sqlite", multiprocessing.Barrier(2)
    SqliteStore(path).close()
    processes = [forked(count_up, path, both_begin) for _ in range(2)]
    assert max(int(last()) for last in processes) == 2 * COUNTS


async def test_file_stays_within_its_bounds_also_if_few_large_values_fill_it(tmp_path):
    path = tmp_path / "s.sqlite"
    stores = [SqliteStore(path, float("inf"), 2**22) for _ in range(2)]
    for number in range(60):
        await stores[number % 2].put(f"{number}", bytes(2**18), 1000)
    assert path.stat().st_size < 2 * 2**22
    assert await stores[0].get("59") is not None
    assert await stores[0].get("0") is None


@given(
    turns=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1))),
    namespace=st.none() | st.binary(),
    cut=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    damaged=st.integers(0),
)
def test_history_is_the_same_after_it_was_stored_if_its_cut_is_inside_and_no_bit_differs(
    turns, namespace, cut, damaged
):
    history = History(tuple(array("i", turn) for turn in turns), *cut, namespace)
    if sum(cut) <= history.tokens:
        written = bytearray(history.written())
        assert History.read(bytes(written)) == history
        damaged %= 8 * len(written)
        written[damaged // 8] ^= 1 << damaged % 8
        with pytest.raises(ValueError):  # noqa: PT011 - also of orjson and array
            History.read(bytes(written))
    else:
        with pytest.raises(ValueError, match="no history"):
            History.read(history.written())


@pytest.mark.parametrize(("ids", "cut"), [([9], (0, 0)), ([-1], (0, 0)), ([8], (-1, 1)), ([8], (1, -1))])
def test_history_with_tokens_or_a_cut_that_cannot_be_is_none(ids, cut):
    with pytest.raises(ValueError, match="no history"):
        History.read(History((array("i", ids),), *cut).written(), vocabulary=9)


# Quotas of several processes.


async def test_requests_of_a_process_that_was_killed_are_in_flight_no_longer_than_a_request_takes():
    store, clock = LocalStore(), Clock()
    killed, other = (
        QuotaUse("client", Quotas(in_flight=2), store, max_seconds=10, clock=clock) for _ in range(2)
    )
    for _ in range(2):
        await killed.begin()
    with pytest.raises(QuotaExceeded):
        await other.begin()
    clock.seconds += 10
    for _ in range(2):
        await other.begin()
    with pytest.raises(QuotaExceeded):
        await other.begin()


async def test_change_that_a_store_was_asked_for_twice_counts_once():
    class Repeated(LocalStore):
        async def compare_and_set(self, *arguments):
            await super().compare_and_set(*arguments)
            return await super().compare_and_set(*arguments)

    use = QuotaUse("client", Quotas(requests_per_minute=2), Repeated(), max_seconds=10, clock=lambda: 1e9)
    assert await use.begin()
    assert await use.begin()
    with pytest.raises(QuotaExceeded):
        await use.begin()


@pytest.mark.parametrize(
    "stored", [b"not json", b"[]", b'{"requests":5}', b'{"in_flight":[]}', b'{"tokens":[null,1]}']
)
async def test_quota_that_another_version_has_stored_is_counted_from_the_beginning(stored, caplog):
    store, quotas = LocalStore(), Quotas(requests_per_minute=1, in_flight=9)
    use = QuotaUse("client", quotas, store, max_seconds=10, clock=lambda: 1e9)
    await store.put(use._key, stored)
    await use.begin()
    with pytest.raises(QuotaExceeded):
        await use.begin()
    assert caplog.text.count("counted from the beginning") == 1


# Sessions of several processes.


def two_processes(folder):
    stores = [(SqliteStore(folder / "h.sqlite"), SqliteStore(folder / "l.sqlite")) for _ in "01"]
    return [
        Sessions(*pair, name, ttl_seconds=60, max_waiting=9, max_seconds=30)
        for pair, name in zip(stores, "01", strict=True)
    ]


async def test_session_is_locked_for_one_process_until_it_unlocks_or_is_killed(tmp_path):
    first, second = two_processes(tmp_path)
    session = b"", "s"
    await first._locks.put("alive/0", b"", 60)
    assert await first.lock(session)
    assert not await second.lock(session)
    assert await second.lock((b"", "other"))
    await second.unlock(session)
    assert not await second.lock(session)
    await first.unlock(session)
    assert await second.lock(session)
    await second.unlock(session)
    assert await first.lock(session)
    await first._locks.put("alive/0", None)
    assert await second.lock(session)
    await first.unlock(session)
    assert await second._locks.count("lock/") == 2


async def test_lock_ends_with_the_longest_time_of_a_request_if_the_file_failed_when_it_was_unlocked(
    tmp_path, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr("service.store.time.monotonic", clock)
    first, second = two_processes(tmp_path)
    session = b"", "s"
    await first._locks.put("alive/0", b"")
    assert await first.lock(session)
    first._locks._retry_at = clock.seconds + 1
    await first.unlock(session)
    clock.seconds += 29
    assert not await second.lock(session)
    clock.seconds += 2
    assert await second.lock(session)


async def test_history_that_another_process_has_changed_is_not_overwritten(tmp_path):
    first, second = two_processes(tmp_path)
    session, history = (b"", "s"), History((array("i", [1]),))
    before = await first.history(session)
    await second.keep(session, None, history)
    assert await first.keep(session, before, History()) == "changed"
    assert await first.history(session) == history.written()


# A file that fails.


class Full:
    """Lets the file of all workers of an app be full, and not full again."""

    def __init__(self, client):
        state = client._transport.app.state.service
        self.stores = [state.sessions._histories, state.sessions._locks]

    def set(self, is_full):
        for store in self.stores:
            pages = 1 if is_full else 2**20
            store._connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()
            store._retry_at = 0.0


@pytest.fixture
def worker(tmp_path):
    return Worker(0, 1, tmp_path)


def test_worker_opens_no_file_that_it_does_not_keep_open(worker):
    settings = Settings(shared="valkey://127.0.0.1:1/0")
    state = ServiceState(settings, lambda: iter(()), None, worker)
    opened = worker.store_files()
    gc.collect()
    assert worker.store_files() == opened
    assert {Path(name).stem for name in opened} == {"shared"}
    assert state.sessions is not None


async def ask(client, **body):
    return await client.post("/embed", json={"normalize": False, **body}, headers={"X-API-Key": "k" * 20})


async def test_full_disk_is_logged_and_requests_are_served_as_far_as_they_can_be(worker, caplog):
    key = f"client {'k' * 20} requests_per_minute=1000"
    async with serving(FakeEngine(), worker=worker, api_key=key) as client:
        full = Full(client)
        big = "x" * 60
        assert (await ask(client, session_id="old", transcript=[big] * 90)).status_code == 200
        full.set(True)
        assert (await ask(client, inputs="a")).status_code == 200
        new = await ask(client, session_id="new", transcript=[big] * 90)
        assert (new.status_code, new.headers["X-AttnCache-Session"]) == (200, "dropped")
        full.set(True)
        refused = await ask(client, session_id="old", transcript=[big] * 180)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert "database or disk is full" in refused.json()["error"]["message"]
        assert refused.headers["Retry-After"] == "1"
        full.set(False)
        # The session is as before, and the one that could not be kept is unknown.
        answer = await ask(client, session_id="old", append="a")
        assert answer.status_code == 200
        assert (await ask(client, session_id="new", append="a")).status_code == 404
    assert "the file that the workers share cannot be used: database or disk is full" in caplog.text
    assert big not in caplog.text


async def test_locked_file_holds_up_no_request_for_long(worker):
    key = f"client {'k' * 20} requests_per_minute=1"
    async with serving(FakeEngine(), worker=worker, api_key=key) as client:
        locking = sqlite3.connect(worker.folder / "shared.sqlite", isolation_level=None)
        locking.execute("BEGIN IMMEDIATE")
        for _ in range(3):  # more than the quota, which nobody can count
            response = await ask(client, inputs="ab")
            assert response.json() == [embedding_of([ord("a"), ord("b")]).tolist()]
        refused = await ask(client, session_id="s", transcript="a", append=None)
        assert refused.status_code in (200, 503)
        locking.execute("ROLLBACK")
        locking.close()
        Full(client).set(False)
        assert (await ask(client, inputs="a")).status_code == 200
        assert (await ask(client, inputs="a")).status_code == 429


async def test_folder_that_cannot_be_written_is_a_sentence():
    with pytest.raises(StoreUnavailable, match="unable to open database file"):
        SqliteStore(Path("/nonexistent/s.sqlite"))


def test_store_is_asked_again_soon_after_one_failure_and_ever_later_after_many(caplog):
    clock = Clock()
    circuit = Circuit(SharedAddress.parse("valkey://store:6379"), "without it", clock)
    for seconds in (0.25, 0.5, 1, 2, 4, 5, 5):
        assert circuit.may_ask()
        for _ in range(3):  # of them, two were asked before the first failure
            circuit.failed("there is no answer in time")
        clock.seconds += seconds * 0.9
        assert not circuit.may_ask()
        clock.seconds += seconds * 0.2
    assert circuit.is_away
    assert len(caplog.records) == 1
    assert circuit.may_ask()
    assert not circuit.may_ask()  # while one question tries
    circuit.answered()
    assert not circuit.is_away
    circuit.failed("there is no connection")
    clock.seconds += 0.3
    assert circuit.may_ask()
    circuit.note(exceptions.ReadOnlyError("READONLY"))  # an answer, although a refusal
    assert not circuit.is_away
    assert circuit.may_ask()
