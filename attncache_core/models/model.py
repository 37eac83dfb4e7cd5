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
from typing import NamedTuple, Protocol

import torch

from attncache_core.heads.embedding import EmbeddingHead
from attncache_core.heads.language import LanguageHead
from attncache_core.models.compiled import CompiledOutputs, compiled_stack
from attncache_core.models.layer import AttentionLayer, Embed
from attncache_core.native.stack import CompiledStack
from attncache_core.runtime.devices import CPU
from attncache_core.text.token_batch import TokenBatch


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
    # A decoder with classes reads its class at the last token of another id; None: at the last token.
    padding: int | None = None
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
        refitted_rows = self.refitted[number].finish(hidden[:refitted], context[:refitted])
        if refitted == len(hidden):
            return refitted_rows
        return torch.cat([refitted_rows, layer.finish(hidden[refitted:], context[refitted:])])

    def search_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the feature projector: what the first layer's attention reads."""
        return self.layers[0].attention_input(hidden)
