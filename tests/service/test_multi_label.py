"""Models with classes that do not exclude each other, and models of natural language inference."""

from types import SimpleNamespace

import numpy as np
import pytest
from core_models import random_text, write_model
from fake_engine import FakeEngine, serving
from families import CASES, write_family
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pair_models import NLI, write_deberta_v3
from scipy.special import expit
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from attncache_core import PrefillEngine, UnsupportedModel
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.heads.decisions import class_scores
from attncache_core.heads.vectors import cosines

MULTI_LABEL = {"problem_type": "multi_label_classification"}
TOPICS = ["transfer", "card", "help"]
LOGITS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=st.floats(-8, 8, width=32)
)


def engine_of(folder, labels, **changes):
    return PrefillEngine.load(read_checkpoint(write_model(folder, labels, **changes)), dtype="float32")


def scores_of_hugging_face(folder, texts):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    classify = pipeline("text-classification", model, tokenizer=AutoTokenizer.from_pretrained(folder))
    return [{row["label"]: row["score"] for row in scores} for scores in classify(texts, top_k=None)]


@pytest.mark.parametrize(
    ("labels", "changes"),
    [(TOPICS, MULTI_LABEL), (["relevant"], {}), (TOPICS, {}), (TOPICS, {"problem_type": None})],
    ids=["multi-label", "one class", "not said", "null"],
)
async def test_scores_are_those_of_hugging_faces_pipeline(tmp_path, labels, changes):
    engine = engine_of(tmp_path, labels, **changes)
    random = np.random.default_rng(3)
    texts = [random_text(random, int(words)) for words in random.integers(1, 20, size=8)]
    async with serving(engine) as client:
        answer = (await client.post("/classify", json={"inputs": texts})).json()
    assert [[row["score"] for row in rows] for rows in answer] == [
        sorted((row["score"] for row in rows), reverse=True) for rows in answer
    ]
    for rows, expected in zip(answer, scores_of_hugging_face(tmp_path, texts), strict=True):
        assert {row["label"]: row["score"] for row in rows} == pytest.approx(expected, abs=1e-5)


async def test_a_choice_of_labels_leaves_their_scores_and_temperature_flattens_them(tmp_path):
    async with serving(engine_of(tmp_path, TOPICS, **MULTI_LABEL)) as client:

        async def ask(**body):
            rows = (await client.post("/classify", json={"inputs": "my card"} | body)).json()[0]
            return {row["label"]: row["score"] for row in rows}

        every, chosen = await ask(), await ask(labels=["help", "card"])
        assert chosen == {label: every[label] for label in ("help", "card")}
        flat = await ask(temperature=1e6)
    assert flat == pytest.approx(dict.fromkeys(TOPICS, 0.5), abs=1e-4)


async def test_scores_that_sum_to_1_are_refused():
    engine = FakeEngine(labels=TOPICS)
    engine.multi_label = True
    async with serving(engine) as client:
        refused, accepted, plain = [
            await client.post("/classify", json={"inputs": "a", "multi_label": value})
            for value in (False, True, None)
        ]
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "multi_label")
    assert accepted.json() == plain.json()


async def test_larger_logit_comes_first_also_where_both_scores_are_1():
    engine = FakeEngine(labels=TOPICS)
    engine.multi_label, engine.class_logits = True, lambda _: np.array([[18.0, 21.0, 20.0]], np.float32)
    best = ["card", "help", "transfer"]
    async with serving(engine) as client:
        for path, body in (
            ("/classify", {"inputs": ["a"]}),
            ("/predict", {"inputs": [["a"]]}),
            ("/predict", {"inputs": [["a"]], "raw_scores": True}),
            ("/predict", {"inputs": ["a"], "parameters": {"top_k": 2}}),
        ):
            (rows,) = (await client.post(path, json=body)).json()
            assert [row["label"] for row in rows] == best[: len(rows)]


def test_model_that_predicts_a_number_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="regression") as refusal:
        read_checkpoint(write_model(tmp_path, ["score"], problem_type="regression"))
    assert refusal.value.field == "model"


def test_engine_compares_each_class_by_itself(tmp_path):
    comparator = engine_of(tmp_path, TOPICS, **MULTI_LABEL).decisions.comparator(Measure.AGREEMENT)
    full = np.array([[3.0, 1.0, -2.0]] * 3, dtype=np.float32)
    # One class is lost although the best stays the best; one class is gained; no decision changes.
    changed = np.array([[3.0, -1.0, -2.0], [1.0, 3.0, 2.0], [0.1, 0.2, -9.0]], dtype=np.float32)
    assert comparator.fidelity(changed, full).tolist() == [0, 0, 1]


@given(LOGITS, st.floats(-2, 2), st.floats(0.1, 10))
def test_likeness_is_the_mean_bhattacharyya_coefficient(logits, shift, temperature):
    np.testing.assert_allclose(
        class_scores(logits, temperature, multi_label=True), expit(logits / temperature), atol=1e-6
    )
    comparator = OutputComparator(Measure.COSINE, lambda outputs: outputs, multi_label=True)
    other = logits + np.float32(shift)
    p, q = expit(logits.astype(float)), expit(other.astype(float))
    coefficients = np.sqrt(p * q) + np.sqrt((1 - p) * (1 - q))
    np.testing.assert_allclose(
        cosines(comparator.comparable(logits), comparator.comparable(other)),
        coefficients.mean(axis=1),
        atol=1e-5,
    )


def test_no_logit_overflows():
    logits = np.array([[-1e30], [-745.0], [745.0], [1e30]])
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_array_equal(class_scores(logits, multi_label=True), expit(logits))


# Labels that a model of natural language inference was not trained for.

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
