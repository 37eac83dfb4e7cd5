"""Model variants: a checkpoint with a quantisation, and without some layers or their attention.

AttnDrop and BlockDrop (He et al. 2024, "What matters in transformers?") remove the least important attention
modules, or whole layers; the residual passes through. `evaluation.importance` ranks the modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attncache_core.checkpoints.checkpoint import (
    MAX_QUANTIZATION_TEXTS,
    Checkpoint,
    DroppedLayers,
    Quantization,
)
from attncache_core.checkpoints.description import find_checkpoint
from attncache_core.corpus.reading import spread
from attncache_core.errors import InvalidInput
from attncache_core.models import model_shape
from attncache_core.text.limits import list_of


def is_count(text: str) -> bool:
    """Return whether the text consists of ASCII digits only."""
    return text.isascii() and text.isdigit()


def parse_layers(text: str, layers: int, *, field: str) -> frozenset[int]:
    """Parse numbers like `0-3` or `0,2,4-5`.

    layers: the number of layers of the model. field: the option's name, for errors. Raises InvalidInput if
    the text has another form, or if a number is not below `layers`.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (is_count(first) and is_count(last)):
            raise InvalidInput(f"{field}: layers are written like 0-3 or 0,2,4-5", field=field)
        if to_number(last) >= layers:
            raise InvalidInput(f"{field}: the model has layers 0 to {layers - 1}", field=field)
        chosen.update(range(to_number(first), to_number(last) + 1))
    if not chosen:
        raise InvalidInput(f"{field}: a range of layers counts upwards, like 0-3", field=field)
    return frozenset(chosen)


def to_number(digits: str) -> int:
    """Convert digits to a number. Of more than nine digits, only the first nine count."""
    # int() raises ValueError for thousands of digits. A number of nine digits is too large for every caller.
    return int(digits.lstrip("0")[:9] or "0")


# The fewest texts to calibrate int8 with; fewer may miss the large activations.
_MIN_TEXTS = 16


def find_variant(
    model: str,
    revision: str | None = None,
    *,
    quantization: Quantization | str | None = None,
    quantization_texts: Iterable[str] = (),
    drop_attention: str = "",
    drop_block: str = "",
) -> Checkpoint:
    """Find a checkpoint and select its variant.

    model, revision: see find_checkpoint. quantization: also by its name, such as "int8".
    quantization_texts: at least 16 texts to calibrate int8 with, of which at most 100 are used, equally
    spaced; by default, texts of the shipped corpus. drop_attention: layers that lose their attention.
    drop_block: layers that are dropped as a whole. Layers are written like 10,11 or 8-11 and numbered from 0
    in the checkpoint's order; "" drops none.

    Raises as find_checkpoint does, UnsupportedModel if the family is not supported, and InvalidInput if
    dropped layers do not exist, are named twice, or leave no layer with attention. Raises InvalidInput also
    for an unknown quantisation, for too few quantisation texts, and for texts where none are used.
    """
    quantization_texts = list_of(quantization_texts, "quantization_texts")
    if quantization not in (None, *Quantization):
        raise InvalidInput(f"quantization must be {', '.join(Quantization)}, or None", field="quantization")
    quantization = None if quantization is None else Quantization(quantization)
    if quantization_texts and quantization is not Quantization.INT8:
        raise InvalidInput(
            "quantization_texts calibrates int8 only; quantize to int8, or leave the texts out",
            field="quantization_texts",
        )
    if 0 < len(quantization_texts) < _MIN_TEXTS:
        raise InvalidInput(
            f"quantization_texts needs at least {_MIN_TEXTS} texts, and has {len(quantization_texts)}",
            field="quantization_texts",
        )
    checkpoint = find_checkpoint(model, revision)
    layers, _ = model_shape(checkpoint)
    attention, blocks = (
        parse_layers(text, layers, field=field) if text.strip() else frozenset[int]()
        for text, field in ((drop_attention, "drop_attention"), (drop_block, "drop_block"))
    )
    variant = replace(
        checkpoint,
        quantization=quantization,
        quantization_texts=tuple(spread(quantization_texts, MAX_QUANTIZATION_TEXTS)),
        dropped=DroppedLayers(attention, blocks),
    )
    model_shape(variant)
    return variant
