"""The keys and values that the store gives to a sequence of chunks, gathered layer by layer.

PrefixKey of each chunk -> KeyValueStore.begin -> blocks -> slots of one layer, at the chunks' positions
"""

from __future__ import annotations

import time
from typing import Self

import numpy as np

from attncache_core.reuse.blend.chunks import Blend
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, TOKEN_BYTES
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.store import KeyValueStore

_SECONDS_BETWEEN_LOOKS = 50e-6  # at the number of layers that are loaded


class GivenChunks:
    """What is given to one sequence. Used in a `with` block, in which the blocks stay in memory."""

    def __init__(
        self, store: KeyValueStore, blend: Blend, whole: PrefixKey | None, length: int, load: bool = True
    ) -> None:
        """whole: how the sequence itself is looked up, for what is stored of its beginning.

        length: the tokens of the sequence. load: whether saved blocks may be loaded.
        """
        self._store = store
        parts = [(chunk.first, chunk.skipped, chunk.prefix_key) for chunk in blend.chunks]
        if whole:
            parts.append((0, 0, whole))
        # Only for what is stored, because places that are reserved for the rest would push out other blocks.
        parts = [(first, skipped, _stored(store, prefix_key)) for first, skipped, prefix_key in parts]
        self._reservation = store.begin([prefix_key for _, _, prefix_key in parts], load)
        self.is_given = np.zeros(length, dtype=bool)
        self.exact_tokens = 0  # at the front
        # What other machines have saved is loaded before the first layer, and hides no computing.
        from_disk = [tier for tier in self._reservation.loaded.values() if tier == "disk"]
        self.loaded_tokens = BLOCK_TOKENS * len(from_disk)
        self._sources: list[tuple[slice, np.ndarray, slice]] = []  # positions; blocks, and tokens in them
        found = zip(parts, self._reservation.given, self._reservation.given_tokens, strict=True)
        for (first, skipped, _), blocks, tokens in found:
            if tokens <= skipped:
                continue
            places = np.array([block.place for block in blocks])
            end = first + tokens - skipped
            self._sources.append((slice(first, end), places, slice(skipped, tokens)))
            self.is_given[first:end] = True
            if not first:
                self.exact_tokens = max(self.exact_tokens, end)

    def loaded(self, layers: range) -> range:
        """Wait until the first of some layers is loaded. Return how many of them are loaded, in a row."""
        loading = self._reservation.loading
        while loading is not None and loading.ready[0] <= layers.start:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return layers if loading is None else range(layers.start, min(layers.stop, int(loading.ready[0])))

    def fill(self, layers: range, slots: np.ndarray) -> None:
        """Write the given slots of some layers, which are loaded, to their positions in `slots`.

        slots: uint8 [layers or more, tokens, slot bytes].
        """
        for of_pass, layer in zip(slots, layers, strict=False):
            of_layer = self._store.memory.pool.layer(layer)
            # The beginning comes last, because it is exact also where chunks are given.
            for positions, places, tokens in self._sources:
                of_pass[positions] = of_layer[places].reshape(-1, slots.shape[2])[tokens]

    def finish(self) -> None:
        """Count what was given, and store nothing. Raises DamagedBlock if what was given is damaged."""
        self._store.wait_until_loaded(self._reservation)
        self._store.finish(self._reservation, keep=lambda _: False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the blocks go."""
        self._store.abandon(self._reservation)


def _stored(store: KeyValueStore, prefix_key: PrefixKey) -> PrefixKey:
    """Return how the stored tokens at the front of a sequence are looked up."""
    tokens = store.givable_tokens(prefix_key)
    if tokens * TOKEN_BYTES == len(prefix_key.tokens):
        return prefix_key
    return PrefixKey.of(
        prefix_key.root, np.frombuffer(prefix_key.tokens, dtype="<i4")[:tokens].tolist(), tokens
    )
