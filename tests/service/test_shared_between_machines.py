"""Servers on several machines and one real Valkey: what they share, and what happens when it fails."""

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import re
import socket
import ssl
import threading
import time
from array import array
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
from fake_engine import FakeEngine, begun, embedding_of, policy_of, serving
from raw_http import make_certificate
from running import Clock, samples, until
from valkeys import running_valkey

from attncache_core.checkpoints.description import read_checkpoint
from service.access import quotas
from service.access.quotas import Quotas, QuotaUse
from service.commands.serving import _check_shared
from service.conversations.conversation import History
from service.conversations.sessions import Sessions
from service.errors import InvalidSettings, QuotaExceeded, SharedUnavailable
from service.loading.engines import load_engine
from service.settings import Settings, read_settings
from service.settings.cluster import SharedAddress
from service.shared import blocks, client, findings, store
from service.store import LocalStore

SECRET = "correct-{run}-battery"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Wait longer on a busy machine, and try again sooner."""
    monkeypatch.setattr(blocks, "_LOOK_SECONDS", 2.0)
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(findings, "_PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(client, "OPEN_SECONDS", 0.2)
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 2.0)
    monkeypatch.setattr("service.state._LOOK_SECONDS", 0.05)


@pytest.fixture
def valkey(tmp_path):
    with running_valkey(tmp_path) as server:
        yield server


@asynccontextmanager
async def machines(url, *engines, **settings):
    """Yield a client of a server for each engine. They share nothing but the store."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(each, shared=url, **settings)) for each in engines]


async def turn(client, request_id=None, **body):
    headers = {"X-Request-Id": request_id} if request_id else {}
    return await client.post("/embed", json={"session_id": "s", "normalize": False, **body}, headers=headers)


def assert_is_about(response, text):
    assert response.status_code == 200, response.text
    np.testing.assert_array_equal(response.json()[0], embedding_of(text.encode()))


def assert_is_away(response):
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shared_unavailable")
    assert "X-Request-Id" in response.json()["error"]["message"]
    assert int(response.headers["Retry-After"]) >= 1


# Sessions.


async def test_session_goes_on_at_any_machine_and_another_model_has_sessions_of_its_own(valkey):
    other = FakeEngine()
    other.fingerprint = "f" * 64
    async with machines(valkey.url, FakeEngine(), FakeEngine(), other) as (first, second, of_other):
        assert_is_about(await turn(first, transcript="a"), "a")
        assert_is_about(await turn(second, append="b"), "ab")
        assert_is_about(await turn(first, append="c"), "abc")
        assert (await turn(of_other, append="d")).status_code == 404
        assert samples((await first.get("/metrics")).text)["attncache_sessions",] == 1
        info = (await first.get("/info")).json()
    assert info["shared"] == {"store": valkey.url, "uses": ["kv", "sessions", "quotas", "findings"]}


@pytest.mark.parametrize("request_id", ["one", "the one", "1" * 129, "ü".encode()])
async def test_append_that_comes_again_is_answered_and_not_appended_twice(valkey, request_id):
    """Also with an id that is not fit for the log."""
    async with machines(valkey.url, FakeEngine(), FakeEngine()) as (first, second):
        await turn(first, transcript="a")
        for server in (first, second, second):
            assert_is_about(await turn(server, request_id, append="b"), "ab")
        # Another turn is another turn, also with an id that a client sends with every request.
        assert_is_about(await turn(first, request_id, append="c"), "abc")
        assert_is_about(await turn(first, "two", append="c"), "abcc")


@pytest.mark.parametrize("again", [{"append": "b"}, {"transcript": ["a", "b"]}])
async def test_turn_that_comes_again_behind_a_later_one_is_answered_as_before_and_changes_nothing(
    valkey, again
):
    async with machines(valkey.url, FakeEngine(), FakeEngine()) as (first, second):
        await turn(first, transcript="a")
        await turn(first, "one", **again)
        await turn(second, "two", append="c")
        assert_is_about(await turn(second, "one", **again), "ab")
        assert_is_about(await turn(first, "one", append="x"), "abcx")
        # The id names two turns now, so none of them can be meant.
        assert_is_about(await turn(first, "two", append="c"), "abc")
        assert_is_about(await turn(first, "three", append="d"), "abcxd")
        assert_is_about(await turn(first, "one", append="x"), "abcxdx")


