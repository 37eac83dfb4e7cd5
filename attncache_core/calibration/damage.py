"""Measure the damage of reusing each head, and rank the heads by it.

The output of a probe is a unit vector. Reusing head i alone moves the output by δᵢ. For small moves, the
moves of several heads add up, so a mask S does the damage 1 - cos = ½ ‖Σ δᵢ‖² = ½ Σ δᵢ·δⱼ over i, j in S. The
means of δᵢ·δⱼ over the probes therefore give the damage of every mask, and measuring them takes one pass per
head. If two mild heads move the output in the same direction, it is better to reuse only one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from attncache_core.calibration.substitution import ProbeBatch, substituted_outputs
from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.models import PackedModel, load_model

# Converts the engine's outputs [n, d] to rows of unit length, which the budget compares by cosine.
Comparable = Callable[[np.ndarray], np.ndarray]


def joint_damage(
    model: PackedModel,
    batches: Sequence[Callable[[], ProbeBatch]],
    comparable: Comparable,
    on_pass: Callable[[int, int], None] = lambda *_: None,
) -> np.ndarray:
    """Return ½ mean δᵢ·δⱼ of every two heads, float64 [layers * heads, layers * heads].

    See the module docstring for δ. batches: functions that each compute one batch of probes with the maps of
    their donors. Each function is called once, so only one batch is in memory at a time. on_pass: called
    after each layer of each batch with the steps done and in total.
    """
    layers, heads = len(model.layers), model.layers[0].heads
    total, count = np.zeros((layers * heads, layers * heads)), 0
    for done, make in enumerate(batches):
        probes = make()
        full = comparable(probes.outputs)
        moves = []
        for layer in range(layers):
            for head in range(heads):
                alone = np.zeros((layers, heads), dtype=bool)
                alone[layer, head] = True
                changed = substituted_outputs(model, probes, alone, first_layer=layer)
                moves.append((comparable(changed) - full).ravel())
            on_pass(done * layers + layer + 1, len(batches) * layers)
        rows = np.array(moves, dtype=np.float64)
        total += rows @ rows.T / 2
        count += len(full)
    return total / count


def model_for_damage(engine: PrefillEngine) -> PackedModel:
    """Return the model to measure damage on: the engine's model, without 8-bit rounding of hidden states.

    An int8 model rounds hidden states to 8 bits, so a change in one layer changes the rounding in all later
    layers. That effect moves an output more than a mild head does, and it is smaller for later layers. With
    rounding, the heads of the last layers, which do the most damage, would seem to be the mildest. So for an
    int8 checkpoint the unquantized model is loaded.
    """
    if engine.checkpoint.quantization is not Quantization.INT8:
        return engine.model
    return load_model(
        replace(engine.checkpoint, quantization=None),
        engine.dtype,
        prompt_tokens=engine.tokenizer.prompt_tokens,
        device=engine.model.device,
    )


def damage_of_each(joint: np.ndarray, layers: int) -> np.ndarray:
    """Return the damage (1 - cosine) of reusing each head alone, float64 [layers, heads]."""
    return np.diagonal(joint).reshape(layers, -1).copy()


def reuse_rank(joint: np.ndarray, layers: int, order: Sequence[Sequence[int]] | None = None) -> np.ndarray:
    """Return the position at which each head joins the reuse mask, int [layers, heads], 0 first.

    The ranking is greedy: the next head is always the one with which the mask does the least damage.
    joint: the result of joint_damage. order: layer -> its heads, in the order in which existing records hold
    them. If given, the heads of each layer are ranked in this order.
    """
    size = len(joint)
    heads = size // layers
    queues = [list(range(layer * heads, (layer + 1) * heads)) for layer in range(layers)]
    if order is not None:
        queues = [[layer * heads + head for head in row] for layer, row in enumerate(order)]
    rank = np.zeros(size, dtype=int)
    with_mask = np.zeros(size)  # for each head, Σ of its joint damage with the heads of the mask
    for position in range(size):
        candidates = [head for queue in queues for head in (queue[:1] if order is not None else queue)]
        chosen = min(candidates, key=lambda head: joint[head, head] + 2 * with_mask[head])
        queues[chosen // heads].remove(chosen)
        with_mask += joint[:, chosen]
        rank[chosen] = position
    return rank.reshape(layers, heads)
