import numpy as np
import pytest
from fake_engine import FakeEngine, embedding_of, serving
from scipy.special import softmax

from attncache_core import PrefillEngine

KNOWN = ("refund", "parcel", "account")


def cosine(left, right):
    a, b = (embedding_of([ord(character) for character in text]) for text in (left, right))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


async def test_given_labels_are_scored_by_similarity_and_sorted():
    labels = ["zzz", "refund", "funder"]
    async with serving() as client:
        response = await client.post("/classify", json={"inputs": ["refunds", "zz"], "labels": labels})
    first, second = response.json()
    scores = softmax([cosine("refunds", label) / 0.05 for label in labels])
    assert [row["label"] for row in first] == ["refund", "funder", "zzz"]
    assert {row["label"]: row["score"] for row in first} == pytest.approx(
        dict(zip(labels, scores, strict=True)), rel=1e-4
    )
    assert second[0]["label"] == "zzz"


async def test_temperature_flattens_the_scores():
    best = []
    async with serving() as client:
        for temperature in (0.01, 1, 1e300):
            body = {"inputs": "refunds", "labels": ["refund", "xyz"], "temperature": temperature}
            best.append((await client.post("/classify", json=body)).json()[0][0]["score"])
    assert best[0] > best[1] > best[2] == pytest.approx(0.5)


async def test_labels_of_the_server_are_scored_as_labels_of_the_request(tiny_checkpoint):
    labels, texts = ["my card", "bank", "help"], ["where is my card", "the bank is closed"]
    engines = [
        PrefillEngine.load(checkpoint, dtype="float32")
        for checkpoint in (tiny_checkpoint, tiny_checkpoint.adapted(labels=labels))
    ]
    for temperature in (None, 0.05, 0.1, 2.0):
        answers = []
        for engine in engines:
            async with serving(engine) as client:
                body = {"inputs": texts, "labels": labels, "temperature": temperature}
                answers.append((await client.post("/classify", json=body)).json())
        for requested, own in zip(*answers, strict=True):
            assert [row["label"] for row in own] == [row["label"] for row in requested]
            np.testing.assert_allclose(
                [row["score"] for row in own], [row["score"] for row in requested], atol=1e-5
            )


async def test_each_label_is_computed_once_without_reuse_and_not_counted():
    engine = FakeEngine(stored={"a", "b", "c", "x"})
    async with serving(engine) as client:
        for labels in (["a", "b"], ["b", "c"], ["c", "a"]):
            response = await client.post("/classify", json={"inputs": "x", "labels": labels})
            assert response.headers["X-AttnCache-Hits"] == "1/1"
        metrics = (await client.get("/metrics")).text
    assert engine.batches == [["a", "b"], ["x"], ["c"], ["x"], ["x"]]
    assert engine.verified == [["a", "b"], ["c"]]  # without reuse
    assert 'attncache_sequences_total{outcome="hit"} 3.0' in metrics
    assert 'attncache_sequences_total{outcome="not_searched"} 0.0' in metrics


async def test_label_without_a_token_is_refused_by_its_own_name():
    class Blank(FakeEngine):
        def tokenize(self, texts, *arguments):
            found = super().tokenize(texts, *arguments)
            return [ids if text.strip() else [] for text, ids in zip(texts, found, strict=True)]

    async with serving(Blank()) as client:
        for _ in range(2):  # the second time, the first label is known
            response = await client.post("/classify", json={"inputs": "x", "labels": ["a", " "]})
            assert response.status_code == 400
            assert response.json()["error"]["field"] == "labels[1]"
            await client.post("/classify", json={"inputs": "x", "labels": ["a"]})


@pytest.mark.parametrize("task", ["embed", "classify"])
async def test_classifier_needs_no_labels(task):
    async with serving(FakeEngine(task=task, labels=KNOWN)) as client:
        response = await client.post("/classify", json={"inputs": ["a", "aa"]})
    first, second = response.json()
    # The logits of "a" are -0.0, 2.9, -0.2; of "aa" -0.0, -0.1, 2.8.
    assert [row["label"] for row in first] == ["parcel", "refund", "account"]
    assert [row["score"] for row in first] == pytest.approx(sorted(softmax([0.0, 2.9, -0.2]), reverse=True))
    assert second[0]["label"] == "account"


async def test_labels_too_long_to_be_repeated_for_each_input_are_refused():
    labels = [character * 100_000 for character in "ab"]
    async with serving() as client:
        for inputs, status in ((84, 422), (83, 200)):
            response = await client.post("/classify", json={"inputs": ["a"] * inputs, "labels": labels})
            assert response.status_code == status
            if status == 422:
                error = response.json()["error"]
                assert (error["code"], error["field"]) == ("too_many_inputs", "labels")
                assert "fewer inputs or shorter labels" in error["message"]


async def test_labels_restrict_a_classifier_and_an_unknown_label_is_named_by_its_index():
    async with serving(FakeEngine(labels=KNOWN)) as client:
        response = await client.post("/classify", json={"inputs": "a", "labels": ["account", "refund"]})
        unknown = await client.post("/classify", json={"inputs": "a", "labels": ["refund", "Sesam"]})
    (row,) = response.json()
    assert [score["label"] for score in row] == ["refund", "account"]
    assert [score["score"] for score in row] == pytest.approx(softmax([0.0, -0.2]))
    assert (unknown.status_code, unknown.json()["error"]["field"]) == (400, "labels[1]")
    assert "Sesam" not in unknown.text


async def test_classes_of_one_name_are_all_answered_and_cannot_be_requested():
    async with serving(FakeEngine(task="classify", labels=("a", "a", "b"))) as client:
        every = await client.post("/classify", json={"inputs": "a"})
        one = await client.post("/classify", json={"inputs": "a", "labels": ["b", "a"]})
    (row,) = every.json()
    assert [score["label"] for score in row] == ["a", "a", "b"]
    assert [score["score"] for score in row] == pytest.approx(sorted(softmax([0.0, 2.9, -0.2]), reverse=True))
    error = one.json()["error"]
    assert (one.status_code, error["field"]) == (400, "labels[1]")
    assert "several classes" in error["message"]
