"""Python binding of stack.h: all layers of a model on packed rows, in one call.

CompiledStack(layers)  ->  run(hidden, rows, layers, ...)
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from attncache_core.native.attention_kernel import NO_BOUND, NUMBER_TYPES, DistanceTermFields
from attncache_core.native.pooling import NormFields, PoolingFields, address
from attncache_core.native.products import ACTIVATION_NUMBERS, Matrix, has_pairs
from attncache_core.native.stack_data import (
    NO_RECORDS,
    AngleTables,
    AttentionHalf,
    CompiledEmbedding,
    CompiledNorm,
    CompiledPooling,
    Counts,
    DistanceTerm,
    ForwardHalf,
    GivenRecords,
    KeyValueSlots,
    Pooled,
    StackRows,
    TreePooling,
)

_LANES = 16  # of vectors.h


class _Embedding(ctypes.Structure):
    """The structure `embedding` of stack.h."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("added", ctypes.c_void_p),
        ("norm", NormFields),
        *((name, ctypes.c_int64) for name in ("word_count", "place_count", "padding")),
        *((name, ctypes.c_int32) for name in ("has_positions", "types", "type")),
        ("scale", ctypes.c_float),
    )


_NORMS = ("before", "branch", "after", "query", "key")
_FORWARD_NORMS = ("forward_before", "forward_branch", "forward_after")
_LAYER_COUNTS = (
    *("heads", "reused", "keys_always", "keys_misses", "values", "width", "value_width", "half", "angles"),
    *("reach_before", "reach_after", "bias_positions", "activation", "maps_before", "number"),
)


class _Layer(ctypes.Structure):
    """The structure `stack_layer` of stack.h."""

    _fields_ = (
        *((name, Matrix) for name in ("always", "misses", "output")),
        *((name, NormFields) for name in _NORMS),
        ("bias", ctypes.c_void_p),
        *((name, DistanceTermFields) for name in ("query_term", "key_term")),
        *((name, ctypes.c_void_p) for name in ("key_heads", "value_heads")),
        *((name, Matrix) for name in ("gate", "up", "down", "refitted_output", "refitted_down")),
        *((name, NormFields) for name in _FORWARD_NORMS),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in _LAYER_COUNTS),
    )


