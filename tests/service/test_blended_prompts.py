"""Prompts of segments and a query: answers, headers, refusals, listwise reranking and verification."""

import asyncio
import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import pytest
from core_decoders import write_decoder_tokenizer, write_llama
from core_models import write_sentence_transformer
from fake_engine import serving
from kv_models import ANY_SHAPE
from running import metrics_of, samples, until, until_metric
from verifying import FAILURES, VERIFIED, verify_all

from attncache_core import InvalidInput, KeyValueOptions, PrefillEngine, PrefillRequest
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.engine.runner import Runner
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.blend.gate import BlendGate, MeasuredRatio, read_gate, write_gate
from attncache_core.reuse.maps.policy import Budget
from attncache_core.text.segments import segmented
from service.batching.pending_request import PendingRequest
from service.batching.segments import Segments
from service.observability.metrics import Metrics
from service.upkeep.blend_verifier import BlendVerifier

SEGMENTS = [
    "the bank was closed today. " * 3,
    "my card is lost and the account too. " * 2,
    "where is it? " * 4,
]
BODY = {"segments": SEGMENTS, "query": "is the card here"}
_DIVIDING = {"divide_texts": True, "blend": Path("g")}
LABELS = {"labels": ("card", "bank"), "label_logits": True, "template": Template.parse("{} Answer:")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama", num_hidden_layers=4)


def checkpoint_of(folder, **use):
    return read_checkpoint(folder).adapted(**use or {"pooling": "lasttoken"})


def load(folder, **use):
    options = KeyValueOptions(2**24)
    return PrefillEngine.load(checkpoint_of(folder, **use), dtype="float32", key_values=options)


def gate_of(engine, *ratios, least=0.0, **more):
    measured = tuple(MeasuredRatio(ratio, 0.99, max(0.98, least), True, 0.3) for ratio in ratios)
    measure = more.pop("measure", Measure.COSINE)
    return BlendGate(engine.fingerprint, Budget(measure, least), "\n", 200, measured, ANY_SHAPE, **more)


def blending(folder, *ratios, **use):
    engine = load(folder, **use)
    engine.open_gate(gate_of(engine, *ratios))
    return engine


async def asked(client, path, body, **how):
    response = await client.post(path, json=body, **how)
    assert response.status_code == 200, response.text
    return response


def joined(engine, body):
    """The token ids of a prompt, each part tokenised by itself."""
    turns = engine.tokenizer.turns([part for segment in body["segments"] for part in (segment, "\n")])
    (query,) = engine.tokenizer.turns([body["query"]])
    return [0, *(token for turn in turns for token in turn), *query]


def chunks_of(response):
    found = []
    for chunk in response.headers["X-AttnCache-Segments"].split(", "):
        tokens, *named = chunk.split(";")
        counts = {name: int(value) for name, value in (part.split("=") for part in named)}
        found.append({"tokens": int(tokens), **counts})
    return found


def exact_output(folder):
    exact = load(folder)
    return exact.run([PrefillRequest(joined(exact, BODY), False)]).outputs


async def test_no_gate_or_a_ratio_of_one_gives_the_exact_answer_and_less_gives_another_one(folder):
    expected, found = exact_output(folder), {}
    for ratio in (None, 1.0, 0.0):
        async with serving(load(folder) if ratio is None else blending(folder, ratio)) as client:
            response = await asked(client, "/embed", {**BODY, "normalize": False})
        assert response.headers.get("X-AttnCache-Approximate") == (None if ratio is None else "blended")
        assert ("X-AttnCache-Segments" in response.headers) == (ratio is not None)
        found[ratio] = np.array(response.json())
    for ratio in (None, 1.0):
        np.testing.assert_allclose(found[ratio], expected, atol=1e-5 * np.abs(expected).max())
    assert np.abs(found[0.0] - expected).max() > 1e-2 * np.abs(expected).max()


async def test_headers_say_what_was_cached_and_recomputed_in_any_order(folder):
    async with serving(blending(folder, 0.5)) as client:
        first = await asked(client, "/embed", BODY)
        again = await asked(client, "/embed", BODY)
        turned = await asked(client, "/embed", {**BODY, "segments": SEGMENTS[::-1]})
        other_salt = await asked(client, "/embed", {**BODY, "cache_salt": "b"})
        values = await metrics_of(client)
        many = await asked(client, "/embed", {**BODY, "segments": ["a"] * 100})
    assert first.json() == again.json()
    assert first.json() != turned.json()
    # The header of many chunks stays short.
    assert len(chunks_of(many)) == 64
    assert len(many.headers["X-AttnCache-Segments"]) < 4096
    assert [chunk["cached"] for chunk in chunks_of(first)] == [0, 0, 0]
    for response in (again, turned):
        chunks = chunks_of(response)
        assert [chunk["cached"] for chunk in chunks] == [chunk["tokens"] for chunk in chunks]
        assert chunks[0]["recomputed"] == 0
        tokens, recomputed = (sum(chunk[name] for chunk in chunks[1:]) for name in ("tokens", "recomputed"))
        assert 0 < recomputed < tokens
        cached = sum(chunk["cached"] - chunk["recomputed"] for chunk in chunks)
        assert response.headers["X-AttnCache-Cached-Tokens"].startswith(f"{cached}/")
    assert [chunk["cached"] for chunk in chunks_of(other_salt)] == [0, 0, 0]
    computed = sum(chunk["tokens"] for response in (first, other_salt) for chunk in chunks_of(response))
    assert values["attncache_segment_tokens_total", "computed"] == computed
    assert values["attncache_segment_tokens_total", "recomputed"] > 0


async def test_answer_about_a_prompt_that_is_stored_exactly_is_exact_and_is_not_verified(folder):
    engine = blending(folder, 0.0)
    async with serving(engine, admin=True, verify_rate=1.0) as client:
        first = await asked(client, "/embed", BODY)
        await until_metric(client, 1, VERIFIED)
        again = await asked(client, "/embed", BODY)
        exact = await asked(client, "/embed", {"inputs": [joined(engine, BODY)]})
        behind = await asked(client, "/embed", BODY)
        found = (await asked(client, "/explain?debug=blend", BODY)).json()
        await asyncio.sleep(0.2)
        values = await metrics_of(client)
    assert first.json() == again.json() != exact.json()
    np.testing.assert_allclose(behind.json(), exact.json(), atol=1e-5)
    for response in (first, again):
        assert response.headers["X-AttnCache-Approximate"] == "blended"
    assert "X-AttnCache-Approximate" not in behind.headers
    assert found["exact_tokens"] >= len(joined(engine, BODY)) - 1
    assert values[VERIFIED,] <= 2


async def test_blended_answers_are_not_kept_for_equal_texts(folder):
    engine, expected = blending(folder, 0.0), exact_output(folder)
    async with serving(engine, result_memory_bytes=2**20) as client:
        await asked(client, "/embed", BODY)
        off = await asked(
            client, "/embed", {**BODY, "normalize": False}, headers={"X-AttnCache-Reuse": "off"}
        )
        engine.blending.gate = None
        later = await asked(client, "/embed", {**BODY, "normalize": False})
    for response in (off, later):
        assert response.headers["X-AttnCache-Repeated"] == "0/1"
        np.testing.assert_allclose(response.json(), expected, atol=1e-5 * np.abs(expected).max())


async def test_each_blended_prompt_is_answered_before_the_next_one_is_computed(folder, monkeypatch):
    engine, may_run, runs, run = blending(folder, 0.5), threading.Semaphore(0), [], Runner.run

    def noting(self, requests):
        runs.append(len(requests))
        may_run.acquire(timeout=240)
        return run(self, requests)

    async with serving(engine) as client:
        monkeypatch.setattr(Runner, "run", noting)
        first = asyncio.create_task(asked(client, "/embed", BODY))
        await until(lambda: runs)
        second, third, left = (
            asyncio.create_task(asked(client, "/embed", {**BODY, "query": query})) for query in "abc"
        )
        await until_metric(client, 3, "attncache_queue_sequences")
        may_run.release(2)
        await asyncio.gather(first, second)
        assert not third.done()
        # Nor is a prompt computed whose client has left meanwhile.
        left.cancel()
        await asyncio.wait([left])
        may_run.release(2)
        await third
        await asked(client, "/embed", BODY)
    assert runs == [1] * 4


def test_chunks_of_waiting_prompts_are_expected_by_the_store(folder):
    engine = blending(folder, 0.5)
    source = Segments(SEGMENTS, BODY["query"], "\n")
    prompt = engine.tokenizer.default_prompt
    future = None
    request = PendingRequest(source, prompt, False, True, future, salt=b"a", may_blend=True)
    sequence = request.next_part(engine, 10**6)
    first, *others = sequence.stored_as
    turns = engine.tokenizer.turns(SEGMENTS)
    assert np.frombuffer(first.tokens, "<i4").tolist() == [0, *turns[0]]
    assert [np.frombuffer(other.tokens, "<i4").tolist() for other in others] == [
        [0, *ids] for ids in turns[1:]
    ]
    assert sequence.tokens < sequence.prefill.tokens


async def test_labels_are_scored_behind_segments_and_other_labels_are_scored_exactly(folder):
    async with serving(blending(folder, 0.0, **LABELS)) as client:
        blended = await asked(client, "/classify", BODY)
        others = await asked(client, "/classify", {**BODY, "labels": ["lost", "here"]})
    assert blended.headers["X-AttnCache-Approximate"] == "blended"
    assert {score["label"] for score in blended.json()[0]} == {"card", "bank"}
    assert "X-AttnCache-Approximate" not in others.headers


async def test_bad_segments_are_refused_and_the_next_request_is_served(folder):
    bad = [
        ({"segments": ["a"]}, "query", "query is required"),
        ({"query": "a"}, "query", "only with segments"),
        ({**BODY, "inputs": "a"}, "inputs", "not accepted with segments"),
        ({**BODY, "session_id": "a"}, "session_id", "not accepted with segments"),
        ({**BODY, "segments": []}, "segments", "must not be empty"),
        ({**BODY, "segments": [7]}, "segments[0]", "string"),
        ({**BODY, "truncate": True}, "truncate", "not accepted with segments"),
        ({**BODY, "segments": ["a" * 3000] * 2}, "segments", "shorten the longer part"),
        ({**BODY, "query": "a " * 2000}, "query", "shorten the longer part"),
        ({**BODY, "segments": ["a"] * 2000}, "segments", "fewer"),
    ]
    async with serving(blending(folder, 0.0)) as client:
        for body, field, message in bad:
            response = await client.post("/embed", json=body)
            assert response.status_code in (400, 422)
            error = response.json()["error"]
            assert error["field"] == field
            assert message in error["message"]
            await asked(client, "/embed", BODY)


async def test_encoders_and_pooling_of_all_tokens_refuse_segments_with_the_reason(folder, tmp_path):
    encoder = PrefillEngine.load(
        read_checkpoint(write_sentence_transformer(tmp_path / "encoder")), key_values=KeyValueOptions(2**20)
    )
    for engine, reason in (
        (encoder, "bidirectional"),
        (load(folder, pooling="mean"), "pooling reads all tokens"),
    ):
        async with serving(engine) as client:
            response = await client.post("/embed", json=BODY)
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]


