"""Keep blocks of keys and values where several machines find them, as values by name.

A value is the file of a block, byte by byte, see block_file.py. Its name is the key of the block, which
stands for the model, the dtype and the code that computes. What keeps the values also bounds their number.

    open    one question for the heads of all blocks; a head proves which block it is, and has the checksums
    read    one value per block
    write   after the answer, by the saving thread; see transfer.py

Nothing fails because values cannot be had: a block that is not found, or is lost, is computed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from attncache_core.reuse.kv.block_file import BlockFormat, DamagedBlock, TierCounter, TierCounts
from attncache_core.reuse.kv.blocks import BlockName

# A batch waits no longer for blocks that it has begun with.
_MAX_READ_SECONDS = 5.0


class BlockValues(Protocol):
    """Values by name that several machines share. Thread safe.

    All methods except `close` raise OSError if the values cannot be had in time.
    """

    def heads(self, names: Sequence[str], size: int) -> list[bytes]:
        """Return the first `size` bytes of each value, by one question; b"" if there is none.

        It is asked while a batch waits, so it gives up within milliseconds.
        """

    def get(self, name: str) -> bytes | None:
        """Return a value, or None if there is none."""

    def contains(self, name: str) -> bool:
        """Return whether there is a value."""

    def put(self, name: str, value: bytes, seconds: float | None = None) -> None:
        """Set a value. seconds: let the value expire so long after now."""

    def remove(self, name: str) -> None:
        """Remove a value if there is one."""

    def clear(self) -> None:
        """Remove all values."""

    def close(self) -> None:
        """End all connections."""


class RemoteTier(TierCounter):
    """Blocks that all have parts of the same sizes, as values. All methods may be called by several threads.

    part_sizes: bytes of each part of a block, as for DiskTier.
    """

    def __init__(self, values: BlockValues, part_sizes: Sequence[int]) -> None:
        super().__init__()
        self.values, self._format = values, BlockFormat(tuple(part_sizes))

    def open(self, names: Sequence[BlockName]) -> dict[bytes, RemoteBlock]:
        """Return the blocks that the tier has, by key, without their parts.

        A value that is not the block of its name is removed and counted as damaged.
        """
        if not names:
            return {}
        try:
            heads = self.values.heads([name.key.hex() for name in names], self._format.head_bytes)
        except OSError:
            self._count(TierCounts(failures=1))
            return {}
        until = time.monotonic() + _MAX_READ_SECONDS
        found = {}
        for name, head in zip(names, heads, strict=True):
            if not head:
                continue
            try:
                checksums = self._format.checksums(head, self._format.identity(name))
            except DamagedBlock:
                self._drop_damaged(name.key)
                continue
            found[name.key] = RemoteBlock(
                partial(self._read, name, until),
                self._format,
                checksums,
                partial(self._drop_damaged, name.key),
            )
        return found

    def write(
        self, name: BlockName, parts: Sequence[memoryview | bytes], seconds: float | None = None
    ) -> bool:
        """Write a block unless the tier has it, and return whether the tier has it now.

        parts: contiguous content of each part, of the tier's part sizes; nobody may change it meanwhile.
        seconds: let the block expire so long after now.
        """
        value_name = name.key.hex()
        try:
            if not self.values.contains(value_name):
                self.values.put(value_name, self._format.encoded(name, parts), seconds)
                self._count(TierCounts(written_bytes=self._format.file_bytes))
        except OSError:
            self._count(TierCounts(failed_writes=1))
            return False
        return True

    def remove(self, key: bytes) -> None:
        """Remove a block if the tier has it. Raises OSError."""
        self.values.remove(key.hex())

    def clear(self) -> None:
        """Remove all blocks, of all machines. Raises OSError."""
        self.values.clear()

    def _read(self, name: BlockName, until: float) -> bytes:
        """Return the value of a block. Raises DamagedBlock if it is gone, or cannot be had in time."""
        try:
            if time.monotonic() > until:
                raise TimeoutError
            value = self.values.get(name.key.hex())
        except OSError as error:
            self._count(TierCounts(failures=1))
            raise DamagedBlock("the block cannot be had") from error
        if value is None:
            raise DamagedBlock("the block is gone")
        self._count(TierCounts(read_bytes=len(value)))
        return value

    def _drop_damaged(self, key: bytes) -> None:
        """Count and remove a damaged block."""
        self._count(TierCounts(damaged=1))
        try:
            self.remove(key)
        except OSError:
            self._count(TierCounts(failures=1))


class RemoteBlock:
    """A block whose head was checked; see OpenBlock. It is read as a whole when its first part is.

    A question for one layer of all blocks costs more than the time that computing beside it saves.
    """

    tier = "shared"
    is_read_whole = True

    def __init__(
        self,
        read: Callable[[], bytes],
        block_format: BlockFormat,
        checksums: Sequence[int],
        on_damage: Callable[[], None],
    ) -> None:
        """read: returns the value, and raises DamagedBlock. checksums: of the head that was checked."""
        self._read, self._format, self._checksums = read, block_format, checksums
        self._on_damage = on_damage
        self._value: memoryview | None = None

    def read_part(self, index: int, into: memoryview) -> None:
        """Read a part into writable, contiguous memory of the part's size. Raises DamagedBlock."""
        if self._value is None:
            self._value = memoryview(self._read())
        first, end = self._format.offsets[index : index + 2]
        part = self._value[first:end]
        if len(part) != end - first or zlib.crc32(part) != self._checksums[index]:
            self._on_damage()
            raise DamagedBlock(f"part {index} of the block was changed")
        into.cast("B")[:] = part

    def close(self) -> None:
        """Forget the value."""
        self._value = None
