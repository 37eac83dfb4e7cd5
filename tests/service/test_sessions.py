"""Conversations: whose history is found, what is computed, and what happens if the window overflows."""

import asyncio
from array import array
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FAILING, NOT_FINITE, FakeEngine, begun, embedding_of, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing import until_waiting
from raw_http import request_and_leave
from running import Clock, until

from attncache_core import InputTooLong, KeyValueOptions, PrefillEngine, PrefillRequest
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.reuse.kv.capacity import DistinctSessions
from attncache_core.text.prompts import SequencePlan
from service.conversations.conversation import Conversation, History
from service.conversations.sessions import CAPACITY_BYTES, Sessions
from service.errors import QueueFull
from service.store import LocalStore

TTL = 100.0
WINDOW = 64  # tokens of the fake engine; a token is a character
REUSE_OFF = {"X-AttnCache-Reuse": "off"}


def app_of(client):
    return client._transport.app


def use_clock(client):
    """Let the sessions of the app expire by a clock of the test."""
    clock = Clock()
    app_of(client).state.service.sessions = sessions_with(clock)
    return clock


async def ask(client, session="s", salt=None, **turn):
    headers = turn.pop("headers", {})
    body = {"session_id": session, "cache_salt": salt, "normalize": False, **turn}
    return await client.post("/embed", json=body, headers=headers)


def assert_is_about(response, text):
    assert response.status_code == 200, response.text
    expected = embedding_of([ord(character) for character in text])
    np.testing.assert_array_equal(response.json(), [expected])


def assert_failed(response, status, code, field):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["field"]) == (code, field)


texts = st.text("abc", min_size=1, max_size=3)
operations = st.one_of(
    st.tuples(st.just("append"), texts),
    st.tuples(st.just("transcript"), st.lists(texts, min_size=1, max_size=4)),
    st.tuples(st.just("edit"), texts),  # the last turn, by a transcript of all turns
    st.tuples(st.just("fail"), st.sampled_from([FAILING, NOT_FINITE])),
    st.tuples(st.just("wait"), st.sampled_from([1.0, TTL / 2, TTL])),
)


@pytest.fixture(scope="module")
async def client():
    async with serving() as client:
        yield client


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([None, "x", "y"]), operations), max_size=14
    )
)
async def test_histories_are_those_of_a_dictionary(client, steps):
    known, clock = {}, use_clock(client)
    for session, salt, (operation, value) in steps:
        if operation == "wait":
            clock.seconds += value
            continue
        key = salt, session
        last, turns = known.pop(key, (-TTL, []))
        turns = turns if clock.seconds - last < TTL else []
        if operation == "fail":
            response = await ask(client, session, salt, transcript=[value])
            assert response.status_code == 500
        elif operation == "append":
            response = await ask(client, session, salt, append=value)
            if not turns:
                assert_failed(response, 404, "unknown_session", "session_id")
                continue
            turns = [*turns, value]
            assert_is_about(response, "".join(turns))
        else:
            turns = [*turns[:-1], value] if operation == "edit" else value
            assert_is_about(await ask(client, session, salt, transcript=turns), "".join(turns))
        if turns:
            known[key] = clock.seconds, turns
    alive = sum(clock.seconds - last < TTL for last, _ in known.values())
    assert await app_of(client).state.service.sessions.count() == alive


async def test_turn_whose_answer_is_refused_is_not_in_the_history(monkeypatch):
    monkeypatch.setattr("service.web.call._PART_BYTES", 16)  # what is free of each answer
    async with serving() as client:
        answers = app_of(client).state.service.answers
        assert_is_about(await ask(client, transcript="ab"), "ab")
        answers.take(answers.maximum)
        assert_failed(await ask(client, append="c"), 429, "queue_full", None)
        answers.give(answers.maximum)
        assert_is_about(await ask(client, append="d"), "abd")
        assert answers.taken == 0


async def test_unknown_session_says_what_to_send():
    async with serving() as client:
        response = await ask(client, "Sesam", append="a")
        assert_failed(response, 404, "unknown_session", "session_id")
        assert "transcript" in response.json()["error"]["message"]
        assert "Sesam" not in response.text
        metrics = (await client.get("/metrics")).text
    assert 'attncache_requests_total{route="/embed",status="404"} 1.0' in metrics


