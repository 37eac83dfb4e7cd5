"""What reuse does to a model's outputs: the damage of each head, and the mask and θ that a budget allows.

A probe is a held-out sentence with the record that would serve it, of the same length. Here nothing is
skipped: every map is computed and some are replaced, so that any mask can be tried on one loaded model.
The model must have no reuse mask of its own: heads count as the checkpoint numbers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from attncache_core.attention_maps.search import MOST_SIMILAR_OTHER
from attncache_core.models import AttentionLayer, PackedModel
from attncache_core.models.attention import apply_maps
from attncache_core.outputs import cosines
from attncache_core.tokens import Group, TokenBatch, by_sequence, pack

# Layer -> for each group of the batch the maps [n, heads, L, L].
BatchMaps = list[list[torch.Tensor]]
# Tokens in one pass over probes: enough to fill the processor, and 100 MB of maps at 128 tokens.
_TOKENS_PER_PASS = 4096


@dataclass(frozen=True)
class ProbeBatch:
    """Probes in packed order, computed in full, with the maps of their records."""

    batch: TokenBatch
    hidden: list[torch.Tensor]  # input of each layer, [tokens, hidden]
    outputs: np.ndarray  # float32 [sequences, d], the full model's
    donors: BatchMaps


def token_passes(lengths: Sequence[int], tokens: int = _TOKENS_PER_PASS) -> Iterator[list[int]]:
    """Indices of sequences, sorted by length, in runs of at most `tokens` tokens (or one sequence)."""
    run: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if run and total + lengths[index] > tokens:
            yield run
            run, total = [], 0
        run.append(index)
        total += lengths[index]
    if run:
        yield run


@torch.inference_mode()
def traced_forward(
    model: PackedModel, batch: TokenBatch, on_maps: Callable[[int, Group, torch.Tensor], None]
) -> tuple[list[torch.Tensor], np.ndarray]:
    """Run the full model, showing every group's maps of every layer to `on_maps(layer, group, maps)`.

    Returns the input of each layer and the outputs [sequences, d], both in packed order.
    """
    hidden = model.embed(batch)
    inputs = []
    for number, layer in enumerate(model.layers):
        inputs.append(hidden)
        hidden = _layer(layer, hidden, batch, partial(on_maps, number))
    return inputs, model.outputs(hidden, batch).representation.numpy()


@torch.inference_mode()
def substituted_outputs(
    model: PackedModel, probes: ProbeBatch, mask: np.ndarray, first_layer: int = 0
) -> np.ndarray:
    """Outputs [sequences, d] with the donors' maps for the heads in `mask`, bool [layers, heads].

    first_layer: the first layer with a head in the mask, where the caller knows it; what lies before is
    not computed again.
    """
    hidden = probes.hidden[first_layer]
    groups = probes.batch.groups()
    for number in range(first_layer, len(model.layers)):
        donors = dict(zip(groups, probes.donors[number], strict=True)) if mask[number].any() else {}
        hidden = _layer(model.layers[number], hidden, probes.batch, _Substitution(mask[number], donors))
    return model.outputs(hidden, probes.batch).representation.numpy()


@dataclass(frozen=True)
class _Substitution:
    """Replaces the maps of some heads of one layer by the donors'."""

    heads: np.ndarray  # bool [heads]
    donors: Mapping[Group, torch.Tensor]

    def __call__(self, group: Group, maps: torch.Tensor) -> None:
        if self.donors:
            chosen = torch.from_numpy(np.flatnonzero(self.heads))
            maps[:, chosen] = self.donors[group][:, chosen].to(maps.dtype)


def _layer(
    layer: AttentionLayer,
    hidden: torch.Tensor,
    batch: TokenBatch,
    on_maps: Callable[[Group, torch.Tensor], None],
) -> torch.Tensor:
    """One layer by way of explicit maps, which `on_maps` sees, and may change, before they are used."""
    value, query, key = layer.project(layer.attention_input(hidden))
    context = torch.empty_like(value)
    for group in batch.groups():
        maps = layer.attention_maps(by_sequence(query, group), by_sequence(key, group))
        on_maps(group, maps)
        found = apply_maps(maps, by_sequence(value, group))
        by_sequence(context, group).copy_(found)
    return layer.finish(hidden, context)


