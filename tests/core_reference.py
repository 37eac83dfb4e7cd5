"""Tolerances, and logits of Hugging Face's eager classifiers in float32, one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

# Tolerance for float32 sums in another order. Outputs have size 1, and after 6 layers they differed by less
# than 3e-6.
FLOAT32 = 1e-5
# Tolerance for maps stored in 16 bits, with random relative errors up to 2^-11. In the tiny model, outputs of
# size 1 then differ by up to 6e-4. The maps of another record change outputs at least ten times as much.
SIXTEEN_BITS = 1.5e-3

# (layer, head) -> map [L, L] that replaces the model's own map.
Maps = Mapping[tuple[int, int], torch.Tensor]


@torch.inference_mode()
def reference_logits(folder: Path, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the logits [sequences, classes] of a sequence-classification checkpoint."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in sequences])


def rounded(maps: Maps) -> dict[tuple[int, int], torch.Tensor]:
    """Return maps rounded to float16, as in a record."""
    return {head: values.half().float() for head, values in maps.items()}