@pytest.mark.parametrize("route", ["/embed", "/classify"])
async def test_wrong_body_is_refused_with_the_field(route):
    bodies = [
        ({}, "inputs"),
        ({"inputs": "a", "append": "b"}, "append"),
        ({"transcript": ["b"]}, "transcript"),
        ({"session_id": "s"}, "append"),
        ({"session_id": "s", "inputs": "a"}, "inputs"),
        ({"session_id": "s", "inputs": "a", "append": "b"}, "inputs"),
        ({"session_id": "s", "append": "a", "transcript": ["a"]}, "transcript"),
        ({"session_id": "s", "append": ["a"]}, "append"),
        ({"session_id": "s", "append": ""}, "append"),
        ({"session_id": "s", "transcript": []}, "transcript"),
        ({"session_id": "s", "transcript": ["a", ""]}, "transcript[1]"),
        ({"session_id": "s", "transcript": 7}, "transcript"),
        ({"session_id": "", "append": "a"}, "session_id"),
        ({"session_id": "s" * 257, "append": "a"}, "session_id"),
        ({"session_id": 7, "append": "a"}, "session_id"),
        ({"inputs": "a", "cache_salt": ""}, "cache_salt"),
        ({"inputs": "a", "cache_salt": "s" * 257}, "cache_salt"),
    ]
    async with serving(FakeEngine(labels=("no", "yes"))) as client:
        for body, field in bodies:
            assert_failed(await client.post(route, json=body), 400, "invalid_input", field)
        accepted = await client.post(route, json={"session_id": "s" * 256, "transcript": "a"})
        assert accepted.status_code == 200


async def test_transcript_of_too_many_turns_is_refused():
    async with serving(max_request_inputs=2) as client:
        response = await ask(client, transcript=["a", "b", "c"])
        assert_failed(response, 422, "too_many_inputs", "transcript")


async def test_classify_answers_about_the_conversation():
    async with serving(FakeEngine(labels=("no", "yes"))) as client:
        best = []
        for turn in ({"transcript": ["a"]}, {"append": "b"}, {"append": "cc"}, {"append": "d"}):
            response = await client.post("/classify", json={"session_id": "s", **turn})
            best.append(response.json()[0][0]["label"])
    # The winner is the label whose index is the length modulo 2; the lengths are 1, 2, 4 and 5.
    assert best == ["yes", "no", "no", "yes"]


@pytest.mark.parametrize(
    ("turn", "status", "code", "field"),
    [
        ({"transcript": [FAILING]}, 500, "internal_error", None),
        ({"transcript": [NOT_FINITE]}, 500, "not_finite", "transcript"),
        ({"append": NOT_FINITE[1:]}, 500, "not_finite", "append"),
    ],
)
async def test_failed_request_leaves_the_history_as_before(turn, status, code, field):
    async with serving() as client:
        await ask(client, transcript=[NOT_FINITE[:1]])
        assert_failed(await ask(client, **turn), status, code, field)
        assert_is_about(await ask(client, append="!"), NOT_FINITE[:1] + "!")


async def test_requests_of_one_session_wait_for_each_other_and_other_sessions_do_not():
    engine = FakeEngine()
    async with serving(engine) as client:
        await ask(client, transcript=["a"])
        first = await begun(engine, ask(client, append="b"))
        second = asyncio.create_task(ask(client, append="c"))
        other = asyncio.create_task(ask(client, "other", transcript=["z"]))
        await until_waiting(client, 1)
        engine.may_run.set()
        for task, text in ((first, "ab"), (second, "abc"), (other, "z")):
            assert_is_about(await task, text)
    assert sorted(text for batch in engine.batches for text in batch) == ["a", "ab", "abc", "z"]