async def test_encoders_and_pooling_of_all_tokens_compute_segments_exactly_without_keys_and_values(
    folder, tmp_path
):
    encoder = read_checkpoint(write_sentence_transformer(tmp_path / "encoder"))
    for checkpoint in (encoder, checkpoint_of(folder, pooling="mean")):
        engine = PrefillEngine.load(checkpoint, dtype="float32")
        (source,) = Segments(**BODY, separator="\n").tokenize(
            engine, engine.tokenizer.default_prompt, None, 10**6
        )
        async with serving(engine) as client:
            response = await asked(client, "/embed", {**BODY, "normalize": False})
        expected = engine.run([PrefillRequest(source.sequences[0], False)]).outputs
        np.testing.assert_array_equal(np.array(response.json(), np.float32), expected)
        assert "X-AttnCache-Approximate" not in response.headers


async def test_texts_are_divided_at_the_separator_or_by_tokens(folder):
    text = "\n".join([*SEGMENTS, BODY["query"]])
    async with serving(blending(folder, 0.5), divide_texts=True, blend=Path("g")) as client:
        divided = await asked(client, "/embed", {"inputs": [text, "a short one"]})
        segments = await asked(client, "/embed", BODY)
    np.testing.assert_allclose(divided.json()[0], segments.json()[0], atol=1e-6)
    assert len(chunks_of(divided)) == 3
    async with serving(blending(folder, 0.5), segment_tokens=16, blend=Path("g")) as client:
        response = await asked(client, "/embed", {"inputs": text})
        tokens = int(response.headers["X-AttnCache-Cached-Tokens"].split("/")[1])
    assert len(chunks_of(response)) == (tokens - 2) // 16


