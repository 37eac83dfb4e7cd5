"""Keep blocks of keys and values on disk, in a folder that several processes may use at once.

    folder/usage                bytes of all other files; its lock is held to create, rename or remove them
    folder/ab/abcdef....kv      the block with the key abcdef..., see block_file.py
    folder/0123....unfinished   a file that a process is writing, locked by its writer

No lock is held while content is written or read: a writer first reserves the size of its file, by creating
an unfinished file of this size, and then fills and renames it. So after a kill at any time, each block is
whole, and the sum of all file sizes never exceeds the limit. The usage may be too high after a kill. Every
scan of the folder corrects it, and removes the unfinished files that nobody locks.

The lock of `usage` also keeps the threads of one process apart, because each use opens the file anew.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
import resource
import secrets
import stat
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from attncache_core.reuse.kv.block_file import BlockFormat, DamagedBlock, OpenBlock, TierCounter, TierCounts
from attncache_core.reuse.kv.blocks import BlockName
from attncache_core.runtime.files import PRIVATE

logger = logging.getLogger(__name__)

# Eviction goes on down to this part of the limit, so that the next writes need none.
_LOW_WATERMARK = 0.95
# An opened block is marked as used at most this often.
_TOUCH_SECONDS = 1.0
# Clocks of machines that share a folder differ a little.
_MAX_AHEAD_NS = 60 * 10**9
# Another process holds the lock for the time of a scan at most, unless it hangs.
_MAX_LOCK_SECONDS = 5.0
_LOCK_POLL_SECONDS = 0.002
_SECONDS_BETWEEN_COMPLAINTS = 60.0
_MAX_FILES = 2**20  # where the system sets no limit
_USAGE = struct.Struct("<q")
_UNFINISHED = ".unfinished"
_BLOCK_FILE = re.compile(r"([0-9a-f]{64})\.kv")


class _Usage:
    """The bytes of all blocks and unfinished files, in a file that the caller has locked."""

    def __init__(self, descriptor: int, used: int) -> None:
        self._descriptor, self.used = descriptor, used

    def set(self, used: int) -> None:
        """Change the number of bytes. Raises OSError."""
        self.used = max(0, used)
        os.pwrite(self._descriptor, _USAGE.pack(self.used), 0)


class _Listed(NamedTuple):
    """A block as the last scan found it."""

    modified: int  # when it was last used, ns
    key: bytes
    size: int  # bytes


class DiskTier(TierCounter):
    """A folder of blocks that all have parts of the same sizes.

    folder: is created if it is missing, and made private to its owner, because blocks hold token ids.
    part_sizes: bytes of each part of a block. most_bytes: limit for the sum of the sizes of all files in the
    folder, whichever process writes them; a folder above the limit is reduced at once. A full tier first
    removes the block whose last use is the longest ago. protected: returns the keys that this tier must not
    evict for a write. It is called without any lock held.

    All methods may be called by several threads at once.
    Raises OSError if the folder holds other files, or cannot be created, made private, read and written to.
    Raises ValueError if there are no parts, or parts without content.
    """

    def __init__(
        self,
        folder: Path,
        part_sizes: Sequence[int],
        most_bytes: int,
        *,
        protected: Callable[[], Container[bytes]] = lambda: (),
    ) -> None:
        super().__init__()
        self._folder, self._format = folder, BlockFormat(tuple(part_sizes))
        self.most_bytes = most_bytes
        self._max_bytes = most_bytes - _USAGE.size
        self._protected = protected
        # The other half of the files that the process may open is for connections, and all else.
        self._may_open = threading.BoundedSemaphore(_allowed_files() // 2)
        self._complained = -math.inf  # when the log last said that blocks are not saved
        # Blocks in the order of eviction. The list is used only while the lock of `usage` is held.
        self._oldest: deque[_Listed] = deque()
        self._make_folder()
        if not (folder / "usage").exists() and any(folder.iterdir()):
            # Its mode is about to be changed, and its files would count as blocks.
            raise OSError(errno.ENOTEMPTY, "it is not empty and no folder of keys and values")
        if stat.S_IMODE(folder.stat().st_mode) != PRIVATE:
            folder.chmod(PRIVATE)
        with self._locked() as usage:
            usage.set(self._scan())
            # An earlier start may have had a higher limit.
            self._evict(usage, self._max_bytes, ())

    @property
    def bytes_used(self) -> int:
        """Bytes of all blocks and unfinished files in the folder, as the processes account for them.

        The number may be too high after a process was killed, until a scan corrects it.
        """
        try:
            with open(self._folder / "usage", "rb", buffering=0) as file:
                return _stored_usage(file.fileno()) or 0
        except OSError:
            return 0

    @property
    def file_bytes(self) -> int:
        """Bytes of the file of a block."""
        return self._format.file_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can be written before a block must be evicted."""
        return max(0, self._max_bytes - self.bytes_used)

    def contains(self, key: bytes) -> bool:
        """Return whether there is a file for this block, of whichever process. The file is not checked."""
        return os.path.exists(self._path(key))

    def open(self, name: BlockName) -> OpenBlock | None:
        """Open a block, or return None if the tier does not have the block.

        Returns None also if half of the files that the process may open are blocks, or if the file cannot be
        opened. A file that is not this block with parts of this tier's sizes is removed and counted as
        damaged. Raises ValueError if key, parent or tokens have a wrong size.
        """
        identity = self._format.identity(name)
        if not self._may_open.acquire(blocking=False):
            return None
        try:
            path = self._path(name.key)
            file = open(path, "rb", buffering=0, opener=_opener_at_once)  # noqa: SIM115 - OpenBlock closes it
        except OSError:
            self._may_open.release()
            return None
        on_close = weakref.finalize(file, self._may_open.release)
        on_damage = partial(self._drop_damaged, name.key)
        try:
            checksums = self._format.read_checksums(file.fileno(), identity)
            self._touch(file.fileno())
        except DamagedBlock:
            file.close()
            on_close()
            on_damage()
            return None
        return OpenBlock(file, self._format, checksums, self._count_read, on_damage, on_close)

    def write(
        self,
        name: BlockName,
        parts: Sequence[memoryview | bytes],
        on_part: Callable[[int], None] = lambda _: None,
    ) -> bool:
        """Write a block, and return whether the tier has it now.

        A block that the tier has already is not written again. If the tier is full, other blocks are evicted.
        Return False if there is no space, on the disk or under the limit, or if writing fails. Nothing of the
        block stays in this case.
        parts: contiguous content of each part, of the tier's part sizes; nobody may change it meanwhile.
        on_part: is called with the index of each part after the part was written, without any lock held. An
        exception that it raises ends the write.
        Raises ValueError if the name or the parts have wrong sizes.
        """
        if self.contains(name.key):
            return True
        try:
            with self._unfinished(self._format.file_bytes) as (path, descriptor):
                self._format.write(descriptor, name, parts, on_part)
                self._finish(path, name.key)
        except OSError as error:
            self._count(TierCounts(failed_writes=1))
            self._complain(error)
            return False
        self._count(TierCounts(written_bytes=self._format.file_bytes))
        return True

    def remove(self, key: bytes) -> None:
        """Remove a block if the tier has it. Raises OSError if the file cannot be removed."""
        self._remove(self._path(key))

    def clear(self) -> None:
        """Remove all blocks, of all processes. A block that is just being written may appear afterwards.

        Raises OSError if a file cannot be removed.
        """
        with self._locked() as usage:
            self._scan()
            for block in self._oldest:
                self._path(block.key).unlink(missing_ok=True)
            usage.set(self._scan())

    def drop_from_page_cache(self, key: bytes) -> None:
        """Let the next reader of a block read it from the disk itself. Raises OSError without a block."""
        with open(self._path(key), "rb") as file:
            # Only pages that have reached the disk can be dropped.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)

    def _complain(self, error: OSError) -> None:
        """Say in the log that blocks are not saved, but not for each of them."""
        now = time.monotonic()
        if now >= self._complained + _SECONDS_BETWEEN_COMPLAINTS:
            self._complained = now
            reason = error.strerror or type(error).__name__
            logger.warning("keys and values are not saved in %s: %s", self._folder, reason)

    def _path(self, key: bytes) -> Path:
        """Return the file of a block."""
        name = key.hex()
        return self._folder / name[:2] / f"{name}.kv"

    def _touch(self, descriptor: int) -> None:
        """Mark an open block as used now, unless that was done just before."""
        if abs(time.time() - os.fstat(descriptor).st_mtime) > _TOUCH_SECONDS:
            # Blocks of a folder that cannot be changed are still readable.
            with suppress(OSError):
                os.utime(descriptor)

    def _drop_damaged(self, key: bytes) -> None:
        """Count and remove a damaged block."""
        self._count(TierCounts(damaged=1))
        with suppress(OSError):
            self.remove(key)

    def _count_read(self, count: int) -> None:
        self._count(TierCounts(read_bytes=count))

    @contextmanager
    def _locked(self) -> Iterator[_Usage]:
        """Hold the lock of the folder while the `with` block runs. Raises OSError.

        A folder that was removed, as programs that clear up do, is made again.
        """
        if not self._folder.exists():
            self._make_folder()
            logger.warning("the folder of keys and values, %s, was removed, and was made again", self._folder)
        with open(self._folder / "usage", "r+b", buffering=0, opener=_private_opener) as file:
            _lock(file)
            try:
                used = _stored_usage(file.fileno())
                usage = _Usage(file.fileno(), self._scan() if used is None else used)
                yield usage
            finally:
                # Closing would not unlock the file if the process was forked meanwhile.
                fcntl.flock(file, fcntl.LOCK_UN)

    @contextmanager
    def _unfinished(self, size: int) -> Iterator[tuple[Path, int]]:
        """Create a file of `size` zeros; yield its path and descriptor.

        At the end of the `with` block, remove the file unless it was renamed.
        Raises OSError, also if there is not enough space under the limit.
        """
        path = self._folder / f"{secrets.token_hex(16)}{_UNFINISHED}"
        try:
            with self._reserve(path, size) as file:
                yield path, file.fileno()
        finally:
            if os.path.exists(path):
                with suppress(OSError):
                    self._remove(path)

    def _reserve(self, path: Path, size: int) -> FileIO:
        """Make room for a file of `size` zeros and create it. Raises OSError."""
        protected = self._protected()
        with self._locked() as usage, ExitStack() as on_error:
            self._make_room(usage, size, protected)
            file = on_error.enter_context(open(path, "x+b", buffering=0, opener=_private_opener))
            # Scans recognize by this lock that the writer is alive.
            fcntl.flock(file, fcntl.LOCK_EX)
            # In this order, a kill leaves the usage too high, never too low.
            on_error.callback(usage.set, usage.used)
            usage.set(usage.used + size)
            file.truncate(size)
            on_error.pop_all()
        return file

    def _finish(self, path: Path, key: bytes) -> None:
        """Give a written file its place, unless another writer was faster. Raises OSError."""
        target = self._path(key)
        # There is no fsync. A power failure may leave a torn block, but its checksums reveal it.
        with self._locked():
            if not target.exists():
                target.parent.mkdir(mode=PRIVATE, exist_ok=True)
                path.rename(target)

    def _remove(self, path: Path) -> None:
        """Remove a file if it exists. Raises OSError."""
        with self._locked() as usage, suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            usage.set(usage.used - size)

    def _make_room(self, usage: _Usage, size: int, protected: Container[bytes]) -> None:
        """Evict blocks if a file of `size` bytes does not fit. Raises OSError if it still does not fit."""
        if usage.used + size <= self._max_bytes:
            return
        goal = min(self._max_bytes - size, int(self._max_bytes * _LOW_WATERMARK))
        if goal >= 0:
            self._evict(usage, goal, protected)
            # If the list accounts for all bytes, a scan would find nothing that could be evicted.
            if usage.used > goal and usage.used != sum(block.size for block in self._oldest):
                usage.set(self._scan())
                self._evict(usage, goal, protected)
        if usage.used + size > self._max_bytes:
            raise OSError(errno.ENOSPC, "no space under the limit of the tier")

    def _evict(self, usage: _Usage, goal: int, protected: Container[bytes]) -> None:
        """Remove listed blocks, the oldest first, until `goal` bytes are used or the rest is protected."""
        used, evictions, kept = usage.used, 0, []
        while used > goal and self._oldest:
            block = self._oldest.popleft()
            if block.key in protected:
                kept.append(block)
            elif self._remove_unused(block):
                used, evictions = used - block.size, evictions + 1
        self._oldest.extendleft(reversed(kept))
        usage.set(used)
        self._count(TierCounts(evictions=evictions))

    def _remove_unused(self, block: _Listed) -> bool:
        """Remove a block unless it was used after the last scan; return whether the block was removed.

        Blocks that were used or written after the scan are younger than the rest of the list, so they can
        wait for the next scan.
        """
        path = self._path(block.key)
        try:
            if path.stat().st_mtime_ns != block.modified:
                return False
            path.unlink()
        except OSError:
            return False
        return True

    def _scan(self) -> int:
        """List the blocks in the order of eviction, and return the bytes of all blocks and unfinished files.

        Remove the unfinished files of processes that are gone. Raises OSError.
        """
        blocks, unfinished = [], 0
        for path in self._folder.iterdir():
            if path.suffix == _UNFINISHED:
                unfinished += _bytes_of_writer(path)
            elif len(path.name) == 2 and path.is_dir():
                blocks += _blocks_in(path)
        # Blocks that were used when the clock was ahead would otherwise stay, and push out those of today.
        latest = time.time_ns() + _MAX_AHEAD_NS
        self._oldest = deque(sorted(blocks, key=lambda block: (block.modified <= latest, block)))
        return unfinished + sum(block.size for block in blocks)


