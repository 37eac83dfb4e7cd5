"""What the engine is measured against: Hugging Face's eager model in float32, one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

# float32 against float32, the same sums in another order: outputs are of size 1, and 6 layers of them were
# seen to differ by less than 3e-6.
FLOAT32 = 1e-5
# Maps kept in 16 bits are off by up to 2^-11 of themselves, at random. The tiny model's strong weights make
# up to 6e-4 of it in outputs of size 1; another record's maps change them ten times as much and more.
SIXTEEN_BITS = 1.5e-3

# (layer, head) -> the map [L, L] that stands in for the model's own.
Maps = Mapping[tuple[int, int], torch.Tensor]


class Reference:
    """A BERT encoder, computed plainly."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModel.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.heads: int = self.model.config.num_attention_heads

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """The last hidden states [L, hidden]."""
        return self.model(torch.tensor([ids])).last_hidden_state[0]

    @torch.inference_mode()
    def maps(self, ids: Sequence[int]) -> dict[tuple[int, int], torch.Tensor]:
        """All attention maps."""
        layers = self.model(torch.tensor([ids]), output_attentions=True).attentions
        return {
            (number, head): maps[0, head] for number, maps in enumerate(layers) for head in range(self.heads)
        }

    @torch.inference_mode()
    def hidden_with_maps(self, ids: Sequence[int], replaced: Maps) -> torch.Tensor:
        """The last hidden states [L, hidden] with some heads' maps replaced, head by head."""
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
        """[L, head_dim] of one head."""
        attention = layer.attention.self
        width = x.shape[1] // self.heads
        rows = slice(head * width, (head + 1) * width)
        query, key, value = (part(x)[:, rows] for part in (attention.query, attention.key, attention.value))
        if maps is None:
            maps = torch.softmax(query @ key.T / width**0.5, dim=1)
        return maps @ value

    def means(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Mean-pooled outputs [sequences, hidden]."""
        return np.stack([self.hidden(ids).mean(dim=0).numpy() for ids in sequences])


@torch.inference_mode()
def reference_logits(folder: Path, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits [sequences, classes] of a sequence-classification checkpoint."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in sequences])


def rounded(maps: Maps) -> dict[tuple[int, int], torch.Tensor]:
    """Maps as a record keeps them: in float16."""
    return {place: values.half().float() for place, values in maps.items()}
