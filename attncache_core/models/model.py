"""A model of any family, on packed tokens. The engine runs Algorithm 2 of the paper over `layers`:

hidden = model.embed(batch)
for layer in model.layers:
    x = layer.attention_input(hidden)
    V of every head, Q and K of the computed heads  = layer.project(x, positions)
    Q and K of the reused heads, for the misses     = layer.project_reused(x, positions)
    context                                         = maps @ V, head by head
    hidden = layer.finish(hidden, context)
outputs = model.outputs(hidden, batch)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from attncache_core.heads.language import LanguageHead
from attncache_core.heads.pooling import Pooler
from attncache_core.models.compiled import compiled_stack, native_norm
from attncache_core.models.layer import AttentionLayer, Embed
from attncache_core.models.linear import Norm
from attncache_core.native.pooling import NativeNorm
from attncache_core.native.stack import CompiledStack
from attncache_core.runtime.devices import CPU
from attncache_core.text.token_batch import TokenBatch


@dataclass
class PackedModel:
    """A model whose forward pass runs on packed tokens."""

    hidden_size: int
    embed: Embed
    layers: Sequence[AttentionLayer]  # first to last
    outputs: Outputs
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32  # of the weights and of the hidden states
    # A decoder with classes reads its class at the last token of another id; None: at the last token.
    padding: int | None = None
    language_head: LanguageHead | None = None  # if a decoder was loaded with its language head
    # The layers with the weights that hits take; see refitted.py. None: hits take the weights of `layers`.
    refitted: Sequence[AttentionLayer] | None = None

    @cached_property
    def is_causal(self) -> bool:
        """Whether no token depends on a later token."""
        return all(layer.attention_mask.is_causal for layer in self.layers)

    @cached_property
    def stack(self) -> CompiledStack | None:
        """The compiled stack of the layers; None if the layers run one by one on the plain executor."""
        if self.device != CPU:
            return None
        modes, norm = self.outputs.pool.modes, self.outputs.norm
        return compiled_stack(
            self.embed, self.layers, modes, norm, self.hidden_size, self.dtype, self.refitted
        )

    @cached_property
    def compiled_outputs(self) -> Outputs | None:
        """The outputs, if one call of the stack makes them from token ids, up to the vectors of sequences."""
        makes_vectors = self.stack is not None and self.stack.embeds and self.stack.pools
        return self.outputs if makes_vectors else None

    def finish(self, number: int, hidden: torch.Tensor, context: torch.Tensor, refitted: int) -> torch.Tensor:
        """Return the output of layer `number`; see AttentionLayer.finish.

        refitted: number of rows, from the first, that take the refitted weights.
        """
        layer = self.layers[number]
        if not refitted:
            return layer.finish(hidden, context)
        assert self.refitted is not None
        refitted_rows = self.refitted[number].finish(hidden[:refitted], context[:refitted])
        if refitted == len(hidden):
            return refitted_rows
        return torch.cat([refitted_rows, layer.finish(hidden[refitted:], context[refitted:])])

    def search_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the feature projector: what the first layer's attention reads."""
        return self.layers[0].attention_input(hidden)


class Head(NamedTuple):
    """A sequence-classification head."""

    read: Callable[[torch.Tensor], torch.Tensor]  # pooled vectors [n, hidden] -> input of `score`
    score: nn.Module  # -> logits [n, classes]
    pool: Pooler = Pooler(("cls",))


class Outputs:
    """The outputs of a model: a norm, then pooled embeddings or the logits of its classification head."""

    def __init__(self, pool: Pooler, head: Head | None, norm: nn.Module | Norm | None = None) -> None:
        """pool: of the model without a head. norm: of each token, before pooling."""
        self.pool, self._head, self.norm = pool if head is None else head.pool, head, norm
        self._native: NativeNorm | None = None
        if norm is not None:
            weight = norm.weight if isinstance(norm, Norm) else next(norm.parameters())
            self._dtype, self._native = weight.dtype, native_norm(norm, weight.device)

    @property
    def finishes(self) -> bool:
        """Whether `of_vectors` changes the vectors."""
        return self._head is not None or self.pool.head is not None

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the rows that a caller receives, float32 [sequences, d], in packed order.

        hidden: the last layer's output [tokens, hidden], of the model's dtype or float32.
        """
        if self.pool.modes == ("lasttoken",):
            return self.of_vectors(self.states(hidden[torch.from_numpy(batch.last_rows)]))
        return self.of_vectors(self.pool(self.states(hidden), batch))

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what pooling reads from the last layer's output, float32 [tokens, hidden]."""
        if self.norm is None:
            return hidden.float()
        return self._native(hidden) if self._native else self.norm(hidden.to(self._dtype)).float()

    def of_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the rows that a caller receives, float32 [n, d], from pooled vectors, float32 [n, width]."""
        if self._head is None:
            return vectors if self.pool.head is None else self.pool.head(vectors)
        read = self._head.read(vectors.to(next(self._head.score.parameters()).dtype))
        return self._head.score(read).float()
