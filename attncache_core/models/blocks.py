"""Parts that all families share: the attention of a layer, its output projection, and the list of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import nn

from attncache_core.models import attention
from attncache_core.models.attention import AttentionMask
from attncache_core.models.layer import AttentionLayer, Dropped, Embed, FeedForward, LayerHeads, Projection
from attncache_core.models.linear import ActivatedLinear, Linear, packed_linear
from attncache_core.models.projections import Projections, head_rows
from attncache_core.runtime.memory import release_mapped_weights

Input = TypeVar("Input")


class QueryKeyValue(Protocol):
    """The projections of a layer to Q, K and V."""

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        ...

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        ...


# Q and K [n, L, h, d], and the slice of the layer's heads that they belong to, in the layer's order -> scores
# [n, h, L, L] in attention.product_dtype. The caller may overwrite the scores.
Scores = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]


class BaseAttentionLayer(ABC):
    """A layer without its norms, which a subclass adds. See AttentionLayer for the methods."""

    _output: Linear  # the projection of the context, set by each family

    def __init__(
        self,
        projections: QueryKeyValue,
        attention_mask: AttentionMask,
        heads: LayerHeads,
        feed_forward: FeedForward,
        scores: Scores | None = None,
    ) -> None:
        """scores: makes the scores before the softmax; None for scale Q Kᵀ."""
        self.heads, self.reused_heads = len(heads.order), heads.reused
        self.attention_mask = attention_mask
        self.feed_forward = feed_forward
        self._projections = projections
        self._scores = scores

    def with_heads(self, heads: LayerHeads) -> Self:
        """Return the same layer with the heads in another order and some of them reused.

        A layer with scores of its own keeps the order of its heads, which its scores depend on. Raises
        NotImplementedError if the projections cannot be packed again (DeepSeek).
        """
        if not isinstance(self._projections, Projections):
            raise NotImplementedError
        if self._scores is not None:
            heads = LayerHeads(range(self.heads), heads.reused)
        layer = copy(self)
        layer.reused_heads = heads.reused
        layer._projections = self._projections.with_heads(heads)
        layer._output = reordered_output(self._output, heads)
        return layer

    @property
    def scores_are_products(self) -> bool:
        """Whether the scores are scale Q Kᵀ, which the compiled kernel can compute."""
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
            return attention.attention_maps(query, key, self.attention_mask)
        return attention.maps_from_scores(self._scores(query, key, heads), self.attention_mask)

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
            attention.attend(query, key, value, offsets, self.attention_mask, context)
            return
        maps_of = partial(self.attention_maps, heads=heads)
        attention.attend_by_maps(maps_of, query, key, value, offsets, context)

    @abstractmethod
    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""

    def finish(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self.feed_forward(self.add_attention(hidden, context))


def reordered_output(output: Linear, heads: LayerHeads) -> Linear:
    """Return the packed projection of a layer's context with its columns in another order of the heads."""
    if isinstance(output, ActivatedLinear):
        raise NotImplementedError
    columns = head_rows(heads.order, output.inputs // len(heads.order))
    return packed_linear(output.weight[:, columns], output.bias)


def output_linear(module: nn.Linear, heads: LayerHeads) -> Linear:
    """Pack the output projection of a layer, its columns in the order of the layer's heads."""
    rows = head_rows(heads.order, module.in_features // len(heads.order))
    return packed_linear(module.weight.detach()[:, rows], module.bias)


def build_layers(
    embed: Embed,
    modules: nn.ModuleList,
    layers: Sequence[LayerHeads | Dropped],
    feed_forward: Callable[[Any], FeedForward],
    build: Callable[[Any, int, LayerHeads, FeedForward], AttentionLayer],
) -> tuple[Embed, list[AttentionLayer]]:
    """Pack the layers and leave out what is dropped. Return `embed` and the layers that attend.

    layers: for each module its heads, or what is dropped of it. feed_forward: packs the second half of a
    module. build: makes a layer from the module, its number, its heads and its second half.

    The feed-forward half of a layer whose attention is dropped becomes the end of the layer before it, or of
    `embed` if there is no layer before it. Removes each module from `modules` as the module is packed, so
    that its original weights are freed.
    """
    built: list[AttentionLayer] = []
    for number, own in enumerate(layers):
        # The previous layer is packed by now, so the pages of its weight file are no longer needed.
        release_mapped_weights()
        module = modules.pop(0)
        if own is Dropped.BLOCK:
            continue
        second_half = feed_forward(module)
        if isinstance(own, LayerHeads):
            built.append(build(module, number, own, second_half))
        elif built:
            built[-1].feed_forward = _chain(built[-1].feed_forward, second_half)
        else:
            embed = _chain(embed, second_half)
    return embed, built


def _chain(first: Callable[[Input], torch.Tensor], second: FeedForward) -> Callable[[Input], torch.Tensor]:
    """Return the function x -> second(first(x))."""
    return lambda x: second(first(x))