@pytest.mark.parametrize("leaving", ["the one that runs", "one that waits"])
async def test_client_that_leaves_releases_its_session(leaving):
    engine, leave = FakeEngine(), asyncio.Event()
    async with serving(engine) as client:
        sessions = app_of(client).state.service.sessions
        await ask(client, transcript=["a"])
        engine.may_run.clear()
        gone_body = {"session_id": "s", "append": "gone"}
        gone = request_and_leave(app_of(client), gone_body, leave)
        tasks = [asyncio.create_task(request) for request in ([gone] if "runs" in leaving else [])]
        tasks.append(asyncio.create_task(ask(client, append="b")))
        await asyncio.to_thread(engine.runs.acquire)
        tasks += [asyncio.create_task(gone)] if "waits" in leaving else []
        tasks.append(asyncio.create_task(ask(client, append="c")))
        await until(lambda: sessions._waiting == len(tasks) - 1)
        leave.set()
        await tasks[0 if "runs" in leaving else 1]
        engine.may_run.set()
        answers = [await task for task in tasks]
        assert_is_about(answers[-1], "abc")
        assert (sessions._turns, sessions._waiting) == ({}, 0)


async def test_turn_of_a_client_that_leaves_while_it_is_answered_is_not_kept():
    leave = asyncio.Event()
    leave.set()
    async with serving() as client:
        await ask(client, transcript=["a"])
        await request_and_leave(app_of(client), {"session_id": "s", "append": "gone"}, leave)
        assert_is_about(await ask(client, append="b"), "ab")


async def test_expired_session_is_found_while_a_request_of_it_runs():
    engine = FakeEngine()
    async with serving(engine) as client:
        clock = use_clock(client)
        await ask(client, transcript=["a"])
        slow = await begun(engine, ask(client, append="b"))
        clock.seconds += 2 * TTL
        engine.may_run.set()
        assert_is_about(await slow, "ab")
        assert_is_about(await ask(client, append="c"), "abc")


@asynccontextmanager
async def overflowing(way, engine=None, **more):
    """Yield a client whose session holds 60 of 64 tokens: ten times abcdef."""
    async with serving(engine, session_overflow=way, **more) as client:
        assert "X-AttnCache-History-Tokens" not in (await ask(client, transcript=["abcdef"] * 10)).headers
        yield client


@pytest.mark.parametrize("turn", [{"append": "ghijklmn"}, {"transcript": [*["abcdef"] * 10, "ghijklmn"]}])
async def test_overflow_is_recomputed_for_the_newest_tokens(turn):
    whole = "abcdef" * 10 + "ghijklmn"
    async with overflowing("recompute") as client:
        cut = await ask(client, **turn)
        assert_is_about(cut, whole[-32:])
        assert cut.headers["X-AttnCache-History-Tokens"] == "32/68"
        assert "X-AttnCache-Approximate" not in cut.headers
        # The cut stays where it is while the conversation grows.
        following = await ask(client, append="op")
        assert_is_about(following, whole[-32:] + "op")
        assert following.headers["X-AttnCache-History-Tokens"] == "34/70"
        again = await ask(client, transcript=[*["abcdef"] * 10, "ghijklmn", "op", "q"])
        assert_is_about(again, whole[-32:] + "opq")
        # A change of what is kept does not move the cut; a change of what was cut does.
        edited = await ask(client, transcript=[*["abcdef"] * 10, "GHIJKLMN", "op"])
        assert_is_about(edited, "abcdef" * 4 + "GHIJKLMN" + "op")
        edited = await ask(client, transcript=["ABCDEF", *["abcdef"] * 9, "ghijklmn", "op"])
        assert_is_about(edited, (whole + "op")[-32:])
        # What fits without a cut is not cut.
        short = await ask(client, transcript=["abcdef", "gh"])
        assert_is_about(short, "abcdefgh")
        assert "X-AttnCache-History-Tokens" not in short.headers


async def test_new_turn_that_is_longer_than_half_of_the_window_remains_whole():
    async with overflowing("recompute") as client:
        assert_is_about(await ask(client, append="ghijklmn" * 5), "ghijklmn" * 5)


@pytest.mark.parametrize("field", ["append", "transcript"])
async def test_overflow_is_refused_with_the_field(field):
    turn = "ghijklmn" if field == "append" else [*["abcdef"] * 10, "ghijklmn"]
    async with overflowing("refuse") as client:
        assert_failed(await ask(client, **{field: turn}), 422, "input_too_long", field)
        assert_is_about(await ask(client, append="ghij"), "abcdef" * 10 + "ghij")


