"""KeyValueReuse: the reuse of keys and values for one model, as an engine uses it.

a sequence, and what is read from it -> PrefixKey: its blocks behind a root, and how many may be given
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.reuse.kv.blocks import NO_CHAIN, root_key
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.reuse.kv.truncation import store_truncated, truncated_salt
from attncache_core.text.prompts import SequencePlan

# So many roots are remembered: of the last salts and prompts.
_ROOTS = 256


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
        self._reads_last = set(pooling.modes) == {"lasttoken"}
        self._skips = not pooling.include_prompt and not self._reads_last
        self._prompt_tokens = prompt_tokens
        self._root_key = lru_cache(_ROOTS)(partial(root_key, fingerprint))
        self._last = NO_CHAIN  # the sequence that was named last; the next one often begins alike

    def prefix_key(
        self, ids: Sequence[int], plan: SequencePlan | None, salt: bytes, *, passing: int = 0
    ) -> PrefixKey:
        """Return how the store is asked for a sequence.

        salt: sequences of one salt share blocks. passing: tokens before the plan's continuation that are not
        worth keeping; the continuation is not worth keeping either.
        """
        back = max((target.back for target in plan.targets), default=-1) if plan else -1
        passing += len(plan.continuation) if plan else 0
        # The hidden states at the targets are read, so these tokens must be computed.
        return self._named(salt, self.skipped(plan), ids[: len(ids) - passing], len(ids) - 1 - back)

    def _named(self, salt: bytes, skipped: int, ids: Sequence[int], max_given: int) -> PrefixKey:
        named = PrefixKey.of(self._root_key(salt, skipped), ids, max_given, self._last)
        self._last = named.chain
        return named

    @property
    def reads_last(self) -> bool:
        """Whether outputs read the last token only."""
        return self._reads_last

    def whole(self, ids: Sequence[int], salt: bytes) -> PrefixKey:
        """Return how token ids are looked up that may all be given. Only if outputs read the last token."""
        return self._named(salt, 0, ids, len(ids))

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
        source = self.prefix_key(ids, plan, salt, passing=passing)
        if not kept or not self._reads_last:
            return None
        kept_salt = truncated_salt(source, kept)
        stored = store_truncated(self.store, source, kept, lambda ids: self.whole(ids, kept_salt))
        return kept_salt if stored else None
