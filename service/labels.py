"""A cache of label embeddings, so that a label is not embedded again with every request."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

# Room for 17,000 short labels with embeddings of 384 floats.
CAPACITY_BYTES = 32 * 2**20


class LabelMemory:
    """Owns the embeddings of the labels that were used last. Used on the event loop only."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        """capacity_bytes: for labels and embeddings, with the overhead of Python's objects."""
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._embeddings: OrderedDict[tuple[str, bool], np.ndarray] = OrderedDict()

    def recall(self, labels: Sequence[str], truncate: bool) -> dict[str, np.ndarray]:
        """Return the cached embeddings of these labels, [dimensions] each, of unit length.

        `truncate` is part of a label's key: with truncation a long label has an embedding, without
        truncation the label is refused.
        """
        known = [label for label in labels if (label, truncate) in self._embeddings]
        for label in known:
            self._embeddings.move_to_end((label, truncate))
        return {label: self._embeddings[label, truncate] for label in known}

    def remember(self, labels: Sequence[str], truncate: bool, embeddings: np.ndarray) -> None:
        """Cache a row of `embeddings`, [labels, dimensions], for each label; drop the least recently used."""
        for label, embedding in zip(labels, embeddings, strict=True):
            # Two concurrent requests may have embedded the same label.
            if (label, truncate) in self._embeddings:
                continue
            # A copy, because a view of one row would keep all rows in memory.
            self._embeddings[label, truncate] = kept = embedding.copy()
            self._bytes += _bytes_of(label, kept)
        while self._bytes > self._capacity_bytes:
            (label, _), dropped = self._embeddings.popitem(last=False)
            self._bytes -= _bytes_of(label, dropped)


def _bytes_of(label: str, embedding: np.ndarray) -> int:
    key: tuple[str, bool] = (label, True)
    # 200 bytes for the entries in the dictionary and in the dictionary's order.
    return sum(map(sys.getsizeof, (key, label, embedding))) + 200
