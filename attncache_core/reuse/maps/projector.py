"""Project sequences to feature vectors, so that a small distance means similar attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from attncache_core import native
from attncache_core.errors import CorruptDatabase
from attncache_core.native.products import MatrixKind, PackedMatrix
from attncache_core.text.token_batch import Group

_TOKEN_FEATURES = 32
DIMENSIONS = 128


class FeatureProjector(nn.Module):
    """A network from the input of the first layer to a feature vector of 128 numbers, in float32.

    f(X) = Σ_p W2[p] gelu(W1 x_p + b1): a two-layer MLP over the whole sequence (AttnCache, section on the
    feature projector). All positions p share the first layer, so sentences of every length train it.
    """

    def __init__(self, hidden_size: int, max_length: int, dimensions: int = DIMENSIONS) -> None:
        super().__init__()
        self.max_length = max_length
        self.token = nn.Linear(hidden_size, _TOKEN_FEATURES, dtype=torch.float32)
        shape = max_length, _TOKEN_FEATURES, dimensions
        self.position = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        # The scale for a second layer with the inputs of a sentence of common length, 16 tokens.
        nn.init.normal_(self.position, std=(16 * _TOKEN_FEATURES) ** -0.5)

    @property
    def hidden_size(self) -> int:
        """The number of elements of a token's hidden state."""
        return self.token.in_features

    @property
    def dimensions(self) -> int:
        """The number of elements of a feature vector."""
        return self.position.shape[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features [n, dimensions] of x [n, L, hidden], with L at most `max_length`."""
        n, length, _ = x.shape
        tokens = self._first_layer(x.float())
        return tokens.reshape(n, -1) @ self.position[:length].flatten(0, 1)

    def _first_layer(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.token(x))

    @cached_property
    def packed(self) -> tuple[PackedMatrix, PackedMatrix] | None:
        """The two layers for native/search.py; None if nothing was compiled. Later training has no effect."""
        kernel = native.kernel()
        if kernel is None:
            return None
        second = self.position.detach().flatten(0, 1).T
        return (
            PackedMatrix(kernel.library, MatrixKind.WHOLE, self.token.weight, self.token.bias),
            PackedMatrix(kernel.library, MatrixKind.WHOLE, second),
        )

    @torch.inference_mode()
    def project(self, hidden: torch.Tensor, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return the features of each group of a packed batch, float32 [n, dimensions] per group.

        hidden: [tokens, hidden] of the batch, on any device. The projector always runs on the CPU, and its
        first layer runs once for all tokens.
        """
        tokens = self._first_layer(hidden.cpu().float())
        second = self.position.flatten(0, 1)  # [positions * features of a token, dimensions]
        flat = (tokens[group.tokens].view(group.count, -1) for group in groups)
        return [(x @ second[: x.shape[1]]).numpy() for x in flat]

    def extended(self, max_length: int) -> FeatureProjector:
        """Return a projector with these weights for sequences of up to `max_length` tokens, to train further.

        Positions behind the last position of this projector take the weights of the last one.
        """
        extended = FeatureProjector(self.hidden_size, max_length, self.dimensions)
        known = torch.arange(max_length).clamp(max=self.max_length - 1)
        with torch.no_grad():
            extended.token.load_state_dict(self.token.state_dict())
            extended.position.copy_(self.position[known])
        return extended

    def to_bytes(self) -> bytes:
        """Return the weights as the content of a safetensors file."""
        return save({name: tensor.contiguous() for name, tensor in self.state_dict().items()})

    @classmethod
    def load(cls, path: Path) -> FeatureProjector:
        """Load a projector from a file with the content of `to_bytes`. Raises CorruptDatabase."""
        try:
            weights = load_file(path)
            max_length, _, dimensions = weights["position"].shape
            projector = cls(weights["token.weight"].shape[1], max_length, dimensions)
            projector.load_state_dict(weights)
        except (OSError, SafetensorError, KeyError, IndexError, ValueError, RuntimeError) as error:
            raise CorruptDatabase(f"{path} cannot be read", field="database") from error
        projector.eval().requires_grad_(False)
        return projector
