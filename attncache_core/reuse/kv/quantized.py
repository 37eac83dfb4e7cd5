"""Blocks in 8 bits: half or a quarter of the bytes on disk, for an approximation of keys and values.

slots, rows of numbers -> for each row a scale (its largest absolute value / 127) and levels from -127 to 127
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_SCALE_BYTES = 4  # float32
# A row is a part of one head's key or value: its numbers are of one size.
_MAX_ROW_NUMBERS = 64


class Int8Slots:
    """Turns the parts of blocks in memory to parts in 8 bits, and back. The pooled state stays as it is."""

    def __init__(self, part_bytes: Sequence[int], slot_bytes: int, dtype: torch.dtype) -> None:
        """part_bytes: of blocks in memory, the pooled state last. dtype: of the numbers in a slot."""
        self._dtype = dtype
        self._row = math.gcd(slot_bytes // dtype.itemsize, _MAX_ROW_NUMBERS)
        *layers, state = part_bytes
        numbers = [size // dtype.itemsize for size in layers]
        sizes = [count + count // self._row * _SCALE_BYTES for count in numbers]
        self.part_bytes = (*sizes, state)  # bytes of each part in 8 bits

    def encode(self, parts: Sequence[memoryview]) -> list[memoryview]:
        """Return the parts of a block in 8 bits."""
        *layers, state = parts
        return [*map(self._encoded, layers), state]

    def decode(self, index: int, part: memoryview, into: memoryview) -> None:
        """Write part `index` of a block to memory."""
        if index == len(self.part_bytes) - 1:
            into[:] = part
            return
        rows = len(part) // (self._row + _SCALE_BYTES)
        scales = torch.frombuffer(part[: rows * _SCALE_BYTES], dtype=torch.float32)
        levels = torch.frombuffer(part[rows * _SCALE_BYTES :], dtype=torch.int8).view(rows, -1)
        numbers = torch.frombuffer(into, dtype=self._dtype).view(rows, -1)
        numbers.copy_(levels * scales[:, None])

    def _encoded(self, part: memoryview) -> memoryview:
        x = torch.frombuffer(part, dtype=self._dtype).view(-1, self._row).float()
        scales = x.abs().amax(dim=1) / 127
        levels = (x / scales.where(scales > 0, 1)[:, None]).round().to(torch.int8)
        return memoryview(bytearray(scales.numpy().tobytes() + levels.numpy().tobytes()))
