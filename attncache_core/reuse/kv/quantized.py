"""Blocks in 8 bits: 63 % of the bytes of bfloat16 on disk, 35 % of float32, for approximate keys and values.

slots [tokens, numbers] -> for each column an offset: its median if the largest absolute value of what is
                           left is less than half of the column's, else 0
                           for each column without its offset an exponent: its largest absolute value is
                           below 2^exponent
                           for each row of a slot, divided by these powers of two, a scale (its largest
                           absolute value / 127) and levels from -127 to 127

Keys of many models have a few columns whose numbers are hundreds of times as large as those of the others,
and where the projection of keys has a bias, as in Qwen2, most of such a number is the same for all tokens.
With a scale for each row alone, these few columns would decide how coarsely the others are rounded. Without
offsets, the bias would decide how coarsely the differences of tokens are rounded (KIVI, Liu et al. 2024, also
subtracts from each column). A median, because one token may have far larger numbers than the others.
Division by a power of two rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

# The name of this format in the fingerprint of blocks. A change of the format needs another name.
INT8_FORMAT = "int8 around medians"
_SCALE_BYTES = 4  # float32
# A row is a part of one head's key or value.
_MAX_ROW_NUMBERS = 64
# The powers of two of these exponents are normal numbers in float32 and bfloat16.
_LEAST_EXPONENT, _GREATEST_EXPONENT = -126, 127


class Int8Slots:
    """Turns the parts of blocks in memory to parts in 8 bits, and back. The pooled state stays as it is."""

    def __init__(self, part_bytes: Sequence[int], slot_bytes: int, dtype: torch.dtype) -> None:
        """part_bytes: of blocks in memory, the pooled state last. dtype: of the numbers in a slot."""
        self._dtype = dtype
        self._columns = slot_bytes // dtype.itemsize
        self._row = math.gcd(self._columns, _MAX_ROW_NUMBERS)
        self._offset_bytes = slot_bytes
        *layers, state = part_bytes
        numbers = [size // dtype.itemsize for size in layers]
        of_columns = self._offset_bytes + self._columns  # offsets and exponents
        sizes = [count // self._row * _SCALE_BYTES + count + of_columns for count in numbers]
        self.part_bytes = (*sizes, state)  # bytes of each part in 8 bits

    def encode(self, parts: Sequence[memoryview], tokens: int) -> list[memoryview]:
        """Return the parts of a block in 8 bits. tokens: of the block; slots behind them hold the offsets."""
        *layers, state = parts
        return [*(self._encoded(part, tokens) for part in layers), state]

    def decode(self, index: int, part: memoryview, into: memoryview) -> None:
        """Write part `index` of a block to memory."""
        if index == len(self.part_bytes) - 1:
            into[:] = part
            return
        numbers = torch.frombuffer(into, dtype=self._dtype).view(-1, self._columns)
        scale_bytes = numbers.numel() // self._row * _SCALE_BYTES
        scales = torch.frombuffer(part[:scale_bytes], dtype=torch.float32)
        offsets = torch.frombuffer(part[scale_bytes:][: self._offset_bytes], dtype=self._dtype)
        levels, exponents = torch.frombuffer(
            part[scale_bytes + self._offset_bytes :], dtype=torch.int8
        ).split([numbers.numel(), self._columns])
        divided = levels.view(-1, self._row) * scales[:, None]
        numbers.copy_(divided.view(numbers.shape).mul_(exponents.float().exp2()).add_(offsets))

    def _encoded(self, part: memoryview, tokens: int) -> memoryview:
        slots = torch.frombuffer(part, dtype=self._dtype).view(-1, self._columns)
        x = slots[:tokens].float()
        medians = x.median(dim=0).values
        is_nearer = (x - medians).abs().amax(dim=0) < x.abs().amax(dim=0) / 2
        offsets = medians.where(is_nearer, 0)  # 0 also where a number is NaN or infinite
        x = functional.pad(x - offsets, (0, 0, 0, len(slots) - tokens))
        exponents = x.abs().amax(dim=0).frexp().exponent.clamp_(_LEAST_EXPONENT, _GREATEST_EXPONENT)
        rows = (x / exponents.float().exp2()).view(-1, self._row)
        scales = rows.abs().amax(dim=1) / 127
        levels = rows.div_(scales.where(scales > 0, 1)[:, None]).round_().clamp_(-127, 127)
        saved = [scales, offsets.to(self._dtype), levels.to(torch.int8), exponents.to(torch.int8)]
        return memoryview(bytearray(b"".join(each.view(torch.uint8).numpy().tobytes() for each in saved)))