async def test_divided_texts_keep_their_tokens_template_and_truncation(folder):
    texts = ["\n".join([*SEGMENTS, BODY["query"]]), "\n".join(["the bank was closed today."] * 400)]
    how = {"truncate": True}
    answers = []
    for engine, options in (
        (load(folder, **LABELS), how),
        (blending(folder, 1.0, **LABELS), _DIVIDING | how),
    ):
        async with serving(engine, **options) as client:
            answers.append([await asked(client, "/classify", {"inputs": text}) for text in texts])
    for exact, divided in zip(*answers, strict=True):
        assert divided.headers["X-AttnCache-Approximate"] == "blended"
        scores = [[entry["score"] for entry in response.json()[0]] for response in (exact, divided)]
        np.testing.assert_allclose(*scores, atol=1e-5)


async def test_documents_are_ranked_in_one_prompt(tmp_path):
    folder = write_llama(tmp_path / "llama")
    body = {"query": "where is the card", "segments": SEGMENTS, "return_documents": True, "top_n": 2}
    # Every letter is one token behind a space.
    write_decoder_tokenizer(folder, words=["card", "bank", "the", *ascii_uppercase])
    engine = load(folder, **LABELS)
    engine.open_gate(gate_of(engine, 1.0, listwise=True))
    async with serving(engine) as client:
        found = await asked(client, "/rerank", body)
        again = await asked(client, "/rerank", {**body, "segments": SEGMENTS[::-1]})
        refused = await client.post("/rerank", json={**body, "segments": ["a"] * 27})
        other_prompt = await asked(client, "/classify", BODY)
    async with serving(load(folder, **LABELS)) as client:
        exact = await asked(client, "/rerank", body)
    results, usage = found.json()["results"], again.json()["usage"]
    assert found.headers["X-AttnCache-Approximate"] == "blended"
    assert [result["document"]["text"] for result in results] == [
        SEGMENTS[result["index"]] for result in results
    ]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    np.testing.assert_allclose(
        scores, [result["relevance_score"] for result in exact.json()["results"]], atol=1e-4
    )
    chunks = usage["prompt_tokens_details"]["segments"]
    # The first document belongs to the beginning of the prompt, with its letter.
    assert [chunk["cached"] for chunk in chunks] == [0, chunks[1]["tokens"], 0]
    assert refused.status_code == 400
    assert "at most 26" in refused.json()["error"]
    # The gate was measured with prompts of listwise reranking only.
    assert "X-AttnCache-Approximate" not in other_prompt.headers


