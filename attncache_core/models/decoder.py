"""Decoders like Llama: norms before each half, rotary positions, causal attention, grouped queries.

Llama, Mistral, Qwen2, Qwen3 and Gemma differ in the optional parts of their modules: biases, a norm of each
head's Q and K, a sliding window in some or all layers, norms after each half, and a block of experts instead
of one feed-forward network. A layer uses the parts that its module has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from attncache_core.checkpoints.hugging_face import declared
from attncache_core.errors import UnsupportedModel
from attncache_core.heads.language import language_head
from attncache_core.heads.pooling import Pooler
from attncache_core.models import attention
from attncache_core.models.attention import AttentionMask
from attncache_core.models.blocks import (
    AttentionNorms,
    BaseAttentionLayer,
    QueryKeyValue,
    Scores,
    WordEmbedding,
    build_layers,
    output_linear,
)
from attncache_core.models.compiled import NotCompiled, compiled_norm, native_norm
from attncache_core.models.experts import GatedNetwork, pack_networks
from attncache_core.models.layer import (
    AttentionLayer,
    Dropped,
    FeedForward,
    LayerHeads,
    Outputs,
    PackedModel,
)
from attncache_core.models.projections import LinearWeights, Projections
from attncache_core.models.rotary import LayerRotary
from attncache_core.native.stack_data import CompiledPooling, ForwardHalf
from attncache_core.text.token_batch import TokenBatch


class DecoderLayer(BaseAttentionLayer):
    """One decoder layer, with any kind of projections to Q, K and V."""

    def __init__(
        self,
        module: Any,
        projections: QueryKeyValue,
        attention_mask: AttentionMask,
        heads: LayerHeads,
        feed_forward: FeedForward,
        scores: Scores | None = None,
    ) -> None:
        super().__init__(projections, attention_mask, heads, feed_forward, scores)
        self._input_norm: nn.Module = module.input_layernorm
        self._output = output_linear(module.self_attn.o_proj, heads)
        # If the feed-forward half has a norm before it, "post_attention_layernorm" is a norm of attention's
        # output. Otherwise it is the norm before the feed-forward half.
        between = getattr(module, "pre_feedforward_layernorm", None)
        self._output_norm: nn.Module | None = module.post_attention_layernorm if between else None

    def _norms(self) -> AttentionNorms:
        return AttentionNorms(self._input_norm, self._output_norm)

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self._input_norm(hidden)

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        if self._output_norm is None:
            return self._output(context.flatten(1), hidden)
        return hidden + self._output_norm(self._output(context.flatten(1)))


class _FeedForward:
    """The second half of a layer: norm, feed-forward network, optional output norm, residual."""

    def __init__(self, module: Any, config: Any) -> None:
        self._network = feed_forward(module.mlp, config)
        between = getattr(module, "pre_feedforward_layernorm", None)
        self._input_norm: nn.Module = between or module.post_attention_layernorm
        self._output_norm: nn.Module | None = getattr(module, "post_feedforward_layernorm", None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        changed = self._network(self._input_norm(hidden))
        return hidden + (changed if self._output_norm is None else self._output_norm(changed))

    def compiled_halves(self) -> list[ForwardHalf]:
        """See compiled.CompiledForward."""
        if not isinstance(self._network, GatedNetwork):
            raise NotCompiled
        norms = compiled_norm(self._input_norm), compiled_norm(self._output_norm)
        return [replace(self._network.compiled(), input_norm=norms[0], branch_norm=norms[1])]


def feed_forward(module: nn.Module, config: Any) -> FeedForward:
    """Pack a feed-forward network or a block of experts. Return a function on [tokens, hidden]."""
    # A checkpoint may have both names.
    name = declared(config, "hidden_activation") or config.hidden_act
    network = pack_networks(module, name)
    if isinstance(network, GatedNetwork):
        return network
    # The expert blocks of transformers expect a batch axis.
    return lambda x: network(x[None])[0]


def decoder(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a decoder checkpoint, for pooled embeddings or with its sequence-classification head."""
    base = getattr(model, "model", model)
    config = base.config
    rotary = LayerRotary(base.rotary_emb, config)

    def build(module: Any, number: int, own: LayerHeads, second_half: FeedForward) -> DecoderLayer:
        attend = module.self_attn
        attention_mask = layer_attention_mask(config, number, attend.scaling)
        query, key, value = (
            LinearWeights.from_module(part) for part in (attend.q_proj, attend.k_proj, attend.v_proj)
        )
        projections = Projections(
            query,
            key,
            value,
            own,
            key_heads=config.num_key_value_heads,
            transform_query=rotary.transform(number, getattr(attend, "q_norm", None)),
            transform_key=rotary.transform(number, getattr(attend, "k_norm", None)),
        )
        cap = getattr(attend, "attn_logit_softcapping", None)
        scores = capped_scores(attention_mask.scale, cap) if cap else None
        return DecoderLayer(module, projections, attention_mask, own, second_half, scores)

    return assemble_decoder(model, heads, build, pool)


