"""Write and read the file of one block: a head with the block's identity and checksums, then its parts.

    0               magic, version, numbers of parts and of tokens, key, parent, tokens, part sizes
                    CRC-32 of each part
                    zeros
    head_bytes - 4  CRC-32 of all bytes before it
    head_bytes      part 0, part 1, ... without gaps; head_bytes is a multiple of 4096

All integers are little-endian. Every byte of the file is covered by a checksum.
"""

from __future__ import annotations

import operator
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from itertools import accumulate
from typing import NamedTuple

from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, TOKEN_BYTES, BlockName

_MAGIC = b"ATTNKEYS"
_VERSION = 1
_PAGE_BYTES = 4096
_KEY_BYTES = 32

# magic, version, number of parts, number of tokens, key, parent, tokens filled up with zeros
_IDENTITY = struct.Struct("<8sIII32s32s64s")
_CHECKSUM = struct.Struct("<I")


class DamagedBlock(Exception):
    """A file is not the whole, unchanged block of its name, or it cannot be read.

    The disk tier removes such a file. The block must be computed again.
    """


@dataclass(frozen=True)
class BlockFormat:
    """The format of files whose blocks have parts of these sizes.

    part_sizes: bytes of each part, at least 1. Raises ValueError for other sizes.
    """

    part_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.part_sizes, default=0) < 1:
            raise ValueError(f"part sizes are {self.part_sizes}, but every part needs at least one byte")

    @cached_property
    def head_bytes(self) -> int:
        """Offset of the first part, a multiple of 4096."""
        parts = struct.calcsize(self._numbers("Q")) + struct.calcsize(self._numbers("I"))
        least = _IDENTITY.size + parts + _CHECKSUM.size
        return -(-least // _PAGE_BYTES) * _PAGE_BYTES

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each part, and then the size of the file, bytes [parts + 1]."""
        return tuple(accumulate(self.part_sizes, initial=self.head_bytes))

    @property
    def file_bytes(self) -> int:
        """Size of every file of this format."""
        return self.offsets[-1]

    def identity(self, name: BlockName) -> bytes:
        """Return the first bytes of the file of block `name`. They differ from those of every other block.

        Raises ValueError if key or parent do not have 32 bytes, or if there are not 1 to 16 whole tokens.
        """
        key, parent, tokens = name.key, name.parent, name.tokens
        count, rest = divmod(len(tokens), TOKEN_BYTES)
        if len(key) != _KEY_BYTES or len(parent) != _KEY_BYTES or rest or not 1 <= count <= BLOCK_TOKENS:
            sizes = f"{len(key)}, {len(parent)} and {len(tokens)}"
            raise ValueError(f"key, parent and tokens of a block cannot have {sizes} bytes")
        fixed = _IDENTITY.pack(_MAGIC, _VERSION, len(self.part_sizes), count, key, parent, tokens)
        return fixed + struct.pack(self._numbers("Q"), *self.part_sizes)

    def write(
        self,
        descriptor: int,
        name: BlockName,
        parts: Sequence[memoryview | bytes],
        on_part: Callable[[int], None],
    ) -> None:
        """Write a block into an open file of `file_bytes` zeros.

        parts: contiguous content of each part, of the sizes in `part_sizes`; nobody may change it meanwhile.
        on_part: is called with the index of each part after the part was written.
        Raises OSError, and ValueError if the name or the sizes are wrong.
        """
        identity = self.identity(name)
        self._require_sizes(parts)
        checksums = []
        for index, (part, offset) in enumerate(zip(parts, self.offsets, strict=False)):
            write_all(descriptor, part, offset)
            checksums.append(zlib.crc32(part))
            on_part(index)
        write_all(descriptor, self._head(identity, checksums), 0)

    def encoded(self, name: BlockName, parts: Sequence[memoryview | bytes]) -> bytes:
        """Return the bytes of a block's file. Arguments and errors: see `write`."""
        identity = self.identity(name)
        self._require_sizes(parts)
        return b"".join([self._head(identity, [zlib.crc32(part) for part in parts]), *parts])

    def _require_sizes(self, parts: Sequence[memoryview | bytes]) -> None:
        sizes = tuple(memoryview(part).nbytes for part in parts)
        if sizes != self.part_sizes:
            raise ValueError(f"parts of {sizes} bytes are not the block's parts of {self.part_sizes} bytes")

    def _head(self, identity: bytes, checksums: Sequence[int]) -> bytes:
        content = identity + struct.pack(self._numbers("I"), *checksums)
        content = content.ljust(self.head_bytes - _CHECKSUM.size, b"\0")
        return content + _CHECKSUM.pack(zlib.crc32(content))

    def read_checksums(self, descriptor: int, identity: bytes) -> tuple[int, ...]:
        """Check the head of an open file, and return the CRC-32 of each part.

        Raises DamagedBlock unless the file has the right size, an unchanged head and this identity.
        """
        head = memoryview(bytearray(self.head_bytes))
        read_all(descriptor, head, 0)
        checksums = self.checksums(head, identity)
        if (size := os.fstat(descriptor).st_size) != self.file_bytes:
            raise DamagedBlock(f"the file has {size} bytes instead of {self.file_bytes}")
        return checksums

    def checksums(self, head: memoryview | bytes, identity: bytes) -> tuple[int, ...]:
        """Return the CRC-32 of each part from the first `head_bytes` of a block's file.

        Raises DamagedBlock unless they are a whole and unchanged head with this identity.
        """
        content, checksum = head[: -_CHECKSUM.size], head[-_CHECKSUM.size :]
        if len(head) != self.head_bytes or _CHECKSUM.pack(zlib.crc32(content)) != checksum:
            raise DamagedBlock("the head of the block was changed")
        if content[: len(identity)] != identity:
            raise DamagedBlock("the file holds another block")
        return struct.unpack_from(self._numbers("I"), content, len(identity))

    def _numbers(self, code: str) -> str:
        """Return the struct format of one number per part."""
        return f"<{len(self.part_sizes)}{code}"


class TierCounts(NamedTuple):
    """What a tier has done since it was created. Other processes and machines count for themselves."""

    evictions: int = 0  # blocks removed because the tier was full
    failures: int = 0  # questions for blocks that were not answered in time, or not asked after a failure
    damaged: int = 0  # times that a file was not the whole, unchanged block of its name
    failed_writes: int = 0  # blocks that were not taken: no space, or an error
    written_bytes: int = 0
    read_bytes: int = 0  # of parts that were read and found unchanged


class TierCounter:
    """The counts of one tier. Any thread may add to them."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self.counts = TierCounts()

    def _count(self, more: TierCounts) -> None:
        with self._counting:
            self.counts = TierCounts(*map(operator.add, self.counts, more))


class OpenBlock:
    """An open block whose head was checked; a context manager that closes the file.

    The block stays readable while it is open, even if it is removed. Several threads may read at once.
    checksums: as `BlockFormat.read_checksums` returned them. on_read: is called with the bytes of each part
    that was read. on_damage: is called before DamagedBlock is raised. on_close: is called after the file was
    closed, maybe more than once.
    """

    tier = "disk"
    is_read_whole = False

    def __init__(
        self,
        file: FileIO,
        block_format: BlockFormat,
        checksums: Sequence[int],
        on_read: Callable[[int], None],
        on_damage: Callable[[], None],
        on_close: Callable[[], object],
    ) -> None:
        self._file, self._format, self._checksums = file, block_format, checksums
        self._on_read, self._on_damage, self._on_close = on_read, on_damage, on_close

    def __enter__(self) -> OpenBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_part(self, index: int, into: memoryview) -> None:
        """Read a part into writable, contiguous memory of the part's size.

        Raises DamagedBlock if the part is not whole and unchanged; `into` then has any content.
        Raises ValueError if `into` has another size, or if the block is closed.
        """
        if into.nbytes != self._format.part_sizes[index]:
            raise ValueError(f"part {index} has {self._format.part_sizes[index]} bytes, not {into.nbytes}")
        try:
            read_all(self._file.fileno(), into, self._format.offsets[index])
            if zlib.crc32(into) != self._checksums[index]:
                raise DamagedBlock(f"part {index} of the block was changed")
        except DamagedBlock:
            self._on_damage()
            raise
        self._on_read(into.nbytes)

    def close(self) -> None:
        """Close the file. Closing it again has no effect."""
        self._file.close()
        self._on_close()


def write_all(descriptor: int, content: memoryview | bytes, offset: int) -> None:
    """Write contiguous `content` at `offset`, without a copy. Raises OSError."""
    rest = memoryview(content).cast("B")
    while rest:
        # One call writes at most 2 GB, and fewer bytes when the disk becomes full.
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def read_all(descriptor: int, into: memoryview, offset: int) -> None:
    """Fill contiguous `into` with the bytes at `offset`, without a copy.

    Raises DamagedBlock if the file ends before, or if it cannot be read.
    """
    rest = into.cast("B")
    while rest:
        try:
            count = os.preadv(descriptor, [rest], offset)
        except OSError as error:
            raise DamagedBlock("the file cannot be read") from error
        if not count:
            raise DamagedBlock("the file is cut short")
        rest, offset = rest[count:], offset + count
