"""The modules of encoders like BERT, with weights and without code.

Only the weights of a model are packed. The modules of transformers come with all that trains models and
generates text: their import takes seconds and 120 MB. So encoders are read without them, if none of their
code is needed. Other models are read as transformers reads them (load.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.checkpoints.hugging_face import declared
from attncache_core.models.bert import BERT, DISTILBERT
from attncache_core.models.encoder import EncoderNames
from attncache_core.models.mpnet import MPNET
from attncache_core.models.prepacked import ACTIVATIONS


class _Family(NamedTuple):
    """What the encoders of one family have."""

    names: EncoderNames
    head: tuple[str, str]  # the linear layers of a classification head, first to last
    has_types: bool = False
    has_buckets: bool = False  # of relative positions


_DENSE = "classifier.dense", "classifier.out_proj"
_ROBERTA = _Family(BERT, _DENSE, has_types=True)
_FAMILIES = {
    "bert": _Family(BERT, ("pooler.dense", "classifier"), has_types=True),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": _Family(DISTILBERT, ("pre_classifier", "classifier")),
    "mpnet": _Family(MPNET, _DENSE, has_buckets=True),
}
# In checkpoints that were made from TensorFlow's.
_FORMER_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class BareEncoder(nn.Module):
    """The modules of an encoder and its head, under the names that checkpoints without a head have."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @property
    def base_model(self) -> BareEncoder:
        """The encoder, which is read from here as from a module of transformers."""
        return self


class WeightReport(NamedTuple):
    """How the weights of a checkpoint differ from what its configuration describes."""

    missing: Sequence[str]
    unexpected: Sequence[str]


def is_bare(config: Any) -> bool:
    """Return whether `read_bare` can read a model. config: its configuration in transformers."""
    is_quantized = getattr(config, "quantization_config", None) is not None
    return config.model_type in _FAMILIES and _activation(config) in ACTIVATIONS and not is_quantized


def read_bare(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> tuple[BareEncoder, WeightReport]:
    """Return an encoder with the weights of a checkpoint in `dtype`, mapped from their files if possible.

    config: the checkpoint's configuration in transformers; see `is_bare`. Raises an error of safetensors or
    torch if the weights cannot be read or have other shapes than the configuration says, and ValueError if
    the configuration describes no model.
    """
    family = _FAMILIES[config.model_type]
    with torch.device("meta"):
        model = _modules(family, config, has_head=checkpoint.task == "classify")
    weights = {name: weight.to(dtype) for name, weight in _weights(checkpoint) if weight.is_floating_point()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    return model, WeightReport(missing, unexpected)


def _activation(config: Any) -> Any:
    return declared(config, "hidden_act") or config.activation  # DistilBERT's name


def _modules(family: _Family, config: Any, *, has_head: bool) -> BareEncoder:
    """Return the modules of an encoder, whose weights are still to be set."""
    hidden, heads, names = config.hidden_size, config.num_attention_heads, family.names
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of the {heads} attention heads")
    inner = declared(config, "intermediate_size") or config.hidden_dim  # DistilBERT's name
    epsilon = 1e-12 if config.model_type == "distilbert" else config.layer_norm_eps
    rows = {"word": config.vocab_size, "position": config.max_position_embeddings}
    if family.has_types:
        rows["token_type"] = config.type_vocab_size
    sizes = {names.up: (hidden, inner), names.down: (inner, hidden)}

    def layer() -> nn.Module:
        made: dict[str, Any] = {
            name: nn.Linear(*sizes.get(name, (hidden, hidden))) for name in names.linear_layers
        }
        norms = {name: nn.LayerNorm(hidden, epsilon) for name in (names.attention_norm, names.norm)}
        return _with(nn.Module(), made | norms | {names.activation: ACTIVATIONS[_activation(config)]})

    made: dict[str, Any] = {f"embeddings.{kind}_embeddings": _table(n, hidden) for kind, n in rows.items()}
    made["embeddings.LayerNorm"] = nn.LayerNorm(hidden, epsilon)
    made[names.layers] = nn.ModuleList([layer() for _ in range(config.num_hidden_layers)])
    if family.has_buckets:
        buckets = config.relative_attention_num_buckets
        made["encoder.relative_attention_bias"] = _table(buckets, heads)
    if has_head:
        dense, score = family.head
        made |= {dense: nn.Linear(hidden, hidden), score: nn.Linear(hidden, config.num_labels)}
    return _with(BareEncoder(config), made)


def _table(rows: int, width: int) -> nn.Embedding:
    # Its constructor would draw random numbers, which imports the compiler of torch for the device "meta".
    return nn.Embedding.from_pretrained(torch.empty(rows, width))


def _with(root: nn.Module, parts: Mapping[str, Any]) -> Any:
    """Return a module with its parts, whose names are paths, such as "attention.self.query"."""
    for path, part in parts.items():
        *parents, name = path.split(".")
        module = root
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        setattr(module, name, part)
    return root


def _weights(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a checkpoint, with the names that they have without a head."""
    prefix = checkpoint.config["model_type"].removeprefix("xlm-") + "."
    for file in checkpoint.weight_files():
        for name, weight in load_file(file).items():
            for former, present in _FORMER_NAMES.items():
                name = name.replace(former, present)
            yield name.removeprefix(prefix), weight
