"""Describe the Dense modules of a sentence-transformers folder: linear layers behind the pooling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from attncache_core.checkpoints.json_files import read_json
from attncache_core.errors import UnsupportedModel

# The names of torch.nn classes; heads/embedding.py has the functions.
Activation = Literal["GELU", "Identity", "ReLU", "SiLU", "Sigmoid", "Tanh"]


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with an activation, applied to pooled vectors."""

    weights: Path  # safetensors: linear.weight [outputs, inputs] and, with a bias, linear.bias [outputs]
    inputs: int
    outputs: int
    bias: bool
    activation: Activation


def read_dense(folder: Path) -> Dense:
    """Describe the Dense module in `folder`.

    Raises UnsupportedModel if the folder has no weights in safetensors, and if the module has an unknown
    activation, reads or writes token vectors, or adds its input to its output.
    """
    config, weights = read_json(folder / "config.json"), folder / "model.safetensors"
    if not weights.is_file():
        raise UnsupportedModel(
            f"Dense module {folder} has no model.safetensors; other weight formats are not read",
            field="model",
        )
    names = {config.get(name) or "sentence_embedding" for name in ("module_input_name", "module_output_name")}
    if config.get("use_residual") or names != {"sentence_embedding"}:
        raise UnsupportedModel(
            f"Dense module {folder} is not a plain layer on pooled vectors (use_residual, module_input_name "
            "or module_output_name in its config.json); such modules are not supported",
            field="model",
        )
    return Dense(
        weights=weights,
        inputs=int(config["in_features"]),
        outputs=int(config["out_features"]),
        bias=bool(config.get("bias", True)),
        activation=_activation(config.get("activation_function", "torch.nn.Tanh"), folder),
    )


def _activation(written: object, folder: Path) -> Activation:
    """Return the class name in a dotted name such as torch.nn.modules.linear.Identity."""
    named = str(written).split(".")
    for known in get_args(Activation):
        if named[:2] == ["torch", "nn"] and named[-1] == known:
            return known
    raise UnsupportedModel(
        f"the activation_function of Dense module {folder} is not supported; supported are: "
        f"{', '.join(get_args(Activation))} of torch.nn",
        field="model",
    )
