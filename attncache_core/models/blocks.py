"""Parts that all families share: the attention of a layer, its output projection, and the list of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import nn

from attncache_core.models import attention
from attncache_core.models.attention import AttentionMask
from attncache_core.models.compiled import NotCompiled, compiled_halves, compiled_norm, packed_matrix
from attncache_core.models.layer import AttentionLayer, Dropped, Embed, FeedForward, LayerHeads, Projection
from attncache_core.models.linear import ActivatedLinear, Linear, Norm, packed_linear
from attncache_core.models.projections import LinearWeights, Projections, head_rows
from attncache_core.native.stack_data import AttentionHalf, CompiledEmbedding, ForwardHalf
from attncache_core.runtime.memory import release_mapped_weights
from attncache_core.text.prefix_tree import PrefixTree
from attncache_core.text.token_batch import TokenBatch

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


@runtime_checkable
class CompiledScores(Protocol):
    """Scores that the compiled stack can compute."""

    def compiled_terms(self) -> dict[str, Any]:
        """Return the fields of native.stack.AttentionHalf in which the scores differ from scale Q Kᵀ."""
        ...


@runtime_checkable
class SlotProjections(QueryKeyValue, Protocol):
    """Projections whose keys and values can be kept in slots."""

    def query_and_slots(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        ...

    def keys_and_values(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        ...


class AttentionNorms(NamedTuple):
    """The norms of an attention half."""

    input: nn.Module | Norm | None = None
    branch: nn.Module | Norm | None = None  # of the half's output, before the residual is added
    output: nn.Module | Norm | None = None  # of the sum with the residual


class WordEmbedding:
    """The embedding of a model without learned positions: a module, then a norm, if any."""

    def __init__(self, module: nn.Module, norm: Norm | None = None) -> None:
        self._module, self._norm = module, norm

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        """Return the first layer's input, [tokens, hidden]."""
        words: torch.Tensor = self._module(batch.ids)
        return words if self._norm is None else self._norm(words)

    def compiled(self) -> CompiledEmbedding:
        """See compiled.CompiledEmbed. Gemma's table scales its rows; a table is recognised by its rows."""
        if not isinstance(self._module, nn.Embedding):
            raise NotCompiled
        words, probe = self._module.weight, torch.arange(min(8, self._module.num_embeddings))
        scale = torch.as_tensor(getattr(self._module, "embed_scale", 1.0), dtype=words.dtype)
        if not torch.allclose(self._module(probe), words[probe] * scale, rtol=0, atol=0, equal_nan=True):
            raise NotCompiled
        return CompiledEmbedding(words, norm=compiled_norm(self._norm), scale=float(scale))


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

    @abstractmethod
    def _norms(self) -> AttentionNorms:
        """Return the norms of the attention half."""

    def compiled_attention(self) -> AttentionHalf:
        """See compiled.CompiledLayer."""
        if not isinstance(self._projections, Projections):
            raise NotCompiled
        mask, norms = self.attention_mask, self._norms()
        fields: dict[str, Any] = {"scale": mask.scale}
        if self._scores is not None:
            if not isinstance(self._scores, CompiledScores):
                raise NotCompiled
            fields |= self._scores.compiled_terms()
        return self._projections.compiled(
            output=packed_matrix(self._output),
            before=mask.before,
            after=mask.after,
            input_norm=compiled_norm(norms.input),
            branch_norm=compiled_norm(norms.branch),
            output_norm=compiled_norm(norms.output),
            **fields,
        )

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

    def query_and_slots(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        assert isinstance(self._projections, SlotProjections)
        return self._projections.query_and_slots(x, positions)

    def keys_and_values(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        assert isinstance(self._projections, SlotProjections)
        return self._projections.keys_and_values(slots, positions)

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
        tree: PrefixTree | None = None,
    ) -> None:
        """See AttentionLayer."""
        if tree is not None:
            for alone in tree.alone:
                self.attend(query, key, value, alone, heads, context)
            scores = self._scores
            scores_of = None if scores is None else lambda q, k: scores(q, k, heads)
            attention.attend_blocks(query, key, value, tree, self.attention_mask, context, scores_of)
            return
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
    return packed_columns(LinearWeights(output.weight, output.bias, output.smoothing), columns)


def output_linear(module: nn.Linear, heads: LayerHeads) -> Linear:
    """Pack the output projection of a layer, its columns in the order of the layer's heads."""
    columns = head_rows(heads.order, module.in_features // len(heads.order))
    return packed_columns(LinearWeights.from_module(module), columns)


def packed_columns(weights: LinearWeights, columns: torch.Tensor) -> Linear:
    """Pack a linear layer with its columns, which are its inputs, in another order: int64 [inputs]."""
    smoothing = None if weights.smoothing is None else weights.smoothing[columns]
    return packed_linear(weights.weight[:, columns], weights.bias, smoothing)


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
            built[-1].feed_forward = _Chain(built[-1].feed_forward, second_half)
        else:
            embed = _Chain(embed, second_half)
    return embed, built


class _Chain(Generic[Input]):
    """The function x -> second(first(x))."""

    def __init__(self, first: Callable[[Input], torch.Tensor], second: FeedForward) -> None:
        self._first, self._second = first, second

    def __call__(self, x: Input) -> torch.Tensor:
        """x: of the type that `first` takes -> [tokens, hidden]."""
        return self._second(self._first(x))

    def compiled_halves(self) -> list[ForwardHalf]:
        """See compiled.CompiledForward."""
        return compiled_halves(self._first) + compiled_halves(self._second)