async def test_history_that_cannot_be_read_is_unknown_and_a_transcript_replaces_it(valkey):
    bad = [
        b"",
        b"[",
        b"[[9],0,0,null,[],0.0]",
        b"[[1],0,0,null]",
        b"[1,0,0,null,[],0.0]",
        b"[[1],0,0,[],[],0.0]",
    ]
    async with machines(valkey.url, FakeEngine()) as (server,):
        await turn(server, transcript="a")
        (name,) = [name for name in valkey.ask("KEYS", "*") if b"session" in name]
        for header in bad:
            content = header + b"\n\1\0\0\0"
            valkey.ask("SET", name, b"%08x" % crc32(content) + content)
            assert (await turn(server, append="b")).status_code == 404, header
            assert_is_about(await turn(server, transcript="b"), "b")
            assert_is_about(await turn(server, append="c"), "bc")


async def test_turns_that_race_on_two_machines_are_each_answered_behind_the_other_ones(valkey):
    letters = "bcdefghijklm"
    async with machines(valkey.url, FakeEngine(), FakeEngine()) as servers:
        await turn(servers[0], transcript="a")
        answers = await asyncio.gather(
            *(turn(servers[place % 2], append=letter) for place, letter in enumerate(letters))
        )
        lengths = [sum(answer.json()[0]) for answer in answers]
        # Each answer is about one more turn than another one, so no turn was lost or added twice.
        assert sorted(lengths) == [*range(2, 2 + len(letters))]
        whole = await turn(servers[1], append="z")
    assert sum(whole.json()[0]) == 2 + len(letters)


async def test_frozen_server_that_wakes_up_finds_its_turn_added_and_adds_it_not_again(valkey):
    frozen = FakeEngine()
    async with machines(valkey.url, frozen, FakeEngine()) as (first, second):
        await turn(first, transcript="a")
        late = await begun(frozen, turn(first, "one", append="b"))
        assert_is_about(await turn(second, "one", append="b"), "ab")
        frozen.may_run.set()
        assert_is_about(await late, "ab")
        assert_is_about(await turn(second, append="c"), "abc")


@pytest.mark.parametrize("seconds", [0.1, 0.3])
async def test_server_that_stood_still_takes_its_own_delay_for_none_of_the_store(
    valkey, monkeypatch, seconds
):
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 0.1)
    stores = store.SharedStores(SharedAddress.parse(valkey.url), pytest.fail)
    histories = stores.store("sessions")
    await histories.put("a", b"1")
    valkey.freeze()
    asked = asyncio.create_task(histories.get("a"))
    await asyncio.sleep(0.02)
    valkey.thaw()
    time.sleep(seconds)  # the answer comes, and patience ends, while nothing runs here
    assert await asked == b"1"
    assert not stores.circuit.is_away
    await stores.close()


async def test_burst_of_questions_is_no_failure_of_the_store(valkey, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 0.5)
    stores = store.SharedStores(SharedAddress.parse(valkey.url), pytest.fail)
    histories = stores.store("sessions")

    async def keep(number):
        assert await histories.get(f"{number}") is None
        return await histories.compare_and_set(f"{number}", None, bytes(100))

    assert all(await asyncio.gather(*map(keep, range(3000))))
    assert not stores.circuit.is_away
    await stores.close()


async def test_error_of_the_event_loop_about_a_closed_connection_is_one_of_the_store(valkey):
    stores = store.SharedStores(SharedAddress.parse(valkey.url), lambda _: None)

    async def question(_server):
        raise RuntimeError("the handler is closed")  # as uvloop says

    with pytest.raises(SharedUnavailable, match="there is no connection"):
        await stores._client.ask(question)
    assert stores.circuit.is_away
    stores.circuit._opens_until = float("inf")
    with pytest.raises(SharedUnavailable, match="did not answer before"):
        await stores._client.ask(question)
    await stores.close()


async def test_error_of_a_question_that_is_given_up_is_reported_to_nobody(valkey, monkeypatch, caplog):
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 0.05)
    stores = store.SharedStores(SharedAddress.parse(valkey.url), lambda _: None)

    given_up = []

    async def question(_server):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            given_up.append(True)
            raise RuntimeError("the handler is closed") from None

    with pytest.raises(SharedUnavailable, match="there is no answer in time"):
        await stores._client.ask(question)
    await asyncio.sleep(0)
    gc.collect()
    assert given_up
    assert "never retrieved" not in caplog.text
    await stores.close()


