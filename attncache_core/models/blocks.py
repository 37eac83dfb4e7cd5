"""What the families' layers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from attncache_core.memory import release_mapped_weights
from attncache_core.models import attention
from attncache_core.models.attention import Pattern
from attncache_core.models.layer import AttentionLayer, Dropped, Embed, FeedForward, LayerHeads, Projection
from attncache_core.models.linear import Linear, packed_linear
from attncache_core.models.projections import head_rows

Input = TypeVar("Input")


class QueryKeyValue(Protocol):
    """Makes Q, K and V of a layer; see AttentionLayer for the two blocks."""

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        ...

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        ...


# Q, K [n, L, h, d] of the layer's heads in the slice, in its order -> scores [n, h, L, L] that may be written
# to, in attention.product_dtype.
Scores = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]


class PlainAttention(ABC):
    """A layer but for its norms: attention within a pattern, of scores scale Q Kᵀ or what `scores` makes."""

    def __init__(
        self,
        projections: QueryKeyValue,
        pattern: Pattern,
        heads: LayerHeads,
        feed_forward: FeedForward,
        scores: Scores | None = None,
    ) -> None:
        self.heads, self.reused_heads = len(heads.order), heads.reused
        self.pattern = pattern
        self.feed_forward = feed_forward
        self._projections = projections
        self._scores = scores

    @property
    def scores_are_products(self) -> bool:
        """Whether scores are scale Q Kᵀ, as the kernel computes them."""
        return self._scores is None

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        return self._projections.project(x, positions)

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        return self._projections.project_reused(x, positions)

    def attention_maps(self, query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:
        """See AttentionLayer."""
        if self._scores is None:
            return attention.attention_maps(query, key, self.pattern)
        return attention.maps_from_scores(self._scores(query, key, heads), self.pattern)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: np.ndarray,
        heads: slice,
        context: torch.Tensor,
    ) -> None:
        """See AttentionLayer."""
        if self._scores is None:
            attention.attend(query, key, value, offsets, self.pattern, context)
            return
        maps_of = partial(self.attention_maps, heads=heads)
        attention.attend_by_maps(maps_of, query, key, value, offsets, context)

    @abstractmethod
    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""

    def finish(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self.feed_forward(self.add_attention(hidden, context))


def output_linear(module: nn.Linear, heads: LayerHeads) -> Linear:
    """The projection of a layer's context, its columns in the order of the heads."""
    rows = head_rows(heads.order, module.in_features // len(heads.order))
    return packed_linear(module.weight.detach()[:, rows], module.bias)


def build_layers(
    embed: Embed,
    modules: nn.ModuleList,
    layers: Sequence[LayerHeads | Dropped],
    feed_forward: Callable[[Any], FeedForward],
    build: Callable[[Any, int, LayerHeads, FeedForward], AttentionLayer],
) -> tuple[Embed, list[AttentionLayer]]:
    """`embed` and the layers that attend, each followed by the feed-forward halves of those that don't.

    feed_forward(module) makes a layer's second half; build(module, number, heads, second half) makes a layer.
    The modules' own weights are let go one by one.
    """
    built: list[AttentionLayer] = []
    for number, own in enumerate(layers):
        # What the layer before read from the weights' file is packed by now.
        release_mapped_weights()
        module = modules.pop(0)
        if own is Dropped.BLOCK:
            continue
        half = feed_forward(module)
        if isinstance(own, LayerHeads):
            built.append(build(module, number, own, half))
        elif built:
            built[-1].feed_forward = _followed(built[-1].feed_forward, half)
        else:
            embed = _followed(embed, half)
    return embed, built


def _followed(first: Callable[[Input], torch.Tensor], second: FeedForward) -> Callable[[Input], torch.Tensor]:
    return lambda x: second(first(x))
