"""The memory tier: the blocks that are found, and which of them leaves when there is no place.

Not thread safe: the store calls it under its lock.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attncache_core.reuse.kv.blocks import (
    BLOCK_TOKENS,
    TOKEN_BYTES,
    BlockLayout,
    BlockName,
    child,
    common_front,
)
from attncache_core.reuse.kv.eviction import LookAhead
from attncache_core.reuse.kv.pool import BlockPool


class PrefixKey(NamedTuple):
    """A sequence whose blocks are looked up and kept."""

    root: bytes  # see blocks.root_key
    tokens: bytes  # the tokens whose blocks are kept, as in BlockName.tokens
    max_given: int  # tokens at the front that may be given
    names: list[BlockName]  # of all blocks of `tokens`; only the last one may hold fewer than BLOCK_TOKENS

    @classmethod
    def of(cls, root: bytes, ids: Sequence[int], max_given: int, like: PrefixKey | None = None) -> PrefixKey:
        """Return how a sequence of token ids is looked up behind a root.

        like: another sequence. The names of whole blocks that both begin with are taken from it.
        """
        tokens, size = array("i", ids).tobytes(), BLOCK_TOKENS * TOKEN_BYTES
        names: list[BlockName] = []
        if like is not None and like.root == root:
            before, maximum = like.tokens, min(len(tokens), len(like.tokens)) // size
            names = like.names[: common_front(maximum, lambda end: tokens.startswith(before[: end * size]))]
        parent = names[-1].key if names else root
        for first in range(len(names) * size, len(tokens), size):
            names.append(child(parent, tokens[first : first + size]))
            parent = names[-1].key
        return cls(root, tokens, min(max_given, len(ids)), names)

    def common_blocks(self, other: PrefixKey, maximum: int) -> int:
        """Return how many of the first `maximum` blocks have one name object in both sequences."""
        maximum = min(len(self.names), len(other.names), maximum)
        return common_front(maximum, lambda end: self.names[end - 1] is other.names[end - 1])

    def short_block(self, parent: bytes, first: int, length: int) -> BlockName | None:
        """Return the name of the block of `length` tokens from token `first`, if it may be given."""
        if first + length > self.max_given:
            return None
        return child(parent, self.tokens[first * TOKEN_BYTES : (first + length) * TOKEN_BYTES])


def names_once(sequences: Iterable[PrefixKey]) -> Iterator[list[BlockName]]:
    """Yield the names of each sequence's blocks, without those that it has from the sequence before it."""
    last: PrefixKey | None = None
    for sequence in sequences:
        yield sequence.names[last.common_blocks(sequence, len(sequence.names)) if last else 0 :]
        last = sequence


@dataclass(eq=False, slots=True)
class Block:
    """A block in memory."""

    name: BlockName
    place: int  # in the pool
    users: int = 1  # batches that read or write the block, and the saver
    is_pinned: bool = False  # by the operator: never evicted
    is_found: bool = False  # if not, the last user frees its place


class Known(NamedTuple):
    """The beginning of a sequence that is in memory."""

    blocks: list[Block]
    tokens: int
    following: BlockName | None  # the next whole block that may be given, if it is not in memory


