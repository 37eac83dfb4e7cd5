"""A layer, described once as data. Two executors read the description.

    compiled.py   hands the description to the compiled stack (native/stack.h), which runs all layers at once
    this module   computes the same with torch's operators, layer by layer: the methods below

A layer has two halves. Each adds a branch to the hidden states, with norms around the branch:

    attention      hidden -> input norm -> Q, K, V -> maps @ V -> output projection -> + hidden -> output norm
    feed-forward   hidden -> input norm -> up, activation, down                     -> + hidden -> output norm

Either half can be dropped (AttnDrop and BlockDrop, He et al. 2024: the residual passes through). A layer
without attention is not an AttentionLayer: its feed-forward half is appended to the previous layer. Layer
counts and layer numbers in the engine include only layers with attention.

A layer orders its heads by the damage that reuse does to them, least damage first. The first `reused_heads`
heads are in the reuse mask: a hit takes their maps from a record. The other heads are computed for every
sequence. With `reused_heads` = 0, all heads are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from attncache_core.errors import UnsupportedModel
from attncache_core.models import attention
from attncache_core.models.attention import AttentionMask
from attncache_core.models.linear import ActivatedLinear, Linear, Norm, packed_linear
from attncache_core.models.projections import (
    LayerHeads,
    LinearWeights,
    Projection,
    Projections,
    QueryKeyValue,
    head_rows,
)
from attncache_core.models.scores import ScoreTerms
from attncache_core.runtime.memory import release_mapped_weights, return_freed_memory
from attncache_core.text.prefix_tree import PrefixTree
from attncache_core.text.token_batch import TokenBatch

# Makes the input of the first layer, [tokens, hidden].
Embed = Callable[[TokenBatch], torch.Tensor]
# After so many bytes of packed weights, the pages of their file are released. A release reads all mappings.
_RELEASED_BYTES = 2**25


class Dropped(Enum):
    """The part of a layer that is dropped. The layer then has no heads."""

    ATTENTION = "attention"
    BLOCK = "block"  # attention and feed-forward


@dataclass(frozen=True)
class Norms:
    """The norms around the branch of a half: output(hidden + branch(product(... input(hidden))))."""

    input: nn.Module | Norm | None = None
    branch: nn.Module | Norm | None = None  # of the branch, before the residual is added
    output: nn.Module | Norm | None = None  # of the sum with the residual

    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the branch."""
        return hidden if self.input is None else self.input(hidden)

    def total(self, hidden: torch.Tensor, last: Linear | Network, x: torch.Tensor) -> torch.Tensor:
        """Return `hidden` plus the branch, whose last step is last(x)."""
        return last(x, hidden) if self.branch is None else hidden + self.branch(last(x))

    def after(self, total: torch.Tensor) -> torch.Tensor:
        """Return the output of the half."""
        return total if self.output is None else self.output(total)


