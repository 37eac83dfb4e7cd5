"""Fit the weights that hits take, so that a layer with reused maps gives what the full layer gives.

    sentences of the corpus -> full pass                                                  target of each layer
                            -> pass with the mean maps of their lengths, layer by layer   input of each layer
    output projection       target: the full layer's sum before its norm, less the hit's residual
    down projection         the same, with the output projection that was just fitted

Both are ridge regressions toward the original weights, in closed form. A layer is fitted to the hidden states
that the refitted layers before it give, so it also corrects what those layers left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attncache_core.calibration.substitution import ObservedMaps, token_passes
from attncache_core.engine.layers import NO_REUSED_MAPS, attention_context
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.models import AttentionLayer
from attncache_core.models.layer import Network
from attncache_core.models.linear import quantizing
from attncache_core.models.projections import LinearWeights
from attncache_core.models.refitted import (
    LastProducts,
    last_products,
    with_last_products,
)
from attncache_core.reuse.execution.reused_maps import ReusedMaps
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.mask import ReuseMask
from attncache_core.text.token_batch import Group, TokenBatch, pack

# Most tokens to fit to, which bounds the time of a fit.
_MAX_TOKENS = 40_000
# Fewer rows per input of a product would fit the rows themselves.
_MIN_ROWS = 4
# Shrinkage toward the original weights, in units of the mean square of an input. Texts like the corpus gain
# the same from 0.001 to 0.1, and texts unlike the corpus lose least with 0.1.
_SHRINKAGE = 0.1


@dataclass
class _States:
    """One batch of sentences between two layers."""

    batch: TokenBatch
    full: torch.Tensor  # [tokens, hidden], of the full model
    hit: torch.Tensor  # [tokens, hidden], with reused maps and refitted weights


class Refitting:
    """Fits the weights of hits for any mask, on the same sentences."""

    def __init__(
        self,
        engine: PrefillEngine,
        search: SearchEngine,
        sequences: Sequence[Sequence[int]],
        random: np.random.Generator,
    ) -> None:
        """engine: without a database. search: with the records that serve hits. sequences: to fit to."""
        self._engine, self._search = engine, search
        means = search.prototypes.means
        known = [sequences[at] for at in random.permutation(len(sequences)) if len(sequences[at]) in means]
        enough = int(np.searchsorted(np.cumsum([len(ids) for ids in known]), _MAX_TOKENS, side="right"))
        self._sequences = known[:enough]

    @torch.inference_mode()
    def products(self, mask: ReuseMask) -> list[LastProducts] | None:
        """Return the weights that hits take with a mask, bfloat16.

        None if the weights of the model's family cannot be refitted, or if there are too few sentences.
        """
        model = self._engine.model
        held = [products for layer in model.layers if (products := last_products(layer))]
        # Of the products to fit, the largest number of inputs.
        inputs = max((part.weight.shape[1] for products in held for part in products), default=0)
        if len(held) < len(model.layers) or sum(map(len, self._sequences)) < _MIN_ROWS * inputs:
            return None
        states = []
        for indices in token_passes([len(ids) for ids in self._sequences]):
            batch = pack([self._sequences[index] for index in indices])
            hidden = model.embed(batch)
            states.append(_States(batch, hidden, hidden))
        reused_maps = self._reused_maps(mask)
        with quantizing(self._engine.checkpoint.quantization):
            return [
                _refit(layer, number, products, states, reused_maps)
                for number, (layer, products) in enumerate(zip(model.layers, held, strict=True))
            ]

    def _reused_maps(self, mask: ReuseMask) -> ObservedMaps:
        """Return a source of maps that replaces the maps of the mask's heads by the mean of the length."""
        store, means = self._search.store, self._search.prototypes.means

        def replace(layer: int, group: Group, maps: torch.Tensor) -> None:
            heads = list(mask.order[layer][: mask.reused[layer]])
            if heads:
                mean = store.segments[group.length].layer_maps(means[group.length], layer, len(heads))
                maps[:, heads] = mean.to(maps)

        return ObservedMaps(replace)


def _refit(
    layer: AttentionLayer,
    number: int,
    held: LastProducts,
    states: Sequence[_States],
    reused_maps: ObservedMaps,
) -> LastProducts:
    """Return the products of hits in a layer, which replace `held`, and move the states behind the layer."""
    (half,) = layer.halves
    assert isinstance(half.network, Network)
    contexts, ridge = [], _Ridge(held.output)
    for state in states:
        full = _context(layer, number, state.full, state.batch, NO_REUSED_MAPS)
        context = _context(layer, number, state.hit, state.batch, reused_maps)
        ridge.add(context.flatten(1), layer.attention_sum(state.full, full).float() - state.hit.float())
        state.full = layer.add_attention(state.full, full)
        contexts.append(context)
    output = ridge.solve()
    refitted, ridge = with_last_products(layer, LastProducts(output, held.down)), _Ridge(held.down)
    for state, context in zip(states, contexts, strict=True):
        state.hit = refitted.add_attention(state.hit, context)
        total = half.network(state.full, state.full)
        ridge.add(half.network.inner(state.hit), total.float() - state.hit.float())
        state.full = half.norms.after(total)
    products = LastProducts(output, ridge.solve())
    refitted = with_last_products(layer, products)
    for state in states:
        state.hit = refitted.feed_forward(state.hit)
    return products


def _context(
    layer: AttentionLayer, number: int, hidden: torch.Tensor, batch: TokenBatch, reused_maps: ReusedMaps
) -> torch.Tensor:
    return attention_context(number, layer, layer.attention_input(hidden), batch, reused_maps)


class _Ridge:
    """A ridge regression of y on x and a constant, toward the weights of a linear layer."""

    def __init__(self, held: LinearWeights) -> None:
        assert held.bias is not None
        # Weights and bias together, [inputs + 1, outputs].
        self._held = torch.cat([held.weight, held.bias[:, None]], dim=1).cpu().double().T
        self._squares = torch.zeros(len(self._held), len(self._held), dtype=torch.float64)
        self._products = torch.zeros_like(self._held)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add rows x [n, inputs] with targets y, float32 [n, outputs]."""
        rows = torch.cat([x.float(), torch.ones(len(x), 1, dtype=torch.float32, device=x.device)], dim=1)
        self._squares += (rows.T @ rows).cpu().double()
        self._products += (rows.T @ y).cpu().double()

    def solve(self) -> LinearWeights:
        """Return weight and bias, bfloat16."""
        shrinkage = _SHRINKAGE * self._squares.diagonal()[:-1].mean().clamp(min=1e-30)
        shrunk = torch.full((len(self._squares),), float(shrinkage), dtype=torch.float64)
        shrunk[-1] *= 1e-3  # a bias costs nothing to move
        move = self._products - self._squares @ self._held
        found = self._held + torch.linalg.solve(self._squares + shrunk.diag(), move)
        weights = found.T.to(torch.bfloat16)
        return LinearWeights(weights[:, :-1].contiguous(), weights[:, -1].contiguous())
