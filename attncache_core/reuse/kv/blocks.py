"""Blocks of keys and values: how they are named, and how a block lies in memory.

    root -> block 0 -> block 1 -> ... -> the last block, which may hold fewer than BLOCK_TOKENS tokens

A block's key is the SHA-256 of its parent's key and its tokens. So a key stands for all tokens up to the end
of the block. The key of the root stands for everything else that could change the values: the model and how
it computes, the salt, and the tokens that pooling leaves out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

BLOCK_TOKENS = 16
TOKEN_BYTES = 4  # a token id in `BlockName.tokens`: int32, little-endian
# Rows of the pooled state at the end of a block, see heads/running.py.
STATE_ROWS = 5


class BlockName(NamedTuple):
    """The identity of a block. Blocks are equal only if all three parts are."""

    key: bytes  # 32 bytes
    parent: bytes  # key of the block before it, or of the root
    tokens: bytes  # 1 to BLOCK_TOKENS token ids, int32, little-endian

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens) // TOKEN_BYTES


def root_key(fingerprint: bytes, salt: bytes, skipped: int = 0) -> bytes:
    """Return the key in front of the first block.

    fingerprint: stands for the model and for how it computes. salt: sequences of different salts share no
    block. skipped: the tokens at the front that pooling leaves out.
    """
    return hashlib.sha256(b"%d %d " % (skipped, len(salt)) + salt + fingerprint).digest()


def child(parent: bytes, tokens: bytes) -> BlockName:
    """Return the name of the block that holds `tokens` behind the block or root with key `parent`."""
    return BlockName(hashlib.sha256(parent + tokens).digest(), parent, tokens)


def common_front(maximum: int, begins_alike: Callable[[int], bool]) -> int:
    """Return the largest number up to `maximum` for which `begins_alike` is true.

    It is true for all smaller numbers, and for no larger one.
    """
    if maximum and begins_alike(maximum):
        return maximum
    low, high = 0, maximum  # begins_alike(low) is true, and begins_alike(high) is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if begins_alike(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class BlockLayout:
    """How a block lies in memory: slots [layers, BLOCK_TOKENS], then the pooled state."""

    layers: int
    slot_bytes: int  # K and V of a token in one layer
    width: int  # of the model's hidden states

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer's slots."""
        return BLOCK_TOKENS * self.slot_bytes

    @cached_property
    def state_first(self) -> int:
        """Where the pooled state begins, in bytes."""
        return self.layers * self.layer_bytes

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part that is loaded and saved at a time: the slots of each layer, and the state."""
        return (*[self.layer_bytes] * self.layers, STATE_ROWS * self.width * 4)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block, whole cache lines."""
        return -(-sum(self.part_bytes) // 64) * 64

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in all layers."""
        return self.layers * self.slot_bytes
