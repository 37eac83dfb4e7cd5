"""DeepSeek-V2 and V3: multi-head latent attention (arXiv 2405.04434, section 2.1).

K and V of all heads come from one short vector of a token, its latent c. Beside it each token has one small
key that is turned by its position and shared by all heads:

    c   = norm(W_DKV x)                     q_h = [rotate(W_QR,h y), W_QC,h y]
    v_h = W_UV,h c                          k_h = [rotate(W_KR x), W_UK,h c]

with y = x, or norm(W_DQ x) where queries have a latent too. V needs c of every token. A hit skips W_QR, W_QC
and W_UK of its reused heads; if these are all heads of the layer, W_DQ and W_KR as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attncache_core.loading import declared
from attncache_core.models.decoder import DecoderLayer, assembled, attention_pattern
from attncache_core.models.layer import Dropped, FeedForward, LayerHeads, PackedModel, Pool, Projection
from attncache_core.models.linear import Linear, packed_linear
from attncache_core.models.projections import Place, Rows, joined
from attncache_core.models.rotary import RotaryOfLayers


class LatentProjections:
    """Q, K and V of one layer. The latents of misses are computed again with the reused heads."""

    def __init__(self, module: Any, heads: LayerHeads, rotate: Place, turning: torch.Tensor) -> None:
        """turning: int64 [r], the numbers that turn, in the order in which `rotate` takes them."""
        down, rank = Rows.of(module.kv_a_proj_with_mqa), module.kv_lora_rank
        self._latent = packed_linear(*down.at(torch.arange(rank)))
        self._norm: nn.Module = module.kv_a_layernorm
        source = _QuerySource(module, down.at(rank + turning))
        self._always = _Heads(module, source, heads.order, heads.computed, rotate, turning)
        reused = heads.order[: heads.reused]
        self._misses = _Heads(module, source, [], reused, rotate, turning) if reused else None

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See AttentionLayer."""
        return self._always(x, self._norm(self._latent(x)), positions)

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionLayer."""
        assert self._misses is not None
        _, query, key = self._misses(x, self._norm(self._latent(x)), positions)
        return query, key


class _QuerySource:
    """The shared key, and what queries are made of: x itself, or a latent, then held once for all heads."""

    def __init__(self, module: Any, shared_key: Rows) -> None:
        self._key_rows = shared_key
        self._norm: nn.Module | None = module.q_a_layernorm
        self._down: Linear | None = None
        if self._norm is not None:
            self._down = joined([shared_key, Rows.of(module.q_a_proj)])

    def reader(self, query: Rows) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
        """A function x [tokens, hidden] -> (the shared key before it is turned, what `query` makes)."""
        width = [len(self._key_rows.weight)]
        if self._down is None:
            both = joined([self._key_rows, query])
            return lambda x: both(x).tensor_split(width, dim=1)
        down, norm, up = self._down, self._norm, packed_linear(*query)
        assert norm is not None

        def read(x: torch.Tensor) -> Sequence[torch.Tensor]:
            key, latent = down(x).tensor_split(width, dim=1)
            return key, up(norm(latent))

        return read


class _Heads:
    """V of some heads, Q and K of some heads, from x and its latent."""

    def __init__(
        self,
        module: Any,
        source: _QuerySource,
        valued: Sequence[int],
        chosen: Sequence[int],
        rotate: Place,
        turning: torch.Tensor,
    ) -> None:
        heads, plain = module.num_heads, torch.arange(module.qk_nope_head_dim)
        self._heads, self._plain, self._turned = len(chosen), len(plain), len(turning)
        self._rotate = rotate
        up = Rows.of(module.kv_b_proj)
        values = len(plain) + torch.arange(module.v_head_dim)
        self._values = (len(valued), module.v_head_dim)
        self._up = joined([up.heads(valued, heads, values), up.heads(chosen, heads, plain)])
        # What turns stands first in a head: there `rotate` looks for it.
        numbers = torch.cat([len(plain) + turning, plain])
        query = Rows.of(module.q_proj if module.q_b_proj is None else module.q_b_proj)
        self._read = source.reader(query.heads(chosen, heads, numbers)) if chosen else None

    def __call__(self, x: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor) -> Projection:
        count, width = self._values
        value, plain = self._up(latent).tensor_split([count * width], dim=1)
        value = value.unflatten(1, self._values)
        if self._read is None:
            none = x.new_empty(len(x), 0, self._turned + self._plain)
            return Projection(value, none, none)
        shared, query = self._read(x)
        query = self._rotate(query.unflatten(1, (self._heads, -1)), positions)
        turned = self._rotate(shared[:, None], positions).expand(-1, self._heads, -1)
        return Projection(value, query, torch.cat([turned, plain.unflatten(1, (self._heads, -1))], dim=-1))


def deepseek(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pool) -> PackedModel:
    """A DeepSeek-V2 or V3 checkpoint, as decoder.decoder."""
    base = getattr(model, "model", model)
    config = base.config
    rotary = RotaryOfLayers(_angles(base.rotary_emb), config)
    turning = torch.arange(config.qk_rope_head_dim)
    if declared(config, "rope_interleave") is not False:
        # Neighbours turn together: the first of each pair, then the second ones. V2 has no other way.
        turning = torch.cat([turning[0::2], turning[1::2]])

    def build(module: Any, number: int, own: LayerHeads, half: FeedForward) -> DecoderLayer:
        attend = module.self_attn
        projections = LatentProjections(attend, own, rotary.place(number), turning)
        pattern = attention_pattern(config, number, attend.scaling)
        return DecoderLayer(module, projections, pattern, own, half)

    return assembled(model, heads, build, pool)


def _angles(module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin of a rotary module that may give them as the parts of complex numbers."""

    def angles(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = module(x, positions)
        if isinstance(found, torch.Tensor):
            found = (found.real.repeat(1, 1, 2), found.imag.repeat(1, 1, 2))
        return found

    return angles
