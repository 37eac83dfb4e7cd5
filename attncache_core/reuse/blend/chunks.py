"""What is blended: a sequence of chunks, and how much of them is computed again.

    sequence    special tokens | chunk 0 | glue | chunk 1 | glue | chunk 2 | query
    stored as   special tokens | chunk 0     special tokens | chunk 1     special tokens | chunk 2

A chunk is stored as the sequence of its own tokens behind the special tokens that open every text, so it has
one entry, whatever stands in front of it. Its keys are stored before their rotation, so they can be used at
any position. The first chunk is a prefix of the whole sequence, so its keys and values are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.reuse.kv.blocks import TOKEN_BYTES
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.reuse.kv.memory import PrefixKey

# A step of layers computes the same tokens in one run of the model's layers. With one layer a step, the small
# operations between runs took half of the time of a model with 8 layers of width 256.
LAYERS_A_STEP = 4


class Chunk(NamedTuple):
    """A part of a sequence whose keys and values are stored by its own tokens."""

    first: int  # position of its first token in the sequence
    skipped: int  # tokens in front of it in its stored sequence; 0 if it begins the sequence
    prefix_key: PrefixKey  # its stored sequence

    @property
    def length(self) -> int:
        """The number of its tokens in the sequence."""
        return len(self.prefix_key.tokens) // TOKEN_BYTES - self.skipped


@dataclass(frozen=True)
class Recomputation:
    """Which of the tokens that are given approximately are computed again, layer by layer.

    The layers in front of `check_layer` compute all of them. The check layer compares their new keys and
    values with the given ones, and the tokens that deviate most go on; after every LAYERS_A_STEP layers,
    fewer of them are picked (gradual filtering; Yao et al. 2024, CacheBlend, section 4.3).
    """

    ratio: float  # mean share of the tokens that are computed in the layers from the check layer on
    check_layer: int = 1  # at least 1, because in layer 0 keys and values do not depend on other tokens
    # From 0 to 1: the first share is up to so much larger than the mean, and the last share smaller.
    fall: float = 0.1
    first_tokens: int = 0  # of each chunk, which are always computed

    def __post_init__(self) -> None:
        """Raise ValueError if the ratio is outside [0, 1], or if another number is impossible."""
        if not 0 <= self.ratio <= 1:
            raise ValueError("a recompute ratio lies between 0 and 1")
        if not 0 <= self.fall <= 1:
            raise ValueError("the recompute ratio's fall lies between 0 and 1")
        if self.check_layer < 1:
            raise ValueError("the check layer is 1 or later: in layer 0, nothing deviates")

    def counts(self, tokens: int, layers: int) -> list[int]:
        """Return how many of `tokens` tokens each of `layers` layers computes; they never grow."""
        check = min(self.check_layer, layers)
        shares = self._shares(layers - check)
        full = tokens if not shares or shares[0] > 0 else 0
        # Rounding up the first share keeps its tokens at every mean above 0.
        return [full] * check + [min(tokens, int(np.ceil(share * tokens - 1e-9))) for share in shares]

    def picked(self, deviation: np.ndarray, count: int) -> np.ndarray:
        """Return the indices of the `count` tokens that deviate most, rising, int64 [count].

        deviation: float32 [tokens]. Of tokens that deviate equally, the earlier ones are picked.
        """
        return np.sort(np.argsort(-deviation, kind="stable")[:count])

    def _shares(self, layers: int) -> Sequence[float]:
        if not self.ratio or layers < 2:
            return [self.ratio] * layers
        fall = min(self.fall, 1 / self.ratio - 1)
        steps = -(-layers // LAYERS_A_STEP)
        ends = [layers * step // steps for step in range(steps + 1)]
        shares = []
        for first, end in pairwise(ends):  # all layers of a step have the share of its middle
            middle = (first + end - 1) / (layers - 1)
            shares += [self.ratio * (1 + fall - fall * middle)] * (end - first)
        return shares


@dataclass(frozen=True)
class Blend:
    """The chunks of a sequence, in order of their positions, and how they are blended."""

    chunks: tuple[Chunk, ...]
    recomputation: Recomputation
    tokens: int = 0  # that are computed if all chunks are stored, about

    @classmethod
    def of(
        cls,
        key_values: KeyValueReuse,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        opening: Sequence[int],
        salt: bytes,
        recomputation: Recomputation,
    ) -> Blend:
        """Return how a sequence is blended whose outputs read its last token.

        spans: first position and end of each chunk, rising, the last end before the last token. What stands
        in front of the first chunk belongs to it. opening: the token ids that open every text. salt: chunks
        of one salt share their keys and values.
        """
        (_, end), *others = spans
        chunks = [Chunk(0, 0, key_values.whole(ids[:end], salt))]
        for first, end in others:
            prefix_key = key_values.whole([*opening, *ids[first:end]], salt)
            chunks.append(Chunk(first, len(opening), prefix_key))
        cached = sum(chunk.length for chunk in chunks)
        again = recomputation.ratio * (cached - chunks[0].length)
        return cls(tuple(chunks), recomputation, len(ids) - cached + round(again))


class ChunkReport(NamedTuple):
    """What was done with one chunk."""

    tokens: int
    cached: int  # tokens whose keys and values were stored before the request
    recomputed: (
        int  # tokens that were computed in their place, in the check layer: all tokens that are not given
    )


@dataclass(frozen=True)
class BlendReport:
    """What was done with one sequence."""

    chunks: tuple[ChunkReport, ...]
    exact_tokens: int  # at the front of the sequence, whose keys and values are exact
    rows: tuple[int, ...]  # tokens that each layer computed
    is_exact: bool  # whether all keys and values that were given are those of `exact_tokens`
    # How much the keys and values of each token deviate in the check layer from the given ones, float32
    # [tokens]; nan: not compared. None: nothing was compared.
    deviations: np.ndarray | None = field(default=None, compare=False)
    computed_tokens: int = 0  # of chunks that were not stored yet, each by itself

    def tokens_by_state(self) -> tuple[int, int, int]:
        """Return the tokens that were used as they were stored, computed again, and not stored before."""
        again = sum(min(chunk.recomputed, chunk.cached) for chunk in self.chunks)
        cached = sum(chunk.cached for chunk in self.chunks)
        return cached - again, again, sum(chunk.tokens for chunk in self.chunks) - cached


def deviations(cached: np.ndarray, computed: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the squared L2 distance of two sets of slots, token by token: float32 [tokens].

    cached, computed: uint8 [tokens, slot bytes], K and V of all heads as `dtype`; for latent attention, the
    latent vectors that K and V are made of. Keys are compared before their rotation, which changes no
    distance between keys at one position. What is not finite deviates infinitely.
    """
    one, other = (
        torch.from_numpy(np.ascontiguousarray(slots)).view(dtype).float() for slots in (cached, computed)
    )
    found: np.ndarray = (one - other).square().sum(1).numpy()
    return np.where(np.isfinite(found), found, np.inf).astype(np.float32)
