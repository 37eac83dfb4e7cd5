"""Labels and their embeddings, remembered, so that a label is embedded once and not with every request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

# 4096 labels of 384 floats are 6 MB.
CAPACITY = 4096


class LabelMemory:
    """The embeddings of the labels asked for last. Used on the event loop only."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
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
            self._embeddings[label, truncate] = embedding
        while len(self._embeddings) > self._capacity:
            self._embeddings.popitem(last=False)
