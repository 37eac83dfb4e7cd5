"""Projections of one layer to Q, K and V, split into the two products that map reuse needs.

    product one, for every sequence   V of all heads, Q and K of the computed heads
    product two, for misses only      Q and K of the reused heads

With grouped queries (Ainslie et al. 2023) several query heads share one head of K and one head of V. A shared
head is computed once and then copied to each of its query heads. A shared head of K is computed only if one
of its query heads needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol, Self

import torch
from torch import nn

from attncache_core.models.linear import ActivatedLinear, Linear, packed_linear
from attncache_core.models.rotary import Rotary
from attncache_core.models.smoothing import smoothing_of


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The order of one layer's heads, and how many of the first heads are reused."""

    order: Sequence[int]  # a permutation of the checkpoint's head numbers
    reused: int

    @property
    def computed(self) -> Sequence[int]:
        """The heads that are computed for every sequence, as head numbers of the checkpoint."""
        return self.order[self.reused :]


class Projection(NamedTuple):
    """The projections that every sequence needs in one layer. The width of V may differ from Q and K."""

    value: torch.Tensor  # [tokens, heads, d_v]
    query: torch.Tensor  # [tokens, computed heads, d]
    key: torch.Tensor  # [tokens, computed heads, d]


class QueryKeyValue(Protocol):
    """The projections of a layer to Q, K and V.

    x: [tokens, hidden], the input of attention. positions: int64 [tokens], the position of each token in its
    own sequence.
    """

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """Return V of all heads, and Q and K of the computed heads."""
        ...

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Q and K of the reused heads, each [tokens, reused heads, d].

        The engine calls this for the tokens of misses, and a few tokens before them.
        """
        ...

    def query_and_slots(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Q [tokens, heads, d], and a slot for each token, [tokens, n].

        A slot is what K and V of the token are made of. It does not depend on the position of the token. Only
        for layers without reused heads.
        """
        ...

    def keys_and_values(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [tokens, heads, d] of slots [tokens, n]."""
        ...


class LinearWeights(NamedTuple):
    """The weight [outputs, inputs] and bias [outputs] of a linear layer, or a selection of their rows."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    smoothing: torch.Tensor | None = None  # float32 [inputs], of 8-bit products; see smoothing.py

    @classmethod
    def from_module(cls, module: nn.Linear) -> Self:
        """Return all rows of a linear module."""
        bias = None if module.bias is None else module.bias.detach()
        return cls(module.weight.detach(), bias, smoothing_of(module))

    def split(self, parts: int) -> list[LinearWeights]:
        """Split a fused linear layer into `parts` linear layers of equal size."""
        biases = [None] * parts if self.bias is None else self.bias.chunk(parts)
        rows = zip(self.weight.chunk(parts), biases, strict=True)
        return [LinearWeights(*part, self.smoothing) for part in rows]

    def select_rows(self, rows: torch.Tensor) -> LinearWeights:
        """Return the rows with these indices (int64 [n]), in the order given."""
        bias = None if self.bias is None else self.bias[rows]
        return LinearWeights(self.weight[rows], bias, self.smoothing)

    def select_heads(
        self, heads: Sequence[int], head_count: int, dims: torch.Tensor | None = None
    ) -> LinearWeights:
        """Return the rows of some of the layer's `head_count` heads; see head_rows."""
        return self.select_rows(head_rows(heads, len(self.weight) // head_count, dims))


def head_rows(heads: Sequence[int], head_dim: int, dims: torch.Tensor | None = None) -> torch.Tensor:
    """Return the row indices of these heads, int64 [rows], in the order given.

    dims: int64 [n], the dimensions to take from each head, in the order given; None takes all `head_dim`.
    """
    first = torch.tensor(heads, dtype=torch.int64)[:, None] * head_dim
    return (first + (torch.arange(head_dim) if dims is None else dims)).flatten()


class SharedHeads:
    """The heads of K or V that a list of query heads uses, and the copy of each to its query heads."""

    def __init__(self, used: Sequence[int], device: torch.device) -> None:
        """used: for each query head, its head of K or V. device: the device of the heads to expand."""
        self.chosen = list(dict.fromkeys(used))  # each head of K or V once
        indices = {head: index for index, head in enumerate(self.chosen)}
        self.used = [indices[head] for head in used]  # for each query head, the index in `chosen`
        self._index = torch.tensor(self.used, dtype=torch.int64, device=device)

    def expand_kv_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Copy K or V [tokens, chosen heads, d] to the query heads: [tokens, query heads, d]."""
        return x if len(self.chosen) == len(self._index) else x.index_select(1, self._index)


class Projections:
    """The projections of one layer to Q, K and V: one packed product for all sequences, one for misses."""

    def __init__(
        self,
        query: LinearWeights,
        key: LinearWeights,
        value: LinearWeights,
        heads: LayerHeads,
        *,
        key_heads: int | None = None,
        rotary: Rotary | None = None,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
    ) -> None:
        """query, key, value: the weights of all heads, in the checkpoint's order.

        key_heads: the number of heads of K and V; None if every query head has its own. query_norm, key_norm:
        of each head of Q and K, before its rotation.
        """
        count = len(heads.order)
        shared = key_heads or count
        self._with = partial(
            Projections, key_heads=key_heads, rotary=rotary, query_norm=query_norm, key_norm=key_norm
        )
        self._heads = heads
        self.rotary, self.query_norm, self.key_norm = rotary, query_norm, key_norm
        self.width = len(query.weight) // count  # of a head of Q and K
        self.value_width = len(value.weight) // shared  # of a head of V
        # The heads of V of all query heads, and the heads of K of the computed and of the reused ones.
        self.values, self.computed, self.reused = (
            SharedHeads([head // (count // shared) for head in chosen], key.weight.device)
            for chosen in (heads.order, heads.computed, heads.order[: heads.reused])
        )

        def query_and_key(chosen: Sequence[int], keys: SharedHeads) -> list[LinearWeights]:
            return [query.select_heads(chosen, count), key.select_heads(keys.chosen, shared)]

        self.always = joined_linear(
            [value.select_heads(self.values.chosen, shared), *query_and_key(heads.computed, self.computed)]
        )
        self.misses = (
            joined_linear(query_and_key(heads.order[: heads.reused], self.reused)) if heads.reused else None
        )

    def with_heads(self, heads: LayerHeads) -> Projections:
        """Return the same projections with the heads in another order and some of them in the second block.

        Only for projections that have all heads in the first block, in the checkpoint's order.
        """
        assert self.misses is None
        assert list(self._heads.order) == list(range(len(self._heads.order)))
        assert not isinstance(self.always, ActivatedLinear)
        joined = LinearWeights(self.always.weight, self.always.bias, self.always.smoothing)
        queries = self._values_end + len(self._heads.order) * self.width
        ends = [0, self._values_end, queries, len(joined.weight)]
        value, query, key = (joined.select_rows(torch.arange(*rows)) for rows in pairwise(ends))
        return self._with(query, key, value, heads)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See QueryKeyValue."""
        value, rest = self.always(x).tensor_split([self._values_end], dim=1)
        return Projection(self._value(value), *self._query_and_key(rest, self.computed, positions))

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See QueryKeyValue."""
        assert self.misses is not None
        return self._query_and_key(self.misses(x), self.reused, positions)

    def query_and_slots(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See QueryKeyValue. A slot is K of all key heads, after their norm, then V of all value heads."""
        assert self.misses is None
        value, rest = self.always(x).tensor_split([self._values_end], dim=1)
        query, key = self._normed_heads(rest, self.computed)
        return self._rotated(query, positions), torch.cat([key.flatten(1), value], dim=1)

    def keys_and_values(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See QueryKeyValue."""
        key, value = slots.tensor_split([slots.shape[1] - self._values_end], dim=1)
        key = self._rotated(key.unflatten(1, (-1, self.width)).clone(), positions)
        return self.computed.expand_kv_heads(key), self._value(value)

    @property
    def _values_end(self) -> int:
        """The number of columns of `always` that are V."""
        return len(self.values.chosen) * self.value_width

    def _value(self, product: torch.Tensor) -> torch.Tensor:
        """Return V of all query heads, from the columns of V."""
        return self.values.expand_kv_heads(product.unflatten(1, (-1, self.value_width)))

    def _query_and_key(
        self, product: torch.Tensor, keys: SharedHeads, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Q and K of the heads that use `keys`, each [tokens, heads, d], from their columns."""
        if not keys.used:
            none = product.new_empty(len(product), 0, self.width)
            return none, none
        query, key = self._normed_heads(product, keys)
        return self._rotated(query, positions), keys.expand_kv_heads(self._rotated(key, positions))

    def _normed_heads(self, product: torch.Tensor, keys: SharedHeads) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Q [tokens, heads, d] and K [tokens, key heads, d] before their rotation."""
        heads = product.unflatten(1, (len(keys.used) + len(keys.chosen), self.width))
        query, key = heads.tensor_split([len(keys.used)], dim=1)
        return (
            query if self.query_norm is None else self.query_norm(query),
            key if self.key_norm is None else self.key_norm(key),
        )

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x if self.rotary is None else self.rotary(x, positions)


def joined_linear(parts: Sequence[LinearWeights]) -> Linear:
    """Pack several linear layers that read the same input, with the same smoothing, into one linear layer."""
    weight, smoothing = torch.cat([part.weight for part in parts]), parts[0].smoothing
    assert all(_are_equal(part.smoothing, smoothing) for part in parts)
    if all(part.bias is None for part in parts):
        return packed_linear(weight, None, smoothing)
    biases = [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
    return packed_linear(weight, torch.cat(biases), smoothing)


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
