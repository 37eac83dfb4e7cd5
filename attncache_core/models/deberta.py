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
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from attncache_core.errors import UnsupportedModel
from attncache_core.heads.pooling import Pooler
from attncache_core.models.attention import attention_scores
from attncache_core.models.encoder import EncoderParts, encoder, pooled_head
from attncache_core.models.layer import Dropped, LayerHeads, PackedModel
from attncache_core.native.stack_data import DistanceTerm


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
    return encoder(
        base,
        base.encoder.layer,
        heads,
        pool,
        pooled_head(getattr(model, "pooler", None), getattr(model, "classifier", None)),
        _parts,
        activation=base.config.hidden_act,
        scores=lambda layer, own: DisentangledScores(layer.attention.self, own, relative),
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
        distances = make_log_bucket_position(
            distances, encoder.position_buckets, encoder.max_relative_positions
        ).long()
    rows = (distances + len(embeddings) // 2).clamp(0, len(embeddings) - 1)
    return RelativePositions(embeddings, rows.to(embeddings.device))


class DisentangledScores:
    """The scores of one layer, with those of the three terms that the checkpoint has."""

    def __init__(self, module: Any, heads: LayerHeads, relative: RelativePositions | None) -> None:
        kinds = module.pos_att_type
        # The scale counts the kinds of terms even if the checkpoint has no relative positions.
        self._scale = (module.attention_head_size * (1 + ("c2p" in kinds) + ("p2c" in kinds))) ** -0.5
        self._keys = self._queries = None
        if relative is None:
            return
        self._rows, embeddings = relative.rows, relative.embeddings

        def projected(linear: nn.Module) -> torch.Tensor:
            """Return the projected embeddings, [heads in the layer's order, rows, d]."""
            by_head: torch.Tensor = linear(embeddings).unflatten(1, (len(heads.order), -1)).transpose(0, 1)
            return by_head[list(heads.order)]

        if "c2p" in kinds:
            self._keys = projected(module.key_proj if module.share_att_key else module.pos_key_proj)
        if "p2c" in kinds:
            self._queries = projected(module.query_proj if module.share_att_key else module.pos_query_proj)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, heads: slice) -> torch.Tensor:
        """See blocks.Scores."""
        scores = attention_scores(query, key, self._scale)
        if self._keys is not None:
            # The row belongs to p - q, and by_distance counts q - p, so the order is reversed.
            rows = self._rows_within(query.shape[1]).flip(0)
            scores += by_distance(query, self._keys[heads, rows] * self._scale, scores.dtype)
        if self._queries is not None:
            rows = self._rows_within(query.shape[1])
            scores += by_distance(key, self._queries[heads, rows] * self._scale, scores.dtype).transpose(2, 3)
        return scores

    def compiled_terms(self) -> dict[str, Any]:
        """See blocks.CompiledScores."""
        terms: dict[str, Any] = {"scale": self._scale}
        if self._keys is not None:
            terms["query_term"] = DistanceTerm(self._keys, self._rows.flip(0))
        if self._queries is not None:
            terms["key_term"] = DistanceTerm(self._queries, self._rows)
        return terms

    def _rows_within(self, length: int) -> torch.Tensor:
        """Return the rows of the distances from 1 - length to length - 1."""
        longest = (len(self._rows) + 1) // 2
        return self._rows[longest - length : longest + length - 1]


def by_distance(x: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x[p] · table[q - p + L - 1] for all tokens p and q: [n, h, L, L] in `dtype`, not contiguous.

    x: [n, L, h, d]; table: [h, 2 L - 1, d], for the distances from 1 - L to L - 1.
    """
    count, length, heads, _ = x.shape
    distances = 2 * length - 1
    by_head = x.to(dtype).permute(2, 0, 1, 3).flatten(1, 2)  # [h, n L, d]
    products = by_head @ table.to(dtype).transpose(1, 2)  # [h, n L, distances]
    # Row p begins at distance index L - 1 - p, so the stride between rows is one less than a row's length.
    strides = (length * distances, count * length * distances, distances - 1, 1)
    return products.as_strided((count, heads, length, length), strides, length - 1)


def _parts(layer: Any) -> EncoderParts:
    attend, output = layer.attention.self, layer.attention.output
    return EncoderParts(
        attend.query_proj,
        attend.key_proj,
        attend.value_proj,
        output.dense,
        output.LayerNorm,
        layer.intermediate.dense,
        layer.output.dense,
        layer.output.LayerNorm,
    )
