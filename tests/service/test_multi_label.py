"""Models with classes that do not exclude each other, in the real app with tiny real models."""

import numpy as np
import pytest
from core_models import random_text, write_model
from fake_engine import FakeEngine, serving
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
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
