"""A linear classifier on embeddings, fitted with scikit-learn and stored without pickle.

DIR/classifier.json          labels, the model's fingerprint, how it was fitted
DIR/classifier.safetensors   weight [classes, d], bias [classes]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from attncache_core.errors import BuildFailed, DatabaseRefused
from attncache_core.files import write_whole
from attncache_core.outputs import normalize, require_finite

# 2: the fingerprint covers all files of the tokenizer.
FORMAT_VERSION = 2
# Cosines lie close together; a twentieth spreads them as a classifier's scores are spread.
SIMILARITY_TEMPERATURE = 0.05
# Little regularisation: embeddings of unit length are small numbers, and there are many texts a class.
_INVERSE_REGULARISATION = 30.0


@dataclass(frozen=True)
class LinearClassifier:
    """Logits from embeddings: one row of weights a class, on embeddings brought to unit length."""

    labels: tuple[str, ...]
    weight: np.ndarray  # float32 [classes, d]
    bias: np.ndarray  # float32 [classes]
    fingerprint: str
    model: str
    fitted: dict[str, Any]  # how it was fitted, for people

    def logits(self, embeddings: np.ndarray) -> np.ndarray:
        """[n, classes] of embeddings [n, d] of any length."""
        logits: np.ndarray = normalize(embeddings) @ self.weight.T + self.bias
        return logits

    def predict(self, embeddings: np.ndarray) -> list[str]:
        """The most probable label of each embedding [n, d]."""
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

    def digest(self) -> str:
        """SHA-256, in hexadecimal, over labels, weights and bias: all that decides a class."""
        digest = hashlib.sha256(json.dumps(self.labels).encode())
        digest.update(save({"weight": self.weight, "bias": self.bias}))
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the classifier's two files into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = save({"weight": self.weight, "bias": self.bias})
        description = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "fitted": self.fitted,
            "labels": self.labels,
            # A fit that is stopped between the two files must not leave labels beside others' weights.
            "weights": hashlib.sha256(weights).hexdigest(),
        }
        write_whole(folder / "classifier.safetensors", weights)
        text = json.dumps(description, indent=1, ensure_ascii=False)
        write_whole(folder / "classifier.json", (text + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> LinearClassifier:
        """The classifier in `folder`. Raises DatabaseRefused if there is none or it cannot be read."""
        try:
            description = json.loads((folder / "classifier.json").read_text(encoding="utf-8"))
            content = (folder / "classifier.safetensors").read_bytes()
            weights = load(content)
            if description["format_version"] != FORMAT_VERSION:
                raise DatabaseRefused(
                    f"classifier {folder} has format version {description['format_version']}, and this "
                    f"program reads {FORMAT_VERSION}; fit it again",
                    field="classifier",
                )
            if len(description["labels"]) != len(weights["weight"]) or len(weights["bias"]) != len(
                weights["weight"]
            ):
                raise ValueError("labels and weights differ in number")
            if not all(np.isfinite(weights[name]).all() for name in ("weight", "bias")):
                raise ValueError("weights that are not finite")
            if description["weights"] != hashlib.sha256(content).hexdigest():
                raise ValueError("weights of another fit")
            return cls(
                labels=tuple(description["labels"]),
                weight=weights["weight"],
                bias=weights["bias"],
                fingerprint=description["fingerprint"],
                model=description["model"],
                fitted=description["fitted"],
            )
        except FileNotFoundError as error:
            raise DatabaseRefused(f"there is no classifier in {folder}", field="classifier") from error
        except DatabaseRefused:
            raise
        except Exception as error:
            # Of safetensors a plain Exception; whatever it is, the folder is of no use.
            raise DatabaseRefused(f"the classifier in {folder} cannot be read", field="classifier") from error


def nearest_label(
    labels: Sequence[str], embeddings: np.ndarray, *, fingerprint: str, model: str
) -> LinearClassifier:
    """Decides for the label whose embedding is the nearest; embeddings: [labels, d], of any length."""
    return LinearClassifier(
        labels=tuple(labels),
        weight=normalize(embeddings) / SIMILARITY_TEMPERATURE,
        bias=np.zeros(len(labels), dtype=np.float32),
        fingerprint=fingerprint,
        model=model,
        fitted={},
    )


def fit_classifier(
    embeddings: np.ndarray, labels: Sequence[str], *, fingerprint: str, model: str
) -> LinearClassifier:
    """A multinomial logistic regression on embeddings [n, d], brought to unit length, and their labels.

    Raises BuildFailed for fewer than two classes, and NotFinite for the first embedding that is not finite.
    """
    # Loading scikit-learn takes most of a second, and only fitting needs it.
    from sklearn.linear_model import LogisticRegression

    classes = sorted(set(labels))
    if len(classes) < 2:
        raise BuildFailed("a classifier needs texts of at least two labels", field="data")
    require_finite(np.isfinite(embeddings), "embeddings")
    regression = LogisticRegression(C=_INVERSE_REGULARISATION, max_iter=2000)
    # In float64: in float32, rounding decides where the solver stops, so machines would differ.
    regression.fit(normalize(embeddings).astype(np.float64), labels)
    weight, bias = regression.coef_, regression.intercept_
    if len(classes) == 2:
        # scikit-learn keeps one row for two classes: the logit of the second against the first.
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return LinearClassifier(
        labels=tuple(regression.classes_.tolist()),
        # safetensors writes memory as it lies, and scikit-learn's lies column by column.
        weight=np.ascontiguousarray(weight, dtype=np.float32),
        bias=np.ascontiguousarray(bias, dtype=np.float32),
        fingerprint=fingerprint,
        model=model,
        fitted={"texts": len(labels), "classes": len(classes)},
    )
