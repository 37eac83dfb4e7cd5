"""Hits are verified while no request waits, and the policy is tightened if hits fail the budget."""

import asyncio
import json
import logging
import random
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from core_models import random_text
from fake_engine import NOT_FINITE, FakeEngine, policy_of, serving, starting, texts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing import batching, hold, queued, submit
from running import metrics_of, samples, until, until_metric
from verifying import (
    FAILURES,
    VERIFIED,
    AnyText,
    requests_of,
    serve,
    serve_and_verify,
    verifier_of,
    verify_all,
)

from attncache_core import AttentionDatabase, CorruptDatabase, LinearClassifier, PrefillEngine
from attncache_core.engine.result import Compared
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.maps.policy import Budget, StrangenessLimit
from attncache_core.reuse.maps.policy_state import ServedPolicy
from attncache_core.runtime.files import locked
from service.observability.metrics import Metrics
from service.upkeep.verifier import Verifier

DROPPED = "attncache_verify_dropped_total"


class UnverifiableEngine(FakeEngine):
    """Fails without reuse, with an exception that quotes the texts."""

    def run(self, requests):
        if not any(request.reuse for request in requests):
            raise RuntimeError(f"cannot compute {texts_of(requests)}")
        return super().run(requests)


class HidingEngine(FakeEngine):
    """Makes NaN of one text in full, in a token outside the output; with reuse the text is finite."""

    def run(self, requests):
        result = super().run(requests)
        return replace(result, finite=np.array([request.reuse for request in requests]) | result.finite)


def hitting_engine(damage=0.0):
    return FakeEngine(stored=AnyText(), damage=damage)


def numbers(metrics):
    return samples(metrics.render().decode())


def verified_texts(engine):
    return [text for batch in engine.verified for text in batch]


# The verifier alone.


@settings(max_examples=30)
@given(seed=st.integers(), rate=st.floats(0, 1), count=st.integers(1, 40))
def test_given_random_generator_chooses_the_hits(seed, rate, count):
    engine, metrics = hitting_engine(), Metrics()
    verifier = verifier_of(engine, metrics, rate, random.Random(seed))
    texts = [f"text {number}" for number in range(count)]
    serve_and_verify(engine, verifier, texts)
    oracle = random.Random(seed)
    assert verified_texts(engine) == [text for text in texts if oracle.random() < rate]


def test_hit_that_comes_to_nan_when_computed_in_full_does_not_agree():
    engine, metrics = HidingEngine(stored=AnyText()), Metrics()
    verifier = verifier_of(engine, metrics)
    serve_and_verify(engine, verifier, ["fine", NOT_FINITE])
    shown = numbers(metrics)
    assert shown["attncache_verify_cosine_bucket", "0.5"] == 1
    assert shown["attncache_verify_cosine_sum",] == pytest.approx(1)
    serve_and_verify(engine, verifier, [NOT_FINITE] * 60)
    assert numbers(metrics)[(FAILURES,)] > 0
    assert engine.map_reuse.policy.groups[1].tightened


def test_pending_hit_keeps_its_own_output_and_not_those_of_the_batch():
    engine = hitting_engine()
    verifier = verifier_of(engine, Metrics())
    serve(engine, verifier, ["a", "b"])
    assert [hit.output.base for hit in verifier._pending] == [None, None]


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 200), max_size=40))
def test_every_hit_is_verified_once_oldest_first_and_few_at_a_time(lengths):
    engine, metrics = hitting_engine(), Metrics()
    engine.tokenizer.max_tokens = 200
    verifier = verifier_of(engine, metrics)
    texts = [chr(ord("a") + number) * length for number, length in enumerate(lengths)]
    if texts:
        serve(engine, verifier, texts)
    verify_all(verifier)
    assert verified_texts(engine) == texts
    for batch in engine.verified:
        assert len(batch) <= 8
        assert len(batch) == 1 or sum(map(len, batch)) <= 128
    assert numbers(metrics)[(VERIFIED,)] == len(texts)


