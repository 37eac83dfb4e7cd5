"""Hugging Face's eager model of any family in float32, one sequence at a time, with maps replaced at will."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from core_reference import Maps
from transformers import AttentionInterface, AutoModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask


class FamilyReference:
    """A checkpoint's encoder or decoder without a head, computed plainly."""

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
        """The last hidden states [L, hidden] with some heads' maps replaced, by the attention interface."""
        with _substituted(self.model, replaced):
            return self.hidden(ids)


@contextmanager
def _substituted(model: Any, replaced: Maps) -> Iterator[None]:
    """The model's own eager attention, layer after layer, but for the maps of some heads."""
    calls = iter(range(model.config.num_hidden_layers))

    def attention(module, query, key, value, mask, **settings):
        own = sys.modules[type(module).__module__].eager_attention_forward
        _, maps = own(module, query, key, value, mask, **settings)
        layer = next(calls)
        for (number, head), values in replaced.items():
            if number == layer:
                maps[:, head] = values
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
