"""DeBERTa-v2 and v3: BERT's layers, and disentangled attention (He et al. 2021).

    scores[p, q] = scale (Q[p] · K[q]  +  Q[p] · K'[δ(p - q)]  +  K[q] · Q'[δ(p - q)])

K' and Q' are projections of the embeddings of relative positions. They are the same for every text, so they
are computed once, when the model is loaded. δ maps each distance to a row of these embeddings. If the model
has buckets, far distances share a row, and the buckets grow with the distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from attncache_core.errors import UnsupportedModel
from attncache_core.heads.pooling import Pooler
from attncache_core.models.bert import BERT
from attncache_core.models.encoder import encoder
from attncache_core.models.layer import Dropped
from attncache_core.models.model import Head, PackedModel
from attncache_core.models.projections import LayerHeads
from attncache_core.models.scores import ScoreTerms
from attncache_core.native.stack_layers import DistanceTerm

DEBERTA = BERT._replace(
    query="attention.self.query_proj", key="attention.self.key_proj", value="attention.self.value_proj"
)


def deberta(model: Any, heads: Sequence[LayerHeads | Dropped], pool: Pooler) -> PackedModel:
    """Pack a DeBERTa-v2 or v3 checkpoint, for pooled embeddings or with its sequence-classification head.

    Raises UnsupportedModel if the checkpoint has a convolution.
    """
    base = model.base_model
    if base.encoder.conv is not None:
        raise UnsupportedModel(
            "a convolution over neighbouring tokens (conv_kernel_size in config.json) is not served; "
            "DeBERTa-v3 models have none",
            field="model",
        )
    relative = relative_positions(base.encoder, base.config.max_position_embeddings)
    attend = base.encoder.layer[0].attention.self
    kinds = attend.pos_att_type  # the scale counts them even if the checkpoint has no relative positions
    return encoder(
        base,
        DEBERTA,
        heads,
        pool,
        Head(lambda first: model.pooler(first[:, None]), model.classifier)
        if hasattr(model, "classifier")
        else None,
        activation=base.config.hidden_act,
        scale=(attend.attention_head_size * (1 + ("c2p" in kinds) + ("p2c" in kinds))) ** -0.5,
        score_terms=lambda layer, heads: _score_terms(layer.attention.self, heads, relative),
    )


class RelativePositions(NamedTuple):
    """A model's embeddings of the distances between tokens."""

    embeddings: torch.Tensor  # [rows, hidden]
    rows: torch.Tensor  # int64 [2 positions - 1]: δ of each distance from 1 - positions to positions - 1


def relative_positions(encoder: Any, positions: int) -> RelativePositions | None:
    """Return the embeddings of the distances in texts of up to `positions` tokens.

    Returns None if the model has no relative positions.
    """
    if not encoder.relative_attention:
        return None
    embeddings = encoder.get_rel_embedding()
    distances = torch.arange(1 - positions, positions)
    if encoder.position_buckets > 0:
        distances = _log_buckets(distances, encoder.position_buckets, encoder.max_relative_positions)
    rows = (distances + len(embeddings) // 2).clamp(0, len(embeddings) - 1)
    return RelativePositions(embeddings, rows.to(embeddings.device))


def _log_buckets(distances: torch.Tensor, buckets: int, positions: int) -> torch.Tensor:
    """Return the bucket of each distance, int64: of small distances their own, of others by the logarithm.

    DeBERTa-v3 (He et al. 2021). transformers' function computes in torch's default dtype, which transformers
    changes while another thread loads a model.
    """
    middle = buckets // 2
    widest = torch.tensor((positions - 1) / middle, dtype=torch.float32).log()
    by_log = (distances.abs().clamp(min=middle - 1).float() / middle).log() / widest * (middle - 1)
    far = (by_log.ceil() + middle) * distances.sign()
    return torch.where(distances.abs() <= middle, distances, far.long())


def _score_terms(module: Any, heads: LayerHeads, relative: RelativePositions | None) -> ScoreTerms:
    """Return the terms of one layer that the checkpoint has."""
    kinds = module.pos_att_type
    if relative is None:
        return ScoreTerms()

    def term(kind: str, shared: nn.Module, unshared: str, rows: torch.Tensor) -> DistanceTerm | None:
        if kind not in kinds:
            return None
        linear = shared if module.share_att_key else getattr(module, unshared)
        by_head = linear(relative.embeddings).unflatten(1, (len(heads.order), -1)).transpose(0, 1)
        return DistanceTerm(by_head[list(heads.order)], rows)

    # The rows belong to p - q. A term of queries counts q - p, so the order is reversed.
    return ScoreTerms(
        query_term=term("c2p", module.key_proj, "pos_key_proj", relative.rows.flip(0)),
        key_term=term("p2c", module.query_proj, "pos_query_proj", relative.rows),
    )