def test_beyond_a_bound_the_oldest_are_dropped_and_counted():
    engine, metrics = hitting_engine(), Metrics()
    verifier = verifier_of(engine, metrics)
    texts = [f"text {number}" for number in range(300)]
    for start in range(0, 300, 50):
        serve(engine, verifier, texts[start : start + 50])
    verify_all(verifier)
    assert verified_texts(engine) == texts[-256:]
    assert (numbers(metrics)[(VERIFIED,)], numbers(metrics)[(DROPPED,)]) == (256, 44)


def test_hits_that_an_engine_leaves_are_dropped_and_counted():
    """Also those of a batch that was running while another engine took over."""
    engine, metrics = hitting_engine(), Metrics()
    verifier = verifier_of(engine, metrics)
    serve(engine, verifier, ["a", "b", "c"])
    verifier.retire()
    assert numbers(metrics)[(DROPPED,)] == 3
    serve(engine, verifier, ["late", "later"])
    assert (numbers(metrics)[(VERIFIED,)], numbers(metrics)[(DROPPED,)]) == (0, 5)


def test_hits_inside_the_budget_tighten_nothing():
    engine, metrics = hitting_engine(damage=0.014), Metrics()
    verifier = verifier_of(engine, metrics)
    for _ in range(10):
        serve_and_verify(engine, verifier, ["short"] * 50)
    assert engine.map_reuse.policy == policy_of()
    assert numbers(metrics)[(FAILURES,)] == 0


@pytest.mark.parametrize(
    ("reuses", "more"),
    [(True, ""), (False, ", and these lengths reuse nothing until the next start measures their gain again")],
)
def test_group_below_the_budget_is_tightened_counted_and_logged(caplog, reuses, more):
    engine, metrics = hitting_engine(damage=0.03), Metrics()
    engine.map_reuse.reuses = lambda _: reuses
    verifier = verifier_of(engine, metrics)
    serve_and_verify(engine, verifier, ["short"] * 45 + ["longer than eight"] * 45)
    assert numbers(metrics)[(FAILURES,)] == 0
    serve_and_verify(engine, verifier, ["short"])
    assert engine.map_reuse.policy == policy_of().tightened(0)
    assert numbers(metrics)[(FAILURES,)] == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "sequences of 1-8 tokens, usual texts: mean cosine 0.9700 of the last 46 verified hits is below the "
        f"budget 0.985; thresholds are now stored 0.9500, prototype 0.9750{more}"
    )


def test_tightening_drops_pending_hits_of_its_group_only():
    engine, metrics = hitting_engine(damage=0.1), Metrics()
    verifier = verifier_of(engine, metrics)
    serve_and_verify(engine, verifier, ["short"] * 60 + ["longer than eight"] * 10)
    # Thirteen hits show it. Hits are verified in batches of eight.
    assert verified_texts(engine) == ["short"] * 16 + ["longer than eight"] * 10
    assert (numbers(metrics)[(VERIFIED,)], numbers(metrics)[(DROPPED,)]) == (26, 44)


def test_budget_of_agreement_is_kept_by_decisions_not_by_cosines():
    # The damage changes the sum of the row, by which the fake classifier decides.
    policy, labels = policy_of(Measure.AGREEMENT), tuple("abcdefg")
    engine, metrics = FakeEngine(stored=AnyText(), damage=0.5, policy=policy, labels=labels), Metrics()
    verifier = verifier_of(engine, metrics)
    kept = requests_of(engine, ["keeps"] * 50)
    verifier.offer(kept, hitting_engine().run(kept), verifier.policy)
    verify_all(verifier)
    assert engine.map_reuse.policy == policy
    serve_and_verify(engine, verifier, ["loses"] * 4)
    assert engine.map_reuse.policy == policy.tightened(0)
    assert numbers(metrics)[("attncache_verify_cosine_sum",)] == pytest.approx(52)


# Usual and unusual texts.

