"""Keep a weighted random sample of the texts that clients ask for, in bounded memory.

A text has the weight 2 ** (asked_at / half-life). The sample holds the texts with the greatest priorities
u ** (1 / weight), where u is uniform in (0, 1): Efraimidis and Spirakis, "Weighted random sampling with a
reservoir" (2006), with the forward decay of Cormode et al. (2009). Instead of the priority, this module
compares an increasing function of it that does not overflow, the logarithm of the weight plus a Gumbel
variable: -ln(-ln(u ** (1 / weight))).

u is a keyed digest of the text and its client, so nobody who lacks the key can choose texts that stay, and a
text that the same client asks again counts once. Reservoirs with one key can be merged: what the merged
reservoir keeps is what one reservoir would have kept of all texts.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# Times are rounded down to this step, so that a text that is asked all the time is seldom written.
TIME_STEP_SECONDS = 600
# One client with an API key holds at most one of so many texts.
CLIENT_SHARE = 10


class SampledText(NamedTuple):
    """One text of a sample, as token ids."""

    tokens: bytes  # little-endian int32 [tokens]
    client: bytes  # digest of the client's name, at most 16 bytes; empty for clients without an API key
    asked_at: int  # Unix time of the last request in seconds, a multiple of TIME_STEP_SECONDS

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the text."""
        return np.frombuffer(self.tokens, dtype="<i4").tolist()


class Reservoir:
    """The `max_texts` texts with the greatest priorities, of which no client has more than a tenth."""

    def __init__(self, key: bytes, *, max_texts: int, half_life_hours: float) -> None:
        """Begin with an empty sample. key: at most 64 secret bytes; equal for reservoirs that are merged."""
        self.max_texts, self.half_life_hours = max_texts, half_life_hours
        self._key = key
        self._max_of_client = max(max_texts // CLIENT_SHARE, 1)
        self._rate = math.log(2) / (half_life_hours * 3600)
        self._kept: dict[bytes, tuple[float, SampledText]] = {}
        self._of_client: dict[bytes, set[bytes]] = {}
        # Pairs of priority and digest, smallest first. Pairs that are no longer true stay until they come up.
        self._smallest: list[tuple[float, bytes]] = []
        self._smallest_of_client: dict[bytes, list[tuple[float, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[SampledText]:
        return (text for _, text in self._kept.values())

    def offer(self, text: SampledText) -> bool:
        """Keep the text if its priority is great enough, and return whether the sample has changed."""
        digest = hashlib.blake2b(text.tokens, digest_size=16, key=self._key, salt=text.client).digest()
        kept = self._kept.get(digest)
        if kept is not None and kept[1].asked_at >= text.asked_at:
            return False
        priority = self._rate * text.asked_at + _gumbel(digest)
        if kept is None and not self._has_room(priority, text.client):
            return False
        self._keep(digest, priority, text)
        return True

    def _has_room(self, priority: float, client: bytes) -> bool:
        """Return whether a new text is kept, after removing the text that it displaces."""
        if client and len(self._of_client.get(client, ())) >= self._max_of_client:
            displaced = self._first(self._smallest_of_client[client])
        elif len(self._kept) >= self.max_texts:
            displaced = self._first(self._smallest)
        else:
            return True
        if priority <= displaced[0]:
            return False
        self._remove(displaced[1])
        return True

    def _first(self, heap: list[tuple[float, bytes]]) -> tuple[float, bytes]:
        """Return the smallest pair of a heap that is still true, and remove the others before it."""
        while (pair := heap[0])[1] not in self._kept or self._kept[pair[1]][0] != pair[0]:
            heapq.heappop(heap)
        return pair

    def _keep(self, digest: bytes, priority: float, text: SampledText) -> None:
        self._kept[digest] = (priority, text)
        self._push(self._smallest, (priority, digest), len(self._kept))
        if text.client:
            digests = self._of_client.setdefault(text.client, set())
            digests.add(digest)
            heap = self._smallest_of_client.setdefault(text.client, [])
            self._push(heap, (priority, digest), len(digests))

    def _push(self, heap: list[tuple[float, bytes]], pair: tuple[float, bytes], true_pairs: int) -> None:
        heapq.heappush(heap, pair)
        if len(heap) > 2 * true_pairs + 16:
            heap[:] = {pair for pair in heap if pair[1] in self._kept and self._kept[pair[1]][0] == pair[0]}
            heapq.heapify(heap)

    def _remove(self, digest: bytes) -> None:
        _, text = self._kept.pop(digest)
        if text.client:
            digests = self._of_client[text.client]
            digests.remove(digest)
            if not digests:
                del self._of_client[text.client], self._smallest_of_client[text.client]


def _gumbel(digest: bytes) -> float:
    """Return the Gumbel variable that belongs to a digest."""
    uniform = (int.from_bytes(digest[:8], "little") + 0.5) / 2**64
    # Of the greatest digests, the quotient is rounded to 1, and its logarithm would be 0.
    return -math.log(-math.log(min(uniform, 1 - 2**-53)))
