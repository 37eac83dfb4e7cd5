"""What is evaluated: texts, as token sequences, and how outputs for them are scored.

A score is a fraction: Spearman's correlation, accuracy, or agreement with the full model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.stats import spearmanr

from attncache_core.engine import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.labels import LabelTokens
from attncache_core.outputs import Judge, cosines, require_finite

Sequences = list[list[int]]


def full_outputs(
    engine: PrefillEngine, sequences: Sequence[Sequence[int]], batch_size: int = 64
) -> np.ndarray:
    """What the engine gives for at least one sequence with everything computed, float32 [sequences, d].

    Raises NotFinite for the first sequence whose output is not finite.
    """
    batches = [sequences[at : at + batch_size] for at in range(0, len(sequences), batch_size)]
    results = [engine.run(batch, [False] * len(batch)) for batch in batches]
    require_finite(np.concatenate([result.finite for result in results]), "data")
    return np.concatenate([result.outputs for result in results])


class Task(Protocol):
    """Token sequences and the scores of outputs for them."""

    metric: str  # what the scores are
    sequences: Sequences
    labels: LabelTokens | None  # read from as many sequences a text as their prompt has; None: a text is one

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """From outputs [texts, d]: name of a data set -> its score."""
        ...

    def items(self, outputs: np.ndarray) -> np.ndarray | None:
        """Scores of single texts, float64 [texts], whose mean is the score; None if it is no mean."""
        ...


def labels_read(engine: PrefillEngine) -> LabelTokens | None:
    """The engine's labels if they have several tokens, so that an output alone does not decide among them."""
    return None if engine.labels else engine.label_tokens


def recordable(task: Task) -> Sequences:
    """The task's texts as a database would record them: in their template, with no label behind."""
    if task.labels is None:
        return task.sequences
    readings = task.labels.prompt.readings
    behind = len(readings[0].continuation)
    return [ids[: len(ids) - behind] for ids in task.sequences[:: len(readings)]]


@dataclass(frozen=True)
class RatedPairs:
    """Pairs of texts and how alike people found them."""

    left: Sequences
    right: Sequences
    ratings: Sequence[float]


class SimilarityTask:
    """Semantic textual similarity: Spearman's correlation of cosine and rating over a whole set."""

    metric = "Spearman"
    labels: LabelTokens | None = None

    def __init__(self, sets: Mapping[str, RatedPairs]) -> None:
        self._sets = sets
        self.sequences = [
            ids for pairs in sets.values() for side in (pairs.left, pairs.right) for ids in side
        ]

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """See Task."""
        scores, first = {}, 0
        for name, pairs in self._sets.items():
            count = len(pairs.ratings)
            left, right = outputs[first : first + count], outputs[first + count : first + 2 * count]
            scores[name] = float(spearmanr(cosines(left, right), pairs.ratings).statistic)
            first += 2 * count
        return scores

    def items(self, outputs: np.ndarray) -> None:  # noqa: ARG002 - a correlation is no mean
        """See Task."""
        return None


class ClassificationTask:
    """Accuracy of an engine's classes: those of its model, of its classifier, or labels of several tokens."""

    metric = "accuracy"

    def __init__(self, name: str, engine: PrefillEngine, sequences: Sequences, labels: Sequence[str]) -> None:
        """Raises InvalidInput for a label that is none of the engine's classes."""
        self.sequences = sequences
        self.labels = labels_read(engine)
        self._name, self._engine = name, engine
        known = self.labels.labels if self.labels else engine.labels or ()
        column = {label: place for place, label in enumerate(known)}
        unknown = sorted(set(labels) - set(column))
        if unknown:
            raise InvalidInput(
                f"{len(unknown)} labels of the data are none of the model's {len(column)} classes",
                field="data",
            )
        self._truth = np.array([column[label] for label in labels])

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """See Task."""
        return {self._name: float(self.items(outputs).mean())}

    def items(self, outputs: np.ndarray) -> np.ndarray:
        """See Task."""
        logits = outputs if self.labels else self._engine.class_logits(outputs)
        require_finite(np.isfinite(logits), "data")
        return np.equal(logits.argmax(axis=1), self._truth).astype(np.float64)


class AgreementTask:
    """Likeness to the full model on texts without labels: the same decision, or without classes cosine."""

    labels: LabelTokens | None = None

    def __init__(self, name: str, judge: Judge, sequences: Sequences, full_outputs: np.ndarray) -> None:
        self.sequences = sequences
        self.metric = str(judge.measure)
        self._name, self._judge, self._full = name, judge, full_outputs

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """See Task."""
        return {self._name: float(self.items(outputs).mean())}

    def items(self, outputs: np.ndarray) -> np.ndarray:
        """See Task."""
        return self._judge.fidelity(outputs, self._full)
