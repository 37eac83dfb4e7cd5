"""The interface between the engine and a model of any family.

The engine runs Algorithm 2 of the paper over `layers`. A family file builds the layers from Hugging Face
modules:

    hidden = model.embed(batch)
    for layer in model.layers:
        x = layer.attention_input(hidden)
        V of every head, Q and K of the computed heads  = layer.project(x, positions)
        Q and K of the reused heads, for the misses     = layer.project_reused(x, positions)
        context                                         = maps @ V, head by head
        hidden = layer.finish(hidden, context)
    outputs = model.outputs(hidden, batch)

A layer orders its heads by the damage that reuse does to them, least damage first. The first `reused_heads`
heads are in the reuse mask: a hit takes their maps from a record. The other heads are computed for every
sequence. With `reused_heads` = 0, all heads are computed.

A layer consists of two halves, finish(hidden, context) = feed_forward(add_attention(hidden, context)), so
that either half can be dropped (AttnDrop and BlockDrop, He et al. 2024: the residual passes through). A
family makes both halves, and blocks.build_layers leaves out what is dropped. A layer without attention is not
an AttentionLayer: its feed-forward half becomes the end of the previous layer. Layer counts and layer numbers
in the engine include only layers with attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from attncache_core.heads.embedding import EmbeddingHead
from attncache_core.heads.language import LanguageHead
from attncache_core.models.attention import AttentionMask
from attncache_core.models.compiled import CompiledOutputs, compiled_stack
from attncache_core.native.stack import CompiledStack
from attncache_core.runtime.devices import CPU
from attncache_core.text.prefix_tree import PrefixTree
from attncache_core.text.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The order of one layer's heads, and how many of the first heads are reused."""

    order: Sequence[int]  # a permutation of the checkpoint's head numbers
    reused: int

    @property
    def computed(self) -> Sequence[int]:
        """The heads that are computed for every sequence, as head numbers of the checkpoint."""
        return self.order[self.reused :]


class Dropped(Enum):
    """The part of a layer that is dropped. The layer then has no heads."""

    ATTENTION = "attention"
    BLOCK = "block"  # attention and feed-forward


class Projection(NamedTuple):
    """The projections that every sequence needs in one layer. The width of V may differ from Q and K."""

    value: torch.Tensor  # [tokens, heads, d_v]
    query: torch.Tensor  # [tokens, computed heads, d]
    key: torch.Tensor  # [tokens, computed heads, d]


# The second half of a layer with its residual and its norms: [tokens, hidden] -> [tokens, hidden].
FeedForward = Callable[[torch.Tensor], torch.Tensor]


class AttentionLayer(Protocol):
    """One layer with attention, on packed tokens."""

    heads: int
    reused_heads: int
    attention_mask: AttentionMask
    feed_forward: FeedForward  # includes the second halves of following layers whose attention is dropped

    def with_heads(self, heads: LayerHeads) -> AttentionLayer:
        """Return the same layer with other heads reused; see load.with_heads."""
        ...

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of attention: the norm of `hidden` if the layer is pre-norm, else `hidden`."""
        ...

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """Project x [tokens, hidden] to V of all heads, and to Q and K of the computed heads.

        positions: int64 [tokens], the position of each token in its own sequence.
        """
        ...

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project x [tokens, hidden] to Q and K of the reused heads, each [tokens, reused heads, d].

        The engine calls this for the tokens of misses, and a few tokens before them.
        """
        ...

    def query_and_slots(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project x [tokens, hidden] to Q [tokens, heads, d], and to what K and V of the tokens are made of.

        The latter is a slot for each token, [tokens, n], which does not depend on the token's position. Only
        for layers without reused heads.
        """
        ...

    def keys_and_values(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [tokens, heads, d] of slots [tokens, n]. positions: int64 [tokens]."""
        ...

    def attention_maps(self, query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return the maps [n, h, L, L], after the softmax, of n sequences of one length.

        query, key: [n, L, h, d]. heads: the slice of the layer's heads that Q and K belong to, in the layer's
        order. The dtype is attention.product_dtype, which may be wider than the model's dtype.
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
        tree: PrefixTree | None = None,
    ) -> None:
        """Compute the maps of packed runs and write maps @ V to `context`; all tensors [tokens, h, ...].

        offsets: int64 [runs + 1], the first token of each run. heads: as in attention_maps. tree: which run
        each run continues; its tokens attend to the tokens of that run too. None: every run is a sequence.
        """
        ...

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return the layer's input plus the output projection of the context: [tokens, hidden].

        hidden: the layer's input. context: [tokens, heads, d_v]. A family with a norm after attention applies
        the norm here.
        """
        ...

    def finish(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, feed_forward(add_attention(hidden, context))."""
        ...


class Outputs(NamedTuple):
    """The outputs of a model for a batch, one row per sequence."""

    representation: torch.Tensor  # float32 [sequences, d]: the embedding, or the classifier's input
    logits: torch.Tensor | None  # float32 [sequences, classes] of a classification model

    @property
    def rows(self) -> torch.Tensor:
        """The rows that a caller receives: the logits of a classification model, else the representations."""
        return self.representation if self.logits is None else self.logits


class FinalStates(Protocol):
    """The parts of a causal model's outputs, for sequences whose first tokens are not computed."""

    modes: tuple[str, ...]  # of pooling; of the last token if the model has classes

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what pooling reads, float32 [n, hidden], from the last layer's output [n, hidden]."""
        ...

    def logits(self, last: torch.Tensor) -> torch.Tensor | None:
        """Return the class logits [n, classes] of last tokens' states [n, hidden]; None without classes."""
        ...


# Makes what pooling reads, float32 [tokens, hidden], from the last layer's output [tokens, hidden].
TokenStates = Callable[[torch.Tensor], torch.Tensor]


# Makes the input of the first layer, [tokens, hidden].
Embed = Callable[[TokenBatch], torch.Tensor]


@dataclass
class PackedModel:
    """A model whose forward pass runs on packed tokens."""

    hidden_size: int
    embed: Embed
    layers: Sequence[AttentionLayer]  # first to last
    # Makes the outputs from the last layer's [tokens, hidden], of `dtype` or float32, in packed order.
    outputs: Callable[[torch.Tensor, TokenBatch], Outputs]
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32  # of the weights and of the hidden states
    final: FinalStates | None = None  # of a causal model
    token_states: TokenStates = torch.Tensor.float
    embedding_head: EmbeddingHead | None = None  # of `outputs`; None: pooled vectors are the embeddings
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
        return compiled_stack(
            self.embed, self.layers, self.outputs, self.hidden_size, self.dtype, self.refitted
        )

    @cached_property
    def compiled_outputs(self) -> CompiledOutputs | None:
        """The outputs, if one call of the stack makes them from token ids, up to the vectors of sequences."""
        makes_vectors = self.stack is not None and self.stack.embeds and self.stack.pools
        return self.outputs if makes_vectors and isinstance(self.outputs, CompiledOutputs) else None

    def finish(self, number: int, hidden: torch.Tensor, context: torch.Tensor, refitted: int) -> torch.Tensor:
        """Return the output of layer `number`; see AttentionLayer.finish.

        refitted: number of rows, from the first, that take the refitted weights.
        """
        layer = self.layers[number]
        if not refitted:
            return layer.finish(hidden, context)
        assert self.refitted is not None
        own = self.refitted[number].finish(hidden[:refitted], context[:refitted])
        if refitted == len(hidden):
            return own
        return torch.cat([own, layer.finish(hidden[refitted:], context[refitted:])])

    def search_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the feature projector: what the first layer's attention reads."""
        return self.layers[0].attention_input(hidden)