async def test_history_that_is_outdated_again_while_it_is_looked_for_is_removed():
    class Store(LocalStore):
        async def get(self, *arguments):
            found = await super().get(*arguments)
            sessions.outdate(session, 2.5)
            return found

    sessions = Sessions(Store(), LocalStore(), ttl_seconds=60, max_waiting=1, max_seconds=60)
    session = (b"", "s")
    await sessions.keep(session, None, History((array("i", [1]),), begun=2.0))
    sessions.outdate(session, 1.5)
    await sessions.remove_outdated()
    assert await sessions.count() == 0


@pytest.mark.parametrize(("outdated", "stays"), [(1.5, True), (2.0, True), (2.5, False)])
async def test_history_that_another_machine_has_begun_after_an_outdated_one_is_not_removed(
    valkey, outdated, stays
):
    of_machines = [store.SharedStores(SharedAddress.parse(valkey.url), pytest.fail) for _ in range(2)]
    first, second = (
        Sessions(each.store("sessions"), LocalStore(), ttl_seconds=60, max_waiting=1, max_seconds=60)
        for each in of_machines
    )
    session, history = (b"", "s"), History((array("i", [1]),), begun=2.0)
    first.outdate(session, outdated)
    await second.keep(session, None, history)
    await first.remove_outdated()
    assert await second.history(session) == (history.written() if stays else None)
    for each in of_machines:
        await each.close()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_without_the_store_transcripts_are_answered_and_nothing_goes_on_without_its_history(
    valkey, how, caplog, monkeypatch
):
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 0.3)
    away, back = (valkey.kill, valkey.start) if how == "killed" else (valkey.freeze, valkey.thaw)
    async with machines(valkey.url, FakeEngine(), FakeEngine()) as (first, second):
        await turn(first, transcript=["a", "b"])
        away()
        started = time.monotonic()
        assert_is_away(await turn(first, append="c"))
        dropped = await turn(first, transcript=["a", "c"])
        assert_is_about(dropped, "ac")
        assert dropped.headers["X-AttnCache-Session"] == "dropped"
        assert (await first.post("/embed", json={"inputs": "x"})).status_code == 200
        assert time.monotonic() - started < 30
        values = samples((await first.get("/metrics")).text)
        assert values["attncache_shared_failures_total", "sessions"] >= 2
        assert values["attncache_shared_away",] == 1
        back()
        # The store has a history that the transcript has outdated, and no machine goes on with it.
        await until(lambda: known_to_nobody(first))
        assert (await turn(second, append="d")).status_code in (404, 503)
        kept = await turn(first, transcript=["a", "d"])
        assert_is_about(kept, "ad")
        assert "X-AttnCache-Session" not in kept.headers
        assert_is_about(await turn(second, append="e"), "ade")
    told = [record for record in caplog.records if "cannot be used: there is no" in record.getMessage()]
    assert 1 <= len(told) <= 3  # each outage once, for sessions with quotas, on each machine


async def known_to_nobody(server, **session):
    return (await turn(server, append="d", **session)).status_code == 404


async def converse(servers, number, is_over, seen):
    """Hold a conversation at any server until the end; every answer must be about all that was said."""
    chance, said, turns, is_kept = random.Random(number), "", 0, False
    while not is_over():
        letter, turns = chance.choice("abcdefgh"), turns + 1
        append = {"append": letter} if is_kept else {"transcript": said + letter}
        while True:
            server = chance.choice(servers)
            body = {"session_id": f"{number}", "normalize": False, **append}
            answer = await server.post("/embed", json=body, headers={"X-Request-Id": f"{number}/{turns}"})
            seen[answer.status_code] += 1
            if answer.status_code == 404:
                append = {"transcript": said + letter}
            elif answer.status_code == 503:
                await asyncio.sleep(0.01)
            else:
                break
        said += letter
        assert_is_about(answer, said)
        is_kept = "X-AttnCache-Session" not in answer.headers
        if len(said) == 60:  # of the window
            number, said, turns, is_kept = number + 1000, "", 0, False


async def test_store_that_starts_again_with_older_histories_knows_none_of_them(tmp_path):
    with running_valkey(tmp_path) as valkey:
        async with machines(valkey.url, FakeEngine(), FakeEngine()) as (first, second):
            await turn(first, transcript="a")
            assert valkey.ask("SAVE")
            assert_is_about(await turn(second, append="b"), "ab")
            valkey.kill()
            valkey.start()
            assert valkey.ask("DBSIZE") == 1
            for server in (first, second):
                while (answer := await turn(server, append="c")).status_code == 503:
                    await asyncio.sleep(0.01)
                assert answer.status_code == 404
            assert samples((await first.get("/metrics")).text)["attncache_sessions",] == 0
            assert_is_about(await turn(second, transcript="abc"), "abc")
            assert_is_about(await turn(first, append="d"), "abcd")


