"""DeepSeek-V2 and V3: multi-head latent attention (arXiv 2405.04434, section 2.1).

K and V of all heads are projected from one short vector per token, its latent c. Each token also has one
small key that is rotated by position and shared by all heads:

    c   = norm(W_DKV x)                     q_h = [rotate(W_QR,h y), W_QC,h y]
    v_h = W_UV,h c                          k_h = [rotate(W_KR x), W_UK,h c]

with y = x, or y = norm(W_DQ x) if queries have a latent too. V needs the latent c of every token. A hit skips
W_QR, W_QC and W_UK of its reused heads. If all heads of the layer are reused, a hit also skips W_DQ and W_KR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attncache_core.heads.pooling import Pooler
from attncache_core.models.decoder import assemble_decoder
from attncache_core.models.layer import Dropped
from attncache_core.models.linear import Linear, packed_linear
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LayerHeads, LinearWeights, Projection, joined_linear
from attncache_core.models.rotary import LayerRotary, Rotary


class LatentProjections:
    """The projections of one layer to Q, K and V. For misses, the reused heads need the latents again."""

    def __init__(self, module: Any, heads: LayerHeads, rotate: Rotary, rotary_dims: torch.Tensor) -> None:
        """rotary_dims: int64 [r], the order in which `rotate` expects the rotary dimensions."""
        down, rank = LinearWeights.from_module(module.kv_a_proj_with_mqa), module.kv_lora_rank
        self._latent = packed_linear(*down.select_rows(torch.arange(rank)))
        self._norm: nn.Module = module.kv_a_layernorm
        source = _QuerySource(module, down.select_rows(rank + rotary_dims))
        self._always = _Heads(module, source, heads.order, heads.computed, rotate, rotary_dims)
        reused = heads.order[: heads.reused]
        self._misses = _Heads(module, source, [], reused, rotate, rotary_dims) if reused else None

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projection:
        """See QueryKeyValue."""
        return self._always(x, self._norm(self._latent(x)), positions)

    def project_reused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See QueryKeyValue."""
        assert self._misses is not None
        _, query, key = self._misses(x, self._norm(self._latent(x)), positions)
        return query, key

    def query_and_slots(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See QueryKeyValue. A slot is the shared key before its rotation, then the latent."""
        assert self._misses is None
        query, shared_key = self._always.query_and_key(x, positions)
        return query, torch.cat([shared_key, self._norm(self._latent(x))], dim=1)

    def keys_and_values(
        self, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See QueryKeyValue."""
        shared_key, latent = slots.tensor_split([self._always.rotary_width], dim=1)
        return self._always.keys_and_values(shared_key.clone(), latent, positions)


class _QuerySource:
    """The shared key and the input of the query projections: x itself, or a latent of x.

    The weights of the latent are packed once for all heads.
    """

    def __init__(self, module: Any, shared_key: LinearWeights) -> None:
        self._shared_key = shared_key
        self._norm: nn.Module | None = module.q_a_layernorm
        self._down: Linear | None = None
        if self._norm is not None:
            self._down = joined_linear([shared_key, LinearWeights.from_module(module.q_a_proj)])

    def projection(self, query: LinearWeights) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
        """Return a function x [tokens, hidden] -> (shared key before its rotation, product with `query`)."""
        width = [len(self._shared_key.weight)]
        if self._down is None:
            both = joined_linear([self._shared_key, query])
            return lambda x: both(x).tensor_split(width, dim=1)
        down, norm, up = self._down, self._norm, packed_linear(*query)
        assert norm is not None

        def project(x: torch.Tensor) -> Sequence[torch.Tensor]:
            key, latent = down(x).tensor_split(width, dim=1)
            return key, up(norm(latent))

        return project


class _Heads:
    """V of some heads, and Q and K of some heads, from x and its latent."""

    def __init__(
        self,
        module: Any,
        source: _QuerySource,
        value_heads: Sequence[int],
        query_heads: Sequence[int],
        rotate: Rotary,
        rotary_dims: torch.Tensor,
    ) -> None:
        heads, plain_dims = module.num_heads, torch.arange(module.qk_nope_head_dim)
        self._head_count = len(query_heads)
        self._plain_width, self.rotary_width = len(plain_dims), len(rotary_dims)
        self._rotate = rotate
        up = LinearWeights.from_module(module.kv_b_proj)
        value_dims = len(plain_dims) + torch.arange(module.v_head_dim)
        self._value_shape = (len(value_heads), module.v_head_dim)
        self._up = joined_linear(
            [
                up.select_heads(value_heads, heads, value_dims),
                up.select_heads(query_heads, heads, plain_dims),
            ]
        )
        # `rotate` turns the first dimensions of a head, so the rotary dimensions come first.
        dims = torch.cat([len(plain_dims) + rotary_dims, plain_dims])
        query = LinearWeights.from_module(module.q_proj if module.q_b_proj is None else module.q_b_proj)
        self._project = (
            source.projection(query.select_heads(query_heads, heads, dims)) if query_heads else None
        )

    def __call__(self, x: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor) -> Projection:
        if self._project is None:
            value, _ = self._expanded(latent)
            none = x.new_empty(len(x), 0, self.rotary_width + self._plain_width)
            return Projection(value, none, none)
        query, shared_key = self.query_and_key(x, positions)
        key, value = self.keys_and_values(shared_key, latent, positions)
        return Projection(value, query, key)

    def query_and_key(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Q [tokens, heads, d] and the shared key before its rotation, [tokens, r]."""
        assert self._project is not None
        shared_key, query = self._project(x)
        return self._rotate(query.unflatten(1, (self._head_count, -1)), positions), shared_key

    def keys_and_values(
        self, shared_key: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, each [tokens, heads, d], of the shared key [tokens, r] and the latent."""
        value, plain_key = self._expanded(latent)
        rotary_key = self._rotate(shared_key[:, None], positions).expand(-1, self._head_count, -1)
        plain_key = plain_key.unflatten(1, (self._head_count, -1))
        return torch.cat([rotary_key, plain_key], dim=-1), value

    def _expanded(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, width = self._value_shape
        value, plain_key = self._up(latent).tensor_split([count * width], dim=1)
        return value.unflatten(1, self._value_shape), plain_key


def deepseek(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a DeepSeek-V2 or V3 checkpoint; see decoder.decoder."""
    base = getattr(model, "model", model)
    config = base.config
    rotary = LayerRotary(base.rotary_emb, config, config.qk_rope_head_dim)
    rotary_dims = torch.arange(config.qk_rope_head_dim)
    if config.model_type == "deepseek_v2" or config.rope_interleave:
        # In this layout adjacent dimensions form a pair, and V2 has no other layout. `rotate` pairs
        # dimension i with i + r/2, so the first of each pair come before the second of each pair.
        rotary_dims = torch.cat([rotary_dims[0::2], rotary_dims[1::2]])

    def projections(attend: Any, number: int, heads: LayerHeads) -> LatentProjections:
        return LatentProjections(attend, heads, rotary[number], rotary_dims)

    return assemble_decoder(model, heads, projections, pool)
