"""Models that run on packed tokens, loaded from checkpoints of the families listed in families.py."""

from attncache_core.models.layer import AttentionLayer
from attncache_core.models.load import load_model, model_shape, with_heads
from attncache_core.models.model import PackedModel
from attncache_core.models.projections import LayerHeads

__all__ = [
    "AttentionLayer",
    "LayerHeads",
    "PackedModel",
    "load_model",
    "model_shape",
    "with_heads",
]
