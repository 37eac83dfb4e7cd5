"""A batch that continues stored blocks: from sequences to rows, slots and states.

sequences -> KeyValueStore.begin -> the tokens that are not given, as a tree -> TokenBatch, KeyValueSlots
the rows and the states that are given -> states of the new blocks, vectors -> KeyValueStore.finish
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.heads.running import empty_states, running_states
from attncache_core.native.stack import KeyValueSlots, TreePooling
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.reuse.kv.memory import Block, PrefixKey
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.text.prefix_tree import PrefixTree, continued_prefixes
from attncache_core.text.token_batch import TokenBatch


class Continued(NamedTuple):
    """A sequence of a batch."""

    ids: Sequence[int]  # at least one token id
    prefix_key: PrefixKey | None  # None: nothing is given, and nothing is kept
    skipped: int = 0  # tokens at the front that pooling leaves out
    group: Hashable = None  # sequences share prefixes only inside a group


class Continuation:
    """One batch that continues what the store gives to it."""

    def __init__(self, store: KeyValueStore, sequences: Sequence[Continued], load: bool = True) -> None:
        """Look the sequences up. The caller runs `batch` in a `with` block, and calls `finish`.

        load: whether saved blocks may be loaded.
        """
        if not all(sequence.ids for sequence in sequences):
            raise ValueError("a sequence needs at least one token")
        storable = [index for index, sequence in enumerate(sequences) if sequence.prefix_key]
        reservation = store.begin(
            [sequence.prefix_key for sequence in sequences if sequence.prefix_key], load
        )
        self._store, self._reservation = store, reservation
        self.lengths = np.array([len(sequence.ids) for sequence in sequences], dtype=np.int64)
        self.skipped = np.array([sequence.skipped for sequence in sequences], dtype=np.int64)
        self.given_tokens = np.zeros(len(sequences), dtype=np.int64)
        self.given_tokens[storable] = reservation.given_tokens
        self._given: list[list[Block]] = [[] for _ in sequences]
        for index, blocks in zip(storable, reservation.given, strict=True):
            self._given[index] = blocks
        self._new = [new._replace(sequence=storable[new.sequence]) for new in reservation.new]
        # The sequences with tokens that are not given, as indices of `sequences`, int64 [n].
        self.computed = np.flatnonzero(self.given_tokens < self.lengths)
        try:
            self.batch = self._packed(sequences) if len(self.computed) else None
        except BaseException:
            store.abandon(reservation)
            raise

    def _packed(self, sequences: Sequence[Continued]) -> TokenBatch:
        """Return the tokens that are not given, as a tree of the computed sequences."""
        chosen = self.computed.tolist()
        cached = self.given_tokens[chosen].tolist()
        groups: list[Hashable] = []
        for index, count in zip(chosen, cached, strict=True):
            sequence = sequences[index]
            end = (
                self._given[index][-1].name.key if count else sequence.prefix_key and sequence.prefix_key.root
            )
            groups.append((sequence.group, sequence.skipped, end))
        rest = [sequences[index].ids[count:] for index, count in zip(chosen, cached, strict=True)]
        found = continued_prefixes(rest, groups, cached)
        lengths = np.diff(found.tree.offsets)
        return TokenBatch(torch.from_numpy(found.ids), lengths, found.order, tree=found.tree)

    @property
    def _tree(self) -> PrefixTree:
        assert self.batch is not None
        assert self.batch.tree is not None
        return self.batch.tree

    @cached_property
    def _of_trees(self) -> list[int]:
        """For each tree one of its sequences, as an index of `sequences`."""
        assert self.batch is not None
        of_trees = np.empty(len(self._tree.trees) - 1, dtype=np.int64)
        of_trees[np.searchsorted(self._tree.trees, self._tree.ends, side="right") - 1] = self.batch.order
        found: list[int] = self.computed[of_trees].tolist()
        return found

    def slots(self) -> KeyValueSlots:
        """Return where the given keys and values are, and where those of the rows are to be written."""
        pool, layout = self._store.memory.pool, self._store.layout
        of_trees = [self._given[index] for index in self._of_trees]
        return KeyValueSlots(
            BLOCK_TOKENS,
            layout.layer_bytes,
            pool.addresses([block.place for blocks in of_trees for block in blocks]),
            np.cumsum([0, *map(len, of_trees)]),
            *self._kept(),
            self._reservation.loading.ready if self._reservation.loading else None,
        )

    def pooling(self) -> TreePooling:
        """Return how the sequences are pooled, and where the states of new blocks are to be written."""
        pool = self._store.memory.pool
        has_given, order = np.flatnonzero(self.given_tokens), np.argsort(self._ends, kind="stable")
        states = np.zeros(len(self.lengths), dtype=np.uint64)
        states[has_given] = pool.state_addresses(
            [self._given[index][-1].place for index in has_given.tolist()]
        )
        ends = np.full(len(self.lengths), -1, dtype=np.int64)
        parents = ends[:0]
        if self.batch is not None:
            parents = self._tree.parents
            ends[self.computed[self.batch.order]] = self._tree.ends
        kept = pool.state_addresses([new.block.place for new in self._new])
        return TreePooling(parents, ends, self.lengths, states, self._ends[order], kept[order])

    def wait_until_loaded(self) -> None:
        """Wait for given blocks that are being loaded. Raises DamagedBlock: nothing of the batch is right."""
        self._store.wait_until_loaded(self._reservation)

    def _kept(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the slots of the new blocks, and the row that is written to each; see KeyValueSlots."""
        if not self._new:
            return None, None
        pool, size = self._store.memory.pool, self._store.layout.slot_bytes
        firsts, ends = self._spans
        counts = ends - firsts
        of_blocks = np.repeat(np.arange(len(self._new)), counts)
        positions = np.arange(len(of_blocks)) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        rows = self._rows(self._sequences_of_new[of_blocks], positions)
        places = pool.addresses([new.block.place for new in self._new])
        addresses = places[of_blocks] + (positions % BLOCK_TOKENS * size).astype(np.uint64)
        order = np.argsort(rows, kind="stable")
        return addresses[order], rows[order]

    @cached_property
    def _sequences_of_new(self) -> np.ndarray:
        """The sequence of each new block, as an index of `sequences`, int64 [blocks]."""
        return np.array([new.sequence for new in self._new], dtype=np.int64)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """The position of the first computed token of each new block, and its end, int64 [blocks]."""
        firsts = np.array([new.first for new in self._new], dtype=np.int64)
        ends = firsts + np.array([new.block.name.length for new in self._new], dtype=np.int64)
        return np.maximum(firsts, self.given_tokens[self._sequences_of_new]), ends

    @cached_property
    def _ends(self) -> np.ndarray:
        """The row at the end of each new block, int64 [blocks]."""
        if not self._new:
            return np.zeros(0, dtype=np.int64)
        return self._rows(self._sequences_of_new, self._spans[1] - 1)

    def _rows(self, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the row of each token, int64 [n]. sequences: indices of the caller's sequences."""
        assert self.batch is not None
        number = np.zeros(len(self.lengths), dtype=np.int64)
        number[self.computed] = np.arange(len(self.computed))
        return self.batch.rows(number[sequences], positions)

    def given_states(self) -> np.ndarray:
        """Return the states of the sequences after their given tokens, float32 [sequences, 5, width]."""
        pool = self._store.memory.pool
        states = empty_states(len(self.lengths), self._store.layout.width)
        for index, blocks in enumerate(self._given):
            if blocks:
                states[index] = pool.state(blocks[-1].place)
        return states

    def states(self, hidden: np.ndarray) -> np.ndarray:
        """Return the states of the sequences, float32 [sequences, 5, width], and write those of new blocks.

        hidden: what pooling reads of the batch's rows, float32 [rows, width].
        """
        states, of_trees = self.given_states(), self._of_trees
        rows = np.concatenate([self._rows(self.computed, self.lengths[self.computed] - 1), self._ends])
        found = running_states(hidden, self._tree, states[of_trees], self.skipped[of_trees], rows)
        states[self.computed] = found[: len(self.computed)]
        for new, state in zip(self._new, found[len(self.computed) :], strict=True):
            self._store.memory.pool.state(new.block.place)[:] = state
        return states

    def finish(self, finite: np.ndarray) -> None:
        """Store what was computed. finite: bool [sequences], what may be kept."""
        pool = self._store.memory.pool
        for block, of, first in self._new:
            known = int(self.given_tokens[of]) - first
            if known > 0:  # the block begins with the tokens of a given one
                pool.slots(block.place)[:, :known] = pool.slots(self._given[of][-1].place)[:, :known]
        damaged = {new.block for new in self._new if not finite[new.sequence]}
        self._store.finish(self._reservation, lambda new: new.block not in damaged)

    def __enter__(self) -> Continuation:
        return self

    def __exit__(self, *_: object) -> None:
        """Free what the batch reserved, unless `finish` was called."""
        self._store.abandon(self._reservation)
