"""Build stage 1: the damage of each head, measured before the projector is trained."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from attncache_core.build.sentences import FirstInputs, Sentences
from attncache_core.calibration.calibrate import MAX_DAMAGE_PROBES, Progress
from attncache_core.calibration.damage import joint_damage, model_for_damage
from attncache_core.calibration.substitution import paired
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.comparator import Measure


def measure_head_damage(
    engine: PrefillEngine,
    sentences: Sentences,
    first_inputs: FirstInputs,
    measure: Measure,
    random: np.random.Generator,
    progress: Progress,
) -> np.ndarray | None:
    """Return the joint damage of every two heads (see damage.joint_damage), or None with fewer than 20 pairs.

    Each held-out sentence takes the maps of the training sentence of its length with the nearest first-layer
    input. Before the projector is trained, the distance of the inputs is the best estimate of the similarity.
    """
    pairs = nearest_by_input(sentences, first_inputs)
    if len(pairs) < MIN_PROBES:
        return None
    chosen = [pairs[index] for index in random.permutation(len(pairs))[:MAX_DAMAGE_PROBES]]
    probes, donors = (sentences.chosen(side) for side in zip(*chosen, strict=True))
    model = model_for_damage(engine)
    return joint_damage(
        model,
        paired(model, probes, donors),
        engine.decisions.comparator(measure).comparable,
        partial(progress, "measuring heads"),
    )


def nearest_by_input(sentences: Sentences, first_inputs: FirstInputs) -> list[tuple[int, int]]:
    """Return pairs of indices: a held-out sentence, and the training sentence of its length nearest to it.

    The distance is the Euclidean distance of the first-layer inputs. Held-out sentences without a training
    sentence of their length are skipped.
    """
    pairs = []
    for indices in sentences.by_length().values():
        probes = [indices[row] for row in sentences.rows(indices, held_out=True)]
        donors = [indices[row] for row in sentences.rows(indices, held_out=False)]
        if probes and donors:
            left, right = (first_inputs.of(sentences.chosen(side)).flatten(1) for side in (probes, donors))
            nearest = torch.cdist(left, right).argmin(dim=1).tolist()
            pairs += [(probe, donors[row]) for probe, row in zip(probes, nearest, strict=True)]
    return pairs