async def test_turn_that_is_too_long_by_itself_is_cut_only_if_truncation_is_allowed():
    turn = "".join(chr(ord("!") + number) for number in range(70))
    async with overflowing("recompute") as client:
        refused = await ask(client, append=turn, truncate=False)
        assert_failed(refused, 422, "input_too_long", "append")
        assert_is_about(await ask(client, append=turn, truncate=True), turn[-WINDOW:])
        assert_is_about(await ask(client, append="a", truncate=False), turn[-31:] + "a")


async def test_turn_that_is_too_long_by_itself_is_refused_also_where_it_was_cut_before():
    turns = ["abcdef", "g" * 70]
    async with serving(session_overflow="recompute") as client:
        assert_is_about(await ask(client, transcript=turns, truncate=True), "g" * WINDOW)
        assert_failed(
            await ask(client, transcript=turns, truncate=False), 422, "input_too_long", "transcript"
        )


@pytest.mark.parametrize("tokens", [60, 61, 64, 65])
async def test_turn_that_fits_by_itself_loses_nothing_to_the_first_tokens(tokens):
    turn = "".join(chr(ord("!") + number) for number in range(tokens))
    async with overflowing("keep-sinks") as client:
        found = await ask(client, append=turn, truncate=True)
        sinks = "abcd"[: WINDOW - tokens] if tokens <= WINDOW else "abcd"
        assert_is_about(found, sinks + turn[-(WINDOW - len(sinks)) :])


class TruncatingEngine(FakeEngine):
    """A fake engine that notes which keys and values it was asked to keep, and with which salts it ran."""

    approximation = None

    def __init__(self, *, is_stored=True):
        super().__init__()
        self.sharing = True
        self.key_values = self
        self.store = SimpleNamespace(looks_ahead=False)
        self.is_stored = is_stored
        self.kept = []  # the tokens, and the salt that they were stored under
        self.salts = []  # with the tokens that pass

    def prefix_key(self, *sequence, passing=0):
        _, _, salt = sequence
        self.salts.append((salt, passing))

    def truncate(self, ids, plan, salt, kept, *, passing):
        assert (plan, passing) == (SequencePlan(0), 0)
        self.kept.append(("".join(chr(ids[position]) for position in kept), salt))
        return b"truncated %d" % len(self.kept) if self.is_stored else None


@pytest.mark.parametrize(
    ("way", "before"), [("truncate", ("abcdef" * 10)[-24:]), ("keep-sinks", "abcd" + ("abcdef" * 10)[-20:])]
)
async def test_stored_keys_and_values_are_truncated_and_reported(way, before):
    engine = TruncatingEngine()
    async with overflowing(way, engine) as client:
        cut = await ask(client, append="ghijklmn")
        assert_is_about(cut, before + "ghijklmn")
        assert cut.headers["X-AttnCache-History-Tokens"] == "32/68"
        assert cut.headers["X-AttnCache-Approximate"] == "truncated"
        following = await ask(client, append="op")
        assert_is_about(following, before + "ghijklmnop")
        assert following.headers["X-AttnCache-Approximate"] == "truncated"
        whole = await ask(client, headers=REUSE_OFF, append="q")
        assert "X-AttnCache-Approximate" not in whole.headers
        assert engine.kept == [(before, b"")]
        # 35 tokens are kept; the second cut begins with what the first cut left.
        again = await ask(client, append="r" * 30)
        left = before + "ghijklmnopq"
        remaining = left[-2:] if way == "truncate" else left[:4]
        assert_is_about(again, remaining + "r" * 30)
        assert engine.kept[1:] == [(remaining, b"truncated 1")]
        other = await ask(client, "other", transcript=["a"])
        assert "X-AttnCache-Approximate" not in other.headers
    # Without reuse, nothing is looked up.
    salts = [b"", b"truncated 1", b"truncated 1", b"truncated 2", b""]
    assert engine.salts == [(salt, 0) for salt in salts]


@pytest.mark.parametrize("way", ["recompute", "refuse"])
async def test_server_that_does_not_truncate_uses_no_truncated_keys_and_values(way):
    cut = History((array("i", [97] * 40), array("i", [98] * 20)), dropped=20, namespace=b"truncated 1")
    engine = TruncatingEngine()
    conversation = Conversation(cut, ["cc"], "append", truncate=False, overflow=way)
    prompt = engine.tokenizer.default_prompt
    (made,) = conversation.tokenize(engine, prompt, b"", 1000)
    assert (made.salt, conversation.approximate, conversation.following.namespace) == (b"", False, None)


