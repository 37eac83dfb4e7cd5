"""KeyValueReuse: the reuse of keys and values for one model, as an engine uses it.

    a sequence, and what is read from it -> PrefixKey: its blocks behind a root, and how many may be given
    a sequence, and the tokens to keep   -> blocks with the slots of these tokens, behind a root of their own

Keys are stored before their rotation, so the slot of a token that is kept can be used at any position
(CachedAttention, section 3.4). The result approximates the sequence of the kept tokens: in every layer but
the first, a kept token was computed with the dropped tokens in front of it. So truncated blocks have a salt
of their own, and never stand for the blocks of any text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np

from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, root_key
from attncache_core.reuse.kv.memory import Block, PrefixKey
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.text.prompts import SequencePlan

# So many roots are remembered: of the last salts and prompts.
_ROOTS = 256
# The first byte of the salts of truncated blocks, and of no client's salt, because clients send UTF-8.
_TRUNCATED = b"\xff"


class KeyValueReuse:
    """The store of one model's keys and values, and what names the sequences in it."""

    def __init__(
        self, store: KeyValueStore, fingerprint: bytes, pooling: Pooling, prompt_tokens: int
    ) -> None:
        """fingerprint: stands for all that could change keys and values of given tokens.

        pooling: of the outputs; of the last token if the model has classes. prompt_tokens: of sequences
        without a plan.
        """
        self.store = store
        self.approximation: str | None = None  # why given keys and values may not be exact
        self.reads_last = set(pooling.modes) == {"lasttoken"}  # outputs read the last token only
        self._skips = not pooling.include_prompt and not self.reads_last
        self._prompt_tokens = prompt_tokens
        self._root_key = lru_cache(_ROOTS)(partial(root_key, fingerprint))
        # The sequence that was named last; the next one often begins alike.
        self._last: PrefixKey | None = None

    def prefix_key(
        self, ids: Sequence[int], plan: SequencePlan | None, salt: bytes, *, passing: int = 0
    ) -> PrefixKey:
        """Return how the store is asked for a sequence.

        salt: sequences of one salt share blocks. passing: tokens before the plan's continuation that are not
        worth keeping; the continuation is not worth keeping either.
        """
        back = max((target.back for target in plan.targets), default=-1) if plan else -1
        if salt.startswith(_TRUNCATED):
            back = max(back, 0)  # the pooled state of kept tokens is unknown; see _copy
        # The hidden states at the targets are read, so these tokens must be computed.
        return self._named(salt, plan, ids, passing, len(ids) - 1 - back)

    def _named(
        self, salt: bytes, plan: SequencePlan | None, ids: Sequence[int], passing: int, max_given: int
    ) -> PrefixKey:
        passing += len(plan.continuation) if plan else 0
        root = self._root_key(salt, self.skipped(plan))
        named = PrefixKey.of(root, ids[: len(ids) - passing], max_given, self._last)
        self._last = named
        return named

    def whole(self, ids: Sequence[int], salt: bytes) -> PrefixKey:
        """Return how token ids are looked up that may all be given. Only if outputs read the last token."""
        return self._named(salt, None, ids, 0, len(ids))

    def skipped(self, plan: SequencePlan | None) -> int:
        """Return the tokens at the front of a sequence that pooling leaves out."""
        if not self._skips:
            return 0
        return plan.prompt_tokens if plan else self._prompt_tokens

    def truncate(
        self,
        ids: Sequence[int],
        plan: SequencePlan | None,
        salt: bytes,
        kept: Sequence[int],
        *,
        passing: int = 0,
    ) -> bytes | None:
        """Store the keys and values of the tokens at positions `kept` (rising) as a sequence of their own.

        Returns the salt under which they are found, for an approximate continuation of these tokens. Returns
        None if not all of them are stored, or if pooling reads other tokens than the last one: what it reads
        of the kept tokens is not stored. ids, plan, salt, passing: as for `prefix_key`.
        """
        prefix_key = self._named(salt, plan, ids, passing, len(ids))
        if not kept or not self.reads_last:
            return None
        self.store.fetch(prefix_key)
        if self.store.lookup(prefix_key).memory <= kept[-1]:
            return None  # before places are reserved for what is not stored
        positions = np.asarray(kept, dtype="<i8").tobytes()
        kept_salt = _TRUNCATED + hashlib.sha256(prefix_key.root + prefix_key.tokens + positions).digest()
        source = self.store.begin([prefix_key], load=False)
        try:
            if source.given_tokens[0] <= kept[-1]:
                return None
            kept_ids = np.frombuffer(prefix_key.tokens, dtype="<i4")[kept].tolist()
            target = self.store.begin([self.whole(kept_ids, kept_salt)], load=False)
            try:
                for block, _, first in target.new:
                    _copy(self.store, source.given[0], kept[first : first + block.name.length], block)
                self.store.finish(target)
            finally:
                self.store.abandon(target)
            return kept_salt
        finally:
            self.store.abandon(source)


def _copy(store: KeyValueStore, blocks: Sequence[Block], positions: Sequence[int], block: Block) -> None:
    """Fill a block with the slots of tokens at these positions. Its pooled state is unknown."""
    pool = store.memory.pool
    to = pool.slots(block.place)
    for at, position in enumerate(positions):
        source = pool.slots(blocks[position // BLOCK_TOKENS].place)
        to[:, at] = source[:, position % BLOCK_TOKENS]
    pool.state(block.place)[:] = np.nan
