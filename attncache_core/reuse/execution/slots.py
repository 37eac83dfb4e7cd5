"""Attention with keys and values in slots, by torch's operators: what the compiled stack does with them.

    x -> Q, slots of the rows -> kept
    given slots + slots of the rows -> K and V of all tokens -> context of the rows

The tokens in front of a tree become a run of the tree, of which only K and V are used.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
import torch

from attncache_core.models import AttentionLayer
from attncache_core.native.stack import KeyValueSlots
from attncache_core.text.prefix_tree import PrefixTree
from attncache_core.text.token_batch import TokenBatch

_SECONDS_BETWEEN_LOOKS = 20e-6  # at the number of layers that are loaded


class SlotAttention:
    """The attention of all layers over a batch whose tree continues given tokens."""

    def __init__(self, batch: TokenBatch, slots: KeyValueSlots) -> None:
        assert batch.tree is not None
        self._batch, self._slots = batch, slots
        self._tree, rows = _among_given(batch) if slots.scattered else batch.tree.with_given_tokens()
        self._rows = torch.from_numpy(rows)
        count = int(self._tree.offsets[-1])
        is_given = np.ones(count, dtype=bool)
        is_given[rows] = False
        self._given_rows = torch.from_numpy(np.flatnonzero(is_given))
        runs = np.repeat(np.arange(len(self._tree.parents)), np.diff(self._tree.offsets))
        positions = np.arange(count) + (self._tree.starts - self._tree.offsets[:-1])[runs]
        self._positions = torch.from_numpy(positions).to(batch.ids.device)

    def context(self, number: int, layer: AttentionLayer, x: torch.Tensor) -> torch.Tensor:
        """Return maps @ V of the rows in layer `number`, and keep the slots of the rows.

        x: the input of attention, [tokens, hidden]. Result: [tokens, heads, head_dim].
        """
        own_query, computed = layer.projections.query_and_slots(x, self._batch.positions)
        self._keep(number, computed)
        slots = computed.new_zeros(len(self._positions), computed.shape[1])
        if self._slots.scattered:
            slots[:] = self._given(number, computed)  # the slots of the rows are among them
        else:
            slots[self._rows] = computed
            slots[self._given_rows] = self._given(number, computed)
        query = own_query.new_zeros(len(slots), *own_query.shape[1:])
        query[self._rows] = own_query
        key, value = layer.projections.keys_and_values(slots, self._positions)
        context = torch.empty_like(value)
        whole = slice(0, layer.heads)
        layer.attend(query, key, value, self._tree.offsets, whole, context, self._tree)
        return context[self._rows]

    def keep(self, number: int, layer: AttentionLayer, x: torch.Tensor) -> None:
        """Keep the slots of the rows in layer `number`. x: as for `context`."""
        self._keep(number, layer.projections.query_and_slots(x, self._batch.positions)[1])

    def _given(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Wait for the given slots of a layer. Return them in the order of rows, [given tokens, n]."""
        slots, tree = self._slots, self._batch.tree
        assert tree is not None
        while slots.ready is not None and slots.ready[0] <= number:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        width = like.shape[1] * like.element_size()
        parts = []
        for at, first in enumerate(tree.trees[:-1].tolist()):
            left = int(tree.starts[first])
            for address in slots.given[slots.given_blocks[at] : slots.given_blocks[at + 1]].tolist():
                count = min(left, slots.block_tokens)
                parts.append(ctypes.string_at(address + number * slots.layer_bytes, count * width))
                left -= count
        numbers = bytearray().join(parts)
        found = torch.frombuffer(numbers, dtype=like.dtype) if numbers else like.new_zeros(0)
        return found.view(-1, like.shape[1]).to(like.device)

    def _keep(self, number: int, computed: torch.Tensor) -> None:
        kept, kept_rows = self._slots.kept, self._slots.kept_rows
        if kept is not None and kept_rows is not None:
            rows = computed.cpu().contiguous()
            width = rows.shape[1] * rows.element_size()
            for row, address in zip(kept_rows.tolist(), kept.tolist(), strict=True):
                to = address + number * self._slots.layer_bytes
                ctypes.memmove(to, rows[row].data_ptr(), width)
        if self._slots.written is not None:
            self._slots.written[number] += len(computed)


def _among_given(batch: TokenBatch) -> tuple[PrefixTree, np.ndarray]:
    """Return the given tokens of all trees as sequences, and the place of each row among them.

    The places are int64 [rows].
    """
    assert batch.tree is not None
    lengths, ends = batch.tree.starts, np.arange(len(batch.tree.starts))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    whole = PrefixTree(np.full(len(ends), -1), np.zeros_like(lengths), offsets, ends)
    return whole, batch.positions.cpu().numpy() + np.repeat(offsets[:-1], batch.lengths)