async def test_segments_can_be_computed_before_their_first_prompt_and_pinned(folder):
    async with serving(blending(folder, 0.5), admin=True) as client:
        warmed = (await asked(client, "/cache/warm", {"segments": SEGMENTS, "pin": True})).json()
        found = (await asked(client, "/cache/lookup", {"segments": SEGMENTS})).json()
        response = await asked(client, "/embed", {**BODY, "segments": SEGMENTS[::-1]})
        both = await client.post("/cache/warm", json={"segments": SEGMENTS, "texts": "a"})
        long = await client.post("/cache/warm", json={"segments": ["a" * 3000]})
    assert warmed["stored_tokens"] == warmed["tokens"] == sum(answer["cached_tokens"] for answer in found)
    chunks = chunks_of(response)
    assert [chunk["cached"] for chunk in chunks] == [chunk["tokens"] for chunk in chunks]
    assert both.status_code == 400
    assert long.status_code == 422


async def test_segments_are_computed_again_after_they_were_dropped_though_their_results_are_kept(folder):
    async with serving(blending(folder, 0.5), admin=True, result_memory_bytes=2**20) as client:
        answers = []
        for _ in range(2):
            for _ in range(2):
                answers.append((await asked(client, "/cache/warm", {"segments": SEGMENTS})).json())
            await client.delete("/cache")
    tokens = answers[0]["tokens"]
    assert [answer["stored_tokens"] for answer in answers] == [tokens] * 4
    assert [answer["cached_tokens"] for answer in answers] == [0, tokens, 0, tokens]