def _lock(file: FileIO) -> None:
    """Lock an open file. Raises OSError if another process holds the lock for long: it may be stopped."""
    last_try = time.monotonic() + _MAX_LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > last_try:
                raise OSError(errno.EAGAIN, "another process holds its lock") from None
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return


def _allowed_files() -> int:
    """Return how many files this process may open."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_FILES if allowed == resource.RLIM_INFINITY else min(allowed, _MAX_FILES)


def _opener_at_once(path: str, flags: int) -> int:
    """Open a file without waiting, as the system does for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _private_opener(path: str, flags: int) -> int:
    """Open a file that only its owner may read, and create it if it is missing."""
    return os.open(path, flags | os.O_CREAT, 0o600)


def _stored_usage(descriptor: int) -> int | None:
    """Return the number in the open file `usage`, or None if the file is new."""
    content = os.pread(descriptor, _USAGE.size, 0)
    return _USAGE.unpack(content)[0] if len(content) == _USAGE.size else None


def _bytes_of_writer(path: Path) -> int:
    """Return the size of an unfinished file. If its writer is gone, remove the file and return 0."""
    try:
        with path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return path.stat().st_size
    return 0


def _blocks_in(folder: Path) -> list[_Listed]:
    """Return the blocks in a subfolder. Other files are skipped."""
    blocks = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(folder.name) and (match := _BLOCK_FILE.fullmatch(entry.name)):
                state = entry.stat(follow_symlinks=False)
                blocks.append(_Listed(state.st_mtime_ns, bytes.fromhex(match[1]), state.st_size))
    return blocks
