"""MPNet: BERT's layers, with a relative position bias on the scores.

    scores[p, q] = scale Q[p] · K[q] + bias[bucket(q - p)]

The bias depends on the head and the distance. All layers share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from attncache_core.errors import UnsupportedModel
from attncache_core.heads.pooling import Pooler
from attncache_core.models.bert import BERT
from attncache_core.models.encoder import dense_head, encoder
from attncache_core.models.layer import Dropped
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LayerHeads
from attncache_core.models.scores import ScoreTerms

MPNET = BERT._replace(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)

# MPNet's own code has these numbers, whatever config.json says.
PADDING = 1
_BUCKETS = 32
_MAX_DISTANCE = 128


def mpnet(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack an MPNet checkpoint, for pooled embeddings or with its sequence-classification head.

    Raises UnsupportedModel if the checkpoint has fewer buckets than MPNet reads.
    """
    base, config = model.base_model, model.config
    positions = config.max_position_embeddings
    by_bucket = base.encoder.relative_attention_bias.weight  # [buckets, heads]
    if len(by_bucket) < _BUCKETS:
        raise UnsupportedModel(
            f"relative_attention_num_buckets in config.json is {len(by_bucket)}, and MPNet reads {_BUCKETS}",
            field="model",
        )
    biases = by_bucket[buckets_of(torch.arange(1 - positions, positions)).to(by_bucket.device)].T
    score = getattr(model, "classifier", None)
    return encoder(
        base,
        MPNET,
        heads,
        pool,
        score and dense_head(score.dense, score.out_proj),
        activation=config.hidden_act,
        padding=PADDING,
        score_terms=lambda _, heads: ScoreTerms(bias=biases[heads.order]),  # of [heads, distances]
    )


def buckets_of(distances: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each distance q - p, int64, as T5 (Raffel et al. 2020) makes them.

    Half of the buckets are for each direction. The first half of these hold one distance each, and the others
    grow with the distance, up to a bucket for all that are farther than _MAX_DISTANCE.
    """
    half = _BUCKETS // 2
    single = half // 2
    far = distances.abs()
    grown = (far.clamp(min=1).float() / single).log() / math.log(_MAX_DISTANCE / single) * (half - single)
    bucket = torch.where(far < single, far, (single + grown.long()).clamp(max=half - 1))
    return bucket + half * (distances > 0)