@pytest.mark.parametrize("ratio", [0.5, 0.0])
async def test_operators_see_which_tokens_deviate_also_where_nothing_is_computed_again(folder, ratio):
    engine = blending(folder, ratio)
    async with serving(engine, admin=True) as client:
        found = (await asked(client, "/explain?debug=blend", BODY)).json()
        unknown = await client.post("/explain?debug=blends", json={"input": "a"})
        assert (unknown.status_code, unknown.json()["error"]["field"]) == (400, "debug")
        wrong = await client.post("/explain?debug=blend", json={"input": "a"})
        one = await client.post("/explain?debug=blend", json={**BODY, "segments": ["a"]})
        engine.blending.gate = gate_of(engine, ratio, listwise=True)
        of_lists = (await asked(client, "/explain?debug=blend", BODY)).json()
        of_ten = replace(ANY_SHAPE, chunks=(10, 10))
        engine.blending.gate = replace(gate_of(engine, ratio), shapes=of_ten)
        few = (await asked(client, "/explain?debug=blend", BODY)).json()
        engine.blending.gate = gate_of(engine, ratio, steps=1)
        closed = (await asked(client, "/explain?debug=blend", BODY)).json()
        engine.blending.gate = None
        without = (await asked(client, "/explain?debug=blend", BODY)).json()
    first, end = found["spans"][1]
    assert (found["served"], found["ratio"], found["why_exact"]) == (True, ratio, None)
    assert [answer["served"] for answer in (of_lists, few, closed, without)] == [False] * 4
    assert "listwise" in of_lists["why_exact"]
    assert f"it has {len(SEGMENTS)} chunks" in few["why_exact"]
    assert "did not keep the budget" in closed["why_exact"]
    assert "--blend" in without["why_exact"]
    assert all(deviation is None for deviation in found["deviations"][: found["exact_tokens"]])
    assert all(deviation > 0 for deviation in found["deviations"][first:end])
    assert len(found["tokens"]) == len(found["deviations"]) > found["spans"][-1][1]
    if ratio:
        assert found["rows"][0] > found["rows"][1] >= found["rows"][-1]
    else:
        assert found["rows"][0] < first
    assert wrong.status_code == one.status_code == 400


def blended_sequence(engine):
    """A prompt of segments that an engine with a gate blends."""
    *turns, query, between = engine.tokenizer.turns([*SEGMENTS, BODY["query"], "\n"])
    return segmented(engine.tokenizer.frame(engine.tokenizer.default_prompt), turns, query, between)


def blended_requests(engine, count):
    sequence = blended_sequence(engine)
    blend = engine.blending.blend(sequence, sequence.ids, b"")
    return [PrefillRequest(sequence.ids, False, blend=blend)] * count


