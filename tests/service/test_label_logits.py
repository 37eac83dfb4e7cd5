"""/classify of the real app with a tiny real decoder that scores labels by their tokens."""

import asyncio
import threading

import numpy as np
import pytest
from core_decoders import write_llama
from core_models import damage_weights, prefill, random_text
from fake_engine import FakeEngine, serving
from running import metrics_of

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    CorpusSentence,
    KeyValueOptions,
    NotFinite,
    PrefillEngine,
    class_scores,
)
from attncache_core.build.builder import build_database
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.engine.decisions import Decisions
from attncache_core.heads.comparator import Measure

WRITTEN = "ask: {}\nanswer:"
SINGLE = ["bank", "card", "lost"]
SEVERAL = ["bank account lost", "bank account", "card", "zebra"]
TEXTS = ["where is my card", "money", "the bank was closed today"]


def load(folder, labels=(), written=WRITTEN, **options):
    adapted = read_checkpoint(folder).adapted(
        template=Template.parse(written), label_logits=True, labels=labels
    )
    return PrefillEngine.load(adapted, dtype="float32", **options)


def expected(folder, labels, written=WRITTEN):
    """Return the scores of the labels for each text, with each label scored in a separate run."""
    engine, rows = load(folder), []
    for text in TEXTS:
        summed = []
        for label in labels:
            # The second label has several tokens, so that the first label has a log-probability in any case.
            prepared = engine.decisions.labels_in(Template.parse(written), [label, "way out of here"])
            sequences = engine.tokenize([text], prompt=prepared.prompt)
            result = prefill(engine, sequences, reuse=False, plans=prepared.prompt.sequence_plans)
            summed.append(
                engine.decisions.label_logits(prepared, result.outputs, result.log_probabilities)[0, 0]
            )
        rows.append(dict(zip(labels, class_scores(np.array(summed)).tolist(), strict=True)))
    return rows


def assert_scores(response, rows):
    assert response.status_code == 200
    for found, row in zip(response.json(), rows, strict=True):
        assert {entry["label"]: entry["score"] for entry in found} == pytest.approx(row, abs=2e-4)
        scores = [entry["score"] for entry in found]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("labels", [SINGLE, SEVERAL], ids=["one-token", "several-tokens"])
async def test_own_labels_are_scored_by_their_tokens_and_sequences_are_counted(folder, labels):
    engine = load(folder, labels)
    async with serving(engine) as client:
        response = await client.post("/classify", json={"inputs": TEXTS})
        metrics = await metrics_of(client)
        softer = await client.post("/classify", json={"inputs": TEXTS[0], "temperature": 2.0})
    assert_scores(response, expected(folder, labels))
    roots = {entry["label"]: entry["score"] ** 0.5 for entry in response.json()[0]}
    halved = {label: root / sum(roots.values()) for label, root in roots.items()}
    assert {entry["label"]: entry["score"] for entry in softer.json()[0]} == pytest.approx(halved, abs=1e-4)
    sequences = len(TEXTS) * len(engine.decisions.labels_in().prompt.sequence_plans)
    assert (sequences > len(TEXTS)) == (labels is SEVERAL)
    assert response.headers["X-AttnCache-Hits"] == f"0/{sequences}"
    assert metrics["attncache_sequences_total", "not_searched"] == sequences
    assert metrics["attncache_queue_sequences",] == 0


@pytest.mark.parametrize("labels", [SINGLE, SEVERAL], ids=["one-token", "several-tokens"])
async def test_a_request_may_bring_labels_and_a_template(folder, labels):
    other = "my card: where?\nyour {} is"
    async with serving(load(folder, ["today", "tomorrow"])) as client:
        both = await client.post("/classify", json={"inputs": TEXTS, "labels": labels, "template": other})
        labels_alone = await client.post("/classify", json={"inputs": TEXTS, "labels": labels})
        template_alone = await client.post("/classify", json={"inputs": TEXTS, "template": other})
    assert_scores(both, expected(folder, labels, other))
    assert_scores(labels_alone, expected(folder, labels))
    assert_scores(template_alone, expected(folder, ["today", "tomorrow"], other))


