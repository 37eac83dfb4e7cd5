"""DeepSeek-MoE (arXiv 2401.06066): Llama with blocks of experts. transformers does not include this family.

    block(x) = shared(x) + Σ_i g_i expert_i(x)      g: the largest k of softmax(W x), 0 for the other experts

The modules here have the names of a checkpoint's weights and are registered with the Auto classes of
transformers. A checkpoint of this family is then loaded like any other, and the Python code in its folder is
never run.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2MLP

from attncache_core.errors import UnsupportedModel
from attncache_core.models.experts import run_experts


@strict
class DeepseekConfig(LlamaConfig):
    """The config.json of the family, with the defaults of the code published with the first checkpoints."""

    model_type = "deepseek"

    vocab_size: int = 102400
    num_hidden_layers: int = 30
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    moe_intermediate_size: int = 1407
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"

    def has_experts(self, number: int) -> bool:
        """Return whether layer `number` has a block of experts instead of one feed-forward network."""
        late = number >= self.first_k_dense_replace and number % self.moe_layer_freq == 0
        return bool(self.n_routed_experts) and late


class DeepseekRouter(nn.Module):
    """The router: chooses the experts of each token."""

    def __init__(self, config: DeepseekConfig) -> None:
        """Raises UnsupportedModel if scores are not a softmax."""
        super().__init__()
        if config.scoring_func != "softmax":
            raise UnsupportedModel(
                f"experts that are chosen by {config.scoring_func!r} (scoring_func in config.json) are not "
                "served for deepseek models; served is: softmax",
                field="model",
            )
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts or 0, config.hidden_size))
        self._chosen = config.num_experts_per_tok or 0
        self._normalizes = config.norm_topk_prob and self._chosen > 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [tokens, hidden] -> the chosen experts' (weights, float32; indices, int64), each [tokens, k]."""
        scores = functional.linear(x.float(), self.weight.float()).softmax(dim=-1)
        weights, experts = scores.topk(self._chosen, dim=-1)
        if self._normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts


class DeepseekMoE(nn.Module):
    """A block of routed experts, k per token, and shared experts, which are stored as one network."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        width = config.moe_intermediate_size
        self.gate = DeepseekRouter(config)
        self.experts = nn.ModuleList(_network(config, width) for _ in range(config.n_routed_experts or 0))
        self.shared_experts: nn.Module | None = None
        if config.n_shared_experts:
            self.shared_experts = _network(config, width * config.n_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden] -> [..., hidden]."""
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows)
        mixed = run_experts(list(self.experts), rows, chosen, weights).view_as(x)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)


def _network(config: Any, width: int) -> nn.Module:
    """Return a feed-forward network with its own intermediate width."""
    return DeepseekV2MLP(config, intermediate_size=width)


class DeepseekModel(LlamaModel):
    """The decoder without a head."""

    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            if config.has_experts(number):
                layer.mlp = DeepseekMoE(config)
        self.post_init()  # type: ignore[no-untyped-call]


class DeepseekForCausalLM(LlamaForCausalLM):
    """The decoder with a language head."""

    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        self.model = DeepseekModel(config)
        self.post_init()  # type: ignore[no-untyped-call]


class DeepseekForSequenceClassification(LlamaForSequenceClassification):
    """The decoder with a sequence-classification head."""

    config_class = DeepseekConfig


# exist_ok: a later version of transformers may include the family, and this implementation stays in use.
AutoConfig.register("deepseek", DeepseekConfig, exist_ok=True)
AutoModel.register(DeepseekConfig, DeepseekModel, exist_ok=True)
AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(DeepseekConfig, DeepseekForSequenceClassification, exist_ok=True)