LIMITED = policy_of(floor=0.95, limit=StrangenessLimit(strangest=0.04, usual=0.02))


def mixed_engine():
    """An engine for which texts that begin with "odd" are strange, and hits of texts with "bad" are bad."""
    return FakeEngine(
        stored=AnyText(),
        policy=LIMITED,
        damage=lambda text: 0.1 if "bad" in text else 0.001,
        strangeness=lambda text: 0.03 if text.startswith("odd") else 0.01,
    )


def test_many_good_usual_hits_hide_no_bad_unusual_ones(caplog):
    engine, metrics = mixed_engine(), Metrics()
    verifier = verifier_of(engine, metrics)
    # The mean of all hits would be 0.989 and would keep the budget.
    serve_and_verify(engine, verifier, ["good"] * 180 + ["odd, bad"] * 20)
    assert engine.map_reuse.policy == LIMITED.tightened(None)
    assert numbers(metrics)[(FAILURES,)] == 1
    (record,) = caplog.records
    assert record.getMessage() == (
        "sequences of 1-8 tokens, unusual texts: 4 of the last 4 verified hits are below cosine 0.9500, and "
        "the budget allows 1%; texts of a strangeness above 0.03 are computed in full now"
    )


def test_bad_usual_hits_tighten_their_group_and_not_the_limit():
    engine, metrics = mixed_engine(), Metrics()
    verifier = verifier_of(engine, metrics)
    serve_and_verify(engine, verifier, ["good"] * 90 + ["bad"] * 4 + ["odd"] * 90)
    # The mean of the usual hits, 0.995, keeps the budget.
    assert engine.map_reuse.policy == LIMITED.tightened(0)


def test_hits_that_a_looser_policy_let_hit_tighten_nothing_more():
    engine, metrics = mixed_engine(), Metrics()
    # The usual hits tighten the group, whose unusual hits are verified beside them.
    serve_and_verify(engine, verifier_of(engine, metrics), ["bad"] * 4 + ["odd, bad"] * 4)
    assert engine.map_reuse.policy == LIMITED.tightened(0)
    assert numbers(metrics)[(FAILURES,)] == 1
    # A batch that ran while the policy was tightened.
    engine = mixed_engine()
    verifier, requests = verifier_of(engine, metrics), requests_of(engine, ["bad"] * 8)
    before, result = verifier.policy, engine.run(requests)
    engine.map_reuse.tighten(0)
    verifier.offer(requests, result, before)
    verify_all(verifier)
    assert engine.map_reuse.policy == LIMITED.tightened(0)
    verifier.offer(requests, result, verifier.policy)
    verify_all(verifier)
    assert engine.map_reuse.policy == LIMITED.tightened(0).tightened(0)


def test_tightening_the_limit_drops_pending_hits_of_unusual_texts_only():
    engine, metrics = mixed_engine(), Metrics()
    verifier = verifier_of(engine, metrics)
    texts = ["odd, bad"] * 10 + ["good"] * 3 + ["odd but good"] * 3
    serve_and_verify(engine, verifier, texts)
    assert verified_texts(engine) == [*texts[:8], *texts[10:13]]
    assert numbers(metrics)[(DROPPED,)] == 5


def test_limit_that_is_never_tight_enough_lets_only_recorded_texts_hit(caplog):
    engine, metrics = mixed_engine(), Metrics()
    engine.strangeness = lambda _: 0.0201
    verifier = verifier_of(engine, metrics)
    for _ in range(20):
        serve_and_verify(engine, verifier, ["bad"] * 8)
    assert engine.map_reuse.policy.limit.is_off
    assert [group.is_off for group in engine.map_reuse.policy.groups] == [False, False]
    assert caplog.records[-1].getMessage().endswith("; only recorded texts hit from now on")