def test_failed_verification_tightens_the_gate_step_by_step_and_keeps_it_in_its_file(
    folder, tmp_path, caplog
):
    engine, path, link = load(folder), tmp_path / "blend.json", tmp_path / "link.json"
    gate = gate_of(engine, 0.0, 0.1, least=0.9999)
    write_gate(path, gate)
    link.symlink_to(path)
    engine.open_gate(gate, link)
    metrics = Metrics()
    verifier = BlendVerifier(engine, 1.0, metrics, random.Random(0))
    sequence, ids = blended_sequence(engine), joined(engine, BODY)
    assert sequence.ids == ids
    for steps, ratio in ((1, 0.1), (2, None)):
        requests = blended_requests(engine, 60)
        verifier.offer(requests, engine.run(requests), engine.blending.gate)
        verify_all(verifier)
        assert engine.blending.gate.steps == steps
        assert verifier.subject == gate.digest != replace(gate, prompts=gate.prompts + 1).digest
        assert engine.blending.gate.ratio == ratio
        assert read_gate(path) == replace(gate, steps=steps)
    # The pending hits of the looser gates were dropped, and not verified.
    values = samples(metrics.render().decode())
    assert values[(VERIFIED,)] + values[("attncache_verify_dropped_total",)] == 120
    assert values[("attncache_verify_dropped_total",)] > 0
    assert "could not be changed" not in caplog.text
    # What another process has found is followed and kept, and the pending hits of a looser gate are dropped.
    write_gate(path, gate)
    engine.open_gate(gate, path)
    requests = blended_requests(engine, 60)
    verifier.offer(requests, engine.run(requests), gate)
    for followed in (0, 2):
        verifier.follow([followed])
        assert (verifier.steps(), verifier.has_work) == ([followed], followed == 0)
    assert read_gate(path) == replace(gate, steps=2)
    engine.open_gate(gate, path)
    path.unlink()
    verifier.offer(requests, engine.run(requests), gate)
    verify_all(verifier)
    assert "could not be changed" in caplog.text
    engine.blending.gate = replace(gate, steps=2)
    assert engine.blending.blend(sequence, ids, b"") is None
    assert engine.info().blending["off"] == "verified answers did not keep the budget"


def test_answers_of_a_gate_that_another_server_has_tightened_meanwhile_tighten_it_no_more(folder, tmp_path):
    engine, path, metrics = load(folder), tmp_path / "blend.json", Metrics()
    gate = gate_of(engine, 0.0, 0.1, least=0.9999)
    write_gate(path, gate)
    engine.open_gate(gate, path)
    verifier = BlendVerifier(engine, 1.0, metrics)
    requests = blended_requests(engine, 60)
    verifier.offer(requests, engine.run(requests), gate)
    write_gate(path, replace(gate, steps=1))
    verify_all(verifier)
    assert engine.blending.gate.steps == 1
    assert samples(metrics.render().decode())[(FAILURES,)] == 0
    # Nor do prompts that were tokenised before it was tightened, and computed afterwards.
    verifier.offer(requests, engine.run(requests), verifier.policy)
    assert not verifier.has_work


def test_answer_that_is_not_finite_is_not_verified_and_one_of_which_the_exact_one_is_not_fails(
    folder, monkeypatch
):
    engine = load(folder)
    engine.open_gate(gate_of(engine, 0.0, least=0.99))
    verifier = BlendVerifier(engine, 1.0, Metrics())
    requests = blended_requests(engine, 30)
    sound = engine.run(requests)
    damaged = replace(sound, finite=np.zeros(30, dtype=bool))
    verifier.offer(requests, damaged, verifier.policy)
    assert not verifier.has_work
    verifier.offer(requests, sound, verifier.policy)

    def run(_engine, hits):
        return replace(damaged, outputs=sound.outputs[: len(hits)], finite=damaged.finite[: len(hits)])

    monkeypatch.setattr(PrefillEngine, "run", run)
    verify_all(verifier)
    assert verifier.steps() == [1]


async def test_answers_that_keep_the_budget_are_verified_and_change_nothing(folder):
    engine = load(folder)
    engine.open_gate(gate_of(engine, 1.0, least=0.99))
    async with serving(engine, verify_rate=1.0) as client:
        for _ in range(3):
            await asked(client, "/embed", BODY)
        values = await until_metric(client, 3, VERIFIED)
    assert values["attncache_verify_cosine_sum",] == pytest.approx(values[VERIFIED,], abs=1e-3)
    assert engine.blending.gate.steps == 0


def test_gate_file_of_another_model_or_that_is_damaged_is_refused(folder, tmp_path):
    engine = load(folder)
    other = replace(gate_of(engine, 0.5), fingerprint="0" * 64)
    with pytest.raises(InvalidInput, match="another model"):
        engine.open_gate(other)
    path = tmp_path / "blend.json"
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_gate(path)
    for content in (b"", b"{}", json.dumps({"format": 9}).encode(), b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(InvalidInput, match="calibrate"):
            read_gate(path)
