"""Model variants: a checkpoint with a quantisation, and without some layers or their attention.

AttnDrop and BlockDrop (He et al. 2024, "What matters in transformers?") remove the least important attention
modules, or whole layers; the residual passes through. `evaluation.importance` ranks the modules.
"""

from __future__ import annotations

from dataclasses import replace

from attncache_core.checkpoints.checkpoint import Checkpoint, DroppedLayers, Quantization
from attncache_core.checkpoints.description import find_checkpoint
from attncache_core.models import model_shape
from attncache_core.models.layer_numbers import parse_layers


def find_variant(
    model: str,
    revision: str | None = None,
    *,
    quantization: Quantization | None = None,
    drop_attention: str = "",
    drop_block: str = "",
) -> Checkpoint:
    """Find a checkpoint and select its variant.

    model, revision: see find_checkpoint. drop_attention: layers that lose their attention. drop_block: layers
    that are dropped as a whole. Layers are written like 10,11 or 8-11 and numbered from 0 in the checkpoint's
    order; "" drops none.

    Raises as find_checkpoint does, UnsupportedModel if the family is not supported, and InvalidInput if
    dropped layers do not exist, are named twice, or leave no layer with attention.
    """
    checkpoint = find_checkpoint(model, revision)
    layers, _ = model_shape(checkpoint)
    attention, blocks = (
        parse_layers(text, layers, field=field) if text.strip() else frozenset[int]()
        for text, field in ((drop_attention, "drop_attention"), (drop_block, "drop_block"))
    )
    variant = replace(checkpoint, quantization=quantization, dropped=DroppedLayers(attention, blocks))
    model_shape(variant)
    return variant