def collect_maps(model: PackedModel, batch: TokenBatch) -> BatchMaps:
    """All maps of a batch."""
    maps: BatchMaps = [[] for _ in model.layers]
    traced_forward(model, batch, lambda layer, _, group_maps: maps[layer].append(group_maps))
    return maps


def probed(model: PackedModel, batch: TokenBatch, donors: BatchMaps) -> ProbeBatch:
    """A packed batch of probes computed in full, beside the maps of their records."""
    hidden, outputs = traced_forward(model, batch, lambda *_: None)
    return ProbeBatch(batch, hidden, outputs, donors)


def head_damage(
    model: PackedModel,
    probes: Sequence[Sequence[int]],
    donors: Sequence[Sequence[int]],
    on_pass: Callable[[int, int], None] = lambda *_: None,
) -> np.ndarray:
    """How much each head hurts when it alone is reused: mean 1 - cosine of the outputs, [layers, heads].

    donors[i] is the token sequence whose maps probe i would take, of the same length.
    """
    layers, heads = len(model.layers), model.layers[0].heads
    damage = np.zeros((layers, heads))
    passes = list(token_passes([len(probe) for probe in probes]))
    for done, indices in enumerate(passes):
        # The indices are sorted by length: packing keeps their order, and donors stand where their probes do.
        donor_maps = collect_maps(model, pack([donors[index] for index in indices]))
        measured = probed(model, pack([probes[index] for index in indices]), donor_maps)
        for layer in range(layers):
            for head in range(heads):
                alone = np.zeros((layers, heads), dtype=bool)
                alone[layer, head] = True
                changed = substituted_outputs(model, measured, alone, first_layer=layer)
                damage[layer, head] += (1 - cosines(changed, measured.outputs)).sum()
            on_pass(done * layers + layer + 1, len(passes) * layers)
    return damage / len(probes)


@dataclass(frozen=True, slots=True)
class ChosenPolicy:
    """A mask size and θ, and what they gave on the probes."""

    heads: int
    threshold: float
    hit_rate: float  # hits / all probes
    mean_cosine: float  # over the hits; nan without any


def choose_policy(
    cosines_by_heads: Mapping[int, np.ndarray],
    similarities: np.ndarray,
    min_cosine: float,
    threshold: float | None = None,
) -> ChosenPolicy:
    """The mask size and θ with the largest hit rate x heads whose hits have a mean cosine >= min_cosine.

    cosines_by_heads: mask size -> cosine of each probe if it hits, [probes]; similarities: of each probe
    to its record, -inf where it has none. For each size the loosest θ inside the budget is taken; a given
    `threshold` fixes θ, and the largest mask inside the budget is taken, or the mildest if none is.
    When no size allows any hit, θ = 1: only sentences that are recorded themselves hit, which is exact.
    """
    # No probe is recorded, so none has similarity 1 when it is served.
    similarities = np.minimum(similarities, MOST_SIMILAR_OTHER)
    options = []
    for heads, cosine in cosines_by_heads.items():
        loosest = _loosest_threshold(cosine, similarities, min_cosine) if threshold is None else threshold
        hits = similarities >= loosest
        mean = float(cosine[hits].mean()) if hits.any() else float("nan")
        options.append(ChosenPolicy(heads, loosest, float(hits.mean()), mean))
    if threshold is not None:
        allowed = [option for option in options if not option.mean_cosine < min_cosine]
        return (
            max(allowed, key=lambda option: option.heads) if allowed else min(options, key=lambda o: o.heads)
        )
    return max(options, key=lambda option: (option.hit_rate * option.heads, option.heads))


def _loosest_threshold(cosine: np.ndarray, similarities: np.ndarray, min_cosine: float) -> float:
    """The lowest θ for which the mean cosine of the probes at or above it is at least `min_cosine`."""
    order = np.argsort(-similarities, kind="stable")
    order = order[np.isfinite(similarities[order])]
    ranked = similarities[order]
    means = np.cumsum(cosine[order]) / np.arange(1, len(order) + 1)
    # Probes of one similarity come in together or not at all.
    last_of_ties = np.append(ranked[:-1] > ranked[1:], True)
    allowed = np.flatnonzero((means >= min_cosine) & last_of_ties[: len(means)])
    if not len(allowed):
        return 1.0
    last = int(allowed[-1])
    # Half way to the first one refused, so that rounding on another machine changes neither.
    return float(ranked[last : last + 2].mean())
