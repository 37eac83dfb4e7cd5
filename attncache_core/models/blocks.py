"""What the families' layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from attncache_core.models import attention
from attncache_core.models.attention import Pattern
from attncache_core.models.layer import AttentionLayer, LayerHeads, Projection
from attncache_core.models.linear import Linear, packed_linear
from attncache_core.models.projections import head_rows

Layer = TypeVar("Layer", bound=AttentionLayer)


class QueryKeyValue(Protocol):
    """Makes Q, K and V of a layer; see AttentionLayer for the two blocks."""

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        ...

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        ...


class PlainAttention:
    """The attention of a layer whose scores are scale Q Kᵀ within its pattern, and nothing else."""

    def __init__(self, projections: QueryKeyValue, pattern: Pattern, heads: LayerHeads) -> None:
        self.heads, self.reused_heads = len(heads.order), heads.reused
        self.pattern = pattern
        self._projections = projections

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        return self._projections.project(x, positions)

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        return self._projections.project_reused(x, positions)

    def attention_maps(self, query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:  # noqa: ARG002
        """See AttentionLayer."""
        return attention.attention_maps(query, key, self.pattern)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: np.ndarray,
        heads: slice,  # noqa: ARG002
        context: torch.Tensor,
    ) -> None:
        """See AttentionLayer."""
        attention.attend(query, key, value, offsets, self.pattern, context)


def output_linear(module: nn.Linear, heads: LayerHeads) -> Linear:
    """The projection of a layer's context, its columns in the order of the heads."""
    rows = head_rows(heads.order, module.in_features // len(heads.order))
    return packed_linear(module.weight.detach()[:, rows], module.bias)


def build_layers(
    modules: nn.ModuleList, heads: Sequence[LayerHeads], build: Callable[[Any, int, LayerHeads], Layer]
) -> list[Layer]:
    """build(module, number, heads) for each layer; the modules' own weights are let go one by one."""
    layers = []
    for number, own in enumerate(heads):
        layers.append(build(modules.pop(0), number, own))
    return layers
