"""MPNet: BERT's layers, with a relative position bias on the scores.

    scores[p, q] = scale Q[p] · K[q] + bias[bucket(q - p)]

The bias depends on the head and the distance. All layers share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attncache_core.heads.pooling import Pooler
from attncache_core.models.encoder import EncoderParts, dense_head, encoder
from attncache_core.models.layer import Dropped
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LayerHeads
from attncache_core.models.scores import ScoreTerms


def mpnet(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack an MPNet checkpoint, for pooled embeddings or with its sequence-classification head."""
    base = model.base_model
    positions = base.config.max_position_embeddings
    distances = torch.arange(1 - positions, positions, device=base.device)
    buckets = base.encoder.relative_position_bucket(distances)
    biases = base.encoder.relative_attention_bias(buckets).T  # [heads, distances]
    return encoder(
        base,
        base.encoder.layer,
        heads,
        pool,
        dense_head(getattr(model, "classifier", None)),
        _parts,
        activation=base.config.hidden_act,
        score_terms=lambda _, heads: ScoreTerms(bias=biases[heads.order]),
    )


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
        layer.intermediate.intermediate_act_fn,
    )