async def test_turn_that_is_computed_while_the_store_starts_again_begins_no_history_without_later_turns(
    valkey,
):
    slow = FakeEngine()
    async with machines(valkey.url, slow, FakeEngine()) as (first, second):
        await turn(first, transcript="a")
        late = await begun(slow, turn(first, append="x"))
        assert_is_about(await turn(second, append="b"), "ab")
        valkey.kill()
        valkey.start()
        for server in (first, second):
            await until(lambda server=server: known_to_nobody(server, session_id="another"))
        slow.may_run.set()
        assert (await late).status_code == 404
        assert (await turn(second, append="c")).status_code == 404


async def test_store_that_does_not_tell_its_run_id_is_asked_for_no_history(valkey, monkeypatch):
    async def read_response(*_, **__):
        return b"valkey_version:9.1.2"

    monkeypatch.setattr(client._RunConnection, "read_response", read_response)
    async with machines(valkey.url, FakeEngine()) as (server,):
        refused = await turn(server, append="a")
        assert_is_away(refused)
        assert "its INFO has no run_id" in refused.json()["error"]["message"]


@pytest.mark.parametrize("keeps", ["no", "yes"])
async def test_conversations_under_load_are_whole_through_outages(tmp_path, keeps, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(client, "OPEN_SECONDS", 0.05)
    seen, chance, over = Counter(), random.Random(1), asyncio.Event()
    with running_valkey(tmp_path, "--appendonly", keeps) as valkey:
        async with (
            machines(valkey.url, FakeEngine(), FakeEngine(), FakeEngine()) as servers,
            asyncio.TaskGroup() as group,
        ):
            for number in range(32):
                group.create_task(converse(servers, number, over.is_set, seen))
            for _ in range(int(os.environ.get("ATTNCACHE_OUTAGES", "3"))):
                await asyncio.sleep(0.3 * chance.random())
                away, back = chance.choice([(valkey.kill, valkey.start), (valkey.freeze, valkey.thaw)])
                away()
                await asyncio.sleep(0.4 * chance.random())
                back()
            await until(lambda: seen[200] > 500)
            over.set()
    assert set(seen) <= {200, 404, 503}


async def test_full_store_serves_what_it_has_and_transcripts(tmp_path, caplog):
    with running_valkey(tmp_path, "--maxmemory", "3mb") as valkey:
        async with machines(valkey.url, FakeEngine()) as (server,):
            await turn(server, transcript="a")
            valkey.ask("EVAL", "redis.call('SET', 'big', string.rep('x', 4000000))", 0)
            refused = await turn(server, append="b")
            assert_is_away(refused)
            assert "full" in refused.json()["error"]["message"]
            assert_is_about(await turn(server, transcript="ab"), "ab")
            valkey.ask("DEL", "big")
            assert (await turn(server, append="c")).status_code == 404
    assert len(re.findall("refuses what it is asked: it is full and evicts nothing", caplog.text)) == 1


# Quotas.


async def test_quotas_are_counted_for_all_machines_and_per_machine_while_the_store_is_away(
    valkey, monkeypatch
):
    # A quota that is used up stays so.
    monkeypatch.setattr(quotas, "time", SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 1e9))
    key = f"client {'k' * 20} admin requests_per_minute=4"
    headers = {"X-API-Key": "k" * 20}

    async def admitted(server, asked):
        answers = [await server.post("/embed", json={"inputs": "a"}, headers=headers) for _ in range(asked)]
        return sum(answer.status_code == 200 for answer in answers)

    async with machines(valkey.url, FakeEngine(), FakeEngine(), api_key=key) as (first, second):
        assert await admitted(first, 3) == 3
        assert await admitted(second, 5) == 1
        valkey.kill()
        assert await admitted(first, 6) == 4
        assert await admitted(second, 6) == 4
        values = samples((await first.get("/metrics", headers=headers)).text)
        assert values["attncache_shared_failures_total", "quotas"] > 0


