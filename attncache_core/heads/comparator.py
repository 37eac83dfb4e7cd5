"""Compare outputs with reuse to the full model's outputs: by cosine, or by agreement of decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from attncache_core.heads.decisions import class_decisions, class_scores
from attncache_core.heads.vectors import cosines, normalize


class Measure(StrEnum):
    """A measure of output quality, reported as the mean over hits."""

    COSINE = "cosine"  # of the output with reuse and the full model's output
    AGREEMENT = "agreement"  # share of decisions that reuse does not change


@dataclass(frozen=True)
class OutputComparator:
    """A comparison of outputs with reuse to the full model's outputs, by one measure.

    class_logits: maps outputs [n, d] to logits [n, classes]; None if the outputs are embeddings.
    multi_label: whether each class is decided separately; see class_scores and class_decisions.
    """

    measure: Measure
    class_logits: Callable[[np.ndarray], np.ndarray] | None
    multi_label: bool = False

    def comparable(self, outputs: np.ndarray) -> np.ndarray:
        """Return rows of unit length to compare by cosine: embeddings, or square roots of probabilities.

        The cosine of two rows of square roots is the Bhattacharyya coefficient of the class probabilities.
        With `multi_label`, the cosine is the mean of the coefficients of the individual classes.
        """
        if self.class_logits is None:
            return normalize(outputs)
        scores = class_scores(self.class_logits(outputs), multi_label=self.multi_label)
        if self.multi_label:
            scores = np.concatenate([scores, 1 - scores], axis=1) / scores.shape[1]
        return np.sqrt(scores)

    def fidelity(self, with_reuse: np.ndarray, full: np.ndarray) -> np.ndarray:
        """Return the measure for each pair of rows, float64 [n].

        For COSINE this is the cosine of the comparable rows, from -1 to 1. For AGREEMENT it is 1 if all
        decisions are equal, else 0. A pair with an output, a comparable row or logits that are not finite has
        the value 0.
        """
        with np.errstate(invalid="ignore"):
            compared = [self._compared(outputs) for outputs in (with_reuse, full)]
            if self.measure is Measure.AGREEMENT:
                decided = [class_decisions(logits, self.multi_label) for logits in compared]
                alike = np.equal(*decided).all(axis=1)
            else:
                alike = np.clip(cosines(*compared), -1, 1)  # a sum of rounded products can be larger
        finite = np.isfinite(np.concatenate([with_reuse, full, *compared], axis=1)).all(axis=1)
        return np.where(finite, alike, 0).astype(np.float64)

    def _compared(self, outputs: np.ndarray) -> np.ndarray:
        """Return what the measure compares: comparable rows for COSINE, logits for AGREEMENT."""
        if self.measure is Measure.COSINE:
            return self.comparable(outputs)
        assert self.class_logits is not None
        return self.class_logits(outputs)
