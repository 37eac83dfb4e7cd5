"""Choose the device on which a model runs, and its compute dtype."""

from __future__ import annotations

import torch

from attncache_core.errors import InvalidInput
from attncache_core.runtime.processor import processor_name

CPU = torch.device("cpu")


def resolve_device(name: str) -> torch.device:
    """Return the torch device of this name, cpu or cuda.

    Raises InvalidInput for another name, and if torch finds no CUDA device for "cuda".
    """
    if name not in {"cpu", "cuda"}:
        raise InvalidInput("device must be cpu or cuda", field="device")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "device: torch finds no CUDA device here; install a CUDA build of torch, or choose cpu",
            field="device",
        )
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of this name.

    "auto" is bfloat16 if the device multiplies bfloat16 faster than float32, otherwise float32. Raises
    InvalidInput for another name.
    """
    if name == "auto" and device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if name == "auto":
        # Without AMX, Intel's processors take 1.6 times as long as in float32 (measured on a Xeon).
        by_vectors = torch.cpu._is_avx512_bf16_supported() and "Intel" not in processor_name()
        return torch.bfloat16 if by_vectors or torch.cpu._init_amx() else torch.float32
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise InvalidInput(f"dtype must be auto, {' or '.join(known)}", field="dtype")
    return known[name]
