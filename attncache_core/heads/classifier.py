"""A linear classifier on embeddings, fitted with scikit-learn and saved as JSON and safetensors.

DIR/classifier.json          labels, the model's fingerprint, a summary of the fit
DIR/classifier.safetensors   weight [classes, d], bias [classes]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from attncache_core.errors import BuildFailed, DatabaseRefused, InvalidInput
from attncache_core.heads.vectors import normalize, require_finite
from attncache_core.runtime.files import write_whole
from attncache_core.text.limits import list_of

# Version 2: the fingerprint covers all tokenizer files.
FORMAT_VERSION = 2
# Cosines of labels lie close together. Dividing by this temperature spreads them like a classifier's logits.
SIMILARITY_TEMPERATURE = 0.05
# By this share of the largest weight, weights that are made from labels may differ between compute dtypes.
_ROUNDING = 0.05
# Weak regularisation, because embeddings of unit length have small elements and a class has many texts.
_INVERSE_REGULARISATION = 30.0


@dataclass(frozen=True)
class LinearClassifier:
    """A linear classifier on embeddings of unit length, with one row of weights per class."""

    labels: tuple[str, ...]
    weight: np.ndarray  # float32 [classes, d]
    bias: np.ndarray  # float32 [classes]
    fingerprint: str
    model: str
    fitted: dict[str, Any]  # a summary of the fit, for people

    def logits(self, embeddings: np.ndarray) -> np.ndarray:
        """Return logits [n, classes] of embeddings [n, d], which may have any length."""
        logits: np.ndarray = normalize(embeddings) @ self.weight.T + self.bias
        return logits

    def predict(self, embeddings: np.ndarray) -> list[str]:
        """Return the most probable label of each embedding [n, d].

        Raises NotFinite, with the index of the first embedding that holds NaN or infinity.
        """
        embeddings = np.asarray(embeddings)
        require_finite(np.isfinite(embeddings), "embeddings")
        return [self.labels[row] for row in self.logits(embeddings).argmax(axis=1)]

    def require_fingerprint(self, fingerprint: str, model: str) -> None:
        """Raise DatabaseRefused unless the classifier was fitted on embeddings of this model."""
        if self.fingerprint != fingerprint:
            raise DatabaseRefused(
                f"the classifier was fitted for {self.model} with fingerprint {self.fingerprint[:12]}, and "
                f"model {model} has {fingerprint[:12]} (other weights, quantisation, tokenizer files, "
                "architecture, layers dropped, pooling or template); fit a classifier for this model",
                field="classifier",
            )

    def require_width(self, dimensions: int) -> None:
        """Raise DatabaseRefused unless the classifier reads embeddings with this many numbers."""
        width = self.weight.shape[1]
        if width != dimensions:
            raise DatabaseRefused(
                f"the classifier reads embeddings of {width} numbers, and those of the model have "
                f"{dimensions}; fit it again",
                field="classifier",
            )

    def decides_as(self, other: LinearClassifier) -> bool:
        """Return whether another classifier is the same, up to rounding if both are made from labels.

        The embeddings of labels depend on the compute dtype.
        """
        if self.fitted or other.fitted:
            return self.digest() == other.digest()
        if self.labels != other.labels or self.weight.shape != other.weight.shape:
            return False
        return bool(np.abs(self.weight - other.weight).max() <= _ROUNDING * np.abs(self.weight).max())

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of labels, weights and bias, which determine every decision."""
        digest = hashlib.sha256(json.dumps(self.labels).encode())
        digest.update(save({"weight": self.weight, "bias": self.bias}))
        return digest.hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write the classifier's two files into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = save({"weight": self.weight, "bias": self.bias})
        description = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "fitted": self.fitted,
            "labels": self.labels,
            "digest": self.digest(),
            # If `save` is interrupted between the two files, this checksum reveals that they do not match.
            "weights": hashlib.sha256(weights).hexdigest(),
        }
        write_whole(folder / "classifier.safetensors", weights)
        text = json.dumps(description, indent=1, ensure_ascii=False)
        write_whole(folder / "classifier.json", (text + "\n").encode())

    @classmethod
    def load(cls, folder: Path | str) -> LinearClassifier:
        """Load the classifier in `folder`. Raises DatabaseRefused if it is missing or unreadable."""
        folder = Path(folder)
        try:
            description = json.loads((folder / "classifier.json").read_text(encoding="utf-8-sig"))
            content = (folder / "classifier.safetensors").read_bytes()
            weights = load(content)
            if description["format_version"] != FORMAT_VERSION:
                raise DatabaseRefused(
                    f"classifier {folder} has format version {description['format_version']}, and this "
                    f"program reads {FORMAT_VERSION}; fit the classifier again",
                    field="classifier",
                )
            labels, weight, bias = description["labels"], weights["weight"], weights["bias"]
            model, fingerprint, fitted = (description[name] for name in ("model", "fingerprint", "fitted"))
            if not all(isinstance(name, str) for name in (model, fingerprint)):
                raise ValueError("names that are no strings")
            if not (isinstance(labels, list) and all(map(_is_label, labels)) and isinstance(fitted, dict)):
                raise ValueError("no list of labels, a label that no text can have, or no summary of the fit")
            count = len(set(labels))
            if (len(labels), len(weight), weight.ndim, bias.shape) != (count, count, 2, (count,)):
                raise ValueError("labels and weights differ in number, or two labels are equal")
            if not (weight.dtype == bias.dtype == np.float32 and weight.size):
                raise ValueError("weights of another type, or none")
            # No logit of an embedding of unit length is larger. Half of what float32 holds leaves room for
            # rounding.
            largest = np.linalg.norm(weight.astype(np.float64), axis=1) + np.abs(bias)
            if not (largest < np.finfo(np.float32).max / 2).all():
                raise ValueError("weights that are not finite, or with logits that may not be")
            if description["weights"] != hashlib.sha256(content).hexdigest():
                raise ValueError("weights of another fit")
            found = cls(tuple(labels), weight, bias, fingerprint, model, fitted)
            # Classifiers of earlier versions have no digest.
            if description.get("digest", found.digest()) != found.digest():
                raise ValueError("labels of another fit")
            return found
        except FileNotFoundError as error:
            raise DatabaseRefused(f"there is no classifier in {folder}", field="classifier") from error
        except DatabaseRefused:
            raise
        except Exception as error:
            # safetensors raises plain Exception, so every error means that the folder is unusable.
            raise DatabaseRefused(
                f"the classifier in {folder} cannot be read; fit it again", field="classifier"
            ) from error


