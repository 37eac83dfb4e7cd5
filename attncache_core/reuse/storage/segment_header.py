"""Pack and read the head of a segment file: the header and the record table.

The header names the format, the sequence length, the dtype, the database and the model. It also has the
checksum of the record table. layout.py describes the whole file.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.storage.layout import PAGE_BYTES, TABLE_ROW, RecordLayout, records_start
from attncache_core.reuse.storage.mapping import RecordFile
from attncache_core.reuse.storage.seal import Seal

_MAGIC = b"ATTNMAPS"
_VERSION = 2

# magic, version, sequence length, number of records, bytes of a record's maps, dtype name, CRC-32 of the
# record table, id of the database, fingerprint of the model
_HEADER = struct.Struct("<8sIIQQ16sI16s32s")


def is_finished(path: Path, length: int, records: int, layout: RecordLayout, seal: Seal) -> bool:
    """Return whether `path` is a finished segment with this many records, so that a build can keep it."""
    try:
        return len(read_head(RecordFile(path), length, layout, seal)[0]) == records
    except (OSError, CorruptDatabase):
        return False


def pack_header(length: int, records: int, layout: RecordLayout, seal: Seal, table_checksum: int) -> bytes:
    """Return the bytes of the header of a finished segment."""
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        length,
        records,
        layout.elements(length) * 2,
        layout.dtype_name,
        table_checksum,
        bytes.fromhex(seal.id),
        bytes.fromhex(seal.fingerprint),
    )


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
