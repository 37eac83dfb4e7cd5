"""Labels and their embeddings, remembered, so that a label is embedded once and not with every request."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

# 17,000 short labels of 384 floats.
CAPACITY_BYTES = 32 * 2**20


class LabelMemory:
    """The embeddings of the labels asked for last. Used on the event loop only."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        """capacity_bytes: of labels and embeddings, and of what Python needs to hold them."""
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._embeddings: OrderedDict[tuple[str, bool], np.ndarray] = OrderedDict()

    def recall(self, labels: Sequence[str], truncate: bool) -> dict[str, np.ndarray]:
        """The embeddings of those labels that are remembered, [dimensions] each, of unit length.

        A label cut to the model's length is another one than the label refused for being too long, so
        `truncate` belongs to its identity.
        """
        known = [label for label in labels if (label, truncate) in self._embeddings]
        for label in known:
            self._embeddings.move_to_end((label, truncate))
        return {label: self._embeddings[label, truncate] for label in known}

    def remember(self, labels: Sequence[str], truncate: bool, embeddings: np.ndarray) -> None:
        """Keep a row of `embeddings`, [labels, dimensions], for each label; the longest unused ones go."""
        for label, embedding in zip(labels, embeddings, strict=True):
            # Two requests may have asked for it at once.
            if (label, truncate) in self._embeddings:
                continue
            # A copy: a row would keep all the others.
            self._embeddings[label, truncate] = kept = embedding.copy()
            self._bytes += _bytes_of(label, kept)
        while self._bytes > self._capacity_bytes:
            (label, _), gone = self._embeddings.popitem(last=False)
            self._bytes -= _bytes_of(label, gone)


def _bytes_of(label: str, embedding: np.ndarray) -> int:
    key: tuple[str, bool] = (label, True)
    # Beside the objects, a place in the dictionary and one in its order.
    return sum(map(sys.getsizeof, (key, label, embedding))) + 200
