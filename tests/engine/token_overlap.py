"""A reuse strategy for tests: the maps come from the record with the most tokens in common.

This strategy represents any kind of reuse beside MapReuse. It plans from tokens alone, without projector,
index or policy, and reads records directly from a store. The engine and the layer loop need no change for it.
"""

from dataclasses import replace

import numpy as np

from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import ReusePlan, no_reuse
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.text.token_batch import TokenBatch


class TokenOverlap(ReuseStrategy):
    """Reuse by token overlap: the similarity of two sequences is the share of positions with equal tokens."""

    def __init__(
        self,
        store: AttentionMapStore,
        recorded: dict[int, list[list[int]]],
        mask: ReuseMask,
        threshold: float,
    ) -> None:
        """recorded: length -> the token ids of its records, in order."""
        self.store, self.recorded, self.threshold = store, recorded, threshold
        self._mask = mask

    @property
    def mask(self) -> ReuseMask:
        return self._mask

    def prepare(self, lengths):
        return self.store.drop_lost(lengths)

    def rule_out(self, lengths, allowed):
        held = (
            length in self.store.segments and length in self.recorded for length in lengths[allowed].tolist()
        )
        return None if self.threshold <= 1 and any(held) else no_reuse(len(lengths)).reasons

    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> ReusePlan:
        plan = replace(no_reuse(len(batch.lengths)), segments=self.store.segments)
        if self.threshold > 1:
            return plan
        corrupt = 0
        for group in batch.groups():
            if not self.store.may_serve(group.length) or group.length not in self.recorded:
                continue
            ids = batch.ids[group.tokens].view(group.count, group.length).numpy()
            same = ids[:, None] == np.array(self.recorded[group.length])  # [sequences, records, L]
            similarities = same.mean(axis=2).astype(np.float32)
            records, best = similarities.argmax(axis=1), similarities.max(axis=1)
            near = allowed[group.sequences] & (best >= self.threshold)
            sound = self.store.segments[group.length].are_sound(records)
            corrupt += int((near & ~sound).sum())
            plan.records[group.sequences] = np.where(near & sound, records, -1)
            plan.similarities[group.sequences] = np.where(allowed[group.sequences], best, np.nan)
        return replace(plan, corrupt_records=corrupt)
