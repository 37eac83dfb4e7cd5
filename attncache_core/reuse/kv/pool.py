"""The memory of blocks: places of equal size in one mapping, taken and given back."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from attncache_core.native.memory import address, large_pages
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, STATE_ROWS, BlockLayout


class BlockPool:
    """Places for blocks. The system gives memory to a place when the place is first written.

    Not thread safe: the store calls it under its lock. Free and used places always sum to `places`.
    """

    def __init__(self, layout: BlockLayout, most_bytes: int) -> None:
        """most_bytes: the places together take at most this many bytes; less than one place: no place."""
        self.layout = layout
        self.places = most_bytes // layout.block_bytes
        size = max(1, self.places) * layout.block_bytes
        # Reserving refuses more than the machine has. Large pages are not reserved, and would fail later.
        mmap.mmap(-1, size).close()
        self._bytes = np.frombuffer(large_pages(size), dtype=np.uint8)
        self._first = address(self._bytes)
        self._free: list[int] = []
        self._never_used = 0  # places from here on were never taken

    @property
    def used(self) -> int:
        """The number of places that are taken."""
        return self._never_used - len(self._free)

    @property
    def free(self) -> int:
        """The number of places that can be taken."""
        return self.places - self.used

    def take(self) -> int | None:
        """Take a place. Returns its number, or None if all places are taken."""
        if self._free:
            return self._free.pop()
        if self._never_used == self.places:
            return None
        self._never_used += 1
        return self._never_used - 1

    def give_back(self, place: int) -> None:
        """Give back a place that was taken."""
        self._free.append(place)

    def addresses(self, places: Sequence[int]) -> np.ndarray:
        """Return the address of each place's first slot, uint64 [places]."""
        found: np.ndarray = np.array(places, dtype=np.uint64) * np.uint64(self.layout.block_bytes)
        return found + np.uint64(self._first)

    def state_addresses(self, places: Sequence[int]) -> np.ndarray:
        """Return the address of each place's pooled state, uint64 [places]."""
        return self.addresses(places) + np.uint64(self.layout.state_first)

    def slots(self, place: int) -> np.ndarray:
        """Return a place's slots, uint8 [layers, BLOCK_TOKENS, slot_bytes], which may be written."""
        layout = self.layout
        return self._part(place, 0, layout.state_first).reshape(layout.layers, -1, layout.slot_bytes)

    def layer(self, number: int) -> np.ndarray:
        """Return the slots of one layer in all places, a view uint8 [places, BLOCK_TOKENS, slot_bytes]."""
        layout = self.layout
        every = self._bytes[: self.places * layout.block_bytes].reshape(self.places, layout.block_bytes)
        of_layer = every[:, number * layout.layer_bytes : (number + 1) * layout.layer_bytes]
        return of_layer.reshape(self.places, BLOCK_TOKENS, layout.slot_bytes)

    def state(self, place: int) -> np.ndarray:
        """Return a place's pooled state, float32 [STATE_ROWS, width], which may be written."""
        size = STATE_ROWS * self.layout.width * 4
        return self._part(place, self.layout.state_first, size).view(np.float32).reshape(STATE_ROWS, -1)

    def parts(self, place: int) -> list[memoryview]:
        """Return a place's parts as in BlockLayout.part_bytes, which may be written."""
        first, parts = 0, []
        for size in self.layout.part_bytes:
            parts.append(self._part(place, first, size).data)
            first += size
        return parts

    def _part(self, place: int, first: int, size: int) -> np.ndarray:
        first += place * self.layout.block_bytes
        return self._bytes[first : first + size]
