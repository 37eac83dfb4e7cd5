"""Feed-forward networks of gate, up and down, packed: one of a layer, or those of a block of experts.

A block keeps its router and its way of adding up; the networks inside it are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attncache_core.models.layer import FeedForward
from attncache_core.models.linear import packed


def pack_networks(module: Any, activation: str) -> nn.Module:
    """`module`, which may be a network itself, with every network in it packed; its own weights are let go.

    activation: what config.json calls that of the gates.
    """
    if {name for name, _ in module.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return _Network(module.gate_proj, module.up_proj, module.down_proj, activation, module.act_fn)
    if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
        return _StackedExperts(module, activation)
    for name, part in list(module.named_children()):
        setattr(module, name, pack_networks(part, activation))
    block: nn.Module = module
    return block


def routed(
    experts: Sequence[FeedForward], x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it, [tokens, hidden].

    x: [tokens, hidden]; chosen: numbers of experts, int64, and weights, any float, both [tokens, k]. Each
    expert runs once, for all tokens that are sent to it.
    """
    order = chosen.flatten().argsort()
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    parts = x[order // chosen.shape[1]].split(counts)
    made = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if len(part)])
    # Back in the order of tokens, so that each one's sum is the same in any company.
    made = made[order.argsort()].unflatten(0, chosen.shape)
    return (made * weights[..., None]).sum(dim=1).to(x.dtype)


class _Network(nn.Module):
    """down(activation(gate(x)) * up(x)), of linear modules."""

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
    """Experts whose weights a module of transformers keeps as gate_up_proj, gates first, and down_proj.

    gate_up_proj: [experts, 2 width, hidden]; down_proj: [experts, hidden, width].
    """

    def __init__(self, module: Any, activation: str) -> None:
        super().__init__()
        self._experts = []
        for gate_up, down in zip(module.gate_up_proj, module.down_proj, strict=True):
            gate, up = gate_up.chunk(2)
            linears = (_linear(gate), _linear(up), _linear(down))
            self._experts.append(_Network(*linears, activation, module.act_fn))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `routed`."""
        return routed(self._experts, x, chosen, weights)


def _linear(weight: torch.Tensor) -> nn.Linear:
    """A linear module that has this weight [outputs, inputs] and no bias."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module
