"""The checkpoint that the options of a command, or the settings of a server, choose."""

from __future__ import annotations

import inspect
from pathlib import Path

from attncache_core import Checkpoint, InvalidInput, Quantization, find_variant
from attncache_core.checkpoints.checkpoint import PoolingMode
from attncache_core.checkpoints.template import Template
from attncache_core.corpus.reading import read_texts
from service.errors import rename
from service.settings import Settings
from service.settings.model import ChosenTask


def chosen_checkpoint(
    *,
    model: str,
    revision: str | None,
    quantize: Quantization | None,
    quantize_texts: str | None = None,
    drop_attention: str = "",
    drop_block: str = "",
    template: Path | None = None,
    pooling: PoolingMode | None = None,
    task: ChosenTask | None = None,
    labels: str | None = None,
) -> Checkpoint:
    """Return the checkpoint that these options choose. Raises ModelNotFound, InvalidInput and others."""
    try:
        found = find_variant(
            model,
            revision,
            quantization=quantize,
            quantization_texts=quantization_texts(quantize_texts),
            drop_attention=drop_attention,
            drop_block=drop_block,
        )
    except InvalidInput as error:
        rename(error, "quantize_texts" if error.field == "quantization_texts" else error.field)
        raise
    return found.adapted(
        template=Template.read(template) if template else None,
        pooling=pooling,
        label_logits=task is not None,
        labels=[name.strip() for name in labels.split(",")] if labels else (),
    )


def checkpoint_of(settings: Settings) -> Checkpoint:
    """Return the checkpoint that a server's settings choose."""
    return chosen_checkpoint(**{name: getattr(settings, name) for name in OF_CHECKPOINTS})


# The options that choose a checkpoint.
OF_CHECKPOINTS = tuple(inspect.signature(chosen_checkpoint).parameters)


def quantization_texts(source: str | None) -> list[str]:
    """Return the texts of --quantize-texts; none without a source.

    Raises InvalidInput as read_texts does, and if the file has no texts.
    """
    texts = read_texts(source) if source else []
    if source and not texts:
        raise InvalidInput(f"quantize_texts: {source} has no texts", field="quantize_texts")
    return texts
