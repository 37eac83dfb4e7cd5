"""What the compiled stack is given and returns, as data: layers, rows, records' maps, keys and values.

models -> CompiledNorm, AttentionHalf, ForwardHalf, CompiledEmbedding  -> CompiledStack (stack.py)
batches -> StackRows, GivenRecords, KeyValueSlots                      -> CompiledStack.run -> Counts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attncache_core.native.products import PackedMatrix

# Number of positions -> cosines and sines, each contiguous float32 [positions or more, half].
AngleTables = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CompiledNorm:
    """A norm of rows: x minus its mean (LayerNorm), divided by its deviation, times weight, plus bias."""

    weight: torch.Tensor  # float32 [width]
    bias: torch.Tensor | None  # float32 [width]
    epsilon: float
    subtracts_mean: bool


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
class GivenRecords:
    """The records whose maps are given to the first sequences of a batch."""

    addresses: np.ndarray  # uint64 [hits], the address of each record
    dtype: torch.dtype = torch.float16  # of the maps
    packed: bool = False  # whether maps are lower triangles
    heads_before: tuple[int, ...] = ()  # for each layer, the number of heads of earlier layers in a record
    refitted: int = 0  # number of hits, from the first, whose rows take the refitted weights


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


@dataclass(frozen=True)
class CompiledPooling:
    """One vector for each sequence, made of the output of the last layer, as data."""

    modes: Sequence[str]  # see heads/pooling.py; their vectors follow each other
    norm: CompiledNorm | None = None  # of each token, before pooling


@dataclass(frozen=True)
class TreePooling:
    """The sequences of trees that are pooled, and the states that are kept; see states.h.

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
class Pooled:
    """The vectors of sequences."""

    vectors: np.ndarray  # float32 [sequences, modes * width]
    finite: np.ndarray  # bool [sequences], whether all states of the last layer and the vector are finite


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


NO_RECORDS = GivenRecords(np.zeros(0, dtype=np.uint64))


@dataclass
class Counts:
    """What a run of the stack computed."""

    multiplications: int  # rows times columns times inputs of all products with weights
    map_rows: int  # rows of maps that were computed, of all heads and layers
    # The part of the run's time that projections, maps and maps @ V took: the share of attention in the time
    # of all threads, of the time of the run.
    attention_seconds: float
