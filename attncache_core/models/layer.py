"""What the engine asks of a model, whatever its family.

The engine runs Algorithm 2 over `layers`; a family file supplies them from Hugging Face's modules:

    hidden = model.embed(batch)
    for layer in model.layers:
        x = layer.attention_input(hidden)
        V of every head, Q and K of the computed heads  = layer.project(x, positions)
        Q and K of the reused heads, for the misses     = layer.project_reused(x, positions)
        context                                         = maps @ V, head by head
        hidden = layer.finish(hidden, context)
    outputs = model.outputs(hidden, batch)

A layer keeps its heads in the order of the damage that reusing them does, mildest first. Its first
`reused_heads` are the reuse mask's: a hit takes their maps from a record. The others are computed for
every sequence. With `reused_heads` = 0 all heads are computed ones.

A layer is two halves, finish(hidden, context) = feed_forward(add_attention(hidden, context)), so that either
can be left out (AttnDrop and BlockDrop, He et al. 2024: the residual passes through). A family says how each
is made; blocks.build_layers leaves out what is dropped. A layer without attention is no AttentionLayer: its
feed-forward half becomes the end of the layer before it, and whatever counts layers counts those that attend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import torch

from attncache_core.models.attention import Pattern
from attncache_core.models.language import LanguageHead
from attncache_core.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """How one layer keeps its heads: the order of damage, and how many of the first are reused."""

    order: Sequence[int]  # a permutation of the checkpoint's head numbers
    reused: int

    @property
    def computed(self) -> Sequence[int]:
        """The heads that every sequence computes."""
        return self.order[self.reused :]


class Dropped(Enum):
    """What a model is run without at one of its layers, which then has no heads."""

    ATTENTION = "attention"
    BLOCK = "block"  # attention and feed-forward


class Projection(NamedTuple):
    """What every sequence needs in one layer. Q and K have one width, V may have another."""

    value: torch.Tensor  # [tokens, heads, d_v]
    query: torch.Tensor  # [tokens, computed heads, d]
    key: torch.Tensor  # [tokens, computed heads, d]


# The second half of a layer with its residual and its norms: [tokens, hidden] -> [tokens, hidden].
FeedForward = Callable[[torch.Tensor], torch.Tensor]


class AttentionLayer(Protocol):
    """One layer on packed tokens."""

    heads: int
    reused_heads: int
    pattern: Pattern
    feed_forward: FeedForward  # followed by those of the next layers whose attention is dropped

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What attention reads: the norm of a pre-norm layer, else `hidden` itself. [tokens, hidden]."""
        ...

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """V of all heads, Q and K of the computed heads, for tokens x [tokens, hidden].

        positions: int64 [tokens], of each token in its own sequence.
        """
        ...

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Q and K of the reused heads, each [tokens, reused heads, d]: of misses and a few tokens before."""
        ...

    def attention_maps(self, query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:
        """Post-softmax maps [n, h, L, L] of n sequences of one length from their Q and K [n, L, h, d].

        heads: which of the layer's heads, in its order, Q and K are of. In attention.product_dtype, which
        may be wider than the model's dtype.
        """
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: np.ndarray,
        heads: slice,
        context: torch.Tensor,
    ) -> None:
        """Write maps @ V of packed sequences to `context`, the maps computed; all tensors [tokens, h, ...].

        offsets: int64 [sequences + 1], the first token of each sequence. heads: as attention_maps has it.
        """
        ...

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The layer's input and, added to it, the projected context [tokens, heads, d_v]: [tokens, hidden].

        With the norm that follows, in a family that normalises after attention.
        """
        ...

    def finish(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The layer's output from its input and the context: feed_forward(add_attention(...))."""
        ...


class Outputs(NamedTuple):
    """What a model says of each sequence."""

    representation: torch.Tensor  # float32 [sequences, d]: the embedding, or what the classifier reads
    logits: torch.Tensor | None  # float32 [sequences, classes] of a classification model

    @property
    def rows(self) -> torch.Tensor:
        """What a caller gets: the logits where there are any, else the representations."""
        return self.representation if self.logits is None else self.logits


# One float32 vector a sequence from the last layer's [tokens, hidden], in packed order.
Pool = Callable[[torch.Tensor, TokenBatch], torch.Tensor]


# The input of the first layer, [tokens, hidden].
Embed = Callable[[TokenBatch], torch.Tensor]


CPU = torch.device("cpu")


@dataclass
class PackedModel:
    """A model whose forward pass runs on packed tokens."""

    hidden_size: int
    embed: Embed
    layers: Sequence[AttentionLayer]  # first to last
    # From the last layer's [tokens, hidden], in packed order.
    outputs: Callable[[torch.Tensor, TokenBatch], Outputs]
    device: torch.device = CPU
    language_head: LanguageHead | None = None  # of a decoder that was loaded with it

    def search_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the projector reads: the first layer's input `hidden` as its attention sees it."""
        return self.layers[0].attention_input(hidden)