class MemoryTier:
    """Blocks by their keys, their places, and the order in which they are evicted."""

    def __init__(self, layout: BlockLayout, most_bytes: int, policy: LookAhead[bytes]) -> None:
        self.pool = BlockPool(layout, most_bytes)
        self.evicted: Counter[str] = Counter({"full": 0, "cleared": 0})  # blocks by reason
        self._policy = policy
        self._blocks: dict[bytes, Block] = {}
        self._short: dict[bytes, Counter[int]] = {}  # parent -> how many of its short blocks have n tokens
        self._in_use = _InUse(self._blocks)
        # The sequence that was looked up last, and its whole blocks, until any block comes or leaves.
        self._last: tuple[PrefixKey, list[Block]] | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    @property
    def pinned(self) -> int:
        """The number of blocks that the operator has pinned."""
        return sum(block.is_pinned for block in self._blocks.values())

    def known(self, prefix_key: PrefixKey, more: Mapping[bytes, Block] | None = None) -> Known:
        """Return the beginning of a sequence that may be given. more: blocks that count as found, by key."""
        more = more or {}
        whole = prefix_key.max_given // BLOCK_TOKENS
        blocks: list[Block] = []
        if self._last:
            last, found = self._last
            blocks = found[: last.common_blocks(prefix_key, min(len(found), whole))]
        following = None
        for name in prefix_key.names[len(blocks) : whole]:
            block = self._blocks.get(name.key) or more.get(name.key)
            if block is None or block.name != name:
                following = name
                break
            blocks.append(block)
        self._last = None if more else (prefix_key, blocks)
        tokens = BLOCK_TOKENS * len(blocks)
        parent = blocks[-1].name.key if blocks else prefix_key.root
        lengths = {*self._short.get(parent, ())}
        if more:
            lengths.update(block.name.length for block in more.values() if block.name.parent == parent)
            lengths.discard(BLOCK_TOKENS)
        for length in sorted(lengths, reverse=True):
            short = prefix_key.short_block(parent, tokens, length)
            block = short and (self._blocks.get(short.key) or more.get(short.key))
            if block and block.name == short:
                return Known([*blocks, block], tokens + length, following)
        return Known(blocks, tokens, following)

    def touch(self, prefix_keys: Sequence[PrefixKey], given: Sequence[Sequence[Block]]) -> None:
        """Note that sequences were used, in this order. given: the blocks that each of them was given.

        The last block of a sequence becomes its oldest, so that it leaves first: behind a block that left,
        nothing is found.
        """
        used: dict[bytes, None] = {}  # latest use first
        for names, blocks in zip(names_once(reversed(prefix_keys)), reversed(given), strict=True):
            for name in names:
                used[name.key] = None
            for block in blocks[-1:]:  # all others are among the names
                used[block.name.key] = None
        for key in reversed(used):
            if key in self._blocks and not self._blocks[key].is_pinned:
                self._policy.used(key)

    def expect(self, keys: Sequence[bytes]) -> None:
        """Take note of the keys that waiting requests will use, soonest first."""
        self._policy.expect(keys)

    def take(self, name: BlockName) -> Block | None:
        """Return a new block with a place, which is not found yet. None: all blocks must stay."""
        place = self.pool.take()
        if place is None and (victim := self._policy.victim(self._in_use)) is not None:
            self.drop(self._blocks[victim], "full")
            place = self.pool.take()
        return None if place is None else Block(name, place)

    def add(self, block: Block) -> None:
        """Let a block be found."""
        name = block.name
        self._last = None
        block.is_found = True
        self._blocks[name.key] = block
        self._policy.added(name.key)
        if name.length < BLOCK_TOKENS:
            self._short.setdefault(name.parent, Counter())[name.length] += 1

    def drop(self, block: Block, reason: str) -> None:
        """Let a block be found no more. Its place is free once nobody uses it."""
        name = block.name
        self._last = None
        self.pin(block, pinned=False)
        del self._blocks[name.key]
        self._policy.removed(name.key)
        self.evicted[reason] += 1
        block.is_found = False
        if name.length < BLOCK_TOKENS:
            lengths = self._short[name.parent]
            lengths[name.length] -= 1
            lengths += Counter()  # without the lengths that no block has
            if not lengths:
                del self._short[name.parent]
        self._free_if_unused(block)

    def pin(self, block: Block, pinned: bool) -> None:
        """Keep a found block from being evicted, or let it go. The policy knows no pinned blocks."""
        if block.is_pinned != pinned:
            block.is_pinned = pinned
            (self._policy.removed if pinned else self._policy.added)(block.name.key)

    def clear(self) -> int:
        """Drop all blocks. Returns their number."""
        blocks = list(self._blocks.values())
        for block in blocks:
            self.drop(block, "cleared")
        return len(blocks)

    def use(self, blocks: Iterable[Block]) -> None:
        """Keep blocks from leaving, until they are released as often."""
        for block in blocks:
            block.users += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Give up the use of blocks."""
        for block in blocks:
            block.users -= 1
            self._free_if_unused(block)

    def _free_if_unused(self, block: Block) -> None:
        if not block.users and not block.is_found:
            self.pool.give_back(block.place)


class _InUse:
    """The keys of the blocks that are in use, which must stay in memory."""

    def __init__(self, blocks: Mapping[bytes, Block]) -> None:
        self._blocks = blocks

    def __contains__(self, key: object) -> bool:
        return bool(self._blocks[key].users)  # type: ignore[index]
