"""Read and write the refitted weights of a database: the weights that hits take; see models/refitted.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from attncache_core.errors import CorruptDatabase
from attncache_core.models.projections import LinearWeights
from attncache_core.models.refitted import LastProducts
from attncache_core.runtime.files import write_whole

REFITTED = "refitted.safetensors"


def write_refitted(folder: Path, products: Sequence[LastProducts] | None) -> None:
    """Write the weights of all layers to the database `folder`; None: remove weights. Raises OSError."""
    path = folder / REFITTED
    if products is None:
        path.unlink(missing_ok=True)
        return
    tensors = {}
    for name in LastProducts._fields:
        layers: list[LinearWeights] = [getattr(layer, name) for layer in products]
        tensors[f"{name}.weight"] = torch.stack([layer.weight for layer in layers])
        tensors[f"{name}.bias"] = torch.stack([layer.bias for layer in layers if layer.bias is not None])
    write_whole(path, save(tensors))


def read_refitted(path: Path) -> list[LastProducts]:
    """Read the weights of all layers from a file. Raises CorruptDatabase."""
    try:
        tensors = load_file(path)
        parts = [
            [
                LinearWeights(*weights)
                for weights in zip(tensors[f"{name}.weight"], tensors[f"{name}.bias"], strict=True)
            ]
            for name in LastProducts._fields
        ]
        return [LastProducts(*products) for products in zip(*parts, strict=True)]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CorruptDatabase(f"{path} cannot be read", field="database") from error
