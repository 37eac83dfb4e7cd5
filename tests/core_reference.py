"""The reference for engines: Hugging Face's eager model in float32, one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

# Tolerance for float32 sums in another order. Outputs have size 1, and after 6 layers they differed by less
# than 3e-6.
FLOAT32 = 1e-5
# Tolerance for maps stored in 16 bits, with random relative errors up to 2^-11. In the tiny model, outputs of
# size 1 then differ by up to 6e-4. The maps of another record change outputs at least ten times as much.
SIXTEEN_BITS = 1.5e-3

# (layer, head) -> map [L, L] that replaces the model's own map.
Maps = Mapping[tuple[int, int], torch.Tensor]


class Reference:
    """A BERT encoder, run one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModel.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.heads: int = self.model.config.num_attention_heads

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the last hidden states [L, hidden]."""
        return self.model(torch.tensor([ids])).last_hidden_state[0]

    @torch.inference_mode()
    def maps(self, ids: Sequence[int]) -> dict[tuple[int, int], torch.Tensor]:
        """Return all attention maps: (layer, head) -> [L, L]."""
        layers = self.model(torch.tensor([ids]), output_attentions=True).attentions
        return {
            (number, head): maps[0, head] for number, maps in enumerate(layers) for head in range(self.heads)
        }

    @torch.inference_mode()
    def hidden_with_maps(self, ids: Sequence[int], replaced: Maps) -> torch.Tensor:
        """Return the last hidden states [L, hidden] with the maps of some heads replaced."""
        x = self.model.embeddings(torch.tensor([ids]))[0]
        for number, layer in enumerate(self.model.encoder.layer):
            contexts = [
                self._context(layer, x, head, replaced.get((number, head))) for head in range(self.heads)
            ]
            x = layer.attention.output(torch.cat(contexts, dim=1), x)
            x = layer.output(layer.intermediate(x), x)
        return x

    def _context(
        self, layer: nn.Module, x: torch.Tensor, head: int, maps: torch.Tensor | None
    ) -> torch.Tensor:
        """Return maps @ V of one head, [L, head_dim]. maps: None for the model's own map."""
        attention = layer.attention.self
        width = x.shape[1] // self.heads
        rows = slice(head * width, (head + 1) * width)
        query, key, value = (part(x)[:, rows] for part in (attention.query, attention.key, attention.value))
        if maps is None:
            maps = torch.softmax(query @ key.T / width**0.5, dim=1)
        return maps @ value

    def means(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Return mean-pooled outputs [sequences, hidden]."""
        return np.stack([self.hidden(ids).mean(dim=0).numpy() for ids in sequences])


@torch.inference_mode()
def reference_logits(folder: Path, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the logits [sequences, classes] of a sequence-classification checkpoint."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in sequences])


def rounded(maps: Maps) -> dict[tuple[int, int], torch.Tensor]:
    """Return maps rounded to float16, as in a record."""
    return {head: values.half().float() for head, values in maps.items()}