async def test_many_requests_of_one_key_are_counted_exactly_though_machines_compete(valkey):
    of_machines = [store.SharedStores(SharedAddress.parse(valkey.url), pytest.fail) for _ in range(3)]
    uses = [
        QuotaUse(
            "k", Quotas(requests_per_minute=200), each.store("quotas"), max_seconds=60, clock=lambda: 1e9
        )
        for each in of_machines
    ]
    begun = await asyncio.gather(*(use.begin() for use in uses * 100), return_exceptions=True)
    assert begun.count(True) == 200
    assert sum(isinstance(error, QuotaExceeded) for error in begun) == 100
    for each in of_machines:
        await each.close()


# Findings.


async def test_findings_hold_on_all_machines_and_maps_are_off_while_the_store_is_away(valkey, tmp_path):
    engines = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        engine = FakeEngine(stored={"short"}, damage=0.1, folder=tmp_path / name)
        engine.map_reuse._served.shared = findings.FindingsOfAll(Settings(shared=valkey.url).shared_address)
        engines.append(engine)
    bad, other = engines
    async with machines(valkey.url, bad, other, verify_rate=1) as (first, _):
        while bad.map_reuse.policy == policy_of():
            await first.post("/embed", json={"inputs": ["short"] * 8})
        await until(lambda: other.map_reuse.policy == bad.map_reuse.policy)
        tight = bad.map_reuse.policy
        assert other.verified == []
        valkey.kill()
        await until(lambda: other.map_reuse.reuse_off)
        assert other.map_reuse.policy == tight.switched_off()
        assert "cannot be read or written" in other.map_reuse.reuse_off[0]
        # An empty store learns again what the servers know.
        valkey.start()
        await until(lambda: not other.map_reuse.reuse_off)
        assert other.map_reuse.policy.steps.groups[0] >= tight.steps.groups[0]
        (name,) = valkey.ask("KEYS", "attncache:findings:*")
        valkey.ask("SET", name, "{}")
        await until(lambda: other.map_reuse.reuse_off)
        assert "its content is damaged" in other.map_reuse.reuse_off[0]
        valkey.ask("DEL", name)
        await until(lambda: not other.map_reuse.reuse_off)


async def test_server_that_verifies_nothing_learns_findings_also_if_the_store_was_away_at_its_start(
    valkey, tmp_path
):
    engines = [FakeEngine(folder=tmp_path / name) for name in ("first", "second")]
    for engine in engines:
        engine.map_reuse._served._folder.mkdir()
        engine.map_reuse._served.shared = findings.FindingsOfAll(Settings(shared=valkey.url).shared_address)
    first, second = (engine.map_reuse for engine in engines)
    valkey.kill()
    first.keep_verified({})
    assert first.reuse_off
    async with machines(valkey.url, engines[0], verify_rate=0):
        valkey.start()
        await until(lambda: not first.reuse_off)
        second.tighten(0)
        second.keep_verified({})
        await until(lambda: first.policy == second.policy)


async def test_change_that_another_machine_interrupts_is_made_again(valkey):
    shared = findings.FindingsOfAll(SharedAddress.parse(valkey.url))

    def count(known):
        if known is None:
            valkey.ask("SET", "attncache:findings:policy", "1")
        return b"%d" % (int(known or 0) + 1)

    shared.change("policy", count)
    assert valkey.ask("GET", "attncache:findings:policy") == b"2"
    shared.close()


async def test_engines_of_a_server_ask_for_findings_over_one_connection_which_ends_with_the_server(
    valkey, tiny_checkpoint, tiny_database
):
    given = {"shared": valkey.url, "shared_uses": "findings", "min_gain": 0}
    settings = Settings(database=tiny_database, dtype="float32", **given)
    async with machines(valkey.url, FakeEngine(), shared_uses="findings"):
        for _ in range(2):
            engine = load_engine(settings, tiny_checkpoint)
            engine.map_reuse._served.shared.change("policy", lambda _: b"")
        assert connections(valkey) == 1
    await until(lambda: connections(valkey) == 0)


def connections(valkey):
    """The connections to the server, without the one that asks."""
    return valkey.ask("CLIENT", "LIST").count(b"laddr=") - 1


# Keys and values.


def engine_of(folder, url, **settings):
    given = {"model": str(folder), "dtype": "float32", "shared": url, **settings}
    engine = load_engine(Settings(**given), read_checkpoint(folder))
    engine.key_values.store.transfers.prefill_speed = 0.0  # so that loading pays
    return engine


def outputs(engine, text="the bank was closed today. " * 8):
    result = engine.run(engine.requests(engine.tokenize([text])))
    engine.key_values.store.transfers.flush()
    return result


