"""Blocks on their way between memory and disk: a thread that loads, and a thread that saves.

    load    layer after layer, so that a batch computes a layer while the next layer is loaded
    save    after the answer; a block that does not fit into the write buffer is dropped and counted

Source of both: CachedAttention, section 3.2 (layer-wise pre-loading, asynchronous saving).
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from attncache_core.reuse.kv.block_file import DamagedBlock, OpenBlock
from attncache_core.reuse.kv.blocks import TOKEN_BYTES, BlockName
from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.quantized import Int8Slots

logger = logging.getLogger(__name__)

# The speed of loading is measured with about so many bytes, in so many blocks.
_MEASURED_BYTES = 16 << 20
_MIN_MEASURED, _MAX_MEASURED = 4, 32
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(eq=False)
class Loading:
    """Blocks that are loaded together, for one batch."""

    blocks: Sequence[tuple[OpenBlock, list[memoryview]]]  # each with the parts to fill
    quantized: Int8Slots | None = None  # how the blocks were saved; None: as they are in memory
    # int32 [1], the number of parts that are loaded, of all layers and of the state; see KeyValueSlots.ready
    ready: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int32))
    is_damaged: bool = False  # a part was not what was saved: nothing of these blocks may be used
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Fill all parts, the layers in order. After damage, all parts count as loaded: nobody waits."""
        parts = len(self.blocks[0][1])
        try:
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
        for block, parts in self.blocks:
            if self.quantized is None:
                block.read_part(part, parts[part])
            else:
                saved = memoryview(bytearray(self.quantized.part_bytes[part]))
                block.read_part(part, saved)
                self.quantized.decode(part, saved, parts[part])


@dataclass
class TransferCounts:
    """What was transferred since the start."""

    loaded_blocks: int = 0
    load_seconds: float = 0.0
    stall_seconds: float = 0.0  # that batches waited for their last layers
    dropped_writes: int = 0  # blocks that did not fit into the write buffer


class Transfers:
    """The threads between the memory and the disk tier of one store."""

    def __init__(self, disk: DiskTier, write_buffer_blocks: int, quantized: Int8Slots | None = None) -> None:
        """write_buffer_blocks: the most blocks that wait to be saved. quantized: save blocks in 8 bits."""
        self.disk, self.quantized = disk, quantized
        self.counts = TransferCounts()
        self.load_speed = 0.0  # bytes of blocks in memory per second; 0: not measured
        self.prefill_speed = 0.0  # tokens per second; 0: not measured
        self._buffer = write_buffer_blocks
        self._closing = self._write_failed = False
        self._saves: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._loads: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._prefetches: deque[Callable[[], None]] = deque()
        self._threads = [
            threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("kv-save", self._saves), ("kv-load", self._loads))
        ]
        for thread in self._threads:
            thread.start()

    def pays(self, token_bytes: int) -> bool:
        """Return whether loading a token's keys and values is faster than computing them, as far as known."""
        if not (self.load_speed and self.prefill_speed):
            return True
        return token_bytes / self.load_speed < 1 / self.prefill_speed

    def measure(self, part_bytes: Sequence[int]) -> None:
        """Measure how fast blocks are loaded that are not in the page cache; see `pays`.

        part_bytes: of a block in memory. Some blocks of random content are written, read and removed. If
        there is no free room for them, the speed stays unknown, because no block is evicted to measure it.
        """
        parts = [memoryview(bytearray(secrets.token_bytes(size))) for size in part_bytes]
        count = max(_MIN_MEASURED, min(_MAX_MEASURED, _MEASURED_BYTES // sum(part_bytes)))
        if self.disk.free_bytes < count * self.disk.file_bytes:
            return
        names = [BlockName(secrets.token_bytes(32), bytes(32), bytes(TOKEN_BYTES)) for _ in range(count)]
        saved = self.quantized.encode(parts) if self.quantized else parts
        with suppress(OSError):
            if all(self.disk.write(name, saved) for name in names):
                for name in names:
                    self.disk.drop_from_page_cache(name.key)
                started = time.perf_counter()
                files = [file for name in names if (file := self.disk.open(name))]
                if files:
                    Loading([(file, parts) for file in files], self.quantized).run()
                self.load_speed = len(files) * sum(part_bytes) / (time.perf_counter() - started)
        for name in names:
            with suppress(OSError):
                self.disk.remove(name.key)

    def load(self, loading: Loading) -> None:
        """Load blocks in the loading thread."""
        self._loads.put(lambda: self.run(loading))

    def run(self, loading: Loading) -> None:
        """Load blocks in this thread."""
        started = time.perf_counter()
        loading.run()
        self.counts.load_seconds += time.perf_counter() - started
        self.counts.loaded_blocks += 0 if loading.is_damaged else len(loading.blocks)

    def prefetch(self, works: Sequence[Callable[[], None]]) -> None:
        """Call functions in the loading thread, one whenever no batch waits for it. Replaces earlier ones."""
        self._prefetches = deque(works)
        self._loads.put(self._prefetch_one)

    def _prefetch_one(self) -> None:
        # Another thread may replace the deque at any time.
        works = self._prefetches
        if works:
            works.popleft()()
            self._loads.put(self._prefetch_one)

    def wait(self, loading: Loading) -> None:
        """Wait until blocks are loaded. Raises DamagedBlock if a part was not what was saved."""
        started = time.perf_counter()
        loading.done.wait()
        self.counts.stall_seconds += time.perf_counter() - started
        if loading.is_damaged:
            raise DamagedBlock("a block was changed on disk")

    def save(self, name: BlockName, parts: Sequence[memoryview], saved: Callable[[], None]) -> bool:
        """Save a block in the saving thread, and then call `saved`. Returns False if the buffer is full."""
        if self._saves.qsize() >= self._buffer:
            self.counts.dropped_writes += 1
            return False

        def work() -> None:
            try:
                # A disk that takes nothing must not delay the end of the process once per block.
                if not (self._closing and self._write_failed):
                    encoded = self.quantized.encode(parts) if self.quantized else parts
                    self._write_failed = not self.disk.write(name, encoded)
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
        """Save what waits, and end the threads. Nothing may be saved or loaded afterwards."""
        self._closing, self._prefetches = True, deque()
        for jobs in (self._saves, self._loads):
            jobs.put(None)
        for thread in self._threads:
            thread.join()


def _wait(jobs: queue.Queue[Callable[[], None] | None], thread: threading.Thread) -> None:
    """Wait until a thread has done all its jobs. After `close`, everything was done."""
    done = threading.Event()
    jobs.put(done.set)
    while thread.is_alive() and not done.wait(_SECONDS_BETWEEN_LOOKS):
        pass


def _work(jobs: queue.Queue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            # The thread must go on: batches wait for what it loads.
            logger.exception("keys and values could not be loaded or saved")
