"""The layers of a model as the compiled stack takes them: as data, and laid out for C.

models -> AttentionHalf, ForwardHalf, CompiledEmbedding -> StackLayout -> CompiledStack (stack.py)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from attncache_core.native.attention_kernel import NO_BOUND, NUMBER_TYPES, DistanceTermFields
from attncache_core.native.pooling import CompiledNorm, CompiledPooling, NormFields, PoolingFields
from attncache_core.native.products import ACTIVATION_NUMBERS, Matrix, PackedMatrix

_LANES = 16  # of vectors.h
# Number of positions -> cosines and sines, each contiguous float32 [positions or more, half].
AngleTables = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class QueryKeyHeads:
    """One product to Q and K of some heads."""

    packed: PackedMatrix
    key_heads: Sequence[int]  # for each of the heads, the index of its K in the product
    keys: int  # number of heads of K in the product


@dataclass(frozen=True)
class DistanceTerm:
    """Scores of tokens with vectors of their distances: x[token] · table[rows[distance]]."""

    table: torch.Tensor  # [heads, rows, width of a head]
    rows: torch.Tensor  # int64 [2 positions - 1], for the distances from 1 - positions to positions - 1


@dataclass(frozen=True)
class AttentionHalf:
    """The attention half of a layer, as data."""

    always: QueryKeyHeads  # rows -> V of all heads of V, then Q and K of the computed heads
    misses: QueryKeyHeads | None  # rows -> Q and K of the reused heads, which are the first heads
    output: PackedMatrix
    value_heads: Sequence[int]  # for each head, the index of its V in the product
    values: int  # number of heads of V
    width: int  # of a head of Q and K
    value_width: int  # of a head of V
    scale: float
    before: int | None = None  # see attention.AttentionMask
    after: int | None = None
    input_norm: CompiledNorm | None = None
    branch_norm: CompiledNorm | None = None  # of the output, before the residual is added
    output_norm: CompiledNorm | None = None  # of the sum with the residual
    query_norm: CompiledNorm | None = None  # of each head
    key_norm: CompiledNorm | None = None
    angles: AngleTables | None = None
    half: int = 0  # half the rotary dimensions
    bias: torch.Tensor | None = None  # float32 [heads, 2 positions - 1], added to scores by distance
    # Added to Q[p] · K[q] before the scale: Q[p] with the distance q - p, and K[q] with the distance p - q.
    # Only for rows without trees.
    query_term: DistanceTerm | None = None
    key_term: DistanceTerm | None = None
    refitted_output: PackedMatrix | None = None  # `output` of refitted rows; None: they have no other weights

    @property
    def reused(self) -> int:
        """The number of reused heads."""
        return len(self.misses.key_heads) if self.misses else 0


@dataclass(frozen=True)
class ForwardHalf:
    """The feed-forward half of a layer, as data.

    down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)).
    """

    up: PackedMatrix
    down: PackedMatrix
    activation: str | None
    gate: PackedMatrix | None = None
    input_norm: CompiledNorm | None = None
    branch_norm: CompiledNorm | None = None
    output_norm: CompiledNorm | None = None
    refitted_down: PackedMatrix | None = None  # `down` of refitted rows; None: they have no other weights


@dataclass(frozen=True)
class CompiledEmbedding:
    """The input of the first layer: norm(scale words[id] + added[place]), as data. Tables of one dtype."""

    words: torch.Tensor  # [tokens of the vocabulary, width]
    added: torch.Tensor | None = None  # [places, width]: position after position, one row for each type
    norm: CompiledNorm | None = None
    types: int = 1  # rows of each position
    has_positions: bool = False  # whether the place of a token depends on its position
    # Places count from padding + 1, and skip tokens with this id, whose place is `padding`. None: from 0.
    padding: int | None = None
    scale: float = 1.0


class EmbeddingFields(ctypes.Structure):
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


class LayerFields(ctypes.Structure):
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


class StackLayout:
    """The layers of a model as stack.h reads them. Owns what the structures point to."""

    def __init__(
        self,
        layers: Sequence[tuple[AttentionHalf, Sequence[ForwardHalf]]],
        embedding: CompiledEmbedding | None,
        pooling: CompiledPooling | None,
        number_type: int,
        *,
        pairs_of: Callable[[int, int, int], int],
    ) -> None:
        """number_type: of Q, K, V and maps. pairs_of: `has_pairs_of` of the library.

        layers, embedding, pooling: see CompiledStack.
        """
        self.kept: list[Any] = [layers, embedding]  # what the structures point to
        self.embedding = None if embedding is None else self._embedding_of(embedding)
        self.pooling = None if pooling is None else self._pooling_of(pooling)
        self.angles: list[AngleTables] = []
        self._number_type = number_type
        self._pairs_of = pairs_of
        # A structure holds one half of each kind; a second feed-forward half has a structure of its own.
        sizes = [max(1, len(halves)) for _, halves in layers]
        self.starts = [0, *accumulate(sizes)]  # of each layer, and their end
        self.layers = (LayerFields * self.starts[-1])()
        for layer in self.layers:
            layer.angles = -1
        for number, (start, (attention, halves)) in enumerate(zip(self.starts, layers, strict=False)):
            self.layers[start].number = number
            self._set_attention(self.layers[start], attention)
            for at, half in enumerate(halves, start):
                self._set_forward(self.layers[at], half)

    def _embedding_of(self, embedding: CompiledEmbedding) -> EmbeddingFields:
        made = EmbeddingFields(type=NUMBER_TYPES[embedding.words.dtype], scale=embedding.scale)
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

    def _set_attention(self, made: LayerFields, half: AttentionHalf) -> None:
        made.always, made.output = half.always.packed.matrix, half.output.matrix
        made.keys_always, made.values = half.always.keys, half.values
        if half.refitted_output:
            made.refitted_output = half.refitted_output.matrix
        key_heads = list(half.always.key_heads)
        if half.misses:
            made.misses, made.keys_misses = half.misses.packed.matrix, half.misses.keys
            key_heads = [*half.misses.key_heads, *key_heads]
        made.key_heads, made.value_heads = self._integers(key_heads), self._integers(half.value_heads)
        made.heads, made.reused = len(half.value_heads), half.reused
        made.width, made.value_width, made.scale = half.width, half.value_width, half.scale
        made.reach_before = NO_BOUND if half.before is None else min(half.before, NO_BOUND)
        made.reach_after = NO_BOUND if half.after is None else min(half.after, NO_BOUND)
        norms = (half.input_norm, half.branch_norm, half.output_norm, half.query_norm, half.key_norm)
        self._set_norms(made, _NORMS, norms)
        if half.angles:
            if half.angles not in self.angles:
                self.angles.append(half.angles)
            made.angles, made.half = self.angles.index(half.angles), half.half
        if half.bias is not None:
            made.bias, made.bias_positions = self._floats(half.bias), (half.bias.shape[1] + 1) // 2
        pairs = bool(self._pairs_of(self._number_type, half.width, half.value_width))
        for name in ("query_term", "key_term"):
            term = getattr(half, name)
            if term is not None:
                setattr(made, name, self._distance_term(term, pairs))

    def _set_forward(self, made: LayerFields, half: ForwardHalf) -> None:
        made.up, made.down = half.up.matrix, half.down.matrix
        if half.gate:
            made.gate = half.gate.matrix
        if half.refitted_down:
            made.refitted_down = half.refitted_down.matrix
        made.activation = ACTIVATION_NUMBERS[half.activation]
        self._set_norms(made, _FORWARD_NORMS, (half.input_norm, half.branch_norm, half.output_norm))

    def _set_norms(
        self, made: ctypes.Structure, names: Sequence[str], norms: Sequence[CompiledNorm | None]
    ) -> None:
        for name, norm in zip(names, norms, strict=True):
            if norm:
                bias = None if norm.bias is None else self._floats(norm.bias)
                kind = 1 if norm.subtracts_mean else 2
                setattr(made, name, NormFields(self._floats(norm.weight), bias, norm.epsilon, kind))

    def _distance_term(self, term: DistanceTerm, pairs: bool) -> DistanceTermFields:
        """Lay out a term as distances.h reads it."""
        table, rows = _with_growing_rows(term.table.detach(), term.rows)
        ends = (rows[:1].expand(_LANES - 1), rows, rows[-1:].expand(_LANES - 1))
        near = torch.cat(ends).int().contiguous()
        columns = -(-table.shape[1] // _LANES) * _LANES
        padded = torch.nn.functional.pad(table, (0, 0, 0, columns - table.shape[1]))
        words = padded.bfloat16().contiguous().view(torch.int32) if pairs else padded.float()
        laid_out = words.transpose(1, 2).contiguous()  # [heads, steps, columns]
        self.kept += [near, laid_out]
        of_zero = near.data_ptr() + 4 * (len(near) // 2)
        return DistanceTermFields(laid_out.data_ptr(), of_zero, columns, laid_out[0].numel())

    def _floats(self, x: torch.Tensor) -> int:
        """Return the address of a float32 copy of `x`, which is kept."""
        self.kept.append(x.detach().float().contiguous())
        return int(self.kept[-1].data_ptr())

    def _integers(self, numbers: Sequence[int]) -> int:
        self.kept.append((ctypes.c_int32 * len(numbers))(*numbers))
        return ctypes.addressof(self.kept[-1])


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


def slot_bytes_of(halves: Sequence[AttentionHalf], dtype: torch.dtype) -> int | None:
    """Return the bytes of K and V of a token in a layer; None if slots cannot hold them.

    Slots need the same key and value heads in all layers, and layers without reused heads.
    """
    sizes = {half.always.keys * half.width + half.values * half.value_width for half in halves}
    if len(sizes) != 1 or any(half.reused for half in halves):
        return None
    return sizes.pop() * dtype.itemsize
