"""Write a segment file, and check the head of a finished one. layout.py describes the file.

The head is the header and the record table. The header names the format, the sequence length, the dtype, the
database and the model. It also has the checksum of the record table.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.storage.layout import (
    PAGE_BYTES,
    TABLE_ROW,
    MapForm,
    RecordKind,
    RecordLayout,
    records_start,
    triangle,
)
from attncache_core.reuse.storage.mapping import RecordFile
from attncache_core.reuse.storage.seal import Seal

_MAGIC = b"ATTNMAPS"
_VERSION = 2

# magic, version, sequence length, number of records, bytes of a record's maps, dtype name, CRC-32 of the
# record table, id of the database, fingerprint of the model
_HEADER = struct.Struct("<8sIIQQ16sI16s32s")


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
            self._file.write(self._header(zlib.crc32(table)))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _header(self, table_checksum: int) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self._length,
            len(self._table),
            self._layout.elements(self._length) * 2,
            self._layout.dtype_name,
            table_checksum,
            bytes.fromhex(self._seal.id),
            bytes.fromhex(self._seal.fingerprint),
        )


def is_finished(path: Path, length: int, records: int, layout: RecordLayout, seal: Seal) -> bool:
    """Return whether `path` is a finished segment with this many records, so that a build can keep it."""
    try:
        return len(read_head(RecordFile(path), length, layout, seal)[0]) == records
    except (OSError, CorruptDatabase):
        return False


def read_head(file: RecordFile, length: int, layout: RecordLayout, seal: Seal) -> tuple[np.ndarray, str]:
    """Return the record table (TABLE_ROW [records]), and the SHA-256 of all bytes before the first record.

    Raises CorruptDatabase unless header, table and file size belong to a finished segment of this length,
    layout and seal.
    """
    path = file.path
    try:
        header = _HEADER.unpack(file.read(_HEADER.size, 0))
        *kind, records, map_bytes, dtype, checksum, database, fingerprint = header
        expected = ([_MAGIC, _VERSION, length], layout.elements(length) * 2, layout.dtype_name)
        if (kind, map_bytes, dtype.rstrip(b"\0")) != expected:
            raise CorruptDatabase(f"{path} is not a segment of length {length} of this database")
        if database.hex() != seal.id:
            raise CorruptDatabase(f"{path} belongs to another database")
        if fingerprint.hex() != seal.fingerprint:
            raise CorruptDatabase(f"{path} holds maps of another model")
        size = file.opened.size
        # A damaged number of records may exceed the memory, so the file size is checked first.
        if size != records_start(records) + records * layout.record_bytes(length):
            raise CorruptDatabase(f"{path} has {size} bytes, which does not match its {records} records")
        head = file.read(records_start(records), 0)
    except (OSError, struct.error) as error:
        raise CorruptDatabase(f"{path} is cut short or cannot be read") from error
    table = head[PAGE_BYTES : PAGE_BYTES + records * TABLE_ROW.itemsize]
    if zlib.crc32(table) != checksum:
        raise CorruptDatabase(f"the record table of {path} was changed since it was written")
    return np.frombuffer(table, dtype=TABLE_ROW), hashlib.sha256(head).hexdigest()