def test_hits_of_both_kinds_are_verified_and_misses_recorded_and_damaged_texts_are_not():
    class RecordingEngine(FakeEngine):
        """Has recorded the texts with a q, and overflows at texts with a z."""

        def run(self, requests):
            result = super().run(requests)
            similarities = np.where(result.outputs[:, ord("q")] > 0, 1, result.similarities)
            compared = Compared(similarities.astype(np.float32), result.strangeness)
            finite = result.outputs[:, ord("z")] == 0
            return replace(result, finite=finite, compared=compared)

    engine = RecordingEngine(stored={"near", "equal", "zero"}, prototypes={"prototype"})
    verifier = verifier_of(engine, Metrics())
    serve_and_verify(engine, verifier, ["near", "equal", "zero", "new", "prototype"])
    assert verified_texts(engine) == ["near", "prototype"]


# Findings are kept with the database.


def keeping_engine(folder, damage):
    return FakeEngine(stored=AnyText(), damage=damage, folder=folder)


def kept_hits(folder):
    content = json.loads((folder / "tightened.json").read_bytes())
    windows = content["policies"][policy_of().digest]["windows"]
    return [fidelity for _, fidelities in windows for fidelity in fidelities]


@pytest.mark.parametrize("counts", [(7, 6), (12, 1)])
def test_hits_before_and_after_a_restart_count_together(tmp_path, counts):
    for count, failures in zip(counts, (0, 1), strict=True):
        engine, metrics = keeping_engine(tmp_path, damage=0.1), Metrics()
        verifier = verifier_of(engine, metrics)
        serve_and_verify(engine, verifier, ["short"] * count)
        verifier.close()
        assert numbers(metrics)[(FAILURES,)] == failures
    assert ServedPolicy(tmp_path, policy_of()).policy == policy_of().tightened(0)


@pytest.mark.parametrize("end", [Verifier.close, Verifier.retire])
def test_hits_are_kept_sixteen_at_a_time_and_the_rest_at_the_end(tmp_path, end):
    engine = keeping_engine(tmp_path, damage=0.01)
    verifier = verifier_of(engine, Metrics())
    kept = []
    for _ in range(5):
        serve_and_verify(engine, verifier, ["short"] * 8)
        kept.append(len(kept_hits(tmp_path)))
    assert kept == [0, 16, 16, 32, 32]
    end(verifier)
    assert kept_hits(tmp_path) == [pytest.approx(0.99)] * 40


def test_tightening_of_another_server_is_adopted_and_its_pending_hits_are_dropped(tmp_path):
    good, bad = keeping_engine(tmp_path, damage=0.0), keeping_engine(tmp_path, damage=0.1)
    metrics = Metrics()
    verifier, tightening = verifier_of(good, metrics), verifier_of(bad, Metrics())
    serve(good, verifier, ["longer than eight"] * 10 + ["short"] * 30)
    serve(bad, tightening, ["short"] * 50)
    verify_all(tightening)
    assert good.policy == policy_of()
    verify_all(verifier)
    assert good.policy == bad.policy == policy_of().tightened(0)
    # The batches have 7, 8 and 8 hits, so the third batch holds the sixteenth hit.
    assert verified_texts(good) == ["longer than eight"] * 10 + ["short"] * 13
    assert numbers(metrics)[(DROPPED,)] == 17


def test_tightening_that_another_process_has_found_is_followed_and_kept(tmp_path):
    engine = keeping_engine(tmp_path, damage=0.1)
    verifier = verifier_of(engine, Metrics())
    serve(engine, verifier, ["short"] * 3)
    verifier.follow([2, 0, 0])
    assert verifier.steps() == [2, 0, 0]
    assert not verifier.has_work  # a looser policy let the pending hits hit
    assert ServedPolicy(tmp_path, policy_of()).policy == policy_of().tightened(0).tightened(0)


def test_tightened_limit_that_another_process_has_found_is_followed():
    verifier = verifier_of(FakeEngine(policy=policy_of(limit=StrangenessLimit(4.0, 2.0))), Metrics())
    verifier.follow([0, 0, 2])
    assert verifier.steps() == [0, 0, 2]
    verifier.follow([0, 0, 9])
    assert (verifier.steps(), verifier.policy.limit.is_off) == ([0, 0, 6], True)


