"""Where the layers of a pass get the maps that they do not compute.

    ReusedMaps    maps that the first sequences of a batch reuse
    HitRecords    the maps of records of the database

Records are scattered over their files, and are read in place: compiled code takes the address of each record
in the mapped file, torch's operators take a view on the file. Packed maps of causal models are unpacked while
they are read: row by row in the processor's cache, or to squares for torch's operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from attncache_core import native
from attncache_core.models import AttentionLayer
from attncache_core.models.attention import apply_maps
from attncache_core.native.stack import NO_RECORDS, ReusedRecords
from attncache_core.reuse.storage.layout import MapForm
from attncache_core.reuse.storage.segment import Segment
from attncache_core.text.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class ComputedHeads:
    """The computed heads of one layer for a whole batch: their Q, K and V, and where maps @ V is written.

    The tensors are [tokens, computed heads, head_dim].
    """

    number: int  # of the layer
    layer: AttentionLayer
    batch: TokenBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: torch.Tensor


class ReusedMaps(ABC):
    """Maps that the first sequences of a batch reuse, in the reused heads of each layer."""

    count: int  # number of sequences that get maps; they come first in the batch
    # Number of sequences, from the first, that take the model's refitted weights; at most `count`.
    refitted: int = 0

    def attend(self, heads: ComputedHeads) -> None:
        """Compute the maps of the computed heads of a layer, and write maps @ V to `heads.context`.

        For all sequences.
        """
        computed, batch = slice(heads.layer.reused_heads, heads.layer.heads), heads.batch
        heads.layer.attend(
            heads.query, heads.key, heads.value, batch.offsets, computed, heads.context, batch.tree
        )

    def records(self) -> ReusedRecords | None:
        """Return the records of the maps for the compiled stack; None if the stack cannot use them."""
        return None

    @abstractmethod
    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """Write maps @ V of the reused heads of layer `number` to the rows of the first `count` sequences.

        value, context: [tokens, reused heads, head_dim] of the whole batch.
        """


class RecordGroup(NamedTuple):
    """The records that serve neighbouring sequences of one length in a batch."""

    segment: Segment
    records: np.ndarray  # int64 [sequences]


class HitRecords(ReusedMaps):
    """The maps that the records of hits give to a batch; see ReusedMaps. The hits come first in the batch."""

    def __init__(self, groups: Sequence[RecordGroup], refitted: int = 0) -> None:
        """groups: the records of the hits, in the order of the batch. refitted: see ReusedMaps."""
        self.refitted = refitted
        self._groups = groups
        self._kernel = native.kernel()
        self.count = sum(len(group.records) for group in groups)  # number of hits
        if not groups:
            return
        self._layout = groups[0].segment.layout
        self._addresses = np.concatenate([g.segment.addresses(g.records) for g in groups])

    @cached_property
    def _lengths(self) -> np.ndarray:
        hits = [len(group.records) for group in self._groups]
        return np.repeat(np.array([g.segment.length for g in self._groups], dtype=np.int64), hits)

    @cached_property
    def _offsets(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self._lengths)))

    @cached_property
    def _cells(self) -> np.ndarray:
        cells: np.ndarray = self._layout.cells(self._lengths)
        return cells

    @cached_property
    def _runs(self) -> np.ndarray:
        # Hits of one record are neighbours, and each run of such hits is one product.
        return np.flatnonzero(np.diff(self._addresses, prepend=-1, append=-1))

    def records(self) -> ReusedRecords | None:
        """See ReusedMaps.records. Only records that the kernel reads can be used."""
        if not self._groups:
            return NO_RECORDS
        if self._kernel is None:
            return None
        layout = self._layout
        return ReusedRecords(
            self._addresses,
            layout.dtype,
            layout.form is MapForm.PACKED,
            layout.heads_before,
            self.refitted,
        )

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """Write maps @ V of the reused heads of layer `number` to the rows of the hits in `context`.

        value, context: [tokens, reused heads, d] of the whole batch. Maps are converted to their dtype.
        """
        if not self._groups:
            return
        if self._kernel and self._kernel.supports(value):
            layout = self._layout
            addresses = self._addresses + 2 * layout.heads_before[number] * self._cells
            packed = layout.form is MapForm.PACKED
            self._kernel.apply_maps(
                addresses, layout.dtype, self._runs, value, self._offsets, context, packed=packed
            )
            return
        hits = [(segment, record) for segment, records in self._groups for record in records.tolist()]
        for (segment, record), first in zip(hits, self._offsets[:-1].tolist(), strict=True):
            tokens = slice(first, first + segment.length)
            maps = segment.layer_maps(record, number, value.shape[1]).to(value)
            context[tokens] = apply_maps(maps[None], value[None, tokens])[0]
