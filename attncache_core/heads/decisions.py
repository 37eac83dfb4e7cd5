"""Convert logits to class probabilities and decisions; the template and letters of listwise reranking."""

from __future__ import annotations

from string import ascii_uppercase

import numpy as np

from attncache_core.checkpoints.template import Template
from attncache_core.errors import InvalidInput

LETTERS = tuple(ascii_uppercase)
LISTWISE = Template.parse("Query: {}\nThe letter of the document that answers the query best:")


def listwise_headings(count: int) -> list[str]:
    """Return what stands in front of each of `count` documents. Raises InvalidInput if there are too many."""
    if count > len(LETTERS):
        raise InvalidInput(
            f"there are {count} documents, and a list has at most {len(LETTERS)}; send fewer",
            field="segments",
        )
    return [f"[{letter}] " for letter in LETTERS[:count]]


@np.errstate(over="ignore")
def class_scores(logits: np.ndarray, temperature: float = 1.0, multi_label: bool = False) -> np.ndarray:
    """Return the probabilities of logits [n, classes], float32 [n, classes].

    Returns softmax(logits / temperature), so each row sums to 1. With `multi_label`, returns
    sigmoid(logits / temperature), for each class separately.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if multi_label:
        return np.exp(-np.logaddexp(0, -logits / temperature)).astype(np.float32)
    powers = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


def class_decisions(logits: np.ndarray, multi_label: bool = False) -> np.ndarray:
    """Return the decisions of logits [n, classes].

    Returns the index of the best class, int64 [n, 1]. With `multi_label`, returns whether each class applies,
    bool [n, classes].
    """
    return logits > 0 if multi_label else logits.argmax(axis=1)[:, None]