async def test_requests_of_all_kinds_share_batches_and_get_their_own_results(folder):
    """A batch holds few tokens, so that the sequences of a request are in several batches."""
    bodies = [{}, {"labels": SEVERAL}, {"labels": SINGLE}, {"labels": SEVERAL[::-1], "template": "my {} is"}]
    engine = load(folder, SINGLE)
    async with serving(engine, max_batch_tokens=40) as client:
        alone = [(await client.post("/classify", json={"inputs": TEXTS, **more})).json() for more in bodies]
        requests = [client.post("/classify", json={"inputs": TEXTS, **more}) for more in bodies * 3]
        together = [response.json() for response in await asyncio.gather(*requests)]
    for single, found in zip(alone * 3, together, strict=True):
        for left, right in zip(single, found, strict=True):
            scores = [{entry["label"]: entry["score"] for entry in row} for row in (left, right)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)


async def test_bad_request_is_refused_with_what_is_wrong(folder):
    bad = [
        ({"template": "nowhere Sesam"}, "invalid_input", "template"),
        ({"template": "{} and {} Sesam"}, "invalid_input", "template"),
        ({"template": "{query} and {document} Sesam"}, "invalid_input", "template"),
        ({"template": "{} Sesam: "}, "invalid_input", "labels[0]"),
        ({"template": "Sesam " * 200 + "{}"}, "invalid_input", "template"),
        ({"labels": ["Sesam", "card", "Sesam"]}, "invalid_input", "labels[2]"),
        ({"labels": []}, "invalid_input", "labels"),
        ({"labels": ["Sesam", ""]}, "invalid_input", "labels[1]"),
        ({"labels": ["Sesam", " card"]}, "invalid_input", "labels[1]"),
        ({"labels": ["Sesam\n", "card"]}, "invalid_input", "labels[0]"),
        ({"labels": ["Sesam"] * 300}, "too_many_inputs", "labels"),
        ({"inputs": ["Sesam " * 200], "truncate": False}, "input_too_long", "inputs[0]"),
        ({"inputs": ["a"] * 40, "labels": SEVERAL}, "too_many_inputs", "inputs"),
        ({"labels": ["Sesam" + " Sesam" * 199, "card"]}, "invalid_input", "labels"),
        ({"labels": [first + " Sesam card" * 10 for first in SINGLE]}, "input_too_long", "labels"),
    ]
    limits = {"max_request_inputs": 64, "max_queue_sequences": 64, "max_request_tokens": 100}
    async with serving(load(folder, SINGLE), **limits) as client:
        for body, code, field in bad:
            response = await client.post("/classify", json={"inputs": "card", **body})
            error = response.json()["error"]
            assert (error["code"], error["field"]) == (code, field), body
            assert "Sesam" not in response.text
        assert (await client.post("/classify", json={"inputs": "card"})).status_code == 200


NUMBERED = [f"label {number}" for number in range(256)]


async def test_request_with_too_many_tokens_is_refused_before_it_is_computed(folder):
    large = [
        ({"template": "{}" + " Sesam" * 1000, "labels": NUMBERED}, 422, "template"),
        ({"template": "{}" + " Sesam" * 30_000, "labels": NUMBERED}, 400, "template"),
        ({"labels": [f"{label} {'Sesam' * 900}" for label in NUMBERED]}, 422, "labels"),
        ({"labels": ["card", "Sesam" * 200_000]}, 400, "labels[1]"),
        ({"inputs": ["a"] * 256, "labels": [f"{label} {'Sesam' * 60}" for label in NUMBERED]}, 422, "labels"),
    ]
    async with serving(load(folder, SINGLE)) as client:
        for body, status, field in large:
            response = await client.post("/classify", json={"inputs": "card", **body})
            assert (response.status_code, response.json()["error"]["field"]) == (status, field)
            assert "Sesam" not in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"inputs": TEXTS}),
        ("/predict", {"inputs": TEXTS[0]}),
        ("/v1/classify", {"input": TEXTS}),
        ("/rerank", {"query": TEXTS[0], "segments": TEXTS}),
        ("/rerank", {"query": TEXTS[0], "texts": TEXTS}),
    ],
)
async def test_logits_are_computed_beside_the_event_loop(folder, monkeypatch, path, body):
    threads, label_logits = [], Decisions.label_logits

    def noting(*arguments):
        threads.append(threading.current_thread())
        return label_logits(*arguments)

    monkeypatch.setattr(Decisions, "label_logits", noting)
    written = "{query} {document}" if "texts" in body else WRITTEN
    engine = load(folder, SINGLE[:2], written, key_values=KeyValueOptions(2**22))
    async with serving(engine) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("number", [float("nan"), 3e38])
