"""How much each head hurts when it is reused, and in which order heads are best given up.

A probe's output is a unit vector. Reusing head i alone moves it by δᵢ; for small steps the moves of several
heads add up, so that a mask S does the damage 1 - cos = ½ ‖Σ δᵢ‖² = ½ Σ δᵢ·δⱼ over i, j in S. The means of
δᵢ·δⱼ over probes, measured with one pass for each head, thus tell the damage of every mask: of two mild heads
that push the same way, one is better left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from attncache_core.attention_maps.substitution import ProbeBatch, substituted_outputs
from attncache_core.checkpoint import Quantization
from attncache_core.engine import PrefillEngine
from attncache_core.models import PackedModel, load_model

# Outputs [n, d] as the engine gives them -> rows of unit length whose cosine is what counts.
Comparable = Callable[[np.ndarray], np.ndarray]


def joint_damage(
    model: PackedModel,
    batches: Sequence[Callable[[], ProbeBatch]],
    comparable: Comparable,
    on_pass: Callable[[int, int], None] = lambda *_: None,
) -> np.ndarray:
    """½ mean δᵢ·δⱼ of every two heads, float64 [layers * heads, layers * heads]; see the module.

    batches: make the probes with the maps of their donors, when they are needed.
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
    """What damage is measured on: the engine's model or, if it rounds hidden states, the model before that.

    Where 8 bits are left of a hidden state, a change in one layer makes all later ones round otherwise. That
    moves an output more than a mild head does, and the less the later the layer is: the last layers' heads,
    which hurt most, would be taken for the mildest.
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
    """1 - cosine when one head alone is reused, [layers, heads]."""
    return np.diagonal(joint).reshape(layers, -1).copy()


def reuse_rank(joint: np.ndarray, layers: int, order: Sequence[Sequence[int]] | None = None) -> np.ndarray:
    """In which place each head joins the reuse mask, int [layers, heads], 0 first.

    Greedy: the next is always the one with which the mask does the least damage. order: layer -> its heads;
    where records hold them in this order already, each layer gives its heads in no other.
    """
    size = len(joint)
    heads = size // layers
    queues = [list(range(layer * heads, (layer + 1) * heads)) for layer in range(layers)]
    if order is not None:
        queues = [[layer * heads + head for head in row] for layer, row in enumerate(order)]
    rank = np.zeros(size, dtype=int)
    with_mask = np.zeros(size)  # Σ over the mask of the damage it shares with each head
    for place in range(size):
        candidates = [head for queue in queues for head in (queue[:1] if order is not None else queue)]
        chosen = min(candidates, key=lambda head: joint[head, head] + 2 * with_mask[head])
        queues[chosen // heads].remove(chosen)
        with_mask += joint[:, chosen]
        rank[chosen] = place
    return rank.reshape(layers, heads)
