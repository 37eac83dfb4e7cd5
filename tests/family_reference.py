"""Hugging Face's eager model of any family in float32, one sequence at a time, with maps replaced at will."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from core_reference import Maps, reference_logits
from torch import nn
from transformers import AttentionInterface, AutoModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from attncache_core.checkpoint import DroppedLayers


class FamilyReference:
    """A checkpoint's encoder or decoder without a head, computed plainly."""

    class_scores = staticmethod(reference_logits)

    def __init__(self, folder: Path) -> None:
        self.model = AutoModel.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """The last hidden states [L, hidden]."""
        return self.model(torch.tensor([ids])).last_hidden_state[0]

    @torch.inference_mode()
    def maps(self, ids: Sequence[int]) -> dict[tuple[int, int], torch.Tensor]:
        """All attention maps."""
        layers = self.model(torch.tensor([ids]), output_attentions=True).attentions
        return {
            (number, head): values
            for number, maps in enumerate(layers)
            for head, values in enumerate(maps[0])
        }

    def hidden_with_maps(self, ids: Sequence[int], replaced: Maps) -> torch.Tensor:
        """The last hidden states [L, hidden] with some heads' maps replaced."""
        by_interface = self.model._supports_attention_backend
        with (_by_interface if by_interface else _by_dropout)(self.model, replaced):
            return self.hidden(ids)

    def hidden_without(self, ids: Sequence[int], dropped: DroppedLayers) -> torch.Tensor:
        """The last hidden states [L, hidden] with some attention modules and whole layers bypassed."""
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


# What a bypassed module gives back of its input.
GivenBack = Callable[[torch.Tensor], torch.Tensor]


def _input(x: torch.Tensor) -> torch.Tensor:
    return x


def _attention_with_its_norm(layer: Any) -> list[tuple[nn.Module, GivenBack]]:
    """A layer's modules whose bypass is that of its attention: the residual passes through."""
    for name in ("self_attn", "attn"):
        if hasattr(layer, name):
            # Its norms are before it or, without a bias, make nothing of nothing.
            return [(getattr(layer, name), torch.zeros_like)]
    if hasattr(layer, "sa_layer_norm"):
        return [(layer.attention, torch.zeros_like), (layer.sa_layer_norm, _input)]
    return [(layer.attention, _input)]


@contextmanager
def _giving(module: nn.Module, back: GivenBack) -> Iterator[None]:
    """The module gives `back` of its first input; whatever else it returns stays as it is."""

    def hook(_module, given, named, made):
        x = back(given[0] if given else named["hidden_states"])
        return (x, *made[1:]) if isinstance(made, tuple) else x

    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _by_interface(model: Any, replaced: Maps) -> Iterator[None]:
    """The model's own eager attention, layer after layer, but for the maps of some heads."""
    calls = iter(range(model.config.num_hidden_layers))

    def attention(module, query, key, value, mask, **settings):
        own = sys.modules[type(module).__module__].eager_attention_forward
        _, maps = own(module, query, key, value, mask, **settings)
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
    assert next(calls, None) is None, "some layer did not ask the attention interface"


@contextmanager
def _by_dropout(model: Any, replaced: Maps) -> Iterator[None]:
    """The same where no interface is asked: maps pass a module that would drop some of them in training."""
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
    assert next(calls, None) is None, "some layer's maps did not pass its dropout"


def replace_maps(maps: torch.Tensor, layer: int, replaced: Maps) -> None:
    """Write the replacements for this layer into its maps [n, heads, L, L]."""
    for (number, head), values in replaced.items():
        if number == layer:
            maps[:, head] = values
