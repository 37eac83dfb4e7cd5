"""Python binding of stack.h: all layers of a model on packed rows, in one call.

layers (stack_layers.py)                          -> CompiledStack
batches -> StackRows, ReusedRecords, KeyValueSlots -> CompiledStack.run -> Counts
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.native.attention_kernel import NUMBER_TYPES, short_calls
from attncache_core.native.memory import address
from attncache_core.native.pooling import CompiledPooling, PoolingFields
from attncache_core.native.products import has_pairs
from attncache_core.native.stack_layers import (
    AttentionHalf,
    CompiledEmbedding,
    ForwardHalf,
    LayerFields,
    StackLayout,
    slot_bytes_of,
)

_NO_LIMIT = 2**62
# What token_error of stack.h means.
_TOKEN_ERRORS = {
    1: "a token has a row outside a table of the embedding",
    2: "a sequence has more tokens than the model has positions",
}


@dataclass(frozen=True)
class ReusedRecords:
    """The records whose maps are given to the first sequences of a batch."""

    addresses: np.ndarray  # uint64 [hits], the address of each record
    dtype: torch.dtype = torch.float16  # of the maps
    packed: bool = False  # whether maps are lower triangles
    heads_before: tuple[int, ...] = ()  # for each layer, the number of heads of earlier layers in a record
    refitted: int = 0  # number of hits, from the first, whose rows take the refitted weights


class TreePooling(NamedTuple):
    """The sequences of trees that are pooled, and the states that are kept, in the order of states.h.

    A state, float32 [5, width], is what every pooling needs to know of some tokens; see heads/running.py.
    """

    parents: np.ndarray  # int64 [runs], the run that each run continues; -1: the run is a root
    ends: np.ndarray  # int64 [sequences], the last run of each sequence; -1: all its tokens are given
    lengths: np.ndarray  # int64 [sequences], tokens of each sequence, given tokens too
    # uint64 [sequences], address of the state after the given tokens of each sequence; 0: no token is given.
    # The sequences of a tree have the same given tokens, and leave out the same number of tokens.
    given: np.ndarray
    kept_rows: np.ndarray  # int64 [states], the rows after which states are kept, rising
    kept: np.ndarray  # uint64 [states], where each of these states goes


@dataclass(frozen=True)
class StackRows:
    """The rows of a batch, as a forest of runs; without trees, every run is a sequence."""

    offsets: np.ndarray  # int64 [runs + 1], first row of each run
    # int64 [rows], position of each row in its sequence; None: the rows of a sequence follow each other
    positions: np.ndarray | None = None
    trees: np.ndarray | None = (
        None  # int64 [trees + 1], first run of each tree; runs are in depth-first order
    )
    starts: np.ndarray | None = None  # int64 [runs], position of the first row of each run; with `trees`
    ids: np.ndarray | None = None  # int64 [rows], token ids, if the stack makes the first layer's input
    types: np.ndarray | None = None  # int64 [rows], token types, with `ids`; None: the first type
    # int64 [sequences], tokens at the front of each sequence that pooling leaves out; None: none
    skipped: np.ndarray | None = None
    pooling: TreePooling | None = None  # of the sequences, if the rows have trees


@dataclass(frozen=True)
class KeyValueSlots:
    """Keys and values of the tokens in front of trees, and places for the keys and values of rows.

    A slot has what a token has in one layer: in the compiled stack K of all key heads, before their rotation,
    then V of all value heads. A block holds slots [layers, block_tokens]. Tokens fill the blocks of a tree in
    order, from position 0 to the position at which the root of the tree starts.
    """

    block_tokens: int
    layer_bytes: int  # from a slot to the slot of the same token in the next layer
    given: np.ndarray  # uint64 [blocks], address of the first slot of each given block
    given_blocks: np.ndarray  # int64 [trees + 1], first block of each tree
    # uint64 [slots], addresses of slots in the first layer that rows are written to. None: no row is kept
    kept: np.ndarray | None = None
    kept_rows: np.ndarray | None = None  # int64 [slots], the row of each of these slots, rising
    # int32 [1], the number of layers whose given slots are filled, and one more once the given states are;
    # the stack waits for the others. None: everything is filled.
    ready: np.ndarray | None = None
    # int32 [layers], to which the rows are added whose keys and values are kept. None: nobody asks.
    written: np.ndarray | None = None
    # Whether the rows of a tree, which is one run, are at any rising positions. They attend to the given
    # tokens up to their own position, and their kept slots are among the given ones. The root
    # starts behind all tokens.
    scattered: bool = False
    # Whether the slots of the rows in one layer are kept, and nothing else is computed.
    only: bool = False


@dataclass
class Counts:
    """What a run of the stack computed."""

    multiplications: int  # rows times columns times inputs of all products with weights
    map_rows: int  # rows of maps that were computed, of all heads and layers
    # The part of the run's time that projections, maps and maps @ V took: the share of attention in the time
    # of all threads, of the time of the run.
    attention_seconds: float


NO_RECORDS = ReusedRecords(np.zeros(0, dtype=np.uint64))


_RESULTS = ("multiplications", "map_rows", "attention_nanoseconds", "busy_nanoseconds")


class _Job(ctypes.Structure):
    """The structure `stack_job` of stack.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "hidden", "embedding", "ids", "types", "places")),
        *((name, ctypes.c_void_p) for name in ("offsets", "trees", "starts", "positions")),
        ("max_tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("angles", "maps")),
        *((name, ctypes.c_int32) for name in ("first", "last", "width", "count", "hits", "type")),
        *((name, ctypes.c_int32) for name in ("map_type", "packed", "threads", "widest")),
        *((name, ctypes.c_int32) for name in ("refitted", "block_tokens")),
        *((name, ctypes.c_void_p) for name in ("given", "given_blocks", "kept", "kept_rows", "kept_starts")),
        *((name, ctypes.c_int64) for name in ("kept_count", "slot_bytes", "layer_bytes")),
        *((name, ctypes.c_void_p) for name in ("ready", "written")),
        *((name, ctypes.c_int32) for name in ("scattered", "only_slots")),
        *((name, ctypes.c_void_p) for name in ("pooling", "tree_pooling")),
        *((name, ctypes.c_int64) for name in _RESULTS),
    )


