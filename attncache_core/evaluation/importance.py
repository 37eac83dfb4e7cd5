"""How important each layer's attention, and each layer as a whole, is to a model (He et al. 2024).

    importance = 1 - cosine(hidden state before, hidden state after), mean over the tokens of a sample

What changes hidden states least is missed least: AttnDrop leaves out the least important attention modules,
BlockDrop the least important layers (`find_variant`). Attention is taken with its residual and, in a family
that normalises after it, its norm: what is left out is what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attncache_core.attention_maps.fetch import HitRecords
from attncache_core.attention_maps.substitution import token_passes
from attncache_core.forward import attention_context
from attncache_core.models import PackedModel
from attncache_core.tokens import pack


@dataclass(frozen=True)
class Importance:
    """Of each layer, float64 [layers], from 0 (it changes nothing) to 2."""

    attention: np.ndarray
    blocks: np.ndarray  # attention and feed-forward together


@torch.inference_mode()
def measure_importance(
    model: PackedModel,
    sequences: Sequence[Sequence[int]],
    on_pass: Callable[[int, int], None] = lambda *_: None,
) -> Importance:
    """Measure on token sequences, at least one, with a model that has all its layers.

    on_pass: told how many of the sequences are done, and of how many.
    """
    totals = np.zeros((2, len(model.layers)))  # of attention and blocks, over tokens
    none = HitRecords([])
    done = 0
    for indices in token_passes([len(sequence) for sequence in sequences]):
        batch = pack([sequences[index] for index in indices])
        hidden = model.embed(batch)
        for number, layer in enumerate(model.layers):
            context = attention_context(number, layer, layer.attention_input(hidden), batch, none)
            attended = layer.add_attention(hidden, context)
            left = layer.feed_forward(attended)
            totals[:, number] += _change(hidden, attended), _change(hidden, left)
            hidden = left
        done += len(indices)
        on_pass(done, len(sequences))
    return Importance(*totals / sum(map(len, sequences)))


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    """1 - cosine of [tokens, hidden], summed over tokens."""
    cosines = torch.cosine_similarity(before.double(), after.double(), dim=1)
    return float((1 - cosines).sum())