def shared_counts(engine):
    return engine.info().key_values.shared


async def test_prefix_of_another_machine_is_given_exactly_and_other_names_belong_to_other_dtypes(
    valkey, folder
):
    first = engine_of(folder, valkey.url)
    expected = outputs(first)
    second = engine_of(folder, valkey.url)
    found = outputs(second)
    np.testing.assert_array_equal(found.outputs, expected.outputs)
    assert found.report.tokens == 0
    assert second.key_values.store.counts.given_blocks["shared"] > 0
    other = engine_of(folder, valkey.url, kv_disk_dtype="int8")
    assert other.info().key_values.identity != first.info().key_values.identity
    assert outputs(other).report.tokens == expected.report.tokens
    for _ in range(2):  # the second time, there is nothing to remove
        first.key_values.store.clear()
        assert valkey.ask("KEYS", "attncache:kv:*") == []
    for engine in (first, second, other):
        engine.close()


async def test_block_stays_for_its_time_and_all_blocks_are_cleared_and_nothing_else(valkey):
    shared = blocks.SharedBlocks(SharedAddress.parse(valkey.url))
    shared.put("a", b"value", 60)
    assert 30_000 < valkey.ask("PTTL", "attncache:kv:a") <= 60_000
    assert shared.contains("a")
    shared.remove("a")
    assert not shared.contains("a")
    valkey.ask(
        "MSET", "another", "", *(part for number in range(3000) for part in (f"attncache:kv:{number}", ""))
    )
    shared.clear()
    assert valkey.ask("KEYS", "*") == [b"another"]
    shared.close()


@pytest.mark.parametrize("how", ["killed", "frozen", "full", "damaged", "another", "a list"])
async def test_failures_of_the_store_cost_time_and_never_an_answer(tmp_path, folder, how, monkeypatch):
    with running_valkey(tmp_path) as valkey:
        first = engine_of(folder, valkey.url)
        expected = outputs(first)
        assert valkey.ask("DBSIZE") > 2
        monkeypatch.setattr(blocks, "_LOOK_SECONDS", 0.2)
        monkeypatch.setattr(blocks, "_VALUE_SECONDS", 0.2)
        store = engine_of(folder, valkey.url)
        names = sorted(valkey.ask("KEYS", "attncache:kv:*"))
        text = "the bank was closed today. " * 8
        if how == "killed":
            valkey.kill()
        elif how == "frozen":
            valkey.freeze()
        elif how == "full":
            valkey.ask("CONFIG", "SET", "maxmemory", "1mb")
            text += "new " * 20
            expected = outputs(engine_of(folder, valkey.url, kv=True, shared_uses="kv"), text)
        elif how == "a list":
            valkey.ask("DEL", names[0])
            valkey.ask("RPUSH", names[0], b"of another program")
        else:
            for name, other in zip(names, [*names[1:], names[0]], strict=True):
                if how == "damaged":
                    valkey.ask("SETRANGE", name, valkey.ask("STRLEN", name) - 9, b"otherbyte")
                else:
                    valkey.ask("COPY", other, f"{name.decode()}x")
            if how == "another":
                for name in names:
                    valkey.ask("RENAME", f"{name.decode()}x", name)
        for _ in range(3):
            np.testing.assert_array_equal(outputs(store, text).outputs, expected.outputs)
        counted = shared_counts(store)
        if how in ("killed", "frozen"):
            assert counted.failures > 0
        elif how == "full":
            assert counted.failed_writes > 0
        else:
            assert counted.damaged_blocks > 0
            assert counted.failures == 0  # the other blocks were had
        if how == "frozen":
            valkey.thaw()
        for engine in (first, store):
            engine.close()


