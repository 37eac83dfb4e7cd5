"""The store of keys and values: which blocks of a batch are known, and which it computes.

    begin     for each sequence the blocks that are given, and places for the blocks that the batch computes
    finish    the batch was computed: its blocks are found from now on
    abandon   the batch failed: its places are free again

A block is computed once: if another batch is computing the next block of a sequence, `begin` waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attncache_core.reuse.kv.blocks import (
    BLOCK_TOKENS,
    TOKEN_BYTES,
    BlockLayout,
    BlockName,
    chain,
    child,
    token_bytes,
)
from attncache_core.reuse.kv.eviction import EvictionPolicy, LookAhead
from attncache_core.reuse.kv.pool import BlockPool

# `begin` computes blocks itself if the batch that computes them takes longer.
_MOST_WAITING_SECONDS = 30.0


class Wanted(NamedTuple):
    """A sequence whose blocks are looked up and kept."""

    root: bytes  # see blocks.root_key
    tokens: bytes  # the tokens whose blocks are kept; see blocks.token_bytes
    most_given: int  # tokens at the front that may be given
    names: list[BlockName]  # of all blocks of `tokens`

    @classmethod
    def of(cls, root: bytes, ids: Sequence[int], most_given: int) -> Wanted:
        """Return how a sequence of token ids is looked up behind a root."""
        tokens = token_bytes(ids)
        return cls(root, tokens, min(most_given, len(ids)), chain(root, tokens))


@dataclass(eq=False, slots=True)
class Block:
    """A block in memory."""

    name: BlockName
    place: int  # in the pool
    users: int = 1  # batches that read or write the block, and the saver
    pinned: bool = False  # by the operator: never evicted
    is_stored: bool = False  # whether the block is found; if not, the last user frees its place


class NewBlock(NamedTuple):
    """A block that a batch computes."""

    block: Block
    sequence: int  # index of the sequence whose tokens fill the block
    first: int  # position of the block's first token


@dataclass(eq=False)
class Reservation:
    """What the store gives to one batch and takes from it."""

    given: list[list[Block]]  # for each sequence, the blocks in front of what is computed
    given_tokens: list[int]
    new: list[NewBlock]
    is_open: bool = True


@dataclass
class Counts:
    """What happened since the store was opened. Numbers of blocks, unless the name says otherwise."""

    lookups: int = 0  # sequences
    given_tokens: int = 0
    stored: int = 0
    evicted: Counter[str] = field(default_factory=Counter)  # by reason: full, cleared
    not_kept: int = 0  # there was no place: all blocks in memory were in use


class KeyValueStore:
    """Blocks of one model in memory. Thread safe."""

    def __init__(
        self,
        layout: BlockLayout,
        memory_bytes: int,
        policy: EvictionPolicy[bytes] | None = None,
    ) -> None:
        """memory_bytes: the most bytes of blocks. policy: which block leaves memory first."""
        self.layout = layout
        self.pool = BlockPool(layout, memory_bytes)
        self.counts = Counts()
        self._policy = policy or LookAhead()
        self._blocks: dict[bytes, Block] = {}
        self._partial: dict[bytes, Counter[int]] = {}  # parent -> how many of its short blocks have n tokens
        self._computing: dict[bytes, Reservation] = {}
        self._changed = threading.Condition()
        self._pinned = _Pinned(self._blocks)

    def begin(self, sequences: Sequence[Wanted]) -> Reservation:
        """Look sequences up, and reserve places for the blocks that are not known yet."""
        deadline = time.monotonic() + _MOST_WAITING_SECONDS
        with self._changed:
            while True:
                found = [self._known(own) for own in sequences]
                awaited = [name for _, _, name in found if name is not None and name.key in self._computing]
                if not awaited or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            reservation = Reservation([given for given, _, _ in found], [count for _, count, _ in found], [])
            self.counts.lookups += len(sequences)
            self.counts.given_tokens += sum(reservation.given_tokens)
            for block in (block for given in reservation.given for block in given):
                block.users += 1
            # From the end, so that the blocks at the front of sequences are the last to be evicted.
            for own in sequences:
                for name in reversed(own.names):
                    if name.key in self._blocks:
                        self._policy.used(name.key)
            for index, own in enumerate(sequences):
                self._reserve(reservation, index, own.names)
        return reservation

    def finish(self, reservation: Reservation, keep: Callable[[NewBlock], bool] = lambda _: True) -> None:
        """Store the blocks of a batch that was computed. keep: whether a block may be stored."""
        with self._changed:
            for new in reservation.new:
                if keep(new):
                    self._store(new.block)
            self._close(reservation)

    def abandon(self, reservation: Reservation) -> None:
        """Free what a batch reserved. Does nothing after `finish`."""
        with self._changed:
            self._close(reservation)

    def lookup(self, wanted: Wanted) -> int:
        """Return how many tokens of a sequence are stored. Changes nothing."""
        with self._changed:
            return self._known(wanted)[1]

    def pin(self, wanted: Wanted, pinned: bool = True) -> int:
        """Keep the blocks of a sequence in memory, or let them go. Returns how many tokens they hold."""
        with self._changed:
            given, tokens, _ = self._known(wanted)
            for block in given:
                block.pinned = pinned
        return tokens

    def expect(self, sequences: Iterable[Wanted]) -> None:
        """Take note of the sequences that wait for a batch, soonest first, to evict their blocks last."""
        keys = [name.key for own in sequences for name in own.names]
        with self._changed:
            self._policy.expect(keys)

    def clear(self) -> int:
        """Drop all blocks, pinned blocks too. Returns their number. Blocks in use are dropped after use."""
        with self._changed:
            dropped = list(self._blocks.values())
            for block in dropped:
                self._drop(block, "cleared")
        return len(dropped)

    @property
    def blocks(self) -> int:
        """The number of blocks that are found."""
        return len(self._blocks)

    @property
    def bytes_used(self) -> int:
        """Bytes of all places that are taken."""
        return self.pool.used * self.layout.block_bytes

    # The caller of the methods below holds the lock.

    def _known(self, wanted: Wanted) -> tuple[list[Block], int, BlockName | None]:
        """Return the stored blocks at the front of a sequence, their tokens, and the block that follows."""
        given: list[Block] = []
        following = None
        for name in wanted.names[: wanted.most_given // BLOCK_TOKENS]:
            if (block := self._find(name)) is None:
                following = name
                break
            given.append(block)
        tokens = BLOCK_TOKENS * len(given)
        parent = given[-1].name.key if given else wanted.root
        for count in sorted(self._partial.get(parent, ()), reverse=True):
            own = wanted.tokens[tokens * TOKEN_BYTES : (tokens + count) * TOKEN_BYTES]
            if tokens + count <= wanted.most_given and len(own) == count * TOKEN_BYTES:
                block = self._find(child(parent, own))
                if block is not None:
                    return [*given, block], tokens + count, following
        return given, tokens, following

    def _find(self, name: BlockName) -> Block | None:
        block = self._blocks.get(name.key)
        return block if block is not None and block.name == name else None

    def _reserve(self, reservation: Reservation, sequence: int, names: list[BlockName]) -> None:
        """Reserve places for the blocks of a sequence that nobody has or computes."""
        for index, name in enumerate(names):
            if name.key in self._blocks or name.key in self._computing:
                continue
            place = self._place()
            if place is None:
                self.counts.not_kept += 1
                return
            block = Block(name, place)
            self._computing[name.key] = reservation
            reservation.new.append(NewBlock(block, sequence, index * BLOCK_TOKENS))

    def _place(self) -> int | None:
        place = self.pool.take()
        if place is None and (victim := self._policy.victim(self._pinned)) is not None:
            self._drop(self._blocks[victim], "full")
            place = self.pool.take()
        return place

    def _store(self, block: Block) -> None:
        name = block.name
        block.is_stored = True
        self._blocks[name.key] = block
        self._policy.added(name.key)
        self.counts.stored += 1
        if name.length < BLOCK_TOKENS:
            self._partial.setdefault(name.parent, Counter())[name.length] += 1

    def _drop(self, block: Block, reason: str) -> None:
        """Let a block be found no more. Its place is free once nobody uses it."""
        name = block.name
        del self._blocks[name.key]
        self._policy.removed(name.key)
        self.counts.evicted[reason] += 1
        block.is_stored = False
        if name.length < BLOCK_TOKENS:
            counts = self._partial[name.parent]
            counts[name.length] -= 1
            if not counts[name.length]:
                del counts[name.length]
            if not counts:
                del self._partial[name.parent]
        self._free_if_unused(block)

    def _close(self, reservation: Reservation) -> None:
        if not reservation.is_open:
            return
        reservation.is_open = False
        for block, _, _ in reservation.new:
            del self._computing[block.name.key]
            self._release(block)
        for given in reservation.given:
            for block in given:
                self._release(block)
        self._changed.notify_all()

    def _release(self, block: Block) -> None:
        block.users -= 1
        self._free_if_unused(block)

    def _free_if_unused(self, block: Block) -> None:
        if not block.users and not block.is_stored:
            self.pool.give_back(block.place)


class _Pinned:
    """The keys of the blocks that must stay in memory."""

    def __init__(self, blocks: dict[bytes, Block]) -> None:
        self._blocks = blocks

    def __contains__(self, key: object) -> bool:
        block = self._blocks[key]  # type: ignore[index]
        return bool(block.users or block.pinned)
