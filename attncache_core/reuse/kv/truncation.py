"""Truncate stored keys and values: some tokens of a sequence, at new positions.

    blocks of a sequence -> slots of the kept tokens -> blocks behind a root of their own

Keys are stored before their rotation, so a token's slot can be used at any position (CachedAttention, section
3.4). The result approximates the sequence of the kept tokens: in every layer but the first, a kept token was
computed with the dropped tokens in front of it. So truncated blocks have a salt of their own, and never stand
for the blocks of any text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.reuse.kv.memory import Block, PrefixKey
from attncache_core.reuse.kv.store import KeyValueStore


def truncated_salt(prefix_key: PrefixKey, positions: Sequence[int]) -> bytes:
    """Return the salt of the tokens of a sequence at these positions."""
    kept = np.asarray(positions, dtype="<i8").tobytes()
    # No salt of a client begins with this byte, because clients send UTF-8.
    return b"\xff" + hashlib.sha256(prefix_key.root + prefix_key.tokens + kept).digest()


def store_truncated(
    store: KeyValueStore,
    prefix_key: PrefixKey,
    positions: Sequence[int],
    prefix_key_with: Callable[[Sequence[int]], PrefixKey],
) -> bool:
    """Store the keys and values of the tokens of a sequence at `positions` (rising) as another sequence.

    prefix_key_with: returns how a sequence of token ids is looked up under the salt of `truncated_salt`.
    Returns False, and stores nothing, unless all the tokens are stored.
    """
    store.fetch(prefix_key)
    if store.lookup(prefix_key).memory <= positions[-1]:
        return False  # before places are reserved for what is not stored
    source = store.begin([prefix_key], load=False)
    try:
        if source.given_tokens[0] <= positions[-1]:
            return False
        ids = np.frombuffer(prefix_key.tokens, dtype="<i4")[positions].tolist()
        target = store.begin([prefix_key_with(ids)], load=False)
        try:
            for block, _, first in target.new:
                kept = positions[first : first + block.name.length]
                _copy(store, source.given[0], kept, block)
            store.finish(target)
        finally:
            store.abandon(target)
        return True
    finally:
        store.abandon(source)


def _copy(store: KeyValueStore, blocks: Sequence[Block], positions: Sequence[int], block: Block) -> None:
    """Fill a block with the slots of tokens at these positions. Its pooled state is unknown."""
    pool = store.memory.pool
    to = pool.slots(block.place)
    for at, position in enumerate(positions):
        source = pool.slots(blocks[position // BLOCK_TOKENS].place)
        to[:, at] = source[:, position % BLOCK_TOKENS]
    pool.state(block.place)[:] = np.nan
