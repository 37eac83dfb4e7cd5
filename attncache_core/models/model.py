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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from attncache_core.heads.language import LanguageHead
from attncache_core.models.compiled import compiled_stack
from attncache_core.models.layer import AttentionLayer, Embed
from attncache_core.models.outputs import Outputs
from attncache_core.native.stack import CompiledStack
from attncache_core.runtime.devices import CPU


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
