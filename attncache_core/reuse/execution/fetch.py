"""Multiply the maps of records by V (maps @ V) for the hits of a batch.

Records are scattered over their files. There are four ways to read their maps:

    in place   the compiled kernel reads each record in the mapped file; hits of one record are one product
    gather     the records of one length are copied into one tensor: one copy, one product
    views      one product per record, on a view of the file: no copy, many small products
    mapped     the method of the papers: the pages of records are mapped side by side (mapped.py)

All four give the same values. Packed maps of causal models are unpacked while they are read: the kernel
unpacks rows in the processor's cache, torch's operators unpack to squares. `Fetch.AUTO` takes the fastest way
(docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch

from attncache_core import native
from attncache_core.models.attention import apply_maps
from attncache_core.native.stack_data import NO_RECORDS, GivenRecords
from attncache_core.reuse.execution.given_maps import GivenMaps
from attncache_core.reuse.execution.mapped import map_side_by_side
from attncache_core.reuse.storage.layout import MapForm
from attncache_core.reuse.storage.segment import Segment

# Starting a product costs about 15 µs, so without the kernel, maps of fewer tokens than this are gathered.
_VIEWS_FROM = 96


class Fetch(StrEnum):
    """The way to read the maps of hits."""

    AUTO = "auto"
    IN_PLACE = "in-place"
    GATHER = "gather"
    VIEWS = "views"
    MAPPED = "mapped"


_BY_KERNEL = (Fetch.AUTO, Fetch.IN_PLACE, Fetch.MAPPED)


class RecordGroup(NamedTuple):
    """The records that serve neighbouring sequences of one length in a batch."""

    segment: Segment
    records: np.ndarray  # int64 [sequences]

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return len(self.records) * self.segment.length


class HitRecords(GivenMaps):
    """The maps that the records of hits give to a batch; see GivenMaps. The hits come first in the batch.

    A context manager: records that are mapped side by side for the batch are unmapped at the end.
    """

    def __init__(self, groups: Sequence[RecordGroup], fetch: Fetch = Fetch.AUTO, refitted: int = 0) -> None:
        """groups: the records of the hits, in the order of the batch. refitted: see GivenMaps."""
        self.refitted = refitted
        self._groups = groups
        self._fetch = fetch
        self._kernel = native.kernel() if fetch in _BY_KERNEL else None
        self._mapped: dict[int, torch.Tensor] = {}  # group index -> its records [sequences, numbers]
        self._open = ExitStack()
        self.count = sum(len(group.records) for group in groups)  # number of hits
        if not groups:
            return
        hits = [len(group.records) for group in groups]
        lengths = np.repeat(np.array([g.segment.length for g in groups], dtype=np.int64), hits)
        self._layout = groups[0].segment.layout
        self._cells = self._layout.cells(lengths)
        self._offsets = np.concatenate(([0], np.cumsum(lengths)))
        self._addresses = np.concatenate([g.segment.addresses(g.records) for g in groups])
        # Hits of one record are neighbours, and each run of such hits is one product.
        self._runs = np.flatnonzero(np.diff(self._addresses, prepend=-1, append=-1))

    def __enter__(self) -> Self:
        if self._fetch is Fetch.MAPPED:
            # If one mapping fails, the mappings made before it are unmapped too.
            with ExitStack() as opened:
                self._map_side_by_side(opened)
                self._open = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Tensors on the mappings must be dropped before the mappings are unmapped.
        self._mapped.clear()
        self._open.close()

    def _map_side_by_side(self, opened: ExitStack) -> None:
        first = 0
        for index, (segment, records) in enumerate(self._groups):
            mapped = opened.enter_context(map_side_by_side(segment, records))
            if mapped is not None:
                self._mapped[index] = mapped
                step = segment.layout.record_bytes(segment.length)
                hits = slice(first, first + len(records))
                self._addresses[hits] = mapped.data_ptr() + step * np.arange(len(records))
            first += len(records)

    def records(self) -> GivenRecords | None:
        """See GivenMaps.records. Only records that the kernel reads can be used."""
        if not self._groups:
            return NO_RECORDS
        if self._kernel is None:
            return None
        layout = self._layout
        return GivenRecords(
            self._addresses,
            layout.dtype,
            layout.form is MapForm.PACKED,
            [layout.heads_before(layer) for layer in range(len(layout.stored_heads))],
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
            addresses = self._addresses + 2 * layout.heads_before(number) * self._cells
            packed = layout.form is MapForm.PACKED
            self._kernel.apply_maps(
                addresses, layout.dtype, self._runs, value, self._offsets, context, packed=packed
            )
            return
        first = 0
        for index, group in enumerate(self._groups):
            tokens = slice(first, first + group.tokens)
            shape = (len(group.records), group.segment.length)
            context[tokens] = self._product(index, number, value[tokens].unflatten(0, shape)).flatten(0, 1)
            first = tokens.stop

    def _product(self, index: int, layer: int, value: torch.Tensor) -> torch.Tensor:
        """Return maps @ V of group `index` by torch's operators, for V [n, L, heads, d]: the same shape."""
        segment, records = self._groups[index]
        heads = value.shape[2]
        if index in self._mapped:
            return _product_by_head(segment.squares(self._mapped[index], layer, heads), value)
        if self._fetch is Fetch.VIEWS or (self._fetch is not Fetch.GATHER and segment.length >= _VIEWS_FROM):
            return torch.cat(
                [
                    apply_maps(segment.layer_maps(record, layer, heads)[None].to(value), own)
                    for record, own in zip(records.tolist(), value.split(1), strict=True)
                ]
            )
        maps = segment.gather_layer_maps(torch.from_numpy(records), layer, heads)
        return apply_maps(maps.to(value), value)


def _product_by_head(maps: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return maps [n, h, L, L] @ V [n, L, h, d], computed head by head: [n, L, h, d].

    The step in memory from record to record differs from the step from head to head, and a batched product
    takes only one step between matrices. A single product of all heads would copy the maps first. (In 16
    bits, the product of one head copies its maps too.)
    """
    products = [torch.bmm(maps[:, head].to(value), value[:, :, head]) for head in range(value.shape[2])]
    return torch.stack(products, dim=2)