def test_lock_of_another_process_delays_neither_verifying_nor_tightening(tmp_path):
    engine, metrics = keeping_engine(tmp_path, damage=0.1), Metrics()
    verifier = verifier_of(engine, metrics)
    with locked(tmp_path / "tightened.json", on_wait=pytest.fail):
        serve_and_verify(engine, verifier, ["short"] * 16)
        assert engine.map_reuse.policy == policy_of().tightened(0)
        assert (numbers(metrics)[(VERIFIED,)], numbers(metrics)[(FAILURES,)]) == (16, 1)
    assert ServedPolicy(tmp_path, policy_of()).policy == policy_of()
    # The next hits are kept together with the tightening, however few the hits are.
    serve_and_verify(engine, verifier, ["short"])
    assert ServedPolicy(tmp_path, policy_of()).policy == policy_of().tightened(0)
    assert len(kept_hits(tmp_path)) == 1


async def test_stopped_server_keeps_its_findings(tmp_path):
    async with serving(keeping_engine(tmp_path, damage=0.0), verify_rate=1) as client:
        await client.post("/embed", json={"inputs": ["short"] * 5})
        await until_metric(client, 5, VERIFIED)
    assert kept_hits(tmp_path) == pytest.approx([1.0] * 5, abs=1e-6)


def lock_is_a_folder(folder):
    (folder / ".tightened.json.lock").unlink(missing_ok=True)
    (folder / ".tightened.json.lock").mkdir()


def file_is_garbage(folder):
    (folder / "tightened.json").write_bytes(b"garbage")


@pytest.mark.parametrize(
    ("spoil", "problem"), [(lock_is_a_folder, "cannot be written"), (file_is_garbage, "cannot be read")]
)
@pytest.mark.parametrize("when", ["at the start", "while serving"])
async def test_nothing_is_reused_if_findings_cannot_be_kept_and_the_server_says_why(
    tmp_path, caplog, spoil, problem, when
):
    body = {"inputs": ["short"] * 16}
    if when == "at the start":
        spoil(tmp_path)
    async with serving(keeping_engine(tmp_path, damage=0.0), verify_rate=1) as client:
        if when == "while serving":
            assert (await metrics_of(client))[("attncache_reuse_off_reasons",)] == 0
            spoil(tmp_path)
            assert (await client.post("/embed", json=body)).headers["X-AttnCache-Hits"] == "16/16"
            await until_metric(client, 1, "attncache_reuse_off_reasons")
        response = await client.post("/embed", json=body)
        values, info = await metrics_of(client), (await client.get("/info")).json()
    assert response.headers["X-AttnCache-Hits"] == "0/16"
    assert values[("attncache_reuse_off_reasons",)] == 1
    assert (values["attncache_reuse_off", "1-8"], values["attncache_reuse_off", "9-"]) == (1, 1)
    (reason,) = info["reuse_off"]
    assert f"tightened.json {problem}" in reason
    assert f"attention maps are not reused: {reason}" in caplog.text


# Behind the batcher.


@asynccontextmanager
async def verifying(engine, sequences=100):
    """Yield a batcher that verifies every hit, and its metrics."""
    metrics = Metrics()
    verifier = verifier_of(engine, metrics)
    async with batching(engine, 10_000, sequences, 10_000, metrics, verifier=verifier) as batcher:
        yield batcher, metrics


async def verified(metrics, count):
    """Wait until `count` hits have been verified."""
    await until(lambda: numbers(metrics)[(VERIFIED,)] >= count)


async def begin_to_close(batcher):
    closing = asyncio.create_task(asyncio.to_thread(batcher.close))
    await until(lambda: batcher.verifier._stopped)
    return closing


class SlowlyVerifyingEngine(FakeEngine):
    """Without reuse, `run` releases `verifies` and waits for `may_verify`."""

    def __init__(self):
        super().__init__(stored=AnyText())
        self.verifies = threading.Semaphore(0)
        self.may_verify = threading.Event()

    def run(self, requests):
        result = super().run(requests)
        if not any(request.reuse for request in requests):
            self.verifies.release()
            assert self.may_verify.wait(timeout=240)
        return result