def answer_in_drops(listener, answer, is_dropped):
    """Answer one client after the other, a byte at a time."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            try:
                while asked := connection.recv(2**16):
                    for byte in b"+OK\r\n" if b"SETINFO" in asked else answer:
                        connection.sendall(bytes([byte]))
                        if b"SETINFO" not in asked:
                            time.sleep(0.005)
            except OSError:
                is_dropped.set()


@pytest.mark.parametrize("question", ["heads", "get"])
async def test_an_answer_that_comes_in_drops_is_not_waited_for(question, monkeypatch):
    monkeypatch.setattr(blocks, "_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(blocks, "_VALUE_SECONDS", 0.2)
    monkeypatch.setattr(client, "OPEN_SECONDS", 3600.0)  # the last question comes before
    is_dropped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = b"$400\r\n" + bytes(400) + b"\r\n"  # takes two seconds, and no part takes long
        threading.Thread(target=answer_in_drops, args=(listener, answer, is_dropped), daemon=True).start()
        shared = blocks.SharedBlocks(SharedAddress.parse(f"valkey://127.0.0.1:{listener.getsockname()[1]}/0"))
        with pytest.raises(OSError, match="no answer in time"):
            shared.heads(["a"], 400) if question == "heads" else shared.get("a")
        assert await asyncio.to_thread(is_dropped.wait, 30)
        with pytest.raises(OSError, match="did not answer before"):
            shared.contains("a")
        listener.shutdown(socket.SHUT_RDWR)
        shared.close()


async def test_a_name_that_is_looked_up_for_too_long_holds_up_no_question(valkey, monkeypatch):
    may_resolve, resolve = threading.Event(), socket.getaddrinfo

    def resolve_late(*arguments):
        may_resolve.wait(240)
        return resolve(*arguments)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 0.25)
    shared = blocks.SharedBlocks(SharedAddress.parse(valkey.url))
    with pytest.raises(OSError, match="no answer in time"):
        shared.heads(["a"], 1)
    may_resolve.set()

    async def is_back():
        with contextlib.suppress(OSError):
            return await asyncio.to_thread(shared.heads, ["a"], 1) == [b""]

    await until(is_back)
    shared.close()


def test_connecting_takes_no_time_from_the_question_that_needs_it(valkey, monkeypatch):
    # Each part that is sent or received takes so long, and a new connection takes at least four.
    seconds = itertools.count(step=0.75)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 30.0)
    shared = blocks.SharedBlocks(SharedAddress.parse(valkey.url))
    assert shared.heads(["a"], 1) == [b""]
    shared.close()


def test_part_of_an_answer_is_waited_for_no_longer_than_the_question_may_take(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=clock))
    patience = client._Patience(0.25, 1.0)
    assert patience.left() == 0.25
    clock.seconds = 0.875
    assert patience.left() == 0.125
    clock.seconds = 1.0
    with pytest.raises(TimeoutError):
        patience.left()


# Security, and the start.


async def test_wrong_password_is_refused_at_the_start_and_never_shown(tmp_path, caplog):
    with running_valkey(tmp_path, "--requirepass", SECRET) as valkey:
        other = valkey.url.replace("//", f"//default:{SECRET}@").removesuffix("/0") + "/99"
        with pytest.raises(InvalidSettings, match="it has no database of this number"):
            _check_shared(Settings(shared=other))
        for right, password in ((False, f"{SECRET}-not"), (True, SECRET)):
            url = valkey.url.replace("//", f"//default:{password}@")
            settings = Settings(shared=url)
            if right:
                with caplog.at_level(logging.WARNING):
                    _check_shared(settings)
                assert "set a maxmemory, and allkeys-lru" in caplog.text
            else:
                with pytest.raises(
                    InvalidSettings, match="the user or the password is not accepted"
                ) as raised:
                    _check_shared(settings)
                assert SECRET not in str(raised.value)
            async with machines(url, FakeEngine()) as (server,):
                answer = await turn(server, transcript="a")
                assert answer.status_code == 200
                assert (await turn(server, append="b")).status_code == (200 if right else 503)
                for path in ("/info", "/metrics"):
                    assert SECRET not in (await server.get(path)).text
            assert SECRET not in repr(settings)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("maxmemory", "policy", "is_told"),
    [("0", "allkeys-lru", True), ("1gb", "volatile-lru", True), ("1gb", "allkeys-lru", False)],
)
async def test_start_warns_of_a_store_that_may_refuse_blocks(tmp_path, caplog, maxmemory, policy, is_told):
    with running_valkey(tmp_path, "--maxmemory", maxmemory, "--maxmemory-policy", policy) as valkey:
        _check_shared(Settings(shared=valkey.url, shared_uses="sessions,quotas"))
        assert caplog.text == ""
        _check_shared(Settings(shared=valkey.url))
    assert ("set a maxmemory" in caplog.text) == is_told


async def test_user_with_the_commands_of_the_documentation_may_do_everything(
    valkey, folder, tmp_path, caplog
):
    page = (Path(__file__).parents[2] / "docs/cluster.md").read_text(encoding="utf-8")
    command = (
        re.search(r"ACL SETUSER (?:.*\\\n)*.*", page)[0].replace("\\\n", " ").replace("PASSWORD", SECRET)
    )
    assert valkey.ask(*command.split()) == b"OK"
    url = valkey.url.replace("//", f"//attncache:{SECRET}@")
    _check_shared(Settings(shared=url))
    key = f"client {'k' * 20} admin requests_per_minute=60"
    engine = FakeEngine(stored={"short"}, folder=tmp_path)
    engine.map_reuse._served.shared = findings.FindingsOfAll(Settings(shared=url).shared_address)
    async with machines(url, engine, api_key=key, verify_rate=1) as (server,):
        server.headers["X-API-Key"] = "k" * 20
        assert_is_about(await turn(server, transcript="a"), "a")
        assert_is_about(await turn(server, append="b"), "ab")
        values = samples((await server.get("/metrics")).text)
        assert (values["attncache_sessions",], values["attncache_shared_away",]) == (1, 0)
    assert engine.map_reuse.reuse_off == []
    models = engine_of(folder, url), engine_of(folder, url)
    assert outputs(models[0]).report.tokens > outputs(models[1]).report.tokens == 0
    models[0].key_values.store.clear()
    for model in models:
        assert (shared_counts(model).failures, shared_counts(model).failed_writes) == (0, 0)
        model.close()
    assert "cannot be used" not in caplog.text
    assert valkey.ask("DBSIZE") == 3  # a history, a quota and findings


@pytest.fixture
def encrypted(valkey, tmp_path):
    """Pass what comes encrypted on to the server; yield the port and the file of the certificate."""
    make_certificate(tmp_path, "store", "DNS:localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "store.pem", tmp_path / "store.key")
    ready, found = threading.Event(), []

    async def copy(reader, writer):
        with contextlib.suppress(OSError):
            while content := await reader.read(2**16):
                writer.write(content)
                await writer.drain()
        writer.close()

    async def connected(reader, writer):
        # The end of the loop cancels the connections that are left.
        with contextlib.suppress(asyncio.CancelledError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", valkey.port)
            await asyncio.gather(copy(reader, to_writer), copy(to_reader, writer))

    async def listen():
        server, stop = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context), asyncio.Event()
        found.extend((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), stop.set))
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(listen(),))
    thread.start()
    assert ready.wait(240)
    port, loop, stop = found
    yield port, tmp_path / "store.pem"
    loop.call_soon_threadsafe(stop)
    thread.join()


async def test_certificate_and_name_of_the_store_are_checked(encrypted, monkeypatch, caplog):
    port, certificate = encrypted
    with pytest.raises(InvalidSettings, match="its certificate is not accepted"):
        _check_shared(Settings(shared=f"valkeys://localhost:{port}"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(InvalidSettings, match="its certificate is not accepted"):
        _check_shared(Settings(shared=f"valkeys://127.0.0.1:{port}"))  # the name is another one
    url = f"valkeys://localhost:{port}"
    _check_shared(Settings(shared=url))
    async with machines(url, FakeEngine(), FakeEngine()) as (first, second):
        assert_is_about(await turn(first, transcript="a"), "a")
        assert_is_about(await turn(second, append="b"), "ab")
    shared, block = blocks.SharedBlocks(SharedAddress.parse(url)), os.urandom(600_000)
    shared.put("a", block)
    assert (shared.get("a"), shared.heads(["a", "b"], 9)) == (block, [block[:9], b""])
    shared.close()
    assert "cannot be used" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://host",
        "valkey://",
        f"valkey://user:{SECRET}@host/zero",
        f"valkey://user:{SECRET}@host/0?x=1",
        "valkey://host:port/0",
        f"valkey://{SECRET}@host/0",
        "valkey://host/-1",
    ],
)
async def test_url_that_is_none_of_a_store_is_refused_and_not_shown(url):
    with pytest.raises(InvalidSettings, match="valkeys://USER:PASSWORD@HOST:6379/0") as raised:
        read_settings({"shared": url})
    assert SECRET not in str(raised.value)


async def test_uses_can_be_left_out(valkey):
    async with machines(valkey.url, FakeEngine(), FakeEngine(), shared_uses="quotas") as (first, second):
        assert_is_about(await turn(first, transcript="a"), "a")
        assert (await turn(second, append="b")).status_code == 404
    assert valkey.ask("DBSIZE") == 0


async def test_store_that_is_away_at_the_start_is_a_warning(valkey, caplog):
    valkey.kill()
    _check_shared(Settings(shared=valkey.url))
    assert "cannot be used yet: there is no connection" in caplog.text
    valkey.start()
