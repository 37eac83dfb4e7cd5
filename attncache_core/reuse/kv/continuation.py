"""A batch that continues stored blocks: from sequences to rows, slots and states.

sequences -> KeyValueStore.begin -> the tokens that are not given, as a tree -> TokenBatch, KeyValueSlots
last hidden states of the rows -> states of the sequences and of the new blocks -> KeyValueStore.finish
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.heads.running import empty_states, running_states
from attncache_core.native.stack_data import KeyValueSlots
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
        if not all(own.ids for own in sequences):
            raise ValueError("a sequence needs at least one token")
        asked = [index for index, own in enumerate(sequences) if own.prefix_key]
        reservation = store.begin([own.prefix_key for own in sequences if own.prefix_key], load)
        self._store, self._reservation = store, reservation
        self.lengths = np.array([len(own.ids) for own in sequences], dtype=np.int64)
        self.skipped = np.array([own.skipped for own in sequences], dtype=np.int64)
        self.given_tokens = np.zeros(len(sequences), dtype=np.int64)
        self.given_tokens[asked] = reservation.given_tokens
        self._given: list[list[Block]] = [[] for _ in sequences]
        for index, given in zip(asked, reservation.given, strict=True):
            self._given[index] = given
        self._new = [new._replace(sequence=asked[new.sequence]) for new in reservation.new]
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
        given = self.given_tokens[chosen].tolist()
        groups: list[Hashable] = []
        for index, count in zip(chosen, given, strict=True):
            own = sequences[index]
            end = self._given[index][-1].name.key if count else own.prefix_key and own.prefix_key.root
            groups.append((own.group, own.skipped, end))
        rest = [sequences[index].ids[count:] for index, count in zip(chosen, given, strict=True)]
        found = continued_prefixes(rest, groups, given)
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
        trees = np.searchsorted(self._tree.trees, self._tree.ends, side="right") - 1
        _, first = np.unique(trees, return_index=True)
        of_trees: list[int] = self.computed[self.batch.order[first]].tolist()
        return of_trees

    def slots(self) -> KeyValueSlots:
        """Return where the given keys and values are, and where those of the rows are to be written."""
        pool, layout = self._store.memory.pool, self._store.layout
        given = [self._given[index] for index in self._of_trees]
        return KeyValueSlots(
            BLOCK_TOKENS,
            layout.layer_bytes,
            pool.addresses([block.place for own in given for block in own]),
            np.concatenate(([0], np.cumsum([len(own) for own in given]))),
            self._kept(),
            self._reservation.loading.ready if self._reservation.loading else None,
        )

    def wait_until_loaded(self) -> None:
        """Wait for given blocks that are being loaded. Raises DamagedBlock: nothing of the batch is right."""
        self._store.wait_until_loaded(self._reservation)

    def _kept(self) -> np.ndarray | None:
        """Return the address of each row's slot, uint64 [rows]. Notes the slots that need a copy of it."""
        self._copies: list[tuple[Block, Block, slice]] = []
        if not self._new:
            return None
        pool, size = self._store.memory.pool, self._store.layout.slot_bytes
        firsts = np.array([max(first, self.given_tokens[of]) for _, of, first in self._new], dtype=np.int64)
        ends = np.array([first + block.name.length for block, _, first in self._new], dtype=np.int64)
        counts = ends - firsts
        of_blocks = np.repeat(np.arange(len(self._new)), counts)
        positions = np.arange(len(of_blocks)) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        rows = self._rows(np.array([new.sequence for new in self._new])[of_blocks], positions)
        kept = np.zeros(int(self._tree.offsets[-1]), dtype=np.uint64)
        places = pool.addresses([new.block.place for new in self._new])
        addresses = places[of_blocks] + (positions % BLOCK_TOKENS * size).astype(np.uint64)
        distinct, first = np.unique(rows, return_index=True)
        kept[distinct] = addresses[first]
        self._note_copies(rows, of_blocks, positions, distinct, first)
        return kept

    def _note_copies(
        self,
        rows: np.ndarray,
        of_blocks: np.ndarray,
        positions: np.ndarray,
        distinct: np.ndarray,
        first: np.ndarray,
    ) -> None:
        """Note the slots of new blocks that are copies of slots in another block: of one token, at one place.

        A row that belongs to several new blocks is written to one of them. A new block may begin with tokens
        of a given block.
        """
        again = np.ones(len(rows), dtype=bool)
        again[first] = False
        sources = of_blocks[first[np.searchsorted(distinct, rows[again])]]
        slots = zip(of_blocks[again].tolist(), sources.tolist(), positions[again].tolist(), strict=True)
        # Slots that follow each other, and so do their numbers, are one copy.
        for (to, source, _), stretch in groupby(
            enumerate(slots), lambda each: (*each[1][:2], each[1][2] - each[0])
        ):
            positions_of = [position for _, (_, _, position) in stretch]
            at = positions_of[0] % BLOCK_TOKENS
            copied = slice(at, at + len(positions_of))
            self._copies.append((self._new[source].block, self._new[to].block, copied))
        for block, of, start in self._new:
            known = int(self.given_tokens[of]) - start
            if known > 0:
                self._copies.append((self._given[of][-1], block, slice(known)))

    def _rows(self, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the row of each token, int64 [n]. sequences: indices of the caller's sequences."""
        assert self.batch is not None
        number = np.zeros(len(self.lengths), dtype=np.int64)
        number[self.computed] = np.arange(len(self.computed))
        return self.batch.rows(number[sequences], positions)

    def states(self, hidden: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the states of the sequences and of the new blocks, each float32 [n, 5, width].

        hidden: what pooling reads of the batch's rows, float32 [rows, width]; None without a batch.
        """
        pool, width = self._store.memory.pool, self._store.layout.width
        states = empty_states(len(self.lengths), width)
        for index, given in enumerate(self._given):
            if given:
                states[index] = pool.state(given[-1].place)
        if hidden is None:
            return states, states[:0]
        ends = [first + block.name.length - 1 for block, _, first in self._new]
        sequences = np.array([*self.computed, *(new.sequence for new in self._new)], dtype=np.int64)
        positions = np.array([*(self.lengths[self.computed] - 1), *ends], dtype=np.int64)
        of_trees = self._of_trees
        found = running_states(
            hidden, self._tree, states[of_trees], self.skipped[of_trees], self._rows(sequences, positions)
        )
        states[self.computed] = found[: len(self.computed)]
        return states, found[len(self.computed) :]

    def finish(self, states: np.ndarray, finite: np.ndarray) -> None:
        """Store what was computed. states: of the new blocks. finite: bool [sequences], what may be kept."""
        pool = self._store.memory.pool
        for source, to, slots in self._copies if self._new else ():
            pool.slots(to.place)[:, slots] = pool.slots(source.place)[:, slots]
        for new, own in zip(self._new, states, strict=True):
            pool.state(new.block.place)[:] = own
        damaged = {new.block for new in self._new if not finite[new.sequence]}
        self._store.finish(self._reservation, lambda new: new.block not in damaged)

    def __enter__(self) -> Continuation:
        return self

    def __exit__(self, *_: object) -> None:
        """Free what the batch reserved, unless `finish` was called."""
        self._store.abandon(self._reservation)