async def test_pair_whose_logit_is_not_finite_is_named(tmp_path, number):
    tiny = write_llama(tmp_path / "model")
    labels = load(tiny, SINGLE[:2]).decisions.label_tokens
    damage_weights(tiny, labels.tokens[1], number, ("lm_head.weight",))
    engine = load(tiny, SINGLE[:2], "{query} {document}")
    async with serving(engine) as client:
        for field, raw in (("texts", False), ("texts", True), ("documents", False)):
            body = {"query": TEXTS[0], field: TEXTS, "raw_scores": raw}
            response = await client.post("/rerank", json=body)
            assert (response.status_code, response.json()["error_type"]) == (500, "Backend")
            assert f"NaN or infinity for {field}[0];" in response.json()["error"]
    with pytest.raises(NotFinite, match=r"documents\[0\]"):
        engine.rerank(TEXTS[0], TEXTS)


async def test_server_without_labels_requires_labels_and_refuses_embeddings_with_a_remedy(folder):
    async with serving(load(folder)) as client:
        embedding = await client.post("/embed", json={"inputs": "card"})
        without = await client.post("/classify", json={"inputs": "card"})
        with_them = await client.post("/classify", json={"inputs": TEXTS, "labels": SINGLE})
    assert (without.status_code, without.json()["error"]["code"]) == (400, "no_classifier")
    assert_scores(with_them, expected(folder, SINGLE))
    assert (embedding.status_code, embedding.json()["error"]["code"]) == (400, "no_embedding")
    assert "without --task" in embedding.json()["error"]["message"]


@pytest.mark.parametrize("labels", [("refund", "parcel"), None])
async def test_template_is_refused_where_labels_are_not_scored_by_their_tokens(labels):
    async with serving(FakeEngine(labels=labels)) as client:
        body = {"inputs": "card", "labels": ["refund", "parcel"], "template": "{} is"}
        response = await client.post("/classify", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["field"]) == (400, "template")
    assert "--task label-logits" in error["message"]


@pytest.fixture(scope="module")
def engines(folder, tmp_path_factory):
    """By their budget, for decisions among SINGLE or for outputs: engines with databases of the same prompts.

    All texts hit.
    """
    random = np.random.default_rng(5)
    texts = sorted({*TEXTS, *(random_text(random, int(words)) for words in random.integers(1, 7, size=40))})
    corpus = [CorpusSentence(text, text) for text in texts]
    options = BuildOptions(heads="all", threshold=0.9, prototypes=0, training_steps=3)
    made = {}
    for measure, labels in ((Measure.AGREEMENT, SINGLE), (Measure.COSINE, [])):
        plain, built = load(folder, labels), tmp_path_factory.mktemp("databases") / measure
        build_database(plain, corpus, built, options)
        database = AttentionDatabase.open(built)
        made[measure] = PrefillEngine.load(plain.checkpoint, database=database, dtype="float32")
    return made


@pytest.mark.parametrize(
    ("measure", "body", "hits"),
    [
        (Measure.AGREEMENT, {}, "3/3"),
        (Measure.AGREEMENT, {"labels": SINGLE, "template": WRITTEN}, "3/3"),
        (Measure.AGREEMENT, {"labels": ["lost", "bank"]}, "0/3"),
        (Measure.AGREEMENT, {"template": "{} It was"}, "0/3"),
        (Measure.COSINE, {"labels": ["lost", "bank"]}, "3/3"),
        (Measure.COSINE, {"labels": SEVERAL}, "0/6"),
        (Measure.COSINE, {"labels": SINGLE, "template": "{} It was"}, "0/3"),
    ],
)
async def test_requests_reuse_only_what_the_budget_was_measured_for(engines, measure, body, hits):
    async with serving(engines[measure]) as client:
        response = await client.post("/classify", json={"inputs": TEXTS} | body)
    assert response.headers["X-AttnCache-Hits"] == hits