def nearest_label(
    labels: Sequence[str], embeddings: np.ndarray, *, fingerprint: str, model: str
) -> LinearClassifier:
    """Make a classifier that chooses the label with the nearest embedding.

    embeddings: of the labels, [labels, d], of any length. fingerprint, model: of the model that computed
    them.
    """
    return LinearClassifier(
        labels=tuple(labels),
        weight=normalize(embeddings) / SIMILARITY_TEMPERATURE,
        bias=np.zeros(len(labels), dtype=np.float32),
        fingerprint=fingerprint,
        model=model,
        fitted={},
    )


def require_labels(labels: Sequence[str]) -> None:
    """Raise BuildFailed if the labels of texts have fewer than two classes, and InvalidInput for no label."""
    if isinstance(labels, str):
        raise InvalidInput("labels must be a list with one string for each text", field="labels")
    for label in dict.fromkeys(labels):
        if not _is_label(label):
            raise InvalidInput(
                "labels must be strings that are not empty, of Unicode characters other than null; write a "
                "number as a string",
                field="labels",
            )
    if len(set(labels)) < 2:
        raise BuildFailed("a classifier needs texts of at least two labels", field="data")


def _is_label(label: Any) -> bool:
    if not (isinstance(label, str) and label and "\0" not in label):
        return False
    try:
        label.encode()
    except UnicodeEncodeError:
        return False
    return True


def fit_classifier(
    embeddings: np.ndarray, labels: Iterable[str], *, fingerprint: str, model: str
) -> LinearClassifier:
    """Fit a multinomial logistic regression on embeddings [n, d], scaled to unit length, and their labels.

    fingerprint, model: of the model that computed the embeddings. Raises BuildFailed if there are fewer than
    two classes, InvalidInput for labels that are no strings or not as many as embeddings, and NotFinite, with
    the index of the first one, if embeddings are not finite.
    """
    # Imported here, because importing scikit-learn takes most of a second and only fitting needs it.
    from sklearn.linear_model import LogisticRegression

    embeddings, labels = np.asarray(embeddings), list_of(labels, "labels")
    require_labels(labels)
    if len(labels) != len(embeddings):
        raise InvalidInput(f"{len(labels)} labels do not fit {len(embeddings)} embeddings", field="labels")
    classes = sorted(set(labels))
    require_finite(np.isfinite(embeddings), "embeddings")
    regression = LogisticRegression(C=_INVERSE_REGULARISATION, max_iter=2000)
    # float64, because in float32 rounding decides where the solver stops, so results would differ by machine.
    regression.fit(normalize(embeddings).astype(np.float64), labels)
    weight, bias = regression.coef_, regression.intercept_
    if len(classes) == 2:
        # For two classes, scikit-learn has one row: the logit of the second class minus that of the first.
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return LinearClassifier(
        labels=tuple(regression.classes_.tolist()),
        # Contiguous, because safetensors writes the memory as is and scikit-learn's arrays are column-major.
        weight=np.ascontiguousarray(weight, dtype=np.float32),
        bias=np.ascontiguousarray(bias, dtype=np.float32),
        fingerprint=fingerprint,
        model=model,
        fitted={"texts": len(labels), "classes": len(classes)},
    )
