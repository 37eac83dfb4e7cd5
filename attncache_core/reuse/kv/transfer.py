"""Blocks on their way between memory and the tiers behind it: a thread that loads, and a thread that saves.

    load    layer after layer, so that a batch computes a layer while the next layer is loaded; blocks that
            other machines have saved come first, one by one
    save    after the answer; a block that does not fit into the write buffer is dropped and counted

Source of both: CachedAttention, section 3.2 (layer-wise pre-loading, asynchronous saving).
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from attncache_core.reuse.kv.block_file import DamagedBlock, OpenBlock
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, TOKEN_BYTES, BlockName
from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.quantized import Int8Slots
from attncache_core.reuse.kv.remote import RemoteBlock, RemoteTier

logger = logging.getLogger(__name__)

# The speed of loading is measured with about so many bytes, in so many blocks.
_MEASURED_BYTES = 16 << 20
_MIN_MEASURED, _MAX_MEASURED = 4, 32
_SECONDS_BETWEEN_LOOKS = 0.1
# After this time, other machines do not find the blocks with which a process measured that was killed.
_MEASURED_SECONDS = 60.0
# After blocks of other machines took longer to load than to compute, nobody asks for others for so long.
_REST_SECONDS = 5.0

# A saved block, of either tier.
SavedBlock = OpenBlock | RemoteBlock


@dataclass(eq=False)
class Loading:
    """Blocks that are loaded together, for one batch."""

    blocks: Sequence[tuple[SavedBlock, list[memoryview]]]  # each with the parts to fill
    quantized: Int8Slots | None = None  # how the blocks were saved; None: as they are in memory
    # int32 [1], the number of parts that are loaded, of all layers and of the state; see KeyValueSlots.ready
    ready: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int32))
    is_damaged: bool = False  # a part was not what was saved: nothing of these blocks may be used
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Fill all parts, the layers in order. After damage, all parts count as loaded: nobody waits."""
        parts = len(self.blocks[0][1])
        try:
            for block, into in self.blocks:
                if block.is_read_whole:
                    for part in range(parts):
                        self._read_part(block, part, into[part])
                    block.close()
            for part in range(parts):
                self._read(part)
                self.ready[0] = part + 1
        except DamagedBlock:
            self.is_damaged = True
        except BaseException:
            self.is_damaged = True  # whatever the reason, the parts are not what was saved
            raise
        finally:
            for block, _ in self.blocks:
                block.close()
            self.ready[0] = parts
            self.done.set()

    def _read(self, part: int) -> None:
        for block, into in self.blocks:
            if not block.is_read_whole:
                self._read_part(block, part, into[part])

    def _read_part(self, block: SavedBlock, part: int, into: memoryview) -> None:
        if self.quantized is None:
            block.read_part(part, into)
        else:
            saved = memoryview(bytearray(self.quantized.part_bytes[part]))
            block.read_part(part, saved)
            self.quantized.decode(part, saved, into)

    @property
    def part_bytes(self) -> int:
        """The bytes of all parts in memory."""
        return sum(part.nbytes for _, into in self.blocks for part in into)


@dataclass
class TransferCounts:
    """What was transferred since the start."""

    loaded_blocks: int = 0
    stall_seconds: float = 0.0  # that batches waited for their last layers
    dropped_writes: int = 0  # blocks that did not fit into the write buffer, or had no thread to save them


