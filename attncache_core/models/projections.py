"""Projections of one layer to Q, K and V, split into the two products that map reuse needs.

    product one, for every sequence   V of all heads, Q and K of the computed heads
    product two, for misses only      Q and K of the reused heads

With grouped queries (Ainslie et al. 2023) several query heads share one head of K and one head of V. A shared
head is computed once and then copied to each of its query heads. A shared head of K is computed only if one
of its query heads needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from attncache_core.models.compiled import NotCompiled, compiled_norm, packed_matrix
from attncache_core.models.layer import LayerHeads, Projection
from attncache_core.models.linear import ActivatedLinear, Linear, packed_linear
from attncache_core.models.rotary import RotaryHeads
from attncache_core.models.smoothing import smoothing_of
from attncache_core.native.products import PackedMatrix
from attncache_core.native.stack_data import AttentionHalf, QueryKeyHeads


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


class QueryKeyTransform(Protocol):
    """A transformation of Q or K after the projection: a norm of each head, a rotation by position."""

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [tokens, h, d], positions: int64 [tokens] -> [tokens, h, d]."""
        ...


def unchanged(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Return `x` itself: the transform of a model without rotary positions and head norms."""
    return x


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
    """The projections of one layer to Q, K and V."""

    def __init__(
        self,
        query: LinearWeights,
        key: LinearWeights,
        value: LinearWeights,
        heads: LayerHeads,
        *,
        key_heads: int | None = None,
        transform_query: QueryKeyTransform = unchanged,
        transform_key: QueryKeyTransform = unchanged,
    ) -> None:
        """query, key, value: the weights of all heads, in the checkpoint's order.

        key_heads: the number of heads of K and V; None if every query head has its own.
        """
        count = len(heads.order)
        shared = key_heads or count
        self._split = partial(
            Projections,
            key_heads=key_heads,
            transform_query=transform_query,
            transform_key=transform_key,
        )
        self._heads = heads
        group = count // shared
        self._values = SharedHeads([head // group for head in heads.order], value.weight.device)
        value_weights = value.select_heads(self._values.chosen, shared)
        self._value_width = len(value_weights.weight)  # of all heads of V together
        head_dim = len(query.weight) // count
        self._transforms = transform_query, transform_key
        self._computed, self._reused = (
            _QueryKey(chosen, count, shared, head_dim, key.weight.device, transform_query, transform_key)
            for chosen in (heads.computed, heads.order[: heads.reused])
        )
        self._always = joined_linear([value_weights, *self._computed.select(query, key)])
        self._misses = joined_linear(self._reused.select(query, key)) if heads.reused else None

    def with_heads(self, heads: LayerHeads) -> Projections:
        """Return the same projections with the heads in another order and some of them in the second block.

        Only for projections that have all heads in the first block, in the checkpoint's order.
        """
        assert self._misses is None
        assert list(self._heads.order) == list(range(len(self._heads.order)))
        assert not isinstance(self._always, ActivatedLinear)
        joined = LinearWeights(self._always.weight, self._always.bias, self._always.smoothing)
        queries = len(self._heads.order) * self._computed.head_dim
        ends = [0, self._value_width, self._value_width + queries, len(joined.weight)]
        value, query, key = (joined.select_rows(torch.arange(*rows)) for rows in pairwise(ends))
        return self._split(query, key, value, heads)

    def compiled(self, *, output: PackedMatrix, **rest: Any) -> AttentionHalf:
        """Describe an attention half with these projections to the compiled stack. Raises NotCompiled.

        output: the projection of the context. rest: the other fields of AttentionHalf.
        """
        width = self._computed.head_dim
        values = len(self._values.chosen)
        placed = self._transforms
        rotary = placed[0].rotary if isinstance(placed[0], RotaryHeads) else None
        norms = [compiled_norm(own.norm) if isinstance(own, RotaryHeads) else None for own in placed]
        if rotary is None and any(own is not unchanged for own in placed):
            raise NotCompiled
        return AttentionHalf(
            always=self._computed.compiled(self._always),
            misses=None if self._misses is None else self._reused.compiled(self._misses),
            output=output,
            value_heads=self._values.used,
            values=values,
            width=width,
            value_width=self._value_width // values,
            query_norm=norms[0],
            key_norm=norms[1],
            angles=rotary.tables if rotary else None,
            half=rotary.half if rotary else 0,
            **rest,
        )

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        value, rest = self._always(x).tensor_split([self._value_width], dim=1)
        value = value.unflatten(1, (len(self._values.chosen), -1))
        return Projection(self._values.expand_kv_heads(value), *self._computed.split(rest, positions))

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        assert self._misses is not None
        return self._reused.split(self._misses(x), positions)

    def query_and_slots(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer. A slot is K of all key heads, after their norm, then V of all value heads."""
        assert self._misses is None
        value, rest = self._always(x).tensor_split([self._value_width], dim=1)
        query, key = self._computed.heads(rest)
        query, key_norm = self._transforms[0](query, positions), getattr(self._transforms[1], "norm", None)
        key = key if key_norm is None else key_norm(key)
        return query, torch.cat([key.flatten(1), value], dim=1)

    def keys_and_values(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        key, value = slots.tensor_split([slots.shape[1] - self._value_width], dim=1)
        rotary = getattr(self._transforms[1], "rotary", unchanged)
        value = value.unflatten(1, (len(self._values.chosen), -1))
        key = rotary(key.unflatten(1, (-1, self._computed.head_dim)).clone(), positions)
        return self._computed.expand_keys(key), self._values.expand_kv_heads(value)


class _QueryKey:
    """Q and K of the chosen query heads."""

    def __init__(
        self,
        chosen: Sequence[int],
        count: int,
        shared: int,
        head_dim: int,
        device: torch.device,
        transform_query: QueryKeyTransform,
        transform_key: QueryKeyTransform,
    ) -> None:
        """count: the number of query heads of the layer; shared: the number of its heads of K."""
        self._chosen, self._count, self._shared, self.head_dim = chosen, count, shared, head_dim
        self._keys = SharedHeads([head // (count // shared) for head in chosen], device)
        self._transform_query, self._transform_key = transform_query, transform_key

    def compiled(self, product: Linear) -> QueryKeyHeads:
        """Describe the product with the selected weights to the compiled stack. Raises NotCompiled."""
        return QueryKeyHeads(packed_matrix(product), self._keys.used, len(self._keys.chosen))

    def select(self, query: LinearWeights, key: LinearWeights) -> tuple[LinearWeights, LinearWeights]:
        """Return the weights of Q and K of the chosen heads, from the weights of all heads."""
        return (
            query.select_heads(self._chosen, self._count),
            key.select_heads(self._keys.chosen, self._shared),
        )

    def split(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the product with the selected weights into Q and K, each [tokens, chosen heads, d]."""
        query, key = self.heads(x)
        if not self._chosen:
            return query, key
        query, key = self._transform_query(query, positions), self._transform_key(key, positions)
        return query, self.expand_keys(key)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the product into heads of Q and heads of K, before their transforms."""
        heads = x.unflatten(1, (len(self._chosen) + len(self._keys.chosen), self.head_dim))
        query, key = heads.tensor_split([len(self._chosen)], dim=1)
        return query, key

    def expand_keys(self, key: torch.Tensor) -> torch.Tensor:
        """Copy heads of K to the query heads: [tokens, key heads, d] -> [tokens, chosen heads, d]."""
        return self._keys.expand_kv_heads(key)


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
