"""Tasks of an evaluation: texts as token sequences, and scores of the outputs for these texts.

A score is a fraction: a Spearman correlation, an accuracy, or the agreement with the full model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.stats import spearmanr

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.heads.vectors import cosines, require_finite
from attncache_core.text.labels import LabelTokens

Sequences = list[list[int]]


class Task(Protocol):
    """Token sequences, and scores of outputs for these sequences."""

    metric: str  # name of the score
    decides: bool  # whether the scores of single texts are 1 or 0, for right and wrong decisions
    sequences: Sequences
    # Labels of several tokens; a text then has as many sequences as the labels' prompt. None: one per text.
    labels: LabelTokens | None

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """Return the score of each data set from outputs [texts, d]: name of the data set -> score."""
        ...

    def items(self, outputs: np.ndarray) -> np.ndarray | None:
        """Return the scores of single texts, float64 [texts]; None if the score is not a mean over texts."""
        ...


def multi_token_labels(engine: PrefillEngine) -> LabelTokens | None:
    """Return the engine's labels if they have several tokens, so that an output does not decide by itself."""
    return None if engine.decisions.labels else engine.decisions.label_tokens


def recordable_sequences(task: Task) -> Sequences:
    """Return one sequence per text as a database would record it: in the template, without a label."""
    if task.labels is None:
        return task.sequences
    sequence_plans = task.labels.prompt.sequence_plans
    label_tokens = len(sequence_plans[0].continuation)
    return [ids[: len(ids) - label_tokens] for ids in task.sequences[:: len(sequence_plans)]]


def label_names(labels: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the labels by the model's names.

    The data may have numbers instead, from 0 on, if no name is a number.
    """
    distinct = set(labels)
    are_numbers = all(each.isdecimal() and int(each) < len(known) for each in distinct)
    if not are_numbers or any(map(_is_number, known)):
        return list(labels)
    return [known[int(label)] for label in labels]


def _is_number(name: str) -> bool:
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def require_known(labels: Sequence[str], known: Sequence[str], field: str) -> None:
    """Raise InvalidInput, which names the field, unless all labels are among the model's names."""
    unknown = set(labels) - set(known)
    if unknown:
        first = next(number for number, label in enumerate(labels, 1) if label in unknown)
        raise InvalidInput(
            f"{len(unknown)} labels of the texts are none of the model's {len(known)} classes, the first one "
            f"that of text {first}; give the names of the classes, or their numbers from 0 on",
            field=field,
        )


@dataclass(frozen=True)
class RatedPairs:
    """Pairs of texts, and people's ratings of their similarity."""

    left: Sequences
    right: Sequences
    ratings: Sequence[float]


_ROUNDING = 1e-6  # cosines that differ by less are equal


class SimilarityTask:
    """Semantic textual similarity: the Spearman correlation of cosines and ratings over a data set."""

    metric = "Spearman"
    decides = False
    labels: LabelTokens | None = None

    def __init__(self, sets: Mapping[str, RatedPairs]) -> None:
        self._sets = sets
        self.sequences = [
            ids for pairs in sets.values() for side in (pairs.left, pairs.right) for ids in side
        ]

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """See Task.scores."""
        scores, first = {}, 0
        for name, pairs in self._sets.items():
            count = len(pairs.ratings)
            left, right = outputs[first : first + count], outputs[first + count : first + 2 * count]
            found = cosines(left, right)
            # Equal cosines have no correlation: NaN stands for what is not measurable.
            is_equal = np.ptp(found) < _ROUNDING
            scores[name] = float("nan") if is_equal else float(spearmanr(found, pairs.ratings).statistic)
            first += 2 * count
        return scores

    def items(self, outputs: np.ndarray) -> None:  # noqa: ARG002 - a correlation is not a mean over texts
        """See Task.items."""
        return None


class ClassificationTask:
    """Accuracy of an engine's classes: classes of its model or classifier, or labels of several tokens."""

    metric = "accuracy"
    decides = True

    def __init__(self, name: str, engine: PrefillEngine, sequences: Sequences, labels: Sequence[str]) -> None:
        """Make the task from sequences and their true labels, for a data set with this name.

        Raises InvalidInput if a label is not a class of the engine.
        """
        self.sequences = sequences
        self.labels = multi_token_labels(engine)
        self._name, self._engine = name, engine
        known = self.labels.labels if self.labels else engine.decisions.labels or ()
        column = {label: index for index, label in enumerate(known)}
        require_known(labels, known, "data")
        self._truth = np.array([column[label] for label in labels])

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """See Task.scores."""
        return {self._name: float(self.items(outputs).mean())}

    def items(self, outputs: np.ndarray) -> np.ndarray:
        """See Task.items."""
        logits = outputs if self.labels else self._engine.decisions.class_logits(outputs)
        require_finite(np.isfinite(logits), "data")
        return np.equal(logits.argmax(axis=1), self._truth).astype(np.float64)


class AgreementTask:
    """Agreement with the full model on texts without labels: of decisions or, without classes, by cosine."""

    labels: LabelTokens | None = None

    def __init__(
        self, name: str, comparator: OutputComparator, sequences: Sequences, full_outputs: np.ndarray
    ) -> None:
        self.sequences = sequences
        self.metric = str(comparator.measure)
        self.decides = comparator.measure is Measure.AGREEMENT
        self._name, self._comparator, self._full = name, comparator, full_outputs

    def scores(self, outputs: np.ndarray) -> dict[str, float]:
        """See Task.scores."""
        return {self._name: float(self.items(outputs).mean())}

    def items(self, outputs: np.ndarray) -> np.ndarray:
        """See Task.items."""
        return self._comparator.fidelity(outputs, self._full)
