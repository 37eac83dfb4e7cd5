"""Write a segment file. layout.py describes the file, segment.py reads it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from attncache_core.reuse.storage.layout import (
    PAGE_BYTES,
    TABLE_ROW,
    MapForm,
    RecordKind,
    RecordLayout,
    records_start,
    triangle,
)
from attncache_core.reuse.storage.seal import Seal
from attncache_core.reuse.storage.segment_header import pack_header


class SegmentWriter:
    """A writer for one segment file, used as a context manager.

    When the `with` block ends without an exception, the segment is complete and on disk.
    """

    def __init__(self, path: Path, length: int, records: int, layout: RecordLayout, seal: Seal) -> None:
        self._path, self._length, self._layout, self._seal = path, length, layout, seal
        self._table = np.zeros(records, dtype=TABLE_ROW)
        self._written = 0

    def __enter__(self) -> SegmentWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        self._file.seek(records_start(len(self._table)))
        return self

    def append(self, maps: Sequence[torch.Tensor], ids: Sequence[int], kind: RecordKind) -> None:
        """Write the next record.

        maps: for each layer a tensor [stored heads, L, L] of the layout's dtype. ids: the token ids.
        Raises ValueError if the maps do not fit the layout.
        """
        if self._layout.form is MapForm.PACKED:
            maps = [layer.flatten(1)[:, triangle(self._length)] for layer in maps]
        flat = torch.cat([layer.reshape(-1) for layer in maps])
        if flat.dtype != self._layout.dtype or len(flat) != self._layout.elements(self._length):
            raise ValueError(f"a record of {len(flat)} numbers of {flat.dtype} does not fit this segment")
        content = flat.view(torch.int16).numpy().tobytes()
        self._table[self._written] = (kind, zlib.crc32(content), self._seal.token_digest(ids))
        self._file.write(content.ljust(self._layout.record_bytes(self._length), b"\0"))
        self._written += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is not None:
                return
            if self._written != len(self._table):
                raise ValueError(f"{self._written} of {len(self._table)} records were written")
            table = self._table.tobytes()
            self._file.seek(PAGE_BYTES)
            self._file.write(table)
            # The header declares the segment finished, so records and table must reach the disk first.
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.seek(0)
            header = pack_header(self._length, len(self._table), self._layout, self._seal, zlib.crc32(table))
            self._file.write(header)
            self._file.flush()
            os.fsync(self._file.fileno())