class Transfers:
    """The threads between the memory and the tiers behind it of one store."""

    def __init__(
        self,
        disk: DiskTier | None,
        write_buffer_blocks: int,
        quantized: Int8Slots | None = None,
        remote: RemoteTier | None = None,
    ) -> None:
        """write_buffer_blocks: the most blocks that wait to be saved. quantized: save blocks in 8 bits.

        remote: is asked for what is not on the disk.
        """
        self.disk, self.quantized, self.remote = disk, quantized, remote
        self.counts = TransferCounts()
        # Bytes of blocks in memory per second, from each tier; 0: not measured.
        self.load_speed = self.remote_speed = 0.0
        self.prefill_speed = 0.0  # tokens per second; 0: not measured
        self._remote_rests_until = 0.0
        # Of loaded blocks of other machines, until they say how fast such blocks load.
        self._learned_bytes, self._learned_seconds = 0, 0.0
        self._buffer = write_buffer_blocks
        self._closing = self._write_failed = False
        self._saves: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._prefetches: deque[Callable[[], None]] = deque()
        self._prefetching = threading.Lock()
        self._is_prefetching = False  # whether `_prefetch_one` is in the queue, or runs
        self._threads = [
            threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("kv-save", self._saves), ("kv-load", self._loads))
        ]
        for thread in self._threads:
            thread.start()
        # If nobody calls `close`, the threads end when this object is collected. At the end of the process
        # they go on, for handlers that still load or save.
        weakref.finalize(self, _end, self._saves, self._loads).atexit = False

    @property
    def tiers(self) -> list[DiskTier | RemoteTier]:
        """Where blocks are saved."""
        return [tier for tier in (self.disk, self.remote) if tier is not None]

    def pays(self, token_bytes: int | None) -> bool:
        """Return whether a token is loaded from the disk faster than it is computed, as far as known."""
        return self.disk is not None and self._is_faster(token_bytes, self.load_speed)

    def remote_pays(self, token_bytes: int | None) -> bool:
        """Return the same for blocks that other machines have saved. See `_REST_SECONDS`."""
        if self.remote is None or time.monotonic() < self._remote_rests_until:
            return False
        return self._is_faster(token_bytes, self.remote_speed)

    def _is_faster(self, token_bytes: int | None, speed: float) -> bool:
        if token_bytes is None or not (speed and self.prefill_speed):
            return True
        return token_bytes / speed < 1 / self.prefill_speed

    def any_pays(self, token_bytes: int) -> bool:
        """Return whether any tier loads a token faster than it is computed, as far as known."""
        return self.pays(token_bytes) or self.remote_pays(token_bytes)

    def open(self, fronts: Sequence[Sequence[BlockName]], token_bytes: int | None) -> dict[bytes, SavedBlock]:
        """Open the saved blocks of sequences, by key.

        token_bytes: open only what is loaded faster than computed; None: open everything. fronts: the names
        of each sequence that are worth opening. If no other machine has blocks, the disk is asked until the
        first block of a sequence that it does not have. Other machines are asked once, for all others.
        """
        opened: dict[bytes, SavedBlock] = {}
        if self.disk is not None and self.pays(token_bytes):
            for names in fronts:
                for name in names:
                    if name.key not in opened:
                        if (file := self.disk.open(name)) is not None:
                            opened[name.key] = file
                        elif self.remote is None:
                            break
        if self.remote is not None and self.remote_pays(token_bytes):
            missing = {name.key: name for names in fronts for name in names if name.key not in opened}
            opened |= self.remote.open(list(missing.values()))
        return opened

    def open_longest(
        self, choices: Sequence[Sequence[BlockName]], token_bytes: int | None
    ) -> list[tuple[BlockName, SavedBlock] | None]:
        """Open the first saved block of each choice; None: no block of the choice is saved. See `open`."""
        found: list[tuple[BlockName, SavedBlock] | None] = [None] * len(choices)
        if self.disk is not None and self.pays(token_bytes):
            for index, names in enumerate(choices):
                opened = ((name, file) for name in names if (file := self.disk.open(name)))
                found[index] = next(opened, None)
        if self.remote is not None and self.remote_pays(token_bytes):
            missing = {
                name.key: name
                for names, block in zip(choices, found, strict=True)
                for name in (names if block is None else ())
            }
            remote = self.remote.open(list(missing.values()))
            for index, names in enumerate(choices):
                if found[index] is None:
                    saved = ((name, remote.pop(name.key)) for name in names if name.key in remote)
                    found[index] = next(saved, None)
        return found

    def measure(self, part_bytes: Sequence[int]) -> None:
        """Measure how fast each tier loads blocks, from the disk outside the page cache; see `pays`.

        part_bytes: of a block in memory. Some blocks of random content are written, read and removed. If
        there is no free room for them, the speed stays unknown, because no block is evicted to measure it.
        While other machines' blocks cannot be had, their speed stays unknown too; see `_learn`.
        """
        parts = [memoryview(bytearray(secrets.token_bytes(size))) for size in part_bytes]
        count = _measured_blocks(sum(part_bytes))
        names = [BlockName(secrets.token_bytes(32), bytes(32), bytes(TOKEN_BYTES)) for _ in range(count)]
        saved = self.quantized.encode(parts, BLOCK_TOKENS) if self.quantized else parts
        for tier in self.tiers:
            if isinstance(tier, RemoteTier):
                self.remote_speed = self._measured(tier, names, saved, parts)
            elif tier.free_bytes >= count * tier.file_bytes:
                self.load_speed = self._measured(tier, names, saved, parts)

    def _measured(
        self,
        tier: DiskTier | RemoteTier,
        names: Sequence[BlockName],
        saved: Sequence[memoryview | bytes],
        parts: list[memoryview],
    ) -> float:
        """Return how many bytes of blocks a tier loads per second; 0: unknown."""
        speed = 0.0
        with suppress(OSError):
            if all(_written(tier, name, saved) for name in names):
                started = time.perf_counter()
                blocks = _opened(tier, names)
                if blocks:
                    loading = Loading([(block, parts) for block in blocks], self.quantized)
                    loading.run()
                    seconds = time.perf_counter() - started
                    speed = 0.0 if loading.is_damaged else loading.part_bytes / seconds
        for name in names:
            with suppress(OSError):
                tier.remove(name.key)
        return speed

    def load(self, loading: Loading) -> None:
        """Load blocks in the loading thread; in this thread after `close`, and in a forked process."""
        if self._threads[1].is_alive():
            self._loads.put(lambda: self.run(loading))
        else:
            _attempt(lambda: self.run(loading))

    def run(self, loading: Loading) -> None:
        """Load blocks in this thread."""
        started = time.perf_counter()
        loading.run()
        seconds = time.perf_counter() - started
        if loading.is_damaged:
            return
        self.counts.loaded_blocks += len(loading.blocks)
        # The most tokens of the blocks that other machines have saved.
        tokens = BLOCK_TOKENS * sum(block.is_read_whole for block, _ in loading.blocks)
        if 0 < tokens < seconds * self.prefill_speed:
            self._remote_rests_until = time.monotonic() + _REST_SECONDS
        if not self.remote_speed:
            self._learn(loading, seconds)

    def _learn(self, loading: Loading, seconds: float) -> None:
        """Learn from blocks that were loaded how fast other machines' blocks load, once they are enough."""
        if all(block.is_read_whole for block, _ in loading.blocks):
            self._learned_bytes += loading.part_bytes
            self._learned_seconds += seconds
            size = loading.part_bytes // len(loading.blocks)
            if self._learned_bytes >= size * _measured_blocks(size):
                self.remote_speed = self._learned_bytes / self._learned_seconds

    def prefetch(self, works: Sequence[Callable[[], None]]) -> None:
        """Call functions in the loading thread, one whenever no batch waits for it. Replaces earlier ones."""
        with self._prefetching:
            self._prefetches = deque(works)
            begins, self._is_prefetching = not self._is_prefetching, True
        # At most one such job waits, because a batch that loads waits for all jobs before it.
        if begins:
            self._loads.put(self._prefetch_one)

    def _prefetch_one(self) -> None:
        with self._prefetching:
            if not self._prefetches:
                self._is_prefetching = False
                return
            work = self._prefetches.popleft()
        try:
            work()
        finally:
            self._loads.put(self._prefetch_one)

    def wait(self, loading: Loading) -> None:
        """Wait until blocks are loaded. Raises DamagedBlock if a part was not what was saved.

        Nobody gives up here, because the thread still writes into the places of the blocks. What loads from
        other machines gives up by itself: no value is asked for some seconds after its block was opened, and
        BlockValues bounds each question.
        """
        started = time.perf_counter()
        loading.done.wait()
        self.counts.stall_seconds += time.perf_counter() - started
        if loading.is_damaged:
            raise DamagedBlock("a saved block was changed, or is lost")

    def save(self, name: BlockName, parts: Sequence[memoryview], saved: Callable[[], None]) -> bool:
        """Save a block in the saving thread, and then call `saved`.

        Returns False if the buffer is full, and after `close` and in a forked process, which have no thread.
        """
        if self._saves.qsize() >= self._buffer or not self._threads[0].is_alive():
            self.counts.dropped_writes += 1
            return False

        def work() -> None:
            try:
                # A disk that takes nothing must not delay the end of the process once per block.
                if not (self._closing and self._write_failed):
                    encoded = self.quantized.encode(parts, name.length) if self.quantized else parts
                    written = [tier.write(name, encoded) for tier in self.tiers]
                    self._write_failed = not all(written)
            finally:
                saved()

        self._saves.put(work)
        return True

    def flush(self) -> None:
        """Wait until everything that waits to be saved or fetched was written or read, or could not be."""
        saving, loading = self._threads
        _wait(self._saves, saving)
        while self._prefetches and loading.is_alive():
            _wait(self._loads, loading)
        _wait(self._loads, loading)

    def close(self) -> None:
        """Save what waits, and end the threads. Nothing is saved afterwards."""
        self._closing = True
        self.prefetch([])
        _end(self._saves, self._loads)
        for thread in self._threads:
            thread.join()
        if self.remote is not None:
            self.remote.values.close()


