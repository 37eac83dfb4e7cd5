"""A model as an operator wants it run: a checkpoint by name, its quantisation, and what of it is left out.

AttnDrop and BlockDrop (He et al. 2024, "What matters in transformers?"): the least important attention
modules, or whole layers, are removed, and the residual passes through. `evaluation.importance` tells which
those are.
"""

from __future__ import annotations

from dataclasses import replace

from attncache_core.attention_maps.mask import parse_layers
from attncache_core.checkpoint import Checkpoint, DroppedLayers, Quantization, find_checkpoint
from attncache_core.models import model_shape


def find_variant(
    model: str,
    revision: str | None = None,
    *,
    quantization: Quantization | None = None,
    drop_attention: str = "",
    drop_block: str = "",
) -> Checkpoint:
    """find_checkpoint(model, revision), quantised, without some layers' attention and some layers as a whole.

    Layers are written like 10,11 or 8-11, numbered from 0 as the checkpoint has them; "" drops none. Raises
    as find_checkpoint does, UnsupportedModel for a family that is not served, and InvalidInput for layers
    that are not there, named twice, or all that attend.
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