@pytest.mark.parametrize(
    "act", [Verifier.retire, Verifier.exchange, lambda verifier: verifier.follow([1, 0, 0])]
)
def test_findings_change_while_no_hits_are_verified(act):
    engine = SlowlyVerifyingEngine()
    verifier = verifier_of(engine, Metrics())
    serve(engine, verifier, ["text"])
    verifying = threading.Thread(target=verifier.verify_some)
    verifying.start()
    engine.verifies.acquire()
    acting = threading.Thread(target=act, args=(verifier,))
    acting.start()
    acting.join(0.05)
    waits = acting.is_alive()
    engine.may_verify.set()
    verifying.join()
    acting.join()
    assert waits


async def test_request_during_verification_waits_for_one_small_batch_only():
    engine = SlowlyVerifyingEngine()
    async with verifying(engine) as (batcher, metrics):
        await submit(batcher, ["first"] * 20)
        await asyncio.to_thread(engine.verifies.acquire)
        urgent = submit(batcher, ["urgent"])
        await queued(batcher, 1)
        engine.may_verify.set()
        await urgent
        await verified(metrics, 21)
    assert engine.batches == [
        *(["first"] * 20, ["first"] * 8, ["urgent"]),
        *(["first"] * 8, ["first"] * 4 + ["urgent"]),
    ]


async def test_endless_load_does_not_starve_verification():
    engine = hitting_engine()
    async with verifying(engine, sequences=4) as (batcher, metrics):
        await hold(engine, batcher)
        pending = [submit(batcher, [f"text {number}"] * 4) for number in range(40)]
        await queued(batcher, 40)
        engine.may_run.set()
        await asyncio.gather(*pending)
        await verified(metrics, 161)
    # The first request has one sequence, the others have four. Whenever 64 hits are pending, eight hits are
    # verified. The remaining hits are verified when no request waits.
    sizes = [len(batch) for batch in engine.batches]
    assert sizes == [1, *[4] * 16, 8, *[4, 4, 8] * 12, *[8] * 7, 1]
    assert numbers(metrics)[(DROPPED,)] == 0


async def test_closing_does_not_wait_for_pending_hits():
    engine = SlowlyVerifyingEngine()
    async with verifying(engine) as (batcher, metrics):
        await submit(batcher, ["text"] * 100)
        await asyncio.to_thread(engine.verifies.acquire)
        closing = await begin_to_close(batcher)
        engine.may_verify.set()
        await closing
        assert numbers(metrics)[(VERIFIED,)] == 8
    assert engine.verified == [["text"] * 8]


async def test_requests_queued_when_closing_are_answered_and_not_verified():
    engine = hitting_engine()
    async with verifying(engine, sequences=1) as (batcher, _):
        await hold(engine, batcher)
        pending = [submit(batcher, [text]) for text in "abc"]
        closing = await begin_to_close(batcher)
        engine.may_run.set()
        await closing
        assert [(await rows).hits for rows in pending] == [1, 1, 1]
    assert engine.verified == []


async def test_failing_verification_does_not_stop_the_engine():
    engine = UnverifiableEngine(stored=AnyText())
    async with verifying(engine) as (batcher, metrics):
        for count in (1, 2, 3):
            assert (await submit(batcher, ["text"])).hits == 1
            await until(lambda least=count: numbers(metrics)[(DROPPED,)] >= least)


async def test_verified_hits_are_not_in_the_metrics_of_requests():
    engine = hitting_engine()
    async with verifying(engine) as (batcher, metrics):
        await submit(batcher, ["a", "bb", "ccc"])
        await verified(metrics, 3)
        values = numbers(metrics)
    expected = {
        ("attncache_sequences_total", "hit"): 3,
        ("attncache_sequences_total", "not_searched"): 0,
        ("attncache_batch_sequences_count",): 1,
        ("attncache_batch_tokens_sum",): 6,
        ("attncache_queue_seconds_count",): 1,
    }
    assert {name: values[name] for name in expected} == expected


