"""From pooled vectors to embeddings: the Dense modules of sentence-transformers, and truncation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import nn

from attncache_core.checkpoints.checkpoint import Checkpoint, Dense, DenseActivation
from attncache_core.errors import InvalidInput, UnsupportedModel, readable

_ACTIVATIONS: dict[DenseActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "GELU": nn.functional.gelu,
    "ReLU": torch.relu,
    "SiLU": nn.functional.silu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer and its activation, if any."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor  # [outputs]
    activate: Callable[[torch.Tensor], torch.Tensor] | None

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs]."""
        made = nn.functional.linear(vectors, self.weight, self.bias)
        return made if self.activate is None else self.activate(made)

    def on(self, device: torch.device) -> DenseLayer:
        """Return the layer in float32 on a device."""
        return DenseLayer(self.weight.float().to(device), self.bias.float().to(device), self.activate)


class EmbeddingHead:
    """Makes embeddings of pooled vectors."""

    def __init__(self, layers: Sequence[DenseLayer], dimensions: int) -> None:
        """dimensions: of an embedding, at most the outputs of the last layer."""
        self._layers, self.dimensions = layers, dimensions

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, float32 [n, dimensions], of pooled vectors, float32 [n, inputs]."""
        for layer in self._layers:
            pooled = layer(pooled)
        return pooled[:, : self.dimensions]


def load_embedding_head(checkpoint: Checkpoint, width: int, device: torch.device) -> EmbeddingHead | None:
    """Load the Dense modules of an embedding model; None if pooled vectors are its embeddings.

    width: of pooled vectors. Raises UnsupportedModel if weights cannot be read, and if the layers do not fit
    each other or the pooled vectors.
    """
    layers = []
    for dense in checkpoint.dense:
        if dense.inputs != width:
            raise UnsupportedModel(
                f"Dense module {dense.weights.parent} takes vectors of {dense.inputs} numbers, and gets "
                f"vectors of {width}",
                field="model",
            )
        layers.append(_read_layer(dense))
        width = dense.outputs
    dimensions = min(width, checkpoint.truncate_dim or width)
    if not layers and dimensions == width:
        return None
    return EmbeddingHead([layer.on(device) for layer in merged(layers)], dimensions)


def _read_layer(dense: Dense) -> DenseLayer:
    """Read the weights of a Dense module, in float64."""
    with readable(f"the weights of Dense module {dense.weights.parent}"):
        tensors = load_file(dense.weights)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    described = {"linear.weight": [dense.outputs, dense.inputs]}
    described |= {"linear.bias": [dense.outputs]} if dense.bias else {}
    if shapes != described:
        raise UnsupportedModel(
            f"the weights of Dense module {dense.weights.parent} are {_listed(shapes)}, and must be "
            f"{_listed(described)} by its config.json; correct in_features, out_features and bias there",
            field="model",
        )
    weight = tensors["linear.weight"].double()
    bias = tensors["linear.bias"].double() if dense.bias else weight.new_zeros(dense.outputs)
    return DenseLayer(weight, bias, _ACTIVATIONS.get(dense.activation))


def _listed(shapes: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))


def merged(layers: Sequence[DenseLayer]) -> list[DenseLayer]:
    """Return layers with the same function, as one layer where two without an activation between them follow.

    EmbeddingGemma widens its vectors to four times their size and narrows them again. The product of both
    weights is an eighth of their size.
    """
    made: list[DenseLayer] = []
    for layer in layers:
        before = made[-1] if made else None
        if before is None or before.activate or _is_larger(before, layer):
            made.append(layer)
            continue
        bias = layer.weight @ before.bias + layer.bias
        made[-1] = DenseLayer(layer.weight @ before.weight, bias, layer.activate)
    return made


def _is_larger(first: DenseLayer, second: DenseLayer) -> bool:
    """Return whether the product of the weights of two layers is larger than both weights."""
    return len(second.weight) * first.weight.shape[1] > first.weight.numel() + second.weight.numel()


def require_dimensions(dimensions: int, maximum: int, offered: Sequence[int]) -> None:
    """Raise InvalidInput unless embeddings of `maximum` dimensions can be truncated to `dimensions`.

    offered: the dimensions that the model was trained for; empty: any.
    """
    choices = sorted({*(number for number in offered if number < maximum), maximum})
    if offered and dimensions not in choices:
        listed = ", ".join(map(str, choices))
        raise InvalidInput(f"dimensions must be one of {listed} for this model", field="dimensions")
    if not 1 <= dimensions <= maximum:
        raise InvalidInput(
            f"dimensions must be 1 to {maximum}, which is what the model's embeddings have",
            field="dimensions",
        )