_NO_LIMIT = 2**62
# What token_error of stack.h means.
_TOKEN_ERRORS = {
    1: "a token has a row outside a table of the embedding",
    2: "a sequence has more tokens than the model has positions",
}
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
        arrays = (
            pooling.parents,
            pooling.ends,
            pooling.lengths,
            pooling.given,
            pooling.kept_rows,
            pooling.kept,
        )
        assert len(pooling.ends) == len(pooling.lengths) == len(pooling.given)
        assert len(pooling.kept_rows) == len(pooling.kept)
        return cls(*map(address, arrays), len(pooling.ends), len(pooling.kept))


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
        self._run.argtypes, self._run.restype = [ctypes.c_void_p], ctypes.c_int32
        self._wake = library.wake_helpers
        self._wake.argtypes, self._wake.restype = [ctypes.c_int32], None
        self._wait = library.wait_for_helpers
        self._wait.argtypes, self._wait.restype = [], None
        self._width = width
        self._kept: list[Any] = [layers, embedding]  # what the structures point to
        self._embedding = None if embedding is None else self._embedding_of(embedding)
        self._pooling = None if pooling is None else self._pooling_of(pooling)
        self._angles: list[AngleTables] = []
        # heads_before of records -> the structures of the layers with these places of maps
        self._described: dict[tuple[int, ...], ctypes.Array[_Layer]] = {}
        self.dtype = dtype if has_pairs(library) else torch.float32  # of Q, K, V and maps
        self._has_pairs_of = library.has_pairs_of
        terms = [term for half, _ in layers for term in (half.query_term, half.key_term) if term is not None]
        distances = [half.bias.shape[1] for half, _ in layers if half.bias is not None]
        distances += [len(term.rows) for term in terms]
        self._has_terms = bool(terms)
        # A structure holds one half of each kind; a second feed-forward half has a structure of its own.
        sizes = [max(1, len(halves)) for _, halves in layers]
        self._starts = [0, *accumulate(sizes)]  # of each layer, and their end
        self._layers = (_Layer * self._starts[-1])()
        for own in self._layers:
            own.angles = -1
        for number, (start, (attention, halves)) in enumerate(zip(self._starts, layers, strict=False)):
            self._layers[start].number = number
            self._set_attention(self._layers[start], attention)
            for at, half in enumerate(halves, start):
                self._set_forward(self._layers[at], half)
        inner = [half.up.outputs for _, halves in layers for half in halves]
        self.slot_bytes = _slot_bytes([attention for attention, _ in layers], self.dtype)
        # What all jobs have in common.
        self._job = _Job(
            layers=ctypes.addressof(self._layers),
            width=width,
            type=NUMBER_TYPES[self.dtype],
            max_tokens=min(((count + 1) // 2 for count in distances), default=_NO_LIMIT),
            widest=max(width, *(attention.output.inputs for attention, _ in layers), *inner),
        )

    @property
    def embeds(self) -> bool:
        """Whether the stack can make the input of the first layer from token ids."""
        return self._embedding is not None

    @property
    def pools(self) -> bool:
        """Whether the stack can make the vectors of sequences."""
        return self._pooling is not None

    def wake(self, threads: int) -> None:
        """Wake the threads that the next `run` uses, if it comes within 0.1 ms."""
        self._wake(threads)

    def run(
        self,
        hidden: torch.Tensor | None,
        rows: StackRows,
        layers: range,
        given: GivenRecords = NO_RECORDS,
        threads: int | None = None,
        slots: KeyValueSlots | None = None,
    ) -> tuple[torch.Tensor, Counts]:
        """Run a range of layers. Return their output, float32 [rows, width], and what was computed.

        hidden: float32 [rows, width], the input of the first of these layers, which is overwritten with the
        output; None: the stack makes it from token ids. given: the records of the first sequences. threads:
        the most threads to use; None: as many as torch. slots: keys and values that are given and kept, if
        the rows have trees; the root of a tree starts behind the tokens that are given to the tree. Raises
        IndexError if a table has no row for a token or a position.
        """
        count = int(rows.offsets[-1])
        if hidden is None:
            hidden = torch.empty(count, self._width)
        assert hidden.dtype == torch.float32
        assert hidden.is_contiguous()
        assert hidden.shape == (count, self._width)
        job = self._job_of(rows, layers, threads or torch.get_num_threads())
        job.hidden = hidden.data_ptr()
        if rows.trees is not None:
            self._set_trees(job, rows)
        if len(given.addresses):
            self._set_records(job, rows, given)
        self._set_slots(job, rows, slots)
        return hidden, self._run_job(job, rows)

    def vectors(
        self,
        rows: StackRows,
        threads: int,
        given: GivenRecords = NO_RECORDS,
        slots: KeyValueSlots | None = None,
        hidden: torch.Tensor | None = None,
    ) -> tuple[Pooled, Counts]:
        """Run all layers from the token ids of sequences, and pool. Trees need `rows.pooling`.

        given, slots: see `run`. hidden: float32 [rows, width], to which the output of the last layer is
        written; None: nobody reads it. Raises IndexError as `run` does.
        """
        assert self._pooling is not None
        job = self._job_of(rows, range(len(self._starts) - 1), threads)
        if hidden is not None:
            assert hidden.shape == (rows.offsets[-1], self._width)
            job.hidden = hidden.data_ptr()
        count = job.count
        if rows.trees is not None:
            assert rows.pooling is not None
            self._set_trees(job, rows)
            trees = _TreePooling.of(rows.pooling)
            job.tree_pooling, count = ctypes.addressof(trees), trees.count
        if len(given.addresses):
            self._set_records(job, rows, given)
        self._set_slots(job, rows, slots)
        shape = count, self._pooling.modes * self._width
        pooled = Pooled(np.empty(shape, np.float32), np.empty(count, np.bool_))
        pooling = PoolingFields.from_buffer_copy(self._pooling)
        pooling.write_to(pooled.vectors, pooled.finite, rows.skipped)
        job.pooling = ctypes.addressof(pooling)
        return pooled, self._run_job(job, rows)

    def _job_of(self, rows: StackRows, layers: range, threads: int) -> _Job:
        """Return a job of these layers for these rows, which must outlive the job."""
        job = _Job.from_buffer_copy(self._job)
        job.first, job.last, job.threads = self._starts[layers.start], self._starts[layers.stop], threads
        job.offsets, job.count = address(rows.offsets), len(rows.offsets) - 1
        if rows.ids is not None:
            assert self._embedding is not None
            assert len(rows.ids) == rows.offsets[-1]
            job.embedding, job.ids = ctypes.addressof(self._embedding), address(rows.ids)
            if rows.types is not None:
                assert len(rows.types) == len(rows.ids)
                job.types = address(rows.types)
        if rows.positions is not None:
            assert len(rows.positions) == rows.offsets[-1]
            job.positions = address(rows.positions)
        return job

    def _run_job(self, job: _Job, rows: StackRows) -> Counts:
        """Run a job. Raises IndexError as `run` does."""
        if self._angles and rows.offsets[-1]:
            tables = [table for angles in self._angles for table in angles(_positions_of(rows))]
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

    def _set_records(self, job: _Job, rows: StackRows, given: GivenRecords) -> None:
        assert rows.trees is None
        described = self._described.get(given.heads_before)
        if described is None:
            described = self._described.setdefault(given.heads_before, self._with_places(given.heads_before))
        job.layers, job.hits = ctypes.addressof(described), len(given.addresses)
        job.maps, job.map_type = address(given.addresses), NUMBER_TYPES[given.dtype]
        job.packed, job.refitted = given.packed, given.refitted

    def _with_places(self, heads_before: tuple[int, ...]) -> ctypes.Array[_Layer]:
        """Return the structures of the layers, with the places of their maps in records."""
        layers = (_Layer * len(self._layers))()
        ctypes.memmove(layers, self._layers, ctypes.sizeof(self._layers))
        for start, heads in zip(self._starts, heads_before, strict=False):
            layers[start].maps_before = heads
        return layers

    def _embedding_of(self, embedding: CompiledEmbedding) -> _Embedding:
        made = _Embedding(type=NUMBER_TYPES[embedding.words.dtype], scale=embedding.scale)
        assert embedding.words.is_contiguous()
        made.words, made.word_count = embedding.words.data_ptr(), len(embedding.words)
        if embedding.added is not None:
            assert embedding.added.is_contiguous()
            assert embedding.added.dtype == embedding.words.dtype
            made.added, made.place_count = embedding.added.data_ptr(), len(embedding.added)
        made.types, made.has_positions = embedding.types, embedding.has_positions
        made.padding = -1 if embedding.padding is None else embedding.padding
        self._set_norms(made, ("norm",), (embedding.norm,))
        return made

    def _pooling_of(self, pooling: CompiledPooling) -> PoolingFields:
        made = PoolingFields.of(pooling.modes)
        self._set_norms(made, ("last",), (pooling.norm,))
        return made

    def __del__(self) -> None:
        # A helper may still look at a job of this stack after `run` has returned.
        self._wait()

    def _set_attention(self, own: _Layer, half: AttentionHalf) -> None:
        own.always, own.output = half.always.packed.matrix, half.output.matrix
        own.keys_always, own.values = half.always.keys, half.values
        if half.refitted_output:
            own.refitted_output = half.refitted_output.matrix
        key_heads = list(half.always.key_heads)
        if half.misses:
            own.misses, own.keys_misses = half.misses.packed.matrix, half.misses.keys
            key_heads = [*half.misses.key_heads, *key_heads]
        own.key_heads, own.value_heads = self._integers(key_heads), self._integers(half.value_heads)
        own.heads, own.reused = len(half.value_heads), half.reused
        own.width, own.value_width, own.scale = half.width, half.value_width, half.scale
        own.reach_before = NO_BOUND if half.before is None else min(half.before, NO_BOUND)
        own.reach_after = NO_BOUND if half.after is None else min(half.after, NO_BOUND)
        norms = (half.input_norm, half.branch_norm, half.output_norm, half.query_norm, half.key_norm)
        self._set_norms(own, _NORMS, norms)
        if half.angles:
            if half.angles not in self._angles:
                self._angles.append(half.angles)
            own.angles, own.half = self._angles.index(half.angles), half.half
        if half.bias is not None:
            own.bias, own.bias_positions = self._floats(half.bias), (half.bias.shape[1] + 1) // 2
        pairs = bool(self._has_pairs_of(NUMBER_TYPES[self.dtype], half.width, half.value_width))
        for name in ("query_term", "key_term"):
            term = getattr(half, name)
            if term is not None:
                setattr(own, name, self._distance_term(term, pairs))

    def _set_forward(self, own: _Layer, half: ForwardHalf) -> None:
        own.up, own.down = half.up.matrix, half.down.matrix
        if half.gate:
            own.gate = half.gate.matrix
        if half.refitted_down:
            own.refitted_down = half.refitted_down.matrix
        own.activation = ACTIVATION_NUMBERS[half.activation]
        self._set_norms(own, _FORWARD_NORMS, (half.input_norm, half.branch_norm, half.output_norm))

    def _set_norms(
        self, own: ctypes.Structure, names: Sequence[str], norms: Sequence[CompiledNorm | None]
    ) -> None:
        for name, norm in zip(names, norms, strict=True):
            if norm:
                bias = None if norm.bias is None else self._floats(norm.bias)
                kind = 1 if norm.subtracts_mean else 2
                setattr(own, name, NormFields(self._floats(norm.weight), bias, norm.epsilon, kind))

    def _distance_term(self, term: DistanceTerm, pairs: bool) -> DistanceTermFields:
        """Lay out a term as distances.h reads it."""
        table, rows = _with_growing_rows(term.table.detach(), term.rows)
        ends = (rows[:1].expand(_LANES - 1), rows, rows[-1:].expand(_LANES - 1))
        near = torch.cat(ends).int().contiguous()
        columns = -(-table.shape[1] // _LANES) * _LANES
        padded = torch.nn.functional.pad(table, (0, 0, 0, columns - table.shape[1]))
        words = padded.bfloat16().contiguous().view(torch.int32) if pairs else padded.float()
        laid_out = words.transpose(1, 2).contiguous()  # [heads, steps, columns]
        self._kept += [near, laid_out]
        of_zero = near.data_ptr() + 4 * (len(near) // 2)
        return DistanceTermFields(laid_out.data_ptr(), of_zero, columns, laid_out[0].numel())

    def _floats(self, x: torch.Tensor) -> int:
        """Return the address of a float32 copy of `x`, which is kept."""
        self._kept.append(x.detach().float().contiguous())
        return int(self._kept[-1].data_ptr())

    def _integers(self, numbers: Sequence[int]) -> int:
        self._kept.append((ctypes.c_int32 * len(numbers))(*numbers))
        return ctypes.addressof(self._kept[-1])


def _with_growing_rows(table: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table [heads, rows, d] and its rows of distances, which grow by 0 or 1 per distance.

    Most tables need only be turned round, if at all. Otherwise each distance gets a row of its own.
    """
    steps = rows.diff()
    if bool(((steps == 0) | (steps == -1)).all()):
        table, rows, steps = table.flip(1), table.shape[1] - 1 - rows, -steps
    if not bool(((steps == 0) | (steps == 1)).all()):
        return table[:, rows], torch.arange(len(rows))
    return table[:, int(rows[0]) : int(rows[-1]) + 1], rows - rows[0]


def _positions_of(rows: StackRows) -> int:
    """Return the number of positions that the rows of a batch and the tokens in front of them can have."""
    if rows.positions is None:
        return int(np.diff(rows.offsets).max())
    # Scattered rows attend to given tokens, all of which are rotated, also those behind the last row.
    last = int(rows.positions.max()) + 1
    return last if rows.starts is None else max(last, int(rows.starts.max()))


def _slot_bytes(halves: Sequence[AttentionHalf], dtype: torch.dtype) -> int | None:
    """Return the bytes of K and V of a token in a layer; None if slots cannot hold them.

    Slots need the same key and value heads in all layers, and layers without reused heads.
    """
    sizes = {half.always.keys * half.width + half.values * half.value_width for half in halves}
    if len(sizes) != 1 or any(half.reused for half in halves):
        return None
    return sizes.pop() * dtype.itemsize
