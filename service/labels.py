"""A cache of label embeddings, so that a label is not embedded again with every request."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

# Room for 17,000 short labels with embeddings of 384 floats.
CAPACITY_BYTES = 32 * 2**20
_Key = tuple[str, bool, bytes]  # label, truncate, salt


class LabelMemory:
    """Owns the embeddings of the labels that were used last. Used on the event loop only."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        """capacity_bytes: for labels and embeddings, with the overhead of Python's objects."""
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._embeddings: OrderedDict[_Key, np.ndarray] = OrderedDict()

    def recall(self, labels: Sequence[str], truncate: bool, salt: bytes = b"") -> dict[str, np.ndarray]:
        """Return the cached embeddings of these labels, [dimensions] each, of unit length.

        `truncate` is part of a label's key: with truncation a long label has an embedding, without
        truncation the label is refused. salt: requests of different salts share no label.
        """
        known = [label for label in labels if (label, truncate, salt) in self._embeddings]
        for label in known:
            self._embeddings.move_to_end((label, truncate, salt))
        return {label: self._embeddings[label, truncate, salt] for label in known}

    def remember(
        self, labels: Sequence[str], truncate: bool, embeddings: np.ndarray, salt: bytes = b""
    ) -> None:
        """Cache a row of `embeddings`, [labels, dimensions], for each label; drop the least recently used."""
        for label, embedding in zip(labels, embeddings, strict=True):
            # Two concurrent requests may have embedded the same label.
            key = (label, truncate, salt)
            if key in self._embeddings:
                continue
            # A copy, because a view of one row would keep all rows in memory.
            self._embeddings[key] = kept = embedding.copy()
            self._bytes += _bytes_of(key, kept)
        while self._bytes > self._capacity_bytes:
            self._bytes -= _bytes_of(*self._embeddings.popitem(last=False))


def _bytes_of(key: _Key, embedding: np.ndarray) -> int:
    # 200 bytes for the entries in the dictionary and in the dictionary's order.
    return sum(map(sys.getsizeof, (key, *key, embedding))) + 200
