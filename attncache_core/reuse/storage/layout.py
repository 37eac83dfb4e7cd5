"""Define the layout of a segment file, and of the attention maps in its records.

A segment file holds the records of all sequences of one length:

    [header, one page | record table, whole pages | record 0 | record 1 | ...]

A record holds the stored maps of one sequence, layer by layer, and in each layer the stored heads in the
order of their damage. A map is an L x L matrix of 16-bit floats, or, for a causal model, the lower triangle
of that matrix, row by row. Each record begins on a page and is padded to whole pages.

The record table has a row per record: the kind of the record, the CRC-32 of its maps, and a digest of its
token ids (seal.py). The header (segment_file.py) names the database and the model. The header is written
last, so a segment without a header is unfinished.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

PAGE_BYTES = 4096

# A row of the record table: RecordKind, CRC-32 of the maps, digest of the token ids.
TABLE_ROW = np.dtype([("kind", "<u4"), ("checksum", "<u4"), ("tokens", "V16")])


class RecordKind(IntEnum):
    """The origin of a record's maps."""

    STORED = 0  # the maps of one sentence
    PROTOTYPE = 1  # synthetic: the mean of the maps of similar sentences
    MEAN = 2  # synthetic: the mean of the maps of all sentences of one length


class MapForm(StrEnum):
    """The form of a map in its record."""

    SQUARE = "square"  # L x L numbers
    PACKED = "packed"  # the lower triangle, row by row; the rest of a causal map is zero


@dataclass(frozen=True)
class RecordLayout:
    """The number, dtype and form of the maps in a record."""

    stored_heads: tuple[int, ...]  # layer -> number of stored heads
    dtype: torch.dtype  # torch.bfloat16 or torch.float16
    form: MapForm = MapForm.SQUARE

    def cells(self, length: int | np.ndarray) -> Any:
        """Return how many numbers a map of `length` tokens has; for an array of lengths, an array."""
        return length * (length + 1) // 2 if self.form is MapForm.PACKED else length * length

    def elements(self, length: int) -> int:
        """Return how many numbers a record of a sequence of `length` tokens has."""
        return sum(self.stored_heads) * self.cells(length)

    def record_bytes(self, length: int) -> int:
        """Return the size of a record in its file in bytes, including padding."""
        return _whole_pages(self.elements(length) * 2)

    @cached_property
    def heads_before(self) -> tuple[int, ...]:
        """For each layer, how many maps of a record precede the maps of the layer."""
        return tuple(accumulate(self.stored_heads[:-1], initial=0))

    @property
    def dtype_name(self) -> bytes:
        """The name of the dtype in the header, in ASCII."""
        return str(self.dtype).removeprefix("torch.").encode()


def segment_path(folder: Path, length: int) -> Path:
    """Return the path of the segment file for sequences of `length` tokens in the database `folder`."""
    return folder / "maps" / f"{length:05d}.maps"


@lru_cache(maxsize=64)
def triangle(length: int) -> torch.Tensor:
    """Return the index of each number of a packed map in the flat square map [L * L], int64 [cells]."""
    rows, columns = torch.tril_indices(length, length)
    return rows * length + columns


def records_start(records: int) -> int:
    """Return the offset of the first record in a file with this many records, in bytes."""
    return PAGE_BYTES + _whole_pages(records * TABLE_ROW.itemsize)


def _whole_pages(size: int) -> int:
    """Round a size in bytes up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
