"""Q, K and V of a layer's heads, in the order and the two blocks in which reuse needs them.

    block one, for every sequence   V of all heads, Q and K of the computed heads: one product
    block two, for misses           Q and K of the reused heads: one product

With grouped queries (Ainslie et al. 2023) several heads share keys and values. Both are computed once for a
group, K only if one of its heads needs it, and then given to each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import torch
from torch import nn

from attncache_core.models.layer import LayerHeads, Projection
from attncache_core.models.linear import Linear, packed_linear


class Rows(NamedTuple):
    """A linear layer's weight [outputs, inputs] and bias [outputs], or a part of its rows."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        """All rows of a linear layer."""
        return cls(module.weight.detach(), None if module.bias is None else module.bias.detach())

    def divided(self, parts: int) -> list[Rows]:
        """Several linear layers of one input from the one that they are joined in, of the same size each."""
        biases = [None] * parts if self.bias is None else self.bias.chunk(parts)
        return [Rows(*part) for part in zip(self.weight.chunk(parts), biases, strict=True)]

    def at(self, rows: torch.Tensor) -> Rows:
        """These rows (int64 [n]), in this order."""
        return Rows(self.weight[rows], None if self.bias is None else self.bias[rows])

    def heads(self, chosen: Sequence[int], count: int, numbers: torch.Tensor | None = None) -> Rows:
        """The rows of the chosen ones of `count` heads, in this order; see head_rows."""
        return self.at(head_rows(chosen, len(self.weight) // count, numbers))


def head_rows(chosen: Sequence[int], head_dim: int, numbers: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of these heads, in this order; of each head all, or `numbers` (int64 [n]). int64 [rows]."""
    first = torch.tensor(chosen, dtype=torch.int64)[:, None] * head_dim
    return (first + (torch.arange(head_dim) if numbers is None else numbers)).flatten()


class Place(Protocol):
    """What is done to Q or K after its projection: a norm of each head, a rotation by its position."""

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [tokens, h, d], positions: int64 [tokens] -> [tokens, h, d]."""
        ...


def as_it_is(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Nothing is done to Q and K."""
    return x


class SharedHeads:
    """Which heads of K or V a list of query heads uses."""

    def __init__(self, used: Sequence[int], device: torch.device) -> None:
        """used: for each query head the head of K or V that it shares; device: of what is `given`."""
        self.chosen = list(dict.fromkeys(used))
        places = {head: place for place, head in enumerate(self.chosen)}
        self._index = torch.tensor([places[head] for head in used], dtype=torch.int64, device=device)

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, chosen heads, d] -> [tokens, query heads, d]."""
        return x if len(self.chosen) == len(self._index) else x.index_select(1, self._index)


class Projections:
    """The projections of one layer."""

    def __init__(
        self,
        query: Rows,
        key: Rows,
        value: Rows,
        heads: LayerHeads,
        *,
        key_heads: int | None = None,
        place_query: Place = as_it_is,
        place_key: Place = as_it_is,
    ) -> None:
        """key_heads: heads of K and V, if they are shared; place_query, place_key: see Place."""
        count = len(heads.order)
        shared = key_heads or count
        group = count // shared
        self._values = SharedHeads([head // group for head in heads.order], value.weight.device)
        value_rows = value.heads(self._values.chosen, shared)
        self._value_numbers = len(value_rows.weight)  # of a token
        width = len(query.weight) // count
        self._computed, self._reused = (
            _QueryKey(chosen, count, shared, width, key.weight.device, place_query, place_key)
            for chosen in (heads.computed, heads.order[: heads.reused])
        )
        self._always = joined([value_rows, *self._computed.rows(query, key)])
        self._misses = joined(self._reused.rows(query, key)) if heads.reused else None

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        value, rest = self._always(x).tensor_split([self._value_numbers], dim=1)
        value = value.unflatten(1, (len(self._values.chosen), -1))
        return Projection(self._values.given(value), *self._computed.divided(rest, positions))

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        assert self._misses is not None
        return self._reused.divided(self._misses(x), positions)


class _QueryKey:
    """Q and K of some heads."""

    def __init__(
        self,
        chosen: Sequence[int],
        count: int,
        shared: int,
        width: int,
        device: torch.device,
        place_query: Place,
        place_key: Place,
    ) -> None:
        self._chosen, self._count, self._shared, self._width = chosen, count, shared, width
        self._keys = SharedHeads([head // (count // shared) for head in chosen], device)
        self._place_query, self._place_key = place_query, place_key

    def rows(self, query: Rows, key: Rows) -> tuple[Rows, Rows]:
        """The rows of Q and of K that `divided` divides the product of, from those of all heads."""
        return query.heads(self._chosen, self._count), key.heads(self._keys.chosen, self._shared)

    def divided(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of `rows` as Q and K, each [tokens, heads, d]."""
        heads = x.unflatten(1, (len(self._chosen) + len(self._keys.chosen), self._width))
        query, key = heads.tensor_split([len(self._chosen)], dim=1)
        if not self._chosen:
            return query, key
        return self._place_query(query, positions), self._keys.given(self._place_key(key, positions))


def joined(parts: Sequence[Rows]) -> Linear:
    """Several linear layers of one input as one."""
    weight = torch.cat([part.weight for part in parts])
    if all(part.bias is None for part in parts):
        return packed_linear(weight)
    biases = [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
    return packed_linear(weight, torch.cat(biases))
