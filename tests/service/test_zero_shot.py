"""POST /classify with labels that a model of natural language inference was not trained for."""

from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine, serving
from families import CASES, write_family
from pair_models import NLI, write_deberta_v3

from attncache_core import PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint

INPUTS, LABELS = ["where is my parcel", "reset my password"], ["parcel", "password", "link"]
# float32 sums in another order.
FLOAT32 = 2e-5


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_deberta_v3(tmp_path_factory.mktemp("models") / "nli", **NLI)
    return PrefillEngine.load(read_checkpoint(folder), dtype="float32")


def by_label(answer):
    return {entry["label"]: entry["score"] for entry in answer}


async def test_each_text_has_the_scores_that_it_has_alone(engine):
    """They are those of transformers: tests/engine/test_pair_models.py, and by HTTP test_clients.py."""
    async with serving(engine) as client:
        asked = [
            await client.post("/classify", json={"inputs": inputs, "labels": LABELS})
            for inputs in (INPUTS, *INPUTS)
        ]
    together, *alone = (answer.json() for answer in asked)
    assert asked[0].headers["X-AttnCache-Hits"] == f"0/{len(INPUTS) * len(LABELS)}"
    for found, [expected] in zip(together, alone, strict=True):
        assert by_label(found) == pytest.approx(by_label(expected), abs=FLOAT32)


async def test_labels_that_are_classes_restrict_the_classes(engine):
    async with serving(engine) as client:
        body = {"inputs": INPUTS[0]}
        [plain] = (await client.post("/classify", json=body)).json()
        body["labels"] = ["entailment", "neutral"]
        [restricted] = (await client.post("/classify", json=body)).json()
        body["multi_label"] = False
        [entailed] = (await client.post("/classify", json=body)).json()
    own_scores, scores = by_label(plain), by_label(restricted)
    assert set(own_scores) == {"entailment", "neutral", "contradiction"}
    ratio = own_scores["entailment"] / own_scores["neutral"]
    assert scores["entailment"] / scores["neutral"] == pytest.approx(ratio, rel=1e-4)
    assert by_label(entailed) != pytest.approx(scores, rel=1e-3)


async def test_bad_request_is_refused_with_the_field(engine):
    bad = [
        ({"labels": ["a", "a"]}, 400, "labels[1]"),
        ({"labels": []}, 400, "labels"),
        ({"labels": ["a", ""]}, 400, "labels[1]"),
        ({"hypothesis_template": "no place"}, 400, "hypothesis_template"),
        ({"hypothesis_template": "{} and {}"}, 400, "hypothesis_template"),
        ({"hypothesis_template": "{query} {document}"}, 400, "hypothesis_template"),
        ({"hypothesis_template": ""}, 400, "hypothesis_template"),
        ({"hypothesis_template": "x " * 600 + "{}"}, 400, "labels[0]"),
        ({"labels": None, "hypothesis_template": "{}"}, 400, "hypothesis_template"),
        ({"labels": None, "multi_label": True}, 400, "multi_label"),
        ({"multi_label": "yes"}, 400, "multi_label"),
        ({"temperature": 2.0}, 400, "temperature"),
        ({"template": "{}"}, 400, "template"),
        ({"inputs": [[5]]}, 400, "inputs[0]"),
        ({"inputs": ["a"] * 200, "labels": list(map(str, range(50)))}, 422, "inputs"),
        ({"inputs": ["a", "where " * 600], "truncate": False}, 422, "inputs[1]"),
        ({"inputs": None, "session_id": "a", "transcript": "b"}, 400, "session_id"),
        ({"inputs": None, "session_id": "a", "append": "b"}, 400, "session_id"),
    ]
    async with serving(engine) as client:
        for changes, status, field in bad:
            answer = await client.post("/classify", json={"inputs": INPUTS, "labels": LABELS, **changes})
            assert (answer.status_code, answer.json()["error"]["field"]) == (status, field), changes


async def test_chunks_are_refused_by_a_decoder_of_natural_language_inference_too(tmp_path):
    labels = ("contradiction", "neutral", "entailment")
    folder = write_family(tmp_path, CASES["llama"].made(), labels)
    body = {"segments": ["one", "two"], "query": "three"}
    asked = {"inputs": INPUTS, "labels": LABELS}
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    async with serving(engine) as client:
        classes = await client.post("/classify", json=body)
        entailed = await client.post("/classify", json={**body, "labels": LABELS})
        whole = await client.post("/classify", json=asked)
    assert classes.status_code == 200
    assert (entailed.status_code, entailed.json()["error"]["field"]) == (400, "segments")
    # Where an operator has inputs divided into chunks, pairs are not divided.
    engine.blending.gate = SimpleNamespace(listwise=True)
    async with serving(engine, blend="gate.json", segment_tokens=2) as client:
        divided = await client.post("/classify", json=asked)
    assert (divided.status_code, divided.json()) == (200, whole.json())


@pytest.mark.parametrize("field", [{"multi_label": True}, {"hypothesis_template": "It is {}"}], ids=str)
async def test_other_models_refuse_the_fields_of_zero_shot_classification(field):
    for fake in (FakeEngine(), FakeEngine(task="classify", labels=("a", "b"))):
        async with serving(fake) as client:
            answer = await client.post("/classify", json={"inputs": "a", "labels": ["a", "b"], **field})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, next(iter(field)))
