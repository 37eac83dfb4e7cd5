"""MPNet: BERT's layers, with a relative position bias on the scores.

    scores[p, q] = scale Q[p] · K[q] + bias[bucket(q - p)]

The bias depends on the head and the distance. All layers share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attncache_core.heads.pooling import Pooler
from attncache_core.models.attention import attention_scores
from attncache_core.models.blocks import Scores
from attncache_core.models.encoder import EncoderParts, dense_head, encoder
from attncache_core.models.layer import Dropped, LayerHeads, PackedModel


def mpnet(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack an MPNet checkpoint, for pooled embeddings or with its sequence-classification head."""
    base = model.base_model
    positions = base.config.max_position_embeddings
    distances = torch.arange(1 - positions, positions, device=base.device)
    buckets = base.encoder.relative_position_bucket(distances)
    biases = base.encoder.relative_attention_bias(buckets).T  # [heads, distances]

    def scores(layer: Any, own: LayerHeads) -> Scores:
        return BiasedScores(layer.attention.attn.attention_head_size**-0.5, biases[own.order])

    return encoder(
        base,
        base.encoder.layer,
        heads,
        pool,
        dense_head(getattr(model, "classifier", None)),
        _parts,
        activation=base.config.hidden_act,
        scores=scores,
    )


class BiasedScores:
    """Scores with a bias for each head and distance q - p."""

    def __init__(self, scale: float, biases: torch.Tensor) -> None:
        """biases: [heads, 2 positions - 1], for the distances from 1 - positions to positions - 1."""
        self._scale, self._biases = scale, biases

    def __call__(self, query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:
        """See blocks.Scores."""
        length, positions = query.shape[1], (self._biases.shape[1] + 1) // 2
        near = self._biases[heads, positions - length : positions + length - 1]  # [h, 2 L - 1]
        # Window i begins at distance i + 1 - L, so it belongs to token L - 1 - i; flip puts them in order.
        by_token = near.unfold(1, length, 1).flip(1)  # [h, L, L]
        made = attention_scores(query, key, self._scale)
        return made.add_(by_token.to(made.dtype))

    def compiled_terms(self) -> dict[str, Any]:
        """See blocks.CompiledScores."""
        return {"scale": self._scale, "bias": self._biases}


def _parts(layer: Any) -> EncoderParts:
    attend = layer.attention.attn
    return EncoderParts(
        attend.q,
        attend.k,
        attend.v,
        attend.o,
        layer.attention.LayerNorm,
        layer.intermediate.dense,
        layer.output.dense,
        layer.output.LayerNorm,
    )
