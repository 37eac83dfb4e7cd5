"""Models that run on packed tokens, loaded from checkpoints of the families listed in families.py."""

from attncache_core.models.layer import (
    AttentionLayer,
    LayerHeads,
    Outputs,
    PackedModel,
    Projection,
)
from attncache_core.models.load import load_model, model_shape, with_heads

__all__ = [
    "AttentionLayer",
    "LayerHeads",
    "Outputs",
    "PackedModel",
    "Projection",
    "load_model",
    "model_shape",
    "with_heads",
]
