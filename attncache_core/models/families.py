"""The supported model families, keyed by the model_type in config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.heads.pooling import Pooler
from attncache_core.models.bert import bert, distilbert, roberta, rotary_bert
from attncache_core.models.deberta import deberta
from attncache_core.models.decoder import decoder
from attncache_core.models.deepseek import deepseek
from attncache_core.models.layer import Dropped
from attncache_core.models.model import PackedModel
from attncache_core.models.modernbert import modernbert
from attncache_core.models.mpnet import mpnet
from attncache_core.models.projections import LayerHeads

Family = Callable[[Any, Sequence[LayerHeads | Dropped], Pooler], PackedModel]


ENCODERS: dict[str, Family] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "camembert": roberta,
    "distilbert": distilbert,
    "mpnet": mpnet,
    "deberta-v2": deberta,
    "modernbert": modernbert,
    "nomic_bert": rotary_bert,
    "gte": rotary_bert,
}


DECODERS: dict[str, Family] = dict.fromkeys(
    (
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "deepseek",
    ),
    decoder,
) | {"deepseek_v2": deepseek, "deepseek_v3": deepseek}


FAMILIES = ENCODERS | DECODERS


def is_causal(checkpoint: Checkpoint) -> bool:
    """Return whether no token depends on a later token, as far as config.json says."""
    config = checkpoint.config
    is_bidirectional = config.get("use_bidirectional_attention") or not config.get("is_causal", True)
    return config.get("model_type") in DECODERS and not is_bidirectional
