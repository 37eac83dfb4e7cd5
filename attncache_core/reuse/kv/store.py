"""The store of keys and values: which blocks of a batch are given to it, and which it computes.

    begin     for each sequence the blocks that are given, and places for the blocks that the batch computes
    finish    the batch was computed: its blocks are found from now on, and saved if there is a disk tier
    abandon   the batch failed: its places are free again

A block is computed or loaded once: if another batch does so with the next block of a sequence, `begin` waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from attncache_core.reuse.kv.block_file import DamagedBlock
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, TOKEN_BYTES, BlockLayout, BlockName
from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.eviction import LookAhead
from attncache_core.reuse.kv.memory import Block, Known, MemoryTier, PrefixKey, names_once
from attncache_core.reuse.kv.transfer import Loading, SavedBlock, Transfers, open_whole_blocks

# `begin` computes blocks itself if the batch that computes them takes longer.
_MAX_WAITING_SECONDS = 30.0


class NewBlock(NamedTuple):
    """A block that a batch computes."""

    block: Block
    sequence: int  # index of the sequence whose tokens fill the block
    first: int  # position of the block's first token


@dataclass(eq=False)
class Reservation:
    """What the store gives to one batch and takes from it."""

    sequences: Sequence[PrefixKey]
    given: list[list[Block]]  # for each sequence, the blocks in front of what is computed
    given_tokens: list[int]
    held: list[Block]  # the distinct blocks of `given`, which must not leave
    asked_tokens: int = 0  # of all sequences, as far as they may be stored
    new: list[NewBlock] = field(default_factory=list)
    loading: Loading | None = None  # of the blocks `loaded`, which are given too
    loaded: dict[Block, str] = field(default_factory=dict)  # each with the tier that has saved it
    generation: int = 0  # blocks are stored only if the store was not cleared meanwhile
    is_open: bool = True


class StoredTokens(NamedTuple):
    """How many tokens at the front of a sequence are stored."""

    memory: int
    disk: int  # behind the tokens in memory; what only other machines have saved does not count


@dataclass
class Counts:
    """What happened since the store was opened."""

    sequences: int = 0  # that were looked up
    asked_tokens: int = 0  # of these sequences, as far as they may be stored
    given_tokens: int = 0  # of these tokens
    # By tier; each block once per batch.
    given_blocks: Counter[str] = field(default_factory=lambda: Counter({"memory": 0, "disk": 0}))
    stored_blocks: int = 0  # computed and stored
    not_kept_blocks: int = 0  # there was no place: all blocks in memory were in use
    recomputed_tokens: int = 0  # found damaged where they were saved, or lost, and computed after all


class KeyValueStore:
    """Blocks of one model, in memory and on disk. Thread safe."""

    def __init__(
        self,
        layout: BlockLayout,
        memory_bytes: int,
        transfers: Transfers | None = None,
        identity: str = "",
    ) -> None:
        """memory_bytes: the most bytes of blocks in memory.

        transfers: to and from the tiers behind the memory; None: there are none. identity: see KeyValueInfo.
        """
        self.identity = identity
        self.layout = layout
        self.memory = MemoryTier(layout, memory_bytes, LookAhead())
        self.transfers = transfers
        self.counts = Counts()
        self.expected: frozenset[bytes] = frozenset()  # the keys that waiting requests will use
        self._generation = 0  # how often the store was cleared
        self._claimed: set[bytes] = set()  # blocks that are being computed or loaded
        self._changed = threading.Condition()

    def begin(self, sequences: Sequence[PrefixKey], load: bool = True) -> Reservation:
        """Look sequences up, and reserve places for the blocks that are not known yet.

        load: load blocks that are saved but not in memory, if this is faster than computing them.
        """
        with self._changed:
            known = self._known_after_waiting(sequences)
            tokens = sum(len(sequence.tokens) for sequence in sequences) // TOKEN_BYTES
            reservation = self._given(sequences, known, tokens)
            for index, (sequence, found) in enumerate(zip(sequences, known, strict=True)):
                self._reserve(reservation, index, sequence.names, found.tokens // BLOCK_TOKENS)
        transfers = self.transfers if load else None
        if transfers and transfers.any_pays(self.layout.token_bytes) and reservation.new:
            try:
                loading = self._open_saved(transfers, reservation, sequences, self.layout.token_bytes)
            except BaseException:
                self.abandon(reservation)
                raise
            if loading:
                transfers.load(loading)
        return reservation

    def wait_until_loaded(self, reservation: Reservation) -> None:
        """Wait for the given blocks that are being loaded.

        Raises DamagedBlock if a block is not what was saved. The caller then abandons the reservation and
        begins again without loading.
        """
        if self.transfers and reservation.loading:
            try:
                self.transfers.wait(reservation.loading)
            except DamagedBlock:
                with self._changed:
                    lost = sum(block.name.length for block in reservation.loaded)
                    self.counts.recomputed_tokens += lost
                raise

    def finish(self, reservation: Reservation, keep: Callable[[NewBlock], bool] = lambda _: True) -> None:
        """Store the blocks of a batch that was computed. keep: whether a new block may be stored."""
        with self._changed:
            self._count(reservation)
            self._add_loaded(reservation)
            for new in reservation.new:
                if keep(new) and reservation.generation == self._generation:
                    self.memory.add(new.block)
                    self.counts.stored_blocks += 1
                    self._save(new.block)
            self.memory.touch(reservation.sequences, reservation.given)
            self._close(reservation)

    def abandon(self, reservation: Reservation) -> None:
        """Free what a batch reserved. Does nothing after `finish`. Waits for blocks that are being loaded."""
        if reservation.is_open and reservation.loading:
            reservation.loading.done.wait()
        with self._changed:
            self._close(reservation)

    def lookup(self, prefix_key: PrefixKey) -> StoredTokens:
        """Return how many tokens of a sequence are stored. Changes nothing."""
        with self._changed:
            tokens = self.memory.known(prefix_key).tokens
        saved, disk = 0, self._disk
        if disk:
            behind = prefix_key.names[tokens // BLOCK_TOKENS : prefix_key.max_given // BLOCK_TOKENS]
            for name in behind:
                if not (disk.contains(name.key) or name.key in self.memory):
                    break
                saved += BLOCK_TOKENS
            end = len(prefix_key.tokens) // TOKEN_BYTES
            short = end - tokens // BLOCK_TOKENS * BLOCK_TOKENS - saved
            if 0 < short < BLOCK_TOKENS and end <= prefix_key.max_given:
                saved += short if disk.contains(prefix_key.names[-1].key) else 0
        return StoredTokens(tokens, max(0, saved - tokens % BLOCK_TOKENS))

    def givable_tokens(self, prefix_key: PrefixKey) -> int:
        """Return how many tokens of a sequence would be given to a batch now."""
        stored = self.lookup(prefix_key)
        return stored.memory + (stored.disk if self._loads_from_disk else 0)

    @contextmanager
    def holding(self, sequences: Sequence[PrefixKey]) -> Iterator[None]:
        """Keep what memory has of some sequences in memory while the `with` block runs."""
        with self._changed:
            held = [block for sequence in sequences for block in self.memory.known(sequence).blocks]
            self.memory.use(held)
        try:
            yield
        finally:
            with self._changed:
                self.memory.release(held)

    def pin(self, prefix_key: PrefixKey, pinned: bool = True) -> int:
        """Keep the blocks of a sequence in memory, or let them go. Returns how many tokens they hold."""
        with self._changed:
            known = self.memory.known(prefix_key)
            for block in known.blocks:
                self.memory.pin(block, pinned)
        return known.tokens

    @property
    def pinned_blocks(self) -> int:
        """The number of blocks in memory that are pinned."""
        with self._changed:
            return self.memory.pinned

    @property
    def _disk(self) -> DiskTier | None:
        return self.transfers.disk if self.transfers else None

    @property
    def _loads_from_disk(self) -> bool:
        """Whether blocks are loaded from a disk: there is room, and that is faster than computing."""
        return bool(
            self.transfers and self.memory.pool.places and self.transfers.pays(self.layout.token_bytes)
        )

    @property
    def looks_ahead(self) -> bool:
        """Whether it matters which sequences wait: blocks must leave memory, or can be fetched into it."""
        return self._disk is not None or not self.memory.pool.free

    def expect(self, sequences: Sequence[PrefixKey]) -> None:
        """Take note of the sequences that wait for a batch, soonest first.

        Blocks of the sequences that fit into memory and disk leave last. Saved blocks of the sequences that
        fit into memory are fetched. How many fit is computed from the average size of the sequences
        (CachedAttention, section 3.3).
        """
        blocks = max(1, sum(len(sequence.names) for sequence in sequences) // max(1, len(sequences)))
        size = blocks * self.layout.block_bytes
        memory = self.memory.pool.places * self.layout.block_bytes
        disk = self._disk.most_bytes if self._disk else 0
        window = sequences[: (memory + disk) // size]
        keys = [name.key for names in names_once(window) for name in names]
        with self._changed:
            self.memory.expect(keys)
        self.expected = frozenset(keys)
        if self._loads_from_disk and self.transfers:
            saved = [sequence for sequence in sequences[: memory // size] if self.lookup(sequence).disk]
            self.transfers.prefetch([partial(self.fetch, sequence) for sequence in saved])

    def fetch(self, prefix_key: PrefixKey) -> None:
        """Load the saved blocks of a sequence into memory, and return when they are loaded."""
        found = sum(self.lookup(prefix_key)) // BLOCK_TOKENS
        with self._changed:
            known = self.memory.known(prefix_key)
            if self.transfers is None or known.following is None or known.following.key in self._claimed:
                return
            reservation = self._given([prefix_key], [known])
            self._reserve(reservation, 0, prefix_key.names[:found], known.tokens // BLOCK_TOKENS)
        try:
            loading = self._open_saved(self.transfers, reservation, [prefix_key], None)
            if loading:
                self.transfers.run(loading)
            if loading and not loading.is_damaged:
                with self._changed:
                    self._add_loaded(reservation)
        finally:
            self.abandon(reservation)

    def clear(self) -> int:
        """Drop all blocks, pinned ones too, from memory and from the tiers behind it, of all machines.

        Returns the number in memory. Places of blocks in use are free after use. What running batches compute
        is not stored. Raises OSError if a saved block cannot be removed.
        """
        with self._changed:
            dropped = self.memory.clear()
            self._generation += 1
        if self.transfers:
            self.transfers.prefetch([])
            self.transfers.flush()  # what waits to be saved would appear again
            with ExitStack() as clearing:  # also if a tier fails
                for tier in self.transfers.tiers:
                    clearing.callback(tier.clear)
        return dropped

    def close(self) -> None:
        """Save what waits to be saved, and end the threads."""
        if self.transfers:
            self.transfers.close()

    # The caller of the methods below holds the lock, unless they say otherwise.

    def _known_after_waiting(self, sequences: Sequence[PrefixKey]) -> list[Known]:
        """Return what is known of sequences, once no other batch computes or loads what comes next."""
        deadline = time.monotonic() + _MAX_WAITING_SECONDS
        while True:
            known = [self.memory.known(sequence) for sequence in sequences]
            awaited = any(found.following and found.following.key in self._claimed for found in known)
            if not awaited or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                return known

    def _given(
        self, sequences: Sequence[PrefixKey], known: Sequence[Known], asked_tokens: int = 0
    ) -> Reservation:
        """Return a reservation that gives what is known, and keeps it from leaving."""
        blocks, tokens = [found.blocks for found in known], [found.tokens for found in known]
        held = list(dict.fromkeys(chain.from_iterable(blocks)))
        self.memory.use(held)
        return Reservation(sequences, blocks, tokens, held, asked_tokens, generation=self._generation)

    def _reserve(
        self, reservation: Reservation, sequence: int, names: Sequence[BlockName], count: int
    ) -> None:
        """Reserve places for the blocks of a sequence that nobody has, computes or loads.

        count: the first blocks, which are in memory.
        """
        for index, name in enumerate(names[count:], count):
            if name.key not in self.memory and name.key not in self._claimed:
                block = self._claim(name)
                if block is None:
                    self.counts.not_kept_blocks += 1
                    return
                reservation.new.append(NewBlock(block, sequence, index * BLOCK_TOKENS))

    def _claim(self, name: BlockName) -> Block | None:
        block = self.memory.take(name)
        if block:
            self._claimed.add(name.key)
        return block

    def _open_saved(
        self,
        transfers: Transfers,
        reservation: Reservation,
        sequences: Sequence[PrefixKey],
        token_bytes: int | None,
    ) -> Loading | None:
        """Give the saved blocks of sequences to a reservation. The caller does not hold the lock.

        token_bytes: see Transfers.open.
        """
        claimed = {new.block.name.key: new.block for new in reservation.new}
        files, choices = open_whole_blocks(transfers, sequences, claimed, self.memory, token_bytes)
        opened = {key: (file, claimed[key]) for key, file in files.items()}
        self._add_short(reservation, transfers.open_longest(choices, token_bytes), claimed, opened)
        if not opened:
            return None
        pool = self.memory.pool
        filled = [(file, pool.parts(block.place)) for file, block in opened.values()]
        loading = Loading(filled, transfers.quantized)
        with self._changed:
            self._give_opened(reservation, sequences, opened)
        reservation.loading = loading
        return loading

    def _add_short(
        self,
        reservation: Reservation,
        found: Sequence[tuple[BlockName, SavedBlock] | None],
        claimed: Mapping[bytes, Block],
        opened: dict[bytes, tuple[SavedBlock, Block]],
    ) -> None:
        """Add short blocks to those that are opened, without holding the lock."""
        for name, file in filter(None, found):
            with self._changed:
                block = claimed.get(name.key)
                if block is None and name.key not in self._claimed and name.key not in self.memory:
                    block = self._claim(name)
                    if block:
                        # So that the reservation frees the block, should opening another one fail.
                        reservation.loaded[block] = file.tier
            if block is None or name.key in opened:
                file.close()
            else:
                opened[name.key] = file, block

    def _give_opened(
        self,
        reservation: Reservation,
        sequences: Sequence[PrefixKey],
        opened: Mapping[bytes, tuple[SavedBlock, Block]],
    ) -> None:
        """Move opened blocks from the new blocks of a reservation to the given ones."""
        reservation.new = [new for new in reservation.new if new.block.name.key not in opened]
        reservation.loaded = {block: file.tier for file, block in opened.values()}
        blocks = {key: block for key, (_, block) in opened.items()}
        now = self._given(sequences, [self.memory.known(sequence, blocks) for sequence in sequences])
        self.memory.release(reservation.held)
        reservation.given, reservation.given_tokens, reservation.held = now.given, now.given_tokens, now.held

    def _add_loaded(self, reservation: Reservation) -> None:
        if reservation.generation == self._generation:
            for block in reversed(reservation.loaded):  # so that the front of a sequence is the youngest
                self.memory.add(block)

    def _count(self, reservation: Reservation) -> None:
        counts = self.counts
        counts.sequences += len(reservation.given)
        counts.asked_tokens += reservation.asked_tokens
        counts.given_tokens += sum(reservation.given_tokens)
        counts.given_blocks.update(reservation.loaded.get(block, "memory") for block in reservation.held)

    def _save(self, block: Block) -> None:
        if self.transfers:
            self.memory.use([block])
            parts = self.memory.pool.parts(block.place)
            if not self.transfers.save(block.name, parts, partial(self._saved, block)):
                self.memory.release([block])

    def _saved(self, block: Block) -> None:
        """Give up the use of a block that was saved. The caller does not hold the lock."""
        with self._changed:
            self.memory.release([block])

    def _close(self, reservation: Reservation) -> None:
        if not reservation.is_open:
            return
        reservation.is_open = False
        blocks = [*(new.block for new in reservation.new), *reservation.loaded]
        self._claimed.difference_update(block.name.key for block in blocks)
        self.memory.release([*blocks, *reservation.held])
        self._changed.notify_all()