def test_server_that_refuses_long_conversations_refuses_one_that_another_server_has_cut():
    cut = History((array("i", [97] * 40), array("i", [98] * 40)), sinks=4, dropped=40)
    conversation = Conversation(cut, ["cc"], "append", truncate=False, overflow="refuse")
    engine = TruncatingEngine()
    with pytest.raises(InputTooLong, match="the conversation has more than"):
        next(conversation.tokenize(engine, engine.tokenizer.default_prompt, b"", 1000))


def test_edit_of_what_was_cut_undoes_the_cut_also_of_a_history_that_is_still_too_long():
    turns = tuple(array("i", [token] * 6) for token in (1, 2, 3))
    cut = History(turns, sinks=2, dropped=8, namespace=b"truncated 1")
    longer = (*turns, array("i", [4] * 6))
    assert cut.edited(longer, room=12) == History(longer, 2, 8, b"truncated 1")
    edited = (turns[0], array("i", [9] * 6), *longer[2:])  # the second turn lies in the cut part
    assert cut.edited(edited, room=12) == History(edited)
    behind = (*turns[:2], array("i", [9] * 6))
    assert cut.edited(behind, room=12) == History(behind, 2, 8, b"truncated 1")


def test_cut_inside_a_last_turn_is_undone_where_the_turn_fits():
    turns = (array("i", [1] * 6), array("i", [2] * 10))
    cut = History(turns, sinks=2, dropped=8)
    assert cut.edited(turns, room=8) == cut
    assert cut.edited(turns, room=9) == History(turns)
    assert History(turns, dropped=6).edited(turns, room=12) == History(turns, dropped=6)


@pytest.mark.parametrize("way", ["recompute", "truncate", "keep-sinks"])
async def test_transcript_without_its_last_turns_is_cut_anew_where_the_cut_would_leave_little(way):
    turns = [letter * 12 for letter in "abcdefghij"]
    async with serving(TruncatingEngine(), session_overflow=way) as client:
        for number in range(1, len(turns) + 1):
            await ask(client, transcript=turns[:number])
        for number in range(len(turns), 5, -1):
            shorter = await ask(client, transcript=turns[:number])
            kept = int(shorter.headers["X-AttnCache-History-Tokens"].partition("/")[0])
            assert WINDOW // 2 <= kept <= WINDOW
            whole = "".join(turns[:number])
            sinks = 4 if way == "keep-sinks" else 0
            assert_is_about(shorter, whole[:sinks] + whole[sinks - kept :])


@pytest.mark.parametrize("way", ["truncate", "keep-sinks"])
@pytest.mark.parametrize("reason", ["not all stored", "reuse off"])
async def test_tokens_are_recomputed_if_they_are_not_stored(way, reason):
    engine = TruncatingEngine(is_stored=reason != "not all stored")
    async with overflowing(way, engine) as client:
        headers = REUSE_OFF if reason == "reuse off" else {}
        cut = await ask(client, headers=headers, append="ghijklmn")
        history = "abcdef" * 10
        before = history[-24:] if way == "truncate" else history[:4] + history[-20:]
        assert_is_about(cut, before + "ghijklmn")
        assert "X-AttnCache-Approximate" not in cut.headers
        assert "X-AttnCache-Approximate" not in (await ask(client, append="o")).headers


async def test_options_bound_the_life_and_the_number_of_sessions():
    async with serving(session_ttl_seconds=1e-9) as client:
        await ask(client, transcript=["a"])
        assert_failed(await ask(client, append="b"), 404, "unknown_session", "session_id")
    async with serving(max_sessions=1) as client:
        await ask(client, transcript=["a"])
        await ask(client, "other", transcript=["a"])
        assert_failed(await ask(client, append="b"), 404, "unknown_session", "session_id")
        assert_is_about(await ask(client, "other", append="b"), "ab")


def history_of(tokens):
    return History((array("i", range(tokens)),))


def key(session):
    return b"", session


def sessions_with(clock=None, max_sessions=100, **limits):
    clock = clock or Clock()
    limits = {"ttl_seconds": TTL, "max_waiting": 100, "max_seconds": 60, **limits}
    histories = LocalStore(max_sessions, limits.get("capacity_bytes", CAPACITY_BYTES), clock)
    return Sessions(histories, LocalStore(), **limits, clock=clock)