def open_whole_blocks(
    transfers: Transfers,
    sequences: Sequence[PrefixKey],
    claimed: Container[bytes],
    memory: Container[bytes],
    token_bytes: int | None,
) -> tuple[dict[bytes, SavedBlock], list[list[BlockName]]]:
    """Open the whole blocks at the front of sequences that are claimed and saved, by key.

    Returns also, for each sequence, the names of the blocks of fewer tokens that may follow, the longest
    first. claimed, memory: the keys of blocks. token_bytes: see Transfers.open.
    """
    found = transfers.open([_worth_opening(each, claimed, memory) for each in sequences], token_bytes)
    opened: dict[bytes, SavedBlock] = {}
    choices = []
    for sequence in sequences:
        parent, walked = sequence.root, 0
        for name in sequence.names[: sequence.max_given // BLOCK_TOKENS]:
            if name.key not in opened and name.key not in memory:
                if (file := found.pop(name.key, None)) is None:
                    break
                opened[name.key] = file
            parent, walked = name.key, walked + BLOCK_TOKENS
        short = (sequence.short_block(parent, walked, length) for length in range(BLOCK_TOKENS - 1, 0, -1))
        choices.append([name for name in short if name])
    for file in found.values():
        file.close()
    return opened, choices


def _worth_opening(
    sequence: PrefixKey, claimed: Container[bytes], memory: Container[bytes]
) -> list[BlockName]:
    """Return the names of the claimed whole blocks at the front of a sequence."""
    front = takewhile(
        lambda name: name.key in claimed or name.key in memory,
        sequence.names[: sequence.max_given // BLOCK_TOKENS],
    )
    return [name for name in front if name.key in claimed]


def _measured_blocks(block_bytes: int) -> int:
    """Return how many blocks say how fast blocks are loaded."""
    return max(_MIN_MEASURED, min(_MAX_MEASURED, _MEASURED_BYTES // block_bytes))


def _wait(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    """Wait until a thread has done all its jobs. After `close`, everything was done."""
    done = threading.Event()
    jobs.put(done.set)
    while thread.is_alive() and not done.wait(_SECONDS_BETWEEN_LOOKS):
        pass


def _written(tier: DiskTier | RemoteTier, name: BlockName, parts: Sequence[memoryview | bytes]) -> bool:
    """Write a block to measure with. Its next reader reads it from the tier itself. Raises OSError."""
    if isinstance(tier, RemoteTier):
        return tier.write(name, parts, _MEASURED_SECONDS)
    is_written = tier.write(name, parts)
    if is_written:
        tier.drop_from_page_cache(name.key)
    return is_written


def _opened(tier: DiskTier | RemoteTier, names: Sequence[BlockName]) -> list[SavedBlock]:
    if isinstance(tier, RemoteTier):
        return list(tier.open(names).values())
    return [file for name in names if (file := tier.open(name))]


def _end(*queues: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """End the threads of these queues, behind what waits there."""
    for jobs in queues:
        jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        _attempt(job)
        del job  # it refers to the Transfers, which could not be collected while this thread waits


def _attempt(job: Callable[[], None]) -> None:
    """Do a job. If the job fails, log why: its thread must go on, because batches wait for what it loads."""
    try:
        job()
    except Exception:
        logger.exception("keys and values could not be loaded or saved")
