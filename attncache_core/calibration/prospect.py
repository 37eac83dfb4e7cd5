"""Tell before a database is built whether reuse of attention maps can save time for a model on a machine.

the model with half of the heads of each layer reused, and made-up maps in memory
    -> passes without reuse and with reuse, in pairs (paired.py)      -> how much faster at most

A build takes minutes, and these passes take seconds. They leave out what a server does for a hit: the
familiarity test, digests, search, and reading records. So real hits save less.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from attncache_core.calibration.gain import BATCH_TOKENS, batches_of
from attncache_core.calibration.paired import IdleMark, always_idle, compare
from attncache_core.calibration.savings import with_reused
from attncache_core.engine.layers import NO_REUSED_MAPS, run_layers
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.runner import threads_of
from attncache_core.models import PackedModel
from attncache_core.models.attention import apply_maps
from attncache_core.native.stack import ReusedRecords
from attncache_core.reuse.execution.reused_maps import ReusedMaps
from attncache_core.text.token_batch import TokenBatch

# Calibration has not yet chosen a mask with more of the heads for a default database.
_REUSED_SHARE = 0.5


class MadeUpMaps(ReusedMaps):
    """Maps in which every token attends equally to all tokens, for all sequences of a batch."""

    def __init__(self, batch: TokenBatch, layers: int, heads: int) -> None:
        """layers, heads: of the model, and reused heads of each layer."""
        self.count = len(batch.lengths)
        self._batch, self._layers, self._heads = batch, layers, heads
        lengths = batch.lengths.tolist()
        # Sequences of one length read one record, and a record is all maps of all layers, in 16 bits.
        self._records = {
            length: torch.full((layers * heads, length, length), 1 / length, dtype=torch.float16)
            for length in set(lengths)
        }
        self._addresses = np.array([self._records[length].data_ptr() for length in lengths], dtype=np.int64)

    def records(self) -> ReusedRecords:
        """See ReusedMaps.records."""
        before = tuple(self._heads * layer for layer in range(self._layers))
        return ReusedRecords(self._addresses, torch.float16, False, before, 0)

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """See ReusedMaps.apply."""
        for group in self._batch.groups():
            maps = self._records[group.length][number * self._heads :][: self._heads].to(value)
            by_sequence = value[group.tokens].unflatten(0, (group.count, group.length))
            shared = maps[None].expand(group.count, -1, -1, -1)
            context[group.tokens] = apply_maps(shared, by_sequence).flatten(0, 1)


@torch.inference_mode()
def could_pay(
    engine: PrefillEngine, lengths: Mapping[int, int], min_gain: float, idle_mark: IdleMark = always_idle
) -> bool:
    """Return False if full batches cannot become faster by `min_gain` with reuse on this machine.

    lengths: of the texts to expect, tokens -> number of texts. idle_mark: see compare. "Cannot" means that
    the upper bound of the measured gain is below `min_gain`. Raises MachineBusy.
    """
    model = engine.model
    reused = max(1, round(_REUSED_SHARE * model.layers[0].heads))
    order = [tuple(range(layer.heads)) for layer in model.layers]
    masked = with_reused(engine, order, [reused] * len(order))

    def passed(model: PackedModel, batch: TokenBatch, maps: ReusedMaps) -> None:
        with threads_of(engine.model, engine.threads):
            hidden, _ = run_layers(model, batch, None, maps)
            hidden[:1].cpu()  # a GPU computes until now

    passes = [
        (
            partial(passed, model, batch, NO_REUSED_MAPS),
            partial(passed, masked, batch, MadeUpMaps(batch, len(model.layers), reused)),
        )
        for batch in batches_of(lengths, BATCH_TOKENS)
    ]
    return compare(passes, min_gain, idle_mark).upper >= min_gain