# In the real app.


@pytest.mark.parametrize(
    ("path", "more"), [("/embed", {}), ("/classify", {"labels": ["yes", "no"]})], ids=["embed", "classify"]
)
async def test_whole_answer_has_been_sent_when_verification_begins(path, more):
    happened = []

    class TellingEngine(FakeEngine):
        def run(self, requests):
            if texts_of(requests)[0] == "a":
                happened.append("with reuse" if requests[0].reuse else "in full")
            return super().run(requests)

    async with serving(TellingEngine(stored={"a"}), verify_rate=1) as client:
        app = client._transport.app

        async def telling_app(scope, receive, send):
            async def telling_send(message):
                await send(message)
                if scope["path"] == path and message["type"] == "http.response.body":
                    happened.append("sent")

            await app(scope, receive, telling_send)

        client._transport.app = telling_app
        for count in range(1, 9):
            await client.post(path, json={"inputs": "a", **more})
            await until_metric(client, count, VERIFIED)
    assert happened == ["with reuse", "sent", "in full"] * 8


async def test_length_group_below_the_budget_ends_without_reuse():
    body = {"inputs": ["short"] * 60 + ["longer than eight"]}
    async with serving(hitting_engine(damage=0.1), verify_rate=1) as client:
        before = await metrics_of(client)
        hits = []
        while (values := await metrics_of(client))["attncache_reuse_off", "1-8"] == 0:
            hits.append((await client.post("/embed", json=body)).headers["X-AttnCache-Hits"])
        hits.append((await client.post("/embed", json=body)).headers["X-AttnCache-Hits"])
    assert (before["attncache_threshold", "stored", "1-8"], before[(FAILURES,)]) == (0.9, 0)
    assert hits[0] == "61/61"
    assert hits[-1] == "1/61"
    assert values[(FAILURES,)] >= 2
    assert values["attncache_threshold", "prototype", "1-8"] == 2
    assert values["attncache_threshold", "prototype", "9-"] == 0.95
    assert values["attncache_reuse_off", "9-"] == 0


async def test_without_a_database_there_is_nothing_to_verify():
    engine = hitting_engine()
    engine.map_reuse = None
    async with serving(engine, verify_rate=1) as client:
        assert (await client.post("/embed", json={"inputs": "a"})).headers["X-AttnCache-Hits"] == "0/1"
        names = {name for name, *_ in await metrics_of(client)}
    assert VERIFIED in names
    assert not names & {"attncache_threshold", "attncache_reuse_off"}


async def test_budget_for_decisions_without_decisions_is_not_verified_and_logged(caplog):
    engine = FakeEngine(stored=AnyText(), policy=policy_of(Measure.AGREEMENT))
    async with serving(engine, verify_rate=1) as client:
        assert (await client.post("/embed", json={"inputs": "a"})).headers["X-AttnCache-Hits"] == "1/1"
    assert "hits are not verified: there are no decisions to agree on" in caplog.text
    assert engine.verified == []


async def test_labels_are_never_verified():
    engine = hitting_engine()
    async with serving(engine, verify_rate=1) as client:
        await client.post("/classify", json={"inputs": "text", "labels": ["yes", "no"]})
        await until_metric(client, 1, VERIFIED)
    assert engine.batches == [["yes", "no"], ["text"], ["text"]]


# With a real engine.


@pytest.fixture
def real_engine(tiny_checkpoint, root):
    """An engine for which every text of a recorded length hits, with a budget that hits keep."""
    database = AttentionDatabase.open(root)
    policy = replace(database.search.policy, budget=Budget(Measure.COSINE, 0.1))
    database = replace(database, search=replace(database.search, policy=policy))
    return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")


def new_texts(count):
    generator = np.random.default_rng(11)
    return [random_text(generator, 5) for _ in range(count)]