def assemble_decoder(
    model: Any,
    heads: Sequence[LayerHeads | Dropped],
    build: Callable[[Any, int, LayerHeads, FeedForward], AttentionLayer],
    pool: Pooler,
) -> PackedModel:
    """Pack a decoder from the layers that `build` makes and the embeddings, last norm and head of `model`."""
    base = getattr(model, "model", model)
    embed_tokens: nn.Module = base.embed_tokens
    embed, layers = build_layers(
        WordEmbedding(embed_tokens),
        base.layers,
        heads,
        lambda module: _FeedForward(module, base.config),
        build,
    )
    outputs = _Outputs(base.norm, getattr(model, "score", None), pool)
    return PackedModel(
        hidden_size=base.config.hidden_size,
        embed=embed,
        layers=layers,
        outputs=outputs,
        final=outputs,
        token_states=outputs.states,
        language_head=language_head(model, base.norm),
    )


class _Outputs:
    """The outputs of a decoder: the last norm, then pooled embeddings or the logits of the last token."""

    def __init__(self, norm: nn.Module, score: nn.Module | None, pool: Pooler) -> None:
        self._norm, self._score = norm, score
        self._pool = pool if score is None else Pooler(("lasttoken",))
        self.modes = self._pool.modes
        self.finishes = score is not None or pool.head is not None
        weight = next(norm.parameters())
        self._dtype, self._native = weight.dtype, native_norm(norm, weight.device)

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> Outputs:
        if self._score is None:
            return Outputs(self._pool(self.states(hidden), batch), None)
        last = self.states(hidden[torch.from_numpy(batch.last_rows)])
        return Outputs(last, self.logits(last))

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """See FinalStates."""
        return self._native(hidden) if self._native else self._norm(hidden.to(self._dtype)).float()

    def logits(self, last: torch.Tensor) -> torch.Tensor | None:
        """See FinalStates."""
        return None if self._score is None else self._score(last.to(self._dtype)).float()

    def compiled(self) -> CompiledPooling:
        """See compiled.CompiledOutputs."""
        return CompiledPooling(self.modes, compiled_norm(self._norm))

    def skipped(self, lengths: np.ndarray, prompt_tokens: np.ndarray | None) -> np.ndarray | None:
        """See compiled.CompiledOutputs."""
        return self._pool.skipped(lengths, prompt_tokens)

    def of_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """See compiled.CompiledOutputs."""
        logits = self.logits(vectors)
        return self._pool.finish(vectors) if logits is None else logits


def capped_scores(scale: float, cap: float) -> Scores:
    """Return a function for capped scores, c tanh(score / c), as Gemma 2 has."""

    def scores(query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:  # noqa: ARG001
        return (attention.attention_scores(query, key, scale) / cap).tanh() * cap

    return scores


def layer_attention_mask(config: Any, number: int, scale: float) -> AttentionMask:
    """Return the attention mask of layer `number`: causal or bidirectional, with a sliding window or without.

    Raises UnsupportedModel if the window is empty, and if config.json has use_bidirectional_attention for a
    family in which transformers interprets the flag in two ways.
    """
    types = getattr(config, "layer_types", None)
    window: int | None = declared(config, "sliding_window")
    if types and types[number] != "sliding_attention":
        window = None
    if window is not None and window < 1:
        raise UnsupportedModel(
            f"sliding_window in config.json is {window}, and must be at least 1", field="model"
        )
    # In a window of w tokens, a token attends to itself and w - 1 others. The exception is is_causal = False
    # below: there transformers uses w others on each side.
    last = None if window is None else window - 1
    if getattr(config, "use_bidirectional_attention", False):
        if config.model_type != "gemma3_text":
            raise UnsupportedModel(
                f"use_bidirectional_attention is not served for {config.model_type} models: what it does in "
                "transformers depends on how attention is computed",
                field="model",
            )
        return AttentionMask(scale, before=last, after=last)
    if not getattr(config, "is_causal", True):
        return AttentionMask(scale, before=window, after=window)
    return AttentionMask(scale, before=last, after=0)
