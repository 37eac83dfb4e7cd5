"""Decoders like Llama: norms before each half, rotary positions, causal attention, grouped queries.

Llama, Mistral, Qwen2, Qwen3 and Gemma differ in the optional parts of their modules: biases, a norm of each
head's Q and K, a sliding window in some or all layers, norms after each half, and a block of experts instead
of one feed-forward network. A layer uses the parts that its module has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from attncache_core.checkpoints.hugging_face import declared, declared_cap
from attncache_core.errors import UnsupportedModel
from attncache_core.heads.language import language_head
from attncache_core.heads.pooling import Pooler
from attncache_core.models.attention import AttentionMask
from attncache_core.models.embedding import Embedding
from attncache_core.models.experts import pack_networks
from attncache_core.models.layer import (
    AttentionLayer,
    Dropped,
    FeedForward,
    Network,
    Norms,
    build_layers,
    output_projection,
)
from attncache_core.models.linear import ActivatedLinear
from attncache_core.models.model import Head, Outputs, PackedModel
from attncache_core.models.projections import LayerHeads, LinearWeights, Projections, QueryKeyValue
from attncache_core.models.rotary import LayerRotary
from attncache_core.models.scores import ScoreTerms


def decoder(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a decoder checkpoint, for pooled embeddings or with its sequence-classification head."""
    base = getattr(model, "model", model)
    config = base.config
    rotary = LayerRotary(base.rotary_emb, config, base.layers[0].self_attn.head_dim)

    def projections(attend: Any, number: int, heads: LayerHeads) -> Projections:
        return Projections(
            LinearWeights.from_module(attend.q_proj),
            LinearWeights.from_module(attend.k_proj),
            LinearWeights.from_module(attend.v_proj),
            heads,
            key_heads=config.num_key_value_heads,
            rotary=rotary[number],
            query_norm=getattr(attend, "q_norm", None),
            key_norm=getattr(attend, "k_norm", None),
        )

    return assemble_decoder(model, heads, projections, pool)


def assemble_decoder(
    model: Any,
    heads: Sequence[LayerHeads | Dropped],
    projections: Callable[[Any, int, LayerHeads], QueryKeyValue],
    pool: Pooler,
) -> PackedModel:
    """Pack a decoder.

    projections: makes the projections to Q, K and V from the attention module of a layer, the number of the
    layer and its heads.
    """
    base = getattr(model, "model", model)
    config = base.config

    def attention(module: Any, number: int, heads: LayerHeads) -> AttentionLayer:
        attend, (norms, _) = module.self_attn, _norms(module)
        # Gemma 3 has this field too, and transformers does not read it.
        cap = declared_cap(config, "attn_logit_softcapping") if config.model_type == "gemma2" else None
        return AttentionLayer(
            heads.order,
            heads.reused,
            projections(attend, number, heads),
            output_projection(LinearWeights.from_module(attend.o_proj), heads),
            norms,
            layer_attention_mask(config, number, attend.scaling),
            None if cap is None else ScoreTerms(cap=cap),
        )

    embed, layers = build_layers(
        Embedding(base.embed_tokens),
        base.layers,
        heads,
        attention,
        lambda module: FeedForward(feed_forward(module.mlp, config), _norms(module)[1]),
    )
    score = getattr(model, "score", None)
    head = None if score is None else Head(lambda last: last, score, Pooler(("lasttoken",)))
    return PackedModel(
        hidden_size=config.hidden_size,
        embed=embed,
        layers=layers,
        outputs=Outputs(pool, head, base.norm),
        padding=None if score is None else model.config.pad_token_id,
        language_head=language_head(model, base.norm),
    )


def _norms(module: Any) -> tuple[Norms, Norms]:
    """Return the norms of both halves of a layer.

    If the feed-forward half has a norm before it, "post_attention_layernorm" is a norm of attention's output.
    Otherwise it is the norm before the feed-forward half.
    """
    middle: nn.Module = module.post_attention_layernorm
    before = getattr(module, "pre_feedforward_layernorm", None)
    after = getattr(module, "post_feedforward_layernorm", None)
    return Norms(module.input_layernorm, middle if before else None), Norms(before or middle, after)


def feed_forward(module: nn.Module, config: Any) -> Network | ActivatedLinear:
    """Pack a feed-forward network or a block of experts. Return a function on [tokens, hidden]."""
    # A checkpoint may have both names.
    name = declared(config, "hidden_activation") or config.hidden_act
    network = pack_networks(module, name)
    if isinstance(network, Network):
        return network
    # The expert blocks of transformers expect a batch axis.
    return ActivatedLinear(lambda x: network(x[None])[0], None)


def layer_attention_mask(config: Any, number: int, scale: float) -> AttentionMask:
    """Return the attention mask of layer `number`: causal or bidirectional, with a sliding window or without.

    Raises UnsupportedModel if the window is empty, and if config.json has is_causal null, or
    use_bidirectional_attention for a family in which transformers interprets the flag in two ways.
    """
    types = declared(config, "layer_types")
    window: int | None = declared(config, "sliding_window")
    if types and not _has_window(types[number], window):
        window = None
    if window is not None and window < 1:
        raise UnsupportedModel(
            f"sliding_window in config.json is {window}, and must be at least 1", field="model"
        )
    # In a window of w tokens, a token attends to itself and w - 1 others. The exception is is_causal = False
    # below: there transformers uses w others on each side.
    last = None if window is None else window - 1
    is_causal = getattr(config, "is_causal", True)
    if is_causal is None:
        raise UnsupportedModel(
            "is_causal in config.json is null, and what null does in transformers depends on how attention "
            "is computed; set is_causal to true or false, or remove it, which is true",
            field="model",
        )
    if not is_causal:
        return AttentionMask(scale, before=window, after=window)
    if getattr(config, "use_bidirectional_attention", False):
        if config.model_type != "gemma3_text":
            raise UnsupportedModel(
                f"use_bidirectional_attention is not served for {config.model_type} models: what it does in "
                "transformers depends on how attention is computed",
                field="model",
            )
        return AttentionMask(scale, before=last, after=last)
    return AttentionMask(scale, before=last, after=0)


def _has_window(layer_type: str, window: int | None) -> bool:
    """Return whether a layer of this type has a sliding window.

    Raises UnsupportedModel for other types than full_attention and sliding_attention, and if the latter has
    no window.
    """
    if layer_type == "sliding_attention" and window is not None:
        return True
    if layer_type == "full_attention":
        return False
    raise UnsupportedModel(
        f"layer_types in config.json has {layer_type!r}, and sliding_window is {window}; served are "
        "full_attention, and sliding_attention with a window",
        field="model",
    )
