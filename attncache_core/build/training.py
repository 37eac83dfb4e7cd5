"""Build stage 3: train the projector to predict the distance of the maps of two sentences of equal length.

records -> pair_groups: map_distances (Eq. 2) by length -> train_projector (Eq. 1 and 3) -> FeatureProjector
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from attncache_core.build.sentences import FirstInputs, Sentences
from attncache_core.calibration.calibrate import Progress
from attncache_core.errors import BuildFailed
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.storage.store import AttentionMapStore

# Eq. 2's α, the scale of predicted distances. With it, the papers' thresholds hold for the similarity 1 - ŷ.
ALPHA = 0.2
TRAINING_STEPS = 1500
_SENTENCES_PER_STEP = 48  # a step trains on all pairs of these sentences
_LEARNING_RATE = 2e-3
# Dropout on the inputs keeps the network from memorizing the few thousand sentences. On held-out sentences,
# dropout lowered the distance of the chosen records from 8.3 % to 5 % above the distance of the best records.
_INPUT_DROPOUT = 0.3
# Pairs closer than a tenth of the mean distance have the weight of pairs at a tenth of the mean distance.
_MIN_TARGET = 0.1
# Maximum number of records per length: 512 records give 130,000 pairs. Fewer records of long sentences are
# used. _MAX_COMPARISONS limits the number of compared map values, so that comparing one length takes seconds.
_MAX_TRAINING_RECORDS = 512
_MAX_COMPARISONS = 2e9


@dataclass(frozen=True, slots=True)
class PairGroup:
    """Sentences of one length, and the distances of their maps."""

    inputs: torch.Tensor  # [m, L, hidden], the input of the first layer
    distances: torch.Tensor  # float32 [m, m], mean total variation distance of the maps, in [0, 1]


def map_distances(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the mean total variation distance of the maps of every pair of records, [m, n] in [0, 1].

    left: [m, heads, L, L], right: [n, heads, L, L]. This is Eq. 2 without α and without the length term (both
    lengths are L): ½ ‖A₁[p] - A₂[p]‖₁, averaged over rows p and heads. The papers write the norm as L2 but
    call the norm L1. Half the L1 distance of two probability rows is their total variation distance.
    """
    _, heads, length, _ = left.shape
    return torch.cdist(left.flatten(1).float(), right.flatten(1).float(), p=1) / (2 * heads * length)


def masked_maps(
    store: AttentionMapStore, mask: ReuseMask, length: int, records: Sequence[int]
) -> torch.Tensor:
    """Return the maps of the mask's heads for records of one length, float32 [n, heads, L, L]."""
    chosen = torch.tensor(records)
    return torch.cat(
        [
            store.segments[length].gather_layer_maps(chosen, layer, reused).float()
            for layer, reused in enumerate(mask.reused)
            if reused
        ],
        dim=1,
    )


def pair_groups(
    store: AttentionMapStore,
    sentences: Sentences,
    first_inputs: FirstInputs,
    mask: ReuseMask,
    random: np.random.Generator,
    progress: Progress,
) -> list[PairGroup]:
    """Return, for each length, the inputs and map distances of training sentences.

    The distances are computed over the heads of `mask`. Raises BuildFailed if no two sentences have
    the same length.
    """
    groups, by_length = [], sentences.by_length()
    for done, (length, indices) in enumerate(by_length.items(), 1):
        rows = sentences.rows(indices, held_out=False)
        maximum = min(_MAX_TRAINING_RECORDS, math.isqrt(int(_MAX_COMPARISONS / (mask.total * length**2))))
        rows = [rows[index] for index in random.permutation(len(rows))[:maximum]]
        if len(rows) > 1:
            maps = masked_maps(store, mask, length, rows)
            inputs = first_inputs.of(sentences.chosen([indices[row] for row in rows]))
            groups.append(PairGroup(inputs, map_distances(maps, maps)))
        progress("comparing maps", done, len(by_length))
    if not groups:
        raise BuildFailed(
            "the corpus has no two texts of one length to train the projector on", field="corpus"
        )
    return groups


def train_projector(
    groups: Sequence[PairGroup],
    projector: FeatureProjector,
    *,
    steps: int = TRAINING_STEPS,
    seed: int = 0,
    is_trained: bool = False,
    on_step: Callable[[int], None] = lambda _: None,
) -> float:
    """Train `projector` in place so that ‖f(X₁) - f(X₂)‖₂ = α y for same-length pairs.

    Eq. 1: ŷ = ‖f(X₁) - f(X₂)‖₂. Eq. 3: Smooth-L1 of ŷ and y, with the bend at 1. The distances are divided by
    their mean for training, so that the loss and its bend have a useful scale. At the end the features are
    scaled to α y. is_trained: the projector was trained before, so its features have that scale already.
    Returns the mean absolute error of ŷ relative to the mean of α y, over the last 100 steps.
    Raises ValueError if no length has two sentences.
    """
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)  # dropout draws from torch's own generator
    pairs = np.array([len(group.inputs) * (len(group.inputs) - 1) / 2 for group in groups])
    if not pairs.sum():
        raise ValueError("no two sentences of one length to train on")
    scale = float(np.average([_mean_distance(group) for group in groups], weights=pairs)) or 1.0
    if is_trained:
        with torch.no_grad():
            projector.position.div_(ALPHA * scale)
    optimizer = torch.optim.AdamW(projector.parameters(), lr=_LEARNING_RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    errors = []
    for step in range(steps):
        group = groups[random.choice(len(groups), p=pairs / pairs.sum())]
        chosen = torch.from_numpy(random.permutation(len(group.inputs))[:_SENTENCES_PER_STEP])
        target = _pairwise(group.distances[chosen][:, chosen]) / scale
        inputs = functional.dropout(group.inputs[chosen], _INPUT_DROPOUT)
        predicted = functional.pdist(projector(inputs))  # Eq. 1
        losses = functional.smooth_l1_loss(predicted, target, reduction="none")  # Eq. 3
        # Only the order of the near records matters, so errors are weighted relative to y.
        weights = 1 / target.clamp(min=_MIN_TARGET)
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        errors.append(float((predicted.detach() - target).abs().mean()))
        on_step(step)
    with torch.no_grad():
        projector.position.mul_(ALPHA / _distance_ratio(projector, groups, random))
    return float(np.mean(errors[-100:]))


def _distance_ratio(
    projector: FeatureProjector, groups: Sequence[PairGroup], random: np.random.Generator
) -> float:
    """Return mean ŷ / mean y of training pairs without dropout, which lengthens distances during training."""
    predicted, true = 0.0, 0.0
    for group in groups:
        chosen = torch.from_numpy(random.permutation(len(group.inputs))[:_SENTENCES_PER_STEP])
        predicted += float(functional.pdist(projector(group.inputs[chosen])).sum())
        true += float(_pairwise(group.distances[chosen][:, chosen]).sum())
    return predicted / true if predicted and true else 1.0


def _mean_distance(group: PairGroup) -> float:
    """Return the mean distance of the pairs of a group, or 0 without a pair."""
    distances = _pairwise(group.distances)
    return float(distances.mean()) if len(distances) else 0.0


def _pairwise(matrix: torch.Tensor) -> torch.Tensor:
    """Return the upper triangle of [m, m] without the diagonal, row by row, in the pair order of pdist."""
    rows, columns = torch.triu_indices(len(matrix), len(matrix), offset=1)
    return matrix[rows, columns]