async def test_cosines_compare_answers_with_reuse_and_without(real_engine):
    body = {"inputs": new_texts(30)}
    async with serving(real_engine, verify_rate=1) as client:
        with_reuse = await client.post("/embed", json=body)
        values = await until_metric(client, 30, VERIFIED)
        full = await client.post("/embed", json=body, headers={"X-AttnCache-Reuse": "off"})
        labelled = await client.post("/classify", json=body | {"labels": ["bank", "card"]})
    assert with_reuse.headers["X-AttnCache-Hits"] == "30/30"
    assert labelled.headers["X-AttnCache-Hits"] == "0/30"  # no budget was measured with these labels
    cosines = (np.array(with_reuse.json()) * np.array(full.json())).sum(axis=1)
    assert cosines.min() < 0.999  # otherwise the test would prove nothing
    assert values[("attncache_verify_cosine_sum",)] == pytest.approx(cosines.sum(), abs=1e-4)


@pytest.fixture
def deciding_engine(tiny_checkpoint, root):
    """The same engine with a budget for decisions. The decision is the embedding's largest dimension."""
    database = AttentionDatabase.open(root)
    weight, bias = np.eye(32, dtype=np.float32), np.zeros(32, np.float32)
    fingerprint = tiny_checkpoint.embedding_fingerprint()
    classifier = LinearClassifier(tuple(map(str, range(32))), weight, bias, fingerprint, "m", {})
    files = database.keep_decisions(classifier)
    policy = replace(database.manifest.policy, budget=Budget(Measure.AGREEMENT, 1.0))
    replace(database.manifest, files=files, policy=policy).write(root)
    database = AttentionDatabase.open(root)
    return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32", classifier=classifier)


async def test_budget_for_decisions_of_the_database_is_verified_and_covers_nothing_else(
    deciding_engine, caplog
):
    body = {"inputs": new_texts(60)}
    async with serving(deciding_engine, verify_rate=1) as client:
        for path, other in (("/embed", {}), ("/classify", {"labels": ["3", "5"]}), ("/similarity", None)):
            texts = (
                {"inputs": {"source_sentence": "a", "sentences": ["b"]}} if other is None else body | other
            )
            answer = await client.post(path, json=texts)
            assert answer.headers["X-AttnCache-Hits"].startswith("0/"), path
        with_reuse = await client.post("/classify", json=body)
        await until_metric(client, 1, FAILURES)
        full = await client.post("/classify", json=body, headers={"X-AttnCache-Reuse": "off"})
    decisions = [[scores[0]["label"] for scores in answer.json()][:8] for answer in (with_reuse, full)]
    same = np.equal(*decisions).mean()
    assert same < 1  # otherwise the test would prove nothing
    assert f"mean agreement {same:.4f} of the last 8 verified hits" in caplog.text


@pytest.mark.parametrize("verify_rate", [0, 1])
async def test_damaged_decisions_are_refused_at_the_start_if_hits_are_verified(deciding_engine, verify_rate):
    folder = deciding_engine.map_reuse.database.folder
    next(folder.glob("decisions-*/classifier.json")).unlink()
    # The database's own classifier decides then.
    strategy = MapReuse(AttentionDatabase.open(folder))
    engine = replace(deciding_engine, classifier=None, strategy=strategy)
    failures = []
    ready = False
    async with starting(lambda: engine, failures.append, verify_rate=verify_rate) as client:
        while not failures and not ready:
            await asyncio.sleep(0.001)
            ready = (await client.get("/ready")).status_code == 200
    assert ready == (verify_rate == 0)
    assert [type(failure) for failure in failures] == [CorruptDatabase] * (verify_rate == 1)


def test_nothing_is_computed_if_another_thread_has_taken_the_hits(caplog):
    engine = FakeEngine(stored=AnyText())
    verifier = Verifier(engine, 1.0, Metrics())
    verifier.verify_some()
    assert engine.batches == []
    assert caplog.records == []