class Network(nn.Module):
    """A feed-forward network: down(activation(up(x))), or gated, down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        up: Linear,
        down: Linear,
        activation: str,
        gate: Linear | None = None,
        *,
        rounds_branch: bool = False,
    ) -> None:
        """up: fused with its activation if there is no gate. gate: fused with its activation.

        activation: the name of the activation. rounds_branch: whether torch rounds the product to the compute
        dtype before it adds the residual.
        """
        super().__init__()
        self.up, self.down, self.activation, self.gate = up, down, activation, gate
        self._rounds_branch = rounds_branch

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        rows = self.inner(x.flatten(0, -2))
        if self._rounds_branch and residual is not None:
            return residual + self.down(rows).view_as(x)
        return self.down(rows, residual).view_as(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the down projection, [tokens, inner]."""
        up: torch.Tensor = self.up(x)
        return up if self.gate is None else self.gate(x).mul_(up)


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward half of a layer."""

    network: Network | ActivatedLinear  # or a block of experts, which is called like a linear layer
    norms: Norms

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.norms.after(self.norms.total(hidden, self.network, self.norms.before(hidden)))


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One layer with attention, on packed tokens."""

    order: Sequence[int]  # of the heads, as head numbers of the checkpoint
    reused_heads: int  # how many of the first heads are reused
    projections: QueryKeyValue
    output: Linear  # projection of the context; its inputs have the order of the heads
    norms: Norms  # of the attention half
    attention_mask: AttentionMask
    score_terms: ScoreTerms | None = None  # None: scores are scale Q Kᵀ, which the compiled kernel computes
    # The layer's feed-forward half, and the halves of following layers whose attention is dropped.
    halves: tuple[FeedForward, ...] = field(default=())

    def __post_init__(self) -> None:
        """Raise UnsupportedModel if the output projection takes another width than the heads give."""
        if isinstance(self.projections, Projections) and not isinstance(self.output, ActivatedLinear):
            given = len(self.order) * self.projections.value_width
            if self.output.inputs != given:
                raise UnsupportedModel(
                    f"the heads of a layer give {given} numbers for each token, and its output projection "
                    f"takes {self.output.inputs}; correct the numbers and widths of heads in config.json",
                    field="model",
                )

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.order)

    def with_heads(self, heads: LayerHeads) -> AttentionLayer:
        """Return the same layer with the heads in another order and some of them reused.

        The layer must have all heads computed, in the checkpoint's order, which stays if the layer has score
        terms. Raises NotImplementedError if the projections cannot be packed again (DeepSeek).
        """
        if not isinstance(self.projections, Projections) or isinstance(self.output, ActivatedLinear):
            raise NotImplementedError
        if self.score_terms is not None:
            heads = LayerHeads(range(self.heads), heads.reused)
        weights = LinearWeights(self.output.weight, self.output.bias, self.output.smoothing)
        return replace(
            self,
            order=heads.order,
            reused_heads=heads.reused,
            projections=self.projections.with_heads(heads),
            output=output_projection(weights, heads),
        )

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of attention: the norm of `hidden` if the layer is pre-norm, else `hidden`."""
        return self.norms.before(hidden)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See QueryKeyValue."""
        return self.projections.project(x, positions)

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See QueryKeyValue."""
        return self.projections.project_reused(x, positions)

    def attention_maps(self, query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return the maps [n, h, L, L], after the softmax, of n sequences of one length.

        query, key: [n, L, h, d]. heads: the slice of the layer's heads that Q and K belong to, in the layer's
        order. The dtype is attention.product_dtype, which may be wider than the model's dtype.
        """
        if self.score_terms is None:
            return attention.attention_maps(query, key, self.attention_mask)
        scores = self.score_terms.scores(query, key, self.attention_mask.scale, heads)
        return attention.maps_from_scores(scores, self.attention_mask)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: np.ndarray,
        heads: slice,
        context: torch.Tensor,
        tree: PrefixTree | None = None,
    ) -> None:
        """Compute the maps of packed runs and write maps @ V to `context`; all tensors [tokens, h, ...].

        offsets: int64 [runs + 1], the first token of each run. heads: as in attention_maps. tree: which run
        each run continues; its tokens attend to the tokens of that run too. None: every run is a sequence.
        """
        terms, mask = self.score_terms, self.attention_mask
        if tree is not None:
            for alone in tree.alone:
                self.attend(query, key, value, alone, heads, context)
            scores_of = None if terms is None else partial(terms.scores, scale=mask.scale, heads=heads)
            attention.attend_blocks(query, key, value, tree, mask, context, scores_of)
        elif terms is None:
            attention.attend(query, key, value, offsets, mask, context)
        else:
            maps_of = partial(self.attention_maps, heads=heads)
            attention.attend_by_maps(maps_of, query, key, value, offsets, context)

    def attention_sum(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return the layer's input plus the output projection of the context, before the output norm.

        hidden: the layer's input, [tokens, hidden]. context: [tokens, heads, d_v].
        """
        return self.norms.total(hidden, self.output, context.flatten(1))

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return the output of the attention half, [tokens, hidden]. Arguments as for attention_sum."""
        return self.norms.after(self.attention_sum(hidden, context))

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the feed-forward halves, [tokens, hidden]. hidden: output of attention."""
        for half in self.halves:
            hidden = half(hidden)
        return hidden

    def finish(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, feed_forward(add_attention(hidden, context))."""
        return self.feed_forward(self.add_attention(hidden, context))


def output_projection(weights: LinearWeights, heads: LayerHeads) -> Linear:
    """Pack the projection of a context, with its columns, which are its inputs, in the order of the heads."""
    columns = head_rows(heads.order, weights.weight.shape[1] // len(heads.order))
    return packed_linear(weights.weight, weights.bias, weights.smoothing, columns=columns)


def build_layers(
    embed: Embed,
    modules: nn.ModuleList,
    layers: Sequence[LayerHeads | Dropped],
    attention: Callable[[Any, int, LayerHeads], AttentionLayer],
    feed_forward: Callable[[Any], FeedForward],
) -> tuple[Embed, list[AttentionLayer]]:
    """Pack the layers and leave out what is dropped. Return `embed` and the layers that attend.

    layers: for each module its heads, or what is dropped of it. attention: makes a layer without its second
    half from the module, its number and its heads. feed_forward: packs the second half of a module.

    The feed-forward half of a layer whose attention is dropped becomes the end of the layer before it, or of
    `embed` if there is no layer before it. Removes each module from `modules` as the module is packed, so
    that its original weights are freed.
    """
    built: list[AttentionLayer] = []
    packed_bytes = 0
    for number, heads in enumerate(layers):
        # The previous layers are packed by now, so the pages of their weight file are no longer needed.
        if packed_bytes >= _RELEASED_BYTES:
            release_mapped_weights()
            return_freed_memory()
            packed_bytes = 0
        module = modules.pop(0)
        packed_bytes += sum(weight.nbytes for weight in module.parameters())
        if heads is Dropped.BLOCK:
            continue
        half = feed_forward(module)
        if isinstance(heads, LayerHeads):
            built.append(replace(attention(module, number, heads), halves=(half,)))
        elif built:
            built[-1] = replace(built[-1], halves=(*built[-1].halves, half))
        else:
            embed = _then(embed, half)
    return embed, built


def _then(embed: Embed, half: FeedForward) -> Embed:
    return lambda batch: half(embed(batch))
