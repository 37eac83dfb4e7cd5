"""The linear classifier decides like scikit-learn's, and saving and loading do not change it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from core_models import update_json
from safetensors.numpy import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import normalize

from attncache_core import LinearClassifier, PrefillEngine, class_scores, fit_classifier
from attncache_core.errors import BuildFailed, DatabaseRefused, InvalidInput, NotFinite

DIMENSIONS = 12
# Weights are stored in float32; embeddings have unit length.
TOLERANCE = 1e-5


def clouds(classes: int, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Make embeddings [n, 12] of overlapping classes, of various lengths, with unsorted labels."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, DIMENSIONS))
    rows = np.repeat(np.arange(classes), 20)
    embeddings = centres[rows] + random.normal(size=(len(rows), DIMENSIONS))
    embeddings *= random.uniform(0.1, 5, size=(len(rows), 1))
    return embeddings.astype(np.float32), [f"label {classes - row}" for row in rows]


def fitted(classes: int = 3) -> LinearClassifier:
    return fit_classifier(*clouds(classes), fingerprint="f" * 64, model="m")


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_decisions_and_scores_are_scikit_learns(classes):
    embeddings, labels = clouds(classes)
    oracle = LogisticRegression(C=30.0, max_iter=2000).fit(normalize(embeddings.astype(np.float64)), labels)
    classifier = fit_classifier(embeddings, labels, fingerprint="", model="m")
    asked, _ = clouds(classes, seed=1)
    expected = oracle.predict_proba(normalize(asked))
    assert classifier.labels == tuple(oracle.classes_)
    np.testing.assert_allclose(class_scores(classifier.logits(asked)), expected, atol=TOLERANCE)
    assert classifier.predict(asked) == [classifier.labels[row] for row in expected.argmax(axis=1)]
    assert len(set(classifier.predict(asked))) == classes
    asked[1, 2] = np.nan
    with pytest.raises(NotFinite, match=r"embeddings\[1\]"):
        classifier.predict(asked)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_loaded_classifier_has_the_logits_and_the_description_of_the_saved_one(tmp_path, classes):
    classifier = fitted(classes)
    classifier.save(tmp_path / "deep" / "folder")
    loaded = LinearClassifier.load(f"{tmp_path}/deep/folder")
    asked, _ = clouds(classes, seed=1)
    np.testing.assert_array_equal(loaded.logits(asked), classifier.logits(asked))
    assert (loaded.labels, loaded.fingerprint, loaded.model) == (classifier.labels, "f" * 64, "m")
    assert loaded.fitted == {"texts": 20 * classes, "classes": classes}


def test_folder_holds_json_and_safetensors_and_nothing_else(tmp_path):
    fitted().save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["classifier.json", "classifier.safetensors"]
    description = json.loads((tmp_path / "classifier.json").read_text(encoding="utf-8"))
    assert description["labels"] == ["label 1", "label 2", "label 3"]
    weights = load_file(tmp_path / "classifier.safetensors")
    assert {name: array.shape for name, array in weights.items()} == {"weight": (3, DIMENSIONS), "bias": (3,)}


def test_labels_in_any_script_survive(tmp_path):
    embeddings, labels = clouds(2)
    names = {"label 1": "жалоба", "label 2": 'a "quoted"\nlabel'}
    classifier = fit_classifier(embeddings, [names[label] for label in labels], fingerprint="", model="m")
    classifier.save(tmp_path)
    assert LinearClassifier.load(tmp_path).labels == classifier.labels
    assert set(classifier.labels) == set(names.values())


@pytest.mark.parametrize("form", [tuple, iter, np.array])
def test_classifier_is_fitted_to_labels_and_embeddings_in_any_form(tmp_path, form):
    embeddings, labels = clouds(3)
    embeddings = embeddings.astype(np.float64)  # as in a list
    classifier = fit_classifier(embeddings.tolist(), form(labels), fingerprint="", model="m")
    expected = fit_classifier(embeddings, labels, fingerprint="", model="m")
    assert classifier.digest() == expected.digest()
    assert classifier.predict(embeddings.tolist()) == expected.predict(embeddings)
    classifier.save(f"{tmp_path}/deep")
    assert LinearClassifier.load(tmp_path / "deep").digest() == expected.digest()


def test_texts_of_a_single_label_are_refused():
    embeddings, _ = clouds(1)
    with pytest.raises(BuildFailed, match="two labels") as failed:
        fit_classifier(embeddings, ["only"] * len(embeddings), fingerprint="", model="m")
    assert failed.value.field == "data"


@pytest.mark.parametrize("second", [1, np.int64(1), True, "", "x\0", "\ud83d"])
def test_labels_that_could_not_be_loaded_are_refused(second):
    embeddings, _ = clouds(2)
    half = len(embeddings) // 2
    labels = ["x"] * half + [second] * (len(embeddings) - half)
    with pytest.raises(InvalidInput, match="labels must be strings") as refused:
        fit_classifier(embeddings, labels, fingerprint="", model="m")
    assert refused.value.field == "labels"
    with pytest.raises(InvalidInput, match="2 labels do not fit"):
        fit_classifier(embeddings, ["x", "y"], fingerprint="", model="m")
    with pytest.raises(InvalidInput, match="labels must be a list"):
        fit_classifier(embeddings, "ab" * half, fingerprint="", model="m")


def test_classifier_of_another_model_is_refused_with_both_fingerprints(tiny_checkpoint):
    with pytest.raises(DatabaseRefused, match="for m with fingerprint ffffffffffff") as refused:
        PrefillEngine.load(tiny_checkpoint, classifier=fitted(), dtype="float32")
    assert tiny_checkpoint.embedding_fingerprint()[:12] in str(refused.value)
    assert refused.value.field == "classifier"


def test_classifier_of_another_width_is_refused_with_both_widths(tiny_checkpoint):
    made = replace(fitted(), fingerprint=tiny_checkpoint.embedding_fingerprint())
    with pytest.raises(DatabaseRefused, match=f"of {DIMENSIONS} numbers, and those of the model have 32"):
        PrefillEngine.load(tiny_checkpoint, classifier=made, dtype="float32")


def test_folder_without_a_classifier_is_refused(tmp_path):
    with pytest.raises(DatabaseRefused, match="there is no classifier in"):
        LinearClassifier.load(tmp_path)


@pytest.mark.parametrize("name", ["classifier.json", "classifier.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff" * 40, None])
def test_classifier_that_cannot_be_read_is_refused(tmp_path, name, content):
    fitted().save(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DatabaseRefused, match=r"classifier in .* cannot be read|no classifier in"):
        LinearClassifier.load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"labels": labels}
            for labels in (
                *(["one"], ["a", "b", "b"], ["a", "b", ""], [1, 2, 3], "abc", [[1]] * 3),
                *(["a", "b", "c\0"], ["a", "b", "\ud83d"]),
            )
        ),
        *(
            {"model": None},
            {"fingerprint": 3},
            {"fitted": None},
            {"labels": ["label 2", "label 1", "label 3"]},
            {"format_version": 3},
        ),
    ],
)
def test_description_that_fits_no_classifier_is_refused(tmp_path, changes):
    fitted().save(tmp_path)
    update_json(tmp_path / "classifier.json", **changes)
    with pytest.raises(DatabaseRefused, match="format version 3" if "format_version" in changes else None):
        LinearClassifier.load(tmp_path)


def test_classifier_of_the_version_before_has_no_digest_and_is_read_behind_a_byte_order_mark(tmp_path):
    fitted().save(tmp_path)
    description = json.loads((tmp_path / "classifier.json").read_text(encoding="utf-8"))
    del description["digest"]
    (tmp_path / "classifier.json").write_text(json.dumps(description), encoding="utf-8-sig")
    assert LinearClassifier.load(tmp_path).digest() == fitted().digest()


@pytest.mark.parametrize(
    "changes",
    [
        *({"bias": np.zeros(shape, np.float32)} for shape in ((3, 1), (2,), ())),
        {"bias": np.zeros(3)},
        {"weight": np.zeros((3, DIMENSIONS), np.float16)},
        {"weight": np.zeros((3, 0), np.float32)},
        {"weight": np.full((3, DIMENSIONS), np.nan, np.float32)},
        {"weight": np.full((3, DIMENSIONS), 3e38, np.float32)},
        {"bias": np.full(3, -3e38, np.float32)},
    ],
)
def test_weights_of_another_shape_or_type_or_without_finite_logits_are_refused(tmp_path, changes):
    replace(fitted(), **changes).save(tmp_path)
    with pytest.raises(DatabaseRefused, match="cannot be read"):
        LinearClassifier.load(tmp_path)
