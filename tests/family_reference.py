"""Reference for every family: Hugging Face's eager float32 model, with maps replaced."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_reference import Maps, reference_logits
from torch import nn
from transformers import AttentionInterface, AutoModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from attncache_core.checkpoints.checkpoint import DroppedLayers


class FamilyReference:
    """Hugging Face's eager encoder or decoder of a checkpoint, without a head."""

    class_scores = staticmethod(reference_logits)

    def __init__(self, folder: Path) -> None:
        self.model = AutoModel.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the last hidden states [L, hidden]."""
        return self.model(torch.tensor([ids])).last_hidden_state[0]

    def means(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Return mean-pooled outputs [sequences, hidden]."""
        return np.stack([self.hidden(ids).mean(dim=0).numpy() for ids in sequences])

    @torch.inference_mode()
    def maps(self, ids: Sequence[int]) -> dict[tuple[int, int], torch.Tensor]:
        """Return all attention maps [L, L], keyed by (layer, head)."""
        layers = self.model(torch.tensor([ids]), output_attentions=True).attentions
        return {
            (number, head): values
            for number, maps in enumerate(layers)
            for head, values in enumerate(maps[0])
        }

    def hidden_with_maps(self, ids: Sequence[int], replaced: Maps) -> torch.Tensor:
        """Return the last hidden states [L, hidden] with some heads' maps replaced."""
        by_interface = self.model._supports_attention_backend
        with (_by_interface if by_interface else _by_dropout)(self.model, replaced):
            return self.hidden(ids)

    def hidden_without(self, ids: Sequence[int], dropped: DroppedLayers) -> torch.Tensor:
        """Return the last hidden states [L, hidden] with some attention modules and whole layers bypassed."""
        (layers,) = (
            module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and re.search(r"(^|\.)layers?$", name)
        )
        with ExitStack() as bypassed:
            for number in dropped.attention:
                for module, back in _attention_with_its_norm(layers[number]):
                    bypassed.enter_context(_giving(module, back))
            for number in dropped.blocks:
                bypassed.enter_context(_giving(layers[number], _input))
            return self.hidden(ids)


# Makes the output of a bypassed module from its input.
GivenBack = Callable[[torch.Tensor], torch.Tensor]


def _input(x: torch.Tensor) -> torch.Tensor:
    return x


def _attention_with_its_norm(layer: Any) -> list[tuple[nn.Module, GivenBack]]:
    """Return the modules to bypass so that only the residual passes through a layer's attention."""
    for name in ("self_attn", "attn"):
        if hasattr(layer, name):
            # The norms come before attention, or map zeros to zeros because they have no bias.
            return [(getattr(layer, name), torch.zeros_like)]
    if hasattr(layer, "sa_layer_norm"):
        return [(layer.attention, torch.zeros_like), (layer.sa_layer_norm, _input)]
    return [(layer.attention, _input)]


@contextmanager
def _giving(module: nn.Module, back: GivenBack) -> Iterator[None]:
    """Make the module return `back` of its first input; its other outputs do not change."""

    def hook(_module, positional, named, made):
        x = back(positional[0] if positional else named["hidden_states"])
        return (x, *made[1:]) if isinstance(made, tuple) else x

    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _by_interface(model: Any, replaced: Maps) -> Iterator[None]:
    """Run the model's own eager attention, with the maps of some heads replaced in each layer."""
    calls = iter(range(model.config.num_hidden_layers))

    def attention(module, query, key, value, mask, **settings):
        eager = sys.modules[type(module).__module__].eager_attention_forward
        _, maps = eager(module, query, key, value, mask, **settings)
        replace_maps(maps, next(calls), replaced)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return (maps @ value).transpose(1, 2).contiguous(), maps

    AttentionInterface.register("substituted", attention)
    AttentionMaskInterface.register("substituted", eager_mask)
    model.set_attn_implementation("substituted")
    try:
        yield
    finally:
        model.set_attn_implementation("eager")
    assert next(calls, None) is None, "some layer did not use the attention interface"


@contextmanager
def _by_dropout(model: Any, replaced: Maps) -> Iterator[None]:
    """Replace maps in a model without attention interface, by hooks on the dropout that its maps pass."""
    calls = iter(range(model.config.num_hidden_layers))
    modules = [module for module in model.modules() if type(module).__name__.endswith("SelfAttention")]
    hooks = [
        module.dropout.register_forward_hook(lambda _, __, maps: replace_maps(maps, next(calls), replaced))
        for module in modules
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    assert next(calls, None) is None, "the maps of some layer did not pass its dropout"


def replace_maps(maps: torch.Tensor, layer: int, replaced: Maps) -> None:
    """Write the replacements for this layer into its maps [n, heads, L, L]."""
    for (number, head), values in replaced.items():
        if number == layer:
            maps[:, head] = values
