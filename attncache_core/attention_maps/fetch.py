"""From records to context: maps @ V for the hits of a batch, straight from the mapped file.

Records lie scattered in their files. There are four ways to multiply them:

    in place   the compiled kernel reads each record where it lies; sequences that share one are one product
    gather     the records of one length are copied into one tensor: one copy, one product
    views      a product for each record, on a view of the file: no copy, many small products
    mapped     the papers' way: each record's pages are mapped side by side in one range of addresses

All give the same values. Packed maps of causal models are unpacked as they are read: by the kernel row by row
in the processor's cache, elsewhere into squares. `Fetch.AUTO` takes what is fastest (docs/benchmarks.md).
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
from attncache_core.attention_maps.mapped import map_side_by_side
from attncache_core.attention_maps.store import MapForm, RecordsChanged, Segment
from attncache_core.models.attention import apply_maps

# Where nothing is compiled: a product costs some 15 µs to start, so that short maps are gathered sooner.
_VIEWS_FROM = 96


class Fetch(StrEnum):
    """How the maps of hits get into their product."""

    AUTO = "auto"
    IN_PLACE = "in-place"
    GATHER = "gather"
    VIEWS = "views"
    MAPPED = "mapped"


_BY_KERNEL = (Fetch.AUTO, Fetch.IN_PLACE, Fetch.MAPPED)


class RecordGroup(NamedTuple):
    """The records that serve neighbouring sequences of one length."""

    segment: Segment
    records: np.ndarray  # int64 [sequences]

    @property
    def tokens(self) -> int:
        """Tokens of the sequences."""
        return len(self.records) * self.segment.length


class HitRecords:
    """The records of a batch's hits, which are its first sequences, group after group.

    A context manager: what is mapped for the batch is unmapped when it is left. RecordsChanged is raised
    then if the records have not always been what they were when they were checked.
    """

    def __init__(self, groups: Sequence[RecordGroup], fetch: Fetch = Fetch.AUTO) -> None:
        self._groups = groups
        self._fetch = fetch
        self._kernel = native.kernel() if fetch in _BY_KERNEL else None
        self._mapped: dict[int, torch.Tensor] = {}  # group -> numbers of its records [sequences, ...]
        self._open = ExitStack()
        self.count = sum(len(group.records) for group in groups)  # hits
        if not groups:
            return
        hits = [len(group.records) for group in groups]
        lengths = np.repeat(np.array([g.segment.length for g in groups], dtype=np.int64), hits)
        self._layout = groups[0].segment.layout
        self._cells = self._layout.cells(lengths)
        self._offsets = np.concatenate(([0], np.cumsum(lengths)))
        self._addresses = np.concatenate([g.segment.addresses(g.records) for g in groups])
        # Hits of one record are neighbours, and each run of them is one product.
        self._runs = np.flatnonzero(np.diff(self._addresses, prepend=-1, append=-1))

    def __enter__(self) -> Self:
        if self._fetch is Fetch.MAPPED:
            # Should one mapping fail, those made before it go as well.
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
        # The views go before what they look at.
        self._mapped.clear()
        self._open.close()
        if kind is None:
            changed = [group.segment for group in self._groups if not group.segment.is_as_checked()]
            if changed:
                raise RecordsChanged(changed)

    def _map_side_by_side(self, opened: ExitStack) -> None:
        first = 0
        for number, (segment, records) in enumerate(self._groups):
            mapped = opened.enter_context(map_side_by_side(segment, records))
            if mapped is not None:
                self._mapped[number] = mapped
                step = segment.layout.record_bytes(segment.length)
                places = slice(first, first + len(records))
                self._addresses[places] = mapped.data_ptr() + step * np.arange(len(records))
            first += len(records)

    def apply(self, layer: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """Write maps @ V of the first heads of a layer to the hits' tokens of `context`.

        value, context: [tokens, heads, d] of the whole batch, as many heads as are reused. Maps of another
        dtype than theirs are converted.
        """
        if not self._groups:
            return
        if self._kernel and self._kernel.takes(value):
            layout = self._layout
            addresses = self._addresses + 2 * layout.heads_before(layer) * self._cells
            packed = layout.form is MapForm.PACKED
            self._kernel.apply_maps(
                addresses, layout.dtype, self._runs, value, self._offsets, context, packed=packed
            )
            return
        first = 0
        for number, group in enumerate(self._groups):
            tokens = slice(first, first + group.tokens)
            shape = (len(group.records), group.segment.length)
            context[tokens] = self._product(number, layer, value[tokens].unflatten(0, shape)).flatten(0, 1)
            first = tokens.stop

    def _product(self, number: int, layer: int, value: torch.Tensor) -> torch.Tensor:
        """maps @ V [n, L, heads, d] of one group, with torch's operators: the context, of the same shape."""
        segment, records = self._groups[number]
        heads = value.shape[2]
        if number in self._mapped:
            return _product_by_head(segment.squares(self._mapped[number], layer, heads), value)
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
    """maps [n, h, L, L] @ V [n, L, h, d], head by head.

    The maps of n records lie further apart than those of a record's heads: one product of all would copy
    them first, since its operator takes one step between matrices. (In 16 bits it copies a head's maps.)
    """
    products = [torch.bmm(maps[:, head].to(value), value[:, :, head]) for head in range(value.shape[2])]
    return torch.stack(products, dim=2)
