"""Gated feed-forward networks (gate, up, down), packed: one per layer, or several in a block of experts.

A block of experts keeps its own module with its router; only the networks inside it are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attncache_core.errors import UnsupportedModel
from attncache_core.models.layer import Network
from attncache_core.models.linear import activated_linear, packed, packed_linear

# Of each family that has experts, the name of their number in its configuration.
_NUMBER_OF_EXPERTS = {
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "deepseek": "n_routed_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}
# How DeepSeek-V2 chooses the experts of a token: topk_method in config.json.
_ROUTINGS = ("greedy", "group_limited_greedy")


def pack_networks(module: Any, activation: str) -> nn.Module:
    """Replace every gated network in `module` by a packed one. Return the module, or its replacement.

    The original weights are freed. activation: the name in config.json of the gates' activation.
    """
    if {name for name, _ in module.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        gate = packed(module.gate_proj, activation, module.act_fn)
        up, down = packed(module.up_proj), packed(module.down_proj)
        return Network(up, down, activation, gate, rounds_branch=True)
    if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
        return _StackedExperts(module, activation)
    for name, part in list(module.named_children()):
        setattr(module, name, pack_networks(part, activation))
    block: nn.Module = module
    return block


def require_routing(config: Any) -> None:
    """Raise UnsupportedModel if config.json names experts or groups that no router can choose."""
    # Other families ignore these names.
    experts = getattr(config, _NUMBER_OF_EXPERTS.get(config.model_type, ""), None)
    if not experts:
        return
    if not 1 <= (config.num_experts_per_tok or 0) <= experts:
        raise UnsupportedModel(
            f"num_experts_per_tok in config.json must be 1 to {experts}, the number of routed experts, "
            f"and is {config.num_experts_per_tok}",
            field="model",
        )
    if config.model_type == "deepseek_v2" and config.topk_method not in _ROUTINGS:
        raise UnsupportedModel(
            f"topk_method in config.json is {config.topk_method!r}; served are: {', '.join(_ROUTINGS)}",
            field="model",
        )
    adds_two = config.model_type == "deepseek_v3"  # the two best experts say how good a group is
    if not (adds_two or (config.model_type == "deepseek_v2" and config.topk_method == _ROUTINGS[1])):
        return
    groups = config.n_group or 0
    if not 1 <= (config.topk_group or 0) <= groups or experts % groups or experts // groups < 1 + adds_two:
        raise UnsupportedModel(
            f"n_group and topk_group in config.json are {config.n_group} and {config.topk_group}; n_group "
            f"must divide the {experts} routed experts{' into groups of two or more' if adds_two else ''}, "
            "and topk_group must be 1 to n_group",
            field="model",
        )


def run_experts(
    experts: Sequence[nn.Module], x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
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


class _StackedExperts(nn.Module):
    """Packed experts of a transformers module that stacks the weights of all experts in two tensors.

    gate_up_proj: [experts, 2 width, hidden], gates first; down_proj: [experts, hidden, width].
    """

    def __init__(self, module: Any, activation: str) -> None:
        super().__init__()
        self._experts = []
        for gate_up, down in zip(module.gate_up_proj, module.down_proj, strict=True):
            gate, up = gate_up.chunk(2)
            opened = activated_linear(gate, None, None, activation, module.act_fn)
            self._experts.append(Network(packed_linear(up), packed_linear(down), activation, opened))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `run_experts`."""
        return run_experts(self._experts, x, chosen, weights)
