"""FeatureProjector: the small network that places sequences so that near means similar maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from attncache_core.errors import CorruptDatabase
from attncache_core.models.prepacked import PackedLinear
from attncache_core.tokens import Group

_TOKEN_FEATURES = 32
DIMENSIONS = 128


class FeatureProjector(nn.Module):
    """f(X) = Σ_p W2[p] gelu(W1 x_p + b1): the input of the first layer -> 128 numbers. float32.

    A two-layer MLP over the whole sequence (AttnCache, section on the feature projector), its first layer
    shared by the positions, so that sentences of every length train it.
    """

    def __init__(self, hidden_size: int, max_length: int, dimensions: int = DIMENSIONS) -> None:
        super().__init__()
        self.max_length = max_length
        self.token = nn.Linear(hidden_size, _TOKEN_FEATURES)
        self._first_layer: Callable[[torch.Tensor], torch.Tensor] = self._plain_first_layer
        self.position = nn.Parameter(torch.empty(max_length, _TOKEN_FEATURES, dimensions))
        # As if the second layer had as many inputs as a sentence of common length gives it.
        nn.init.normal_(self.position, std=(16 * _TOKEN_FEATURES) ** -0.5)

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's hidden state, as the projector reads it."""
        return self.token.in_features

    @property
    def dimensions(self) -> int:
        """Numbers of a feature vector."""
        return self.position.shape[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, L, hidden], L at most `max_length` -> features [n, dimensions]."""
        n, length, _ = x.shape
        tokens = self._plain_first_layer(x.float())
        return tokens.reshape(n, -1) @ self.position[:length].flatten(0, 1)

    def _plain_first_layer(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.token(x))

    @torch.inference_mode()
    def project(self, hidden: torch.Tensor, groups: Sequence[Group]) -> list[np.ndarray]:
        """Features float32 [n, dimensions] of each group of a packed batch's hidden states [tokens, hidden].

        The first layer runs once for all tokens, on the CPU wherever the hidden states are.
        """
        tokens = self._first_layer(hidden.cpu().float())
        return [
            (tokens[group.tokens].view(group.count, -1) @ self.position[: group.length].flatten(0, 1)).numpy()
            for group in groups
        ]

    def to_bytes(self) -> bytes:
        """The weights as the content of a safetensors file."""
        return save({name: tensor.contiguous() for name, tensor in self.state_dict().items()})

    @classmethod
    def load(cls, path: Path) -> FeatureProjector:
        """The projector whose `to_bytes` is in the file. Raises CorruptDatabase."""
        try:
            weights = load_file(path)
            max_length, _, dimensions = weights["position"].shape
            projector = cls(weights["token.weight"].shape[1], max_length, dimensions)
            projector.load_state_dict(weights)
        except (OSError, SafetensorError, KeyError, IndexError, ValueError, RuntimeError) as error:
            raise CorruptDatabase(f"{path} cannot be read", field="database") from error
        projector.eval().requires_grad_(False)
        projector._first_layer = PackedLinear(projector.token.weight, projector.token.bias, "gelu")
        return projector