async def keep(sessions, name, tokens=1):
    await sessions.keep(key(name), await sessions.history(key(name)), history_of(tokens))


async def test_memory_is_bounded_and_freed():
    clock = Clock()
    sessions = sessions_with(clock, capacity_bytes=80_000)
    for number in range(200):
        await keep(sessions, str(number % 70), 100 * (number % 9))
        assert sessions._histories._bytes <= 80_000
    count = await sessions.count()
    assert 20 < count < 70
    await keep(sessions, "too long", 2_000)
    assert await sessions.history(key("too long")) is None
    assert await sessions.count() == count
    clock.seconds = 3 * TTL
    assert (await sessions.count(), sessions.distinct) == (0, 0)
    assert sessions._histories._bytes == 0


async def test_access_prolongs_the_life_of_a_session():
    clock = Clock()
    sessions = sessions_with(clock)
    await keep(sessions, "a")
    for _ in range(3):
        clock.seconds += TTL - 1
        assert await sessions.history(key("a")) is not None
    clock.seconds += TTL
    assert await sessions.history(key("a")) is None


async def test_waiting_requests_are_bounded():
    sessions = sessions_with(max_waiting=2)
    first, second, third = (sessions.begin(key("a")) for _ in range(3))
    with pytest.raises(QueueFull):
        sessions.begin(key("a"))
    assert sessions.begin(key("b")).done()
    assert [turn.done() for turn in (first, second, third)] == [True, False, False]
    sessions.end(key("a"), second)  # a client that leaves while it waits
    assert not third.done()
    sessions.end(key("a"), first)
    assert third.done()
    sessions.end(key("a"), third)
    assert sessions._waiting == 0


WRITTEN = Template.parse("ask: {}\nanswer:")
TURNS = ["where is my card", " the bank was closed today", " money", " my card was lost, please help", "!"]


def engine_of(folder, *, max_tokens=None, **adapted):
    checkpoint = read_checkpoint(folder).adapted(template=WRITTEN, **adapted)
    options = KeyValueOptions(memory_bytes=2**24)
    return PrefillEngine.load(checkpoint, dtype="float32", key_values=options, max_tokens=max_tokens)


def growing(turns):
    """Yield the number of turns and the body of each request of a conversation."""
    yield 1, {"transcript": turns[:1]}
    for count, turn in enumerate(turns[1:], 2):
        yield count, {"append": turn}


def assert_is_as_computed_alone(response, engine, sequence):
    plan = engine.tokenizer.default_prompt.sequence_plan(0)
    alone = engine.run([PrefillRequest(sequence, reuse=False, sequence_plan=plan)]).outputs
    np.testing.assert_allclose(response.json(), alone, rtol=1e-5, atol=1e-5)


def cached(response):
    known, asked = response.headers["X-AttnCache-Cached-Tokens"].split("/")
    return int(known), int(asked)


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
async def test_turns_equal_one_run_of_all_tokens_and_compute_only_what_is_new(folder, pooling):
    engine = engine_of(folder, pooling=pooling)
    frame = engine.tokenizer.frame(engine.tokenizer.default_prompt)
    ids = engine.tokenizer.turns(TURNS)
    async with serving(engine) as client:
        for count, turn in growing(TURNS):
            response = await ask(client, **turn)
            before = sum(map(len, ids[: count - 1]))
            sequence = frame.around([token for ids in ids[:count] for token in ids])
            known = len(frame.before) + before if count > 1 else 0
            assert cached(response) == (known, len(sequence))
            assert_is_as_computed_alone(response, engine, sequence)
        # An edited turn falls back to what is common, also for another session.
        edited = await ask(client, "other", transcript=[*TURNS[:2], " zebra", *TURNS[3:]])
        common = sum(map(len, [frame.before, *ids[:2]]))
        assert common - 16 < cached(edited)[0] <= common + 1
        hidden = await ask(client, "other", salt="other", transcript=TURNS)
        assert cached(hidden)[0] == 0
        computed = await ask(client, headers=REUSE_OFF, append=" zebra")
        assert cached(computed)[0] == 0


