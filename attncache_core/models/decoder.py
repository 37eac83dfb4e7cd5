"""Decoders of Llama's kind: norms before each half, rotary positions, causal attention, grouped queries.

Llama, Mistral, Qwen2, Qwen3 and Gemma differ in what their modules carry: biases, a norm of each head's Q and
K, a sliding window in some or all layers, norms after each half, a block of experts instead of one
feed-forward network. Each is used where it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attncache_core.errors import UnsupportedModel
from attncache_core.loading import declared
from attncache_core.models import attention
from attncache_core.models.attention import Pattern
from attncache_core.models.blocks import PlainAttention, QueryKeyValue, Scores, build_layers, output_linear
from attncache_core.models.experts import pack_networks
from attncache_core.models.language import language_head
from attncache_core.models.layer import (
    AttentionLayer,
    Dropped,
    FeedForward,
    LayerHeads,
    Outputs,
    PackedModel,
    Pool,
)
from attncache_core.models.projections import Projections, Rows
from attncache_core.models.rotary import RotaryOfLayers
from attncache_core.tokens import TokenBatch


class DecoderLayer(PlainAttention):
    """One decoder layer around any way of making Q, K and V."""

    def __init__(
        self,
        module: Any,
        projections: QueryKeyValue,
        pattern: Pattern,
        heads: LayerHeads,
        feed_forward: FeedForward,
        scores: Scores | None = None,
    ) -> None:
        super().__init__(projections, pattern, heads, feed_forward, scores)
        self._input_norm: nn.Module = module.input_layernorm
        self._output = output_linear(module.self_attn.o_proj, heads)
        # With norms on both sides of the feed-forward half, the one "after attention" is of its output.
        between = getattr(module, "pre_feedforward_layernorm", None)
        self._output_norm: nn.Module | None = module.post_attention_layernorm if between else None

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        return self._input_norm(hidden)

    def add_attention(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """See AttentionLayer."""
        if self._output_norm is None:
            return self._output(context.flatten(1), hidden)
        return hidden + self._output_norm(self._output(context.flatten(1)))


class _FeedForward:
    """The second half of a layer: its norm, the network, a norm of what comes out if there is one."""

    def __init__(self, module: Any, config: Any) -> None:
        self._network = feed_forward(module.mlp, config)
        between = getattr(module, "pre_feedforward_layernorm", None)
        self._input_norm: nn.Module = between or module.post_attention_layernorm
        self._output_norm: nn.Module | None = getattr(module, "post_feedforward_layernorm", None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        changed = self._network(self._input_norm(hidden))
        return hidden + (changed if self._output_norm is None else self._output_norm(changed))


def feed_forward(module: nn.Module, config: Any) -> FeedForward:
    """A feed-forward network, or a block of experts, with all that is gate, up and down in it packed."""
    # A checkpoint may carry both names.
    name = declared(config, "hidden_activation") or config.hidden_act
    network = pack_networks(module, name)
    # transformers' blocks of experts take a batch.
    return lambda x: network(x[None])[0]


def decoder(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pool) -> PackedModel:
    """A decoder's checkpoint: hidden states pooled, or the class scores of the last token."""
    base = getattr(model, "model", model)
    config = base.config
    rotary = RotaryOfLayers(base.rotary_emb, config)

    def build(module: Any, number: int, own: LayerHeads, half: FeedForward) -> DecoderLayer:
        attend = module.self_attn
        pattern = attention_pattern(config, number, attend.scaling)
        query, key, value = (Rows.of(part) for part in (attend.q_proj, attend.k_proj, attend.v_proj))
        projections = Projections(
            query,
            key,
            value,
            own,
            key_heads=config.num_key_value_heads,
            place_query=rotary.place(number, getattr(attend, "q_norm", None)),
            place_key=rotary.place(number, getattr(attend, "k_norm", None)),
        )
        cap = getattr(attend, "attn_logit_softcapping", None)
        scores = capped_scores(pattern.scale, cap) if cap else None
        return DecoderLayer(module, projections, pattern, own, half, scores)

    return assembled(model, heads, build, pool)


def assembled(
    model: Any,
    heads: Sequence[LayerHeads | Dropped],
    build: Callable[[Any, int, LayerHeads, FeedForward], AttentionLayer],
    pool: Pool,
) -> PackedModel:
    """A decoder of the layers that `build` makes, with the embeddings, last norm and head of `model`."""
    base = getattr(model, "model", model)
    embed_tokens: nn.Module = base.embed_tokens
    embed, layers = build_layers(
        lambda batch: embed_tokens(batch.ids),
        base.layers,
        heads,
        lambda module: _FeedForward(module, base.config),
        build,
    )
    return PackedModel(
        hidden_size=base.config.hidden_size,
        embed=embed,
        layers=layers,
        outputs=_Outputs(base.norm, getattr(model, "score", None), pool),
        language_head=language_head(model, base.norm),
    )


class _Outputs:
    """The last norm, then pooled embeddings, or the class scores of the last token."""

    def __init__(self, norm: nn.Module, score: nn.Module | None, pool: Pool) -> None:
        self._norm, self._score, self._pool = norm, score, pool

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> Outputs:
        if self._score is None:
            return Outputs(self._pool(self._norm(hidden), batch), None)
        last = self._norm(hidden[torch.from_numpy(batch.offsets[1:] - 1)])
        return Outputs(last.float(), self._score(last).float())


def capped_scores(scale: float, cap: float) -> Scores:
    """Scores that are capped, c tanh(score / c), as Gemma 2 does."""

    def scores(query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:  # noqa: ARG001
        return (attention.attention_scores(query, key, scale) / cap).tanh() * cap

    return scores


def attention_pattern(config: Any, number: int, scale: float) -> Pattern:
    """What tokens of layer `number` attend to: all before them, or a window; both sides if config says so.

    Raises UnsupportedModel for a window without a token, and for a flag that transformers itself reads in two
    ways.
    """
    types = getattr(config, "layer_types", None)
    window: int | None = declared(config, "sliding_window")
    if types and types[number] != "sliding_attention":
        window = None
    if window is not None and window < 1:
        raise UnsupportedModel(
            f"sliding_window {window} in config.json: it must be 1 at least", field="model"
        )
    # Of a window of w tokens a token sees itself and w - 1 others; only where a decoder of another kind is
    # told to look both ways, w others on each side.
    last = None if window is None else window - 1
    if getattr(config, "use_bidirectional_attention", False):
        if config.model_type != "gemma3_text":
            raise UnsupportedModel(
                f"use_bidirectional_attention is not served for {config.model_type} models: what it does in "
                "transformers depends on how attention is computed",
                field="model",
            )
        return Pattern(scale, before=last, after=last)
    if not getattr(config, "is_causal", True):
        return Pattern(scale, before=window, after=window)
    return Pattern(scale, before=last, after=0)
