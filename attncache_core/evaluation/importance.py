"""Measure how important each layer, and the attention of each layer, is to a model (He et al. 2024).

    importance = 1 - cosine(hidden state before, hidden state after), mean over the tokens of a sample

A module that changes hidden states little can be dropped with little loss: AttnDrop drops the least important
attention modules, BlockDrop drops the least important layers (`find_variant`). The measured attention module
is the part that AttnDrop drops: attention with its residual and, in families that normalise after attention,
with the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attncache_core.calibration.substitution import token_passes
from attncache_core.engine.layers import NO_REUSED_MAPS, attention_context
from attncache_core.models import PackedModel
from attncache_core.text.token_batch import pack


@dataclass(frozen=True)
class Importance:
    """The importance of each layer, from 0 (changes nothing) to 2."""

    attention: np.ndarray  # float64 [layers], of the attention module
    blocks: np.ndarray  # float64 [layers], of attention and feed-forward together


@torch.inference_mode()
def measure_importance(
    model: PackedModel,
    sequences: Sequence[Sequence[int]],
    on_pass: Callable[[int, int], None] = lambda *_: None,
) -> Importance:
    """Measure the importance of each layer on one or more token sequences.

    model: a model with all its layers. on_pass: called with the number of finished sequences and of all
    sequences.
    """
    totals = np.zeros((2, len(model.layers)))  # sums over tokens, for attention and for blocks
    done = 0
    for indices in token_passes([len(sequence) for sequence in sequences]):
        batch = pack([sequences[index] for index in indices])
        hidden = model.embed(batch)
        for number, layer in enumerate(model.layers):
            context = attention_context(number, layer, layer.attention_input(hidden), batch, NO_REUSED_MAPS)
            attended = layer.add_attention(hidden, context)
            output = layer.feed_forward(attended)
            totals[:, number] += _change(hidden, attended), _change(hidden, output)
            hidden = output
        done += len(indices)
        on_pass(done, len(sequences))
    return Importance(*totals / sum(map(len, sequences)))


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return 1 - cosine of hidden states [tokens, hidden], summed over tokens."""
    cosines = torch.cosine_similarity(before.double(), after.double(), dim=1)
    return float((1 - cosines).sum())