async def test_labels_of_several_tokens_are_scored_behind_the_history(folder):
    labels = ["bank account lost", "bank account", "card", "zebra"]
    engine = engine_of(folder, label_logits=True, labels=labels)
    frame = engine.tokenizer.frame(engine.decisions.labels_in(None, labels).prompt)
    async with serving(engine) as client:
        for count, turn in growing(TURNS):
            response = await client.post("/classify", json={"session_id": "s", **turn})
            alone = {"session_id": "all", "transcript": TURNS[:count]}
            full = await client.post("/classify", json=alone, headers=REUSE_OFF)
            scores, expected = (
                {entry["label"]: entry["score"] for entry in answer.json()[0]} for answer in (response, full)
            )
            assert scores == pytest.approx(expected, abs=1e-5)
            history = sum(map(len, engine.tokenizer.turns(TURNS[: count - 1])))
            plans = len(engine.decisions.labels_in(None, labels).prompt.sequence_plans)
            assert cached(response)[0] == (plans * (len(frame.before) + history) if count > 1 else 0)


@pytest.mark.parametrize("way", ["recompute", "refuse"])
async def test_real_conversation_never_exceeds_the_window(folder, way):
    engine = engine_of(folder, max_tokens=48, pooling="mean")
    frame = engine.tokenizer.frame(engine.tokenizer.default_prompt)
    turns = []
    async with serving(engine, session_overflow=way) as client:
        for turn in TURNS * 3:
            response = await ask(client, **({"append": turn} if turns else {"transcript": [turn]}))
            if response.status_code == 422:
                assert way == "refuse"
                continue
            turns.append(turn)
            known, asked = cached(response)
            all_ids = [token for turn in engine.tokenizer.turns(turns) for token in turn]
            kept = asked - len(frame.before) - len(frame.after)
            sequence = frame.around(all_ids[len(all_ids) - kept :])
            assert known < len(sequence) <= engine.tokenizer.max_tokens
            assert_is_as_computed_alone(response, engine, sequence)
    assert (len(turns) == len(TURNS) * 3) == (way == "recompute")


@pytest.mark.parametrize("way", ["truncate", "keep-sinks"])
@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
async def test_truncation_of_a_real_conversation_computes_only_new_tokens(folder, way, pooling):
    engine = engine_of(folder, max_tokens=48, pooling=pooling)
    frame = engine.tokenizer.frame(engine.tokenizer.default_prompt)
    cuts = approximate = 0
    async with serving(engine, session_overflow=way) as client:
        for number, turn in enumerate(TURNS * 3):
            response = await ask(client, **({"append": turn} if number else {"transcript": [turn]}))
            known, asked = cached(response)
            new = len(engine.tokenizer.turns([turn])[0]) + len(frame.after)
            if response.headers.get("X-AttnCache-Approximate"):
                assert known == asked - new
                approximate += 1
            cuts += "X-AttnCache-History-Tokens" in response.headers
    assert cuts > 1
    # Mean pooling reads all tokens, also those that truncation does not compute, so it computes them again.
    assert (approximate > 1) == (pooling == "lasttoken")


async def test_session_of_an_encoder_computes_every_turn_in_full(tiny_engine):
    frame = tiny_engine.tokenizer.frame(tiny_engine.tokenizer.default_prompt)
    turns = ["lost card", "help my bank", "money"]
    async with serving(tiny_engine) as client:
        for count, turn in growing(turns):
            response = await ask(client, **turn)
            assert "X-AttnCache-Cached-Tokens" not in response.headers
            ids = [token for turn in tiny_engine.tokenizer.turns(turns[:count]) for token in turn]
            assert frame.around(ids) == tiny_engine.tokenize([" ".join(turns[:count])])[0]
            alone = tiny_engine.embed([" ".join(turns[:count])], normalize=False)
            np.testing.assert_allclose(response.json(), alone, rtol=1e-5, atol=1e-5)


async def test_count_of_distinct_sessions_holds_a_bounded_number(monkeypatch):
    monkeypatch.setattr(DistinctSessions, "MAX", 3)
    sessions = sessions_with(ttl_seconds=1e9, max_sessions=2)
    for number in [*range(5), 4]:
        await keep(sessions, str(number))
    assert sessions.distinct == 3
    assert len(sessions._distinct._last_use) == 3