class _TreePooling(ctypes.Structure):
    """The structure `tree_pooling` of states.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parents", "ends", "lengths", "given", "kept_rows", "kept")),
        *((name, ctypes.c_int64) for name in ("count", "kept_count")),
    )

    @classmethod
    def of(cls, pooling: TreePooling) -> _TreePooling:
        """Return the structure, which does not keep the arrays."""
        assert len(pooling.ends) == len(pooling.lengths) == len(pooling.given)
        assert len(pooling.kept_rows) == len(pooling.kept)
        return cls(*map(address, pooling), len(pooling.ends), len(pooling.kept))


class CompiledStack:
    """The layers of a model, ready to be run by compiled code. Any number of threads may call `run`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[tuple[AttentionHalf, Sequence[ForwardHalf]]],
        width: int,
        embedding: CompiledEmbedding | None = None,
        pooling: CompiledPooling | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """layers: the attention half of each layer, and the feed-forward halves up to the next layer.

        width: of the hidden states. embedding: None if the input of the first layer must be given. pooling:
        None if the stack pools nothing. dtype: of Q, K, V and maps; bfloat16 is used if the processor
        multiplies pairs of it.
        """
        self._run = library.run_stack
        self._wake = short_calls(library).wake_helpers
        self._wait = library.wait_for_helpers
        self._width = width
        self.dtype = dtype if has_pairs(library) else torch.float32  # of Q, K, V and maps
        number_type = NUMBER_TYPES[self.dtype]
        self._layout = StackLayout(layers, embedding, pooling, number_type, pairs_of=library.has_pairs_of)
        # heads_before of records -> the structures of the layers with these places of maps
        self._described: dict[tuple[int, ...], ctypes.Array[LayerFields]] = {}
        terms = [term for half, _ in layers for term in (half.query_term, half.key_term) if term is not None]
        distances = [half.bias.shape[1] for half, _ in layers if half.bias is not None]
        distances += [len(term.rows) for term in terms]
        self._has_terms = bool(terms)
        inner = [half.up.outputs for _, halves in layers for half in halves]
        self.slot_bytes = slot_bytes_of([attention for attention, _ in layers], self.dtype)
        # What all jobs have in common.
        self._job = _Job(
            layers=ctypes.addressof(self._layout.layers),
            width=width,
            type=number_type,
            max_tokens=min(((count + 1) // 2 for count in distances), default=_NO_LIMIT),
            widest=max(width, *(attention.output.inputs for attention, _ in layers), *inner),
        )

    @property
    def embeds(self) -> bool:
        """Whether the stack can make the input of the first layer from token ids."""
        return self._layout.embedding is not None

    @property
    def pools(self) -> bool:
        """Whether the stack can make the vectors of sequences."""
        return self._layout.pooling is not None

    def wake(self, threads: int) -> None:
        """Wake the threads that the next `run` uses, if it comes within 0.1 ms."""
        self._wake(threads)

    def run(
        self,
        hidden: torch.Tensor | None,
        rows: StackRows,
        layers: range,
        records: ReusedRecords = NO_RECORDS,
        threads: int | None = None,
        slots: KeyValueSlots | None = None,
    ) -> tuple[torch.Tensor, Counts]:
        """Run a range of layers. Return their output, float32 [rows, width], and what was computed.

        hidden: float32 [rows, width], the input of the first of these layers, which is overwritten with the
        output; None: the stack makes it from token ids. records: of the first sequences. threads:
        the most threads to use; None: as many as torch. slots: keys and values that are given and kept, if
        the rows have trees; the root of a tree starts behind the tokens that are given to the tree. Raises
        IndexError if a table has no row for a token or a position.
        """
        count = int(rows.offsets[-1])
        if hidden is None:
            hidden = torch.empty(count, self._width, dtype=torch.float32)
        assert hidden.dtype == torch.float32
        assert hidden.is_contiguous()
        assert hidden.shape == (count, self._width)
        job = self._job_of(rows, layers, threads or torch.get_num_threads(), records, slots)
        job.hidden = hidden.data_ptr()
        return hidden, self._run_job(job, rows)

    def vectors(
        self,
        rows: StackRows,
        threads: int,
        records: ReusedRecords = NO_RECORDS,
        slots: KeyValueSlots | None = None,
        hidden: torch.Tensor | None = None,
    ) -> tuple[np.ndarray, np.ndarray, Counts]:
        """Run all layers from the token ids of sequences, and pool. Trees need `rows.pooling`.

        Returns vectors, float32 [sequences, modes * width]; whether all states of the last layer and the
        vector are finite, bool [sequences]; and what was computed. records, slots: see `run`. hidden: float32
        [rows, width], to which the output of the last layer is written; None: nobody reads it. Raises
        IndexError as `run` does.
        """
        assert self._layout.pooling is not None
        job = self._job_of(rows, range(len(self._layout.starts) - 1), threads, records, slots)
        if hidden is not None:
            assert hidden.shape == (rows.offsets[-1], self._width)
            job.hidden = hidden.data_ptr()
        count = job.count
        if rows.trees is not None:
            assert rows.pooling is not None
            trees = _TreePooling.of(rows.pooling)
            job.tree_pooling, count = ctypes.addressof(trees), trees.count
        shape = count, self._layout.pooling.modes * self._width
        vectors, finite = np.empty(shape, np.float32), np.empty(count, np.bool_)
        pooling = PoolingFields.from_buffer_copy(self._layout.pooling)
        pooling.write_to(vectors, finite, rows.skipped)
        job.pooling = ctypes.addressof(pooling)
        return vectors, finite, self._run_job(job, rows)

    def _job_of(
        self,
        rows: StackRows,
        layers: range,
        threads: int,
        records: ReusedRecords,
        slots: KeyValueSlots | None,
    ) -> _Job:
        """Return a job of these layers for these rows; rows, records and slots must outlive the job."""
        job = _Job.from_buffer_copy(self._job)
        job.first, job.last = self._layout.starts[layers.start], self._layout.starts[layers.stop]
        job.threads = threads
        job.offsets, job.count = address(rows.offsets), len(rows.offsets) - 1
        if rows.ids is not None:
            assert self._layout.embedding is not None
            assert len(rows.ids) == rows.offsets[-1]
            job.embedding, job.ids = ctypes.addressof(self._layout.embedding), address(rows.ids)
            if rows.types is not None:
                assert len(rows.types) == len(rows.ids)
                job.types = address(rows.types)
        if rows.positions is not None:
            assert len(rows.positions) == rows.offsets[-1]
            job.positions = address(rows.positions)
        if rows.trees is not None:
            self._set_trees(job, rows)
        if len(records.addresses):
            self._set_records(job, rows, records)
        self._set_slots(job, rows, slots)
        return job

    def _run_job(self, job: _Job, rows: StackRows) -> Counts:
        """Run a job. Raises IndexError as `run` does."""
        if self._layout.angles and rows.offsets[-1]:
            tables = [table for angles in self._layout.angles for table in angles(_positions_of(rows))]
            pointers = (ctypes.c_void_p * len(tables))(*(table.data_ptr() for table in tables))
            job.angles = ctypes.addressof(pointers)
        started = time.perf_counter()
        error = self._run(ctypes.addressof(job))
        if error:
            raise IndexError(_TOKEN_ERRORS[error])
        share = job.attention_nanoseconds / max(1, job.busy_nanoseconds)
        seconds = share * (time.perf_counter() - started)
        return Counts(job.multiplications, job.map_rows, seconds)

    def _set_trees(self, job: _Job, rows: StackRows) -> None:
        assert rows.trees is not None
        assert rows.starts is not None
        assert rows.positions is not None
        assert not self._has_terms
        job.trees, job.starts = address(rows.trees), address(rows.starts)
        job.count = len(rows.trees) - 1

    def _set_slots(self, job: _Job, rows: StackRows, slots: KeyValueSlots | None) -> None:
        if slots is None:
            # Nothing is given in front of a root.
            assert rows.trees is None or (rows.starts is not None and not rows.starts[rows.trees[:-1]].any())
            return
        assert self.slot_bytes is not None
        assert rows.trees is not None
        assert rows.starts is not None
        tokens = np.diff(slots.given_blocks) * slots.block_tokens - rows.starts[rows.trees[:-1]]
        assert ((tokens >= 0) & (tokens < slots.block_tokens)).all()
        assert len(slots.given) == slots.given_blocks[-1]
        job.block_tokens, job.slot_bytes = slots.block_tokens, self.slot_bytes
        job.layer_bytes, job.scattered, job.only_slots = slots.layer_bytes, slots.scattered, slots.only
        job.given, job.given_blocks = address(slots.given), address(slots.given_blocks)
        if slots.kept is not None:
            assert slots.kept_rows is not None
            assert len(slots.kept_rows) == len(slots.kept)
            job.kept, job.kept_rows = address(slots.kept), address(slots.kept_rows)
            job.kept_count = len(slots.kept)
        if slots.ready is not None:
            job.ready = address(slots.ready)
        if slots.written is not None:
            job.written = address(slots.written)

    def _set_records(self, job: _Job, rows: StackRows, records: ReusedRecords) -> None:
        assert rows.trees is None
        described = self._described.get(records.heads_before)
        if described is None:
            described = self._described.setdefault(
                records.heads_before, self._with_places(records.heads_before)
            )
        job.layers, job.hits = ctypes.addressof(described), len(records.addresses)
        job.maps, job.map_type = address(records.addresses), NUMBER_TYPES[records.dtype]
        job.packed, job.refitted = records.packed, records.refitted

    def _with_places(self, heads_before: tuple[int, ...]) -> ctypes.Array[LayerFields]:
        """Return the structures of the layers, with the places of their maps in records."""
        layers = (LayerFields * len(self._layout.layers))()
        ctypes.memmove(layers, self._layout.layers, ctypes.sizeof(self._layout.layers))
        for start, heads in zip(self._layout.starts, heads_before, strict=False):
            layers[start].maps_before = heads
        return layers

    def __del__(self) -> None:
        # A helper may still look at a job of this stack after `run` has returned.
        self._wait()


def _positions_of(rows: StackRows) -> int:
    """Return the number of positions that the rows of a batch and the tokens in front of them can have."""
    if rows.positions is None:
        return int(np.diff(rows.offsets).max())
    # Scattered rows attend to given tokens, all of which are rotated, also those behind the last row.
    last = int(rows.positions.max()) + 1
    return last if rows.starts is None else max(last, int(rows.starts.max()))
