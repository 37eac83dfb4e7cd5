"""Gated feed-forward networks (gate, up, down), packed: one per layer, or several in a block of experts.

A block of experts keeps its own module with its router; only the networks inside it are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attncache_core.models.layer import FeedForward
from attncache_core.models.linear import packed


def pack_networks(module: Any, activation: str) -> nn.Module:
    """Replace every gated network in `module` by a packed one. Return the module, or its replacement.

    The original weights are freed. activation: the name in config.json of the gates' activation.
    """
    if {name for name, _ in module.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return _Network(module.gate_proj, module.up_proj, module.down_proj, activation, module.act_fn)
    if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
        return _StackedExperts(module, activation)
    for name, part in list(module.named_children()):
        setattr(module, name, pack_networks(part, activation))
    block: nn.Module = module
    return block


def run_experts(
    experts: Sequence[FeedForward], x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, [tokens, hidden].

    x: [tokens, hidden]. chosen: indices of experts, int64 [tokens, k]. weights: any float [tokens, k]. Each
    expert runs once, on all tokens routed to it.
    """
    order = chosen.flatten().argsort()
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    parts = x[order // chosen.shape[1]].split(counts)
    outputs = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if len(part)])
    # Restore the order of the tokens before summing, so that a token's sum does not depend on the batch.
    outputs = outputs[order.argsort()].unflatten(0, chosen.shape)
    return (outputs * weights[..., None]).sum(dim=1).to(x.dtype)


class _Network(nn.Module):
    """A packed gated network: down(activation(gate(x)) * up(x))."""

    def __init__(
        self, gate: Any, up: Any, down: Any, activation: str, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self._gate, self._up, self._down = packed(gate, activation, function), packed(up), packed(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        rows = x.flatten(0, -2)
        return self._down(self._gate(rows).mul_(self._up(rows))).view_as(x)


class _StackedExperts(nn.Module):
    """Packed experts of a transformers module that stacks the weights of all experts in two tensors.

    gate_up_proj: [experts, 2 width, hidden], gates first; down_proj: [experts, hidden, width].
    """

    def __init__(self, module: Any, activation: str) -> None:
        super().__init__()
        self._experts = []
        for gate_up, down in zip(module.gate_up_proj, module.down_proj, strict=True):
            gate, up = gate_up.chunk(2)
            linears = (_linear(gate), _linear(up), _linear(down))
            self._experts.append(_Network(*linears, activation, module.act_fn))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `run_experts`."""
        return run_experts(self._experts, x, chosen, weights)


def _linear(weight: torch.Tensor) -> nn.Linear:
    """Return a linear module with this weight [outputs, inputs] and no bias."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module
