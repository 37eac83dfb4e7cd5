"""The modules of encoders like BERT, without transformers' code of models.

Only the weights of a model are packed. The modules of transformers come with all that trains models and
generates text: their import takes seconds and 120 MB. So these encoders are read without them. Other models
are read as transformers reads them (load.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.checkpoints.hugging_face import declared
from attncache_core.errors import UnsupportedModel
from attncache_core.models.bert import BERT, DISTILBERT
from attncache_core.models.encoder import EncoderNames, embedding_of
from attncache_core.models.mpnet import MPNET, PADDING, buckets_of
from attncache_core.models.prepacked import ACTIVATIONS
from attncache_core.text.token_batch import pack


class _Family(NamedTuple):
    """What the encoders of one family have."""

    names: EncoderNames
    head: tuple[str, str]  # the linear layers of a classification head, first to last
    padding: Callable[[Any], int | None]  # from the configuration; see Embedding
    has_types: bool = False
    has_buckets: bool = False  # of relative positions


_DENSE = "classifier.dense", "classifier.out_proj"
_ROBERTA = _Family(BERT, _DENSE, lambda config: config.pad_token_id, has_types=True)
_FAMILIES = {
    "bert": _Family(BERT, ("pooler.dense", "classifier"), lambda _: None, has_types=True),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _Family(DISTILBERT, ("pre_classifier", "classifier"), lambda _: None),
    "mpnet": _Family(MPNET, _DENSE, lambda _: PADDING, has_buckets=True),
}
_BUCKETS = "encoder.relative_attention_bias"
# In front of the names of an encoder's weights, if the weights have a head; else the name of the family.
_PREFIXES = {"xlm-roberta": "roberta", "camembert": "roberta"}
# In checkpoints that were made from TensorFlow's.
_FORMER_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class BareEncoder(nn.Module):
    """The modules of an encoder and its head, under the names that checkpoints without a head have."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self._family = _FAMILIES[config.model_type]

    @property
    def base_model(self) -> BareEncoder:
        """The encoder, which is read from here as from a module of transformers."""
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the last states, [sequences, length, hidden], of token ids, int64 [sequences, length].

        For the calibration of 8-bit products, which reads the inputs of the linear layers. A model that
        serves is packed.
        """
        names, heads = self._family.names, self.config.num_attention_heads
        activation = ACTIVATIONS[_activation(self.config)]
        embed = embedding_of(self.embeddings, self._family.padding(self.config))
        x = embed(pack(ids.tolist())).unflatten(0, ids.shape)
        bias = self._position_bias(ids.shape[1])
        for layer in attrgetter(names.layers)(self):
            projected = [part(x) for part in attrgetter(names.query, names.key, names.value)(layer)]
            query, key, value = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in projected)
            context = functional.scaled_dot_product_attention(query, key, value, bias)
            output, attention_norm = attrgetter(names.output, names.attention_norm)(layer)
            x = attention_norm(x + output(context.transpose(1, 2).flatten(2)))
            up, down, norm = attrgetter(names.up, names.down, names.norm)(layer)
            x = norm(x + down(activation(up(x))))
        return x

    def _position_bias(self, length: int) -> torch.Tensor | None:
        """Return what the positions of two tokens add to their score, [heads, length, length]."""
        if not self._family.has_buckets:
            return None
        positions = torch.arange(length)
        by_bucket: Any = attrgetter(_BUCKETS)(self)
        return by_bucket(buckets_of(positions - positions[:, None])).movedim(2, 0)


class WeightReport(NamedTuple):
    """How the weights of a checkpoint differ from what its configuration describes."""

    missing: Sequence[str]
    unexpected: Sequence[str]


def is_bare(config: Any) -> bool:
    """Return whether `read_bare` can read a model. config: its configuration in transformers."""
    is_quantized = getattr(config, "quantization_config", None) is not None
    return config.model_type in _FAMILIES and _activation(config) in ACTIVATIONS and not is_quantized


def wrong_shape(
    checkpoint: Checkpoint, name: str, found: Sequence[int], expected: Sequence[int]
) -> UnsupportedModel:
    """Return the error for a weight of another shape than the configuration says."""
    is_head = name.startswith(("classifier", "score")) and expected[0] == len(checkpoint.classes)
    remedy = "; name all classes in id2label" if is_head else ""
    return UnsupportedModel(
        f"{name} of model {checkpoint.name} has the shape {list(found)} in the weights, and {list(expected)} "
        f"by config.json{remedy}",
        field="model",
    )


def wrong_type(checkpoint: Checkpoint, name: str, found: object) -> UnsupportedModel:
    """Return the error for a weight whose numbers are no floating-point numbers."""
    return UnsupportedModel(
        f"{name} of model {checkpoint.name} has the type {found}, and only floating-point weights are "
        "served; serve the model's weights from before they were quantised",
        field="model",
    )


def read_bare(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> tuple[BareEncoder, WeightReport]:
    """Return an encoder with the weights of a checkpoint in `dtype`, mapped from their files if possible.

    config: the checkpoint's configuration in transformers; see `is_bare`. Raises an error of safetensors if
    the weights cannot be read, UnsupportedModel if they have other shapes than the configuration says, are no
    floating-point numbers or have two names, and ValueError if the configuration describes no model.
    """
    family = _FAMILIES[config.model_type]
    with torch.device("meta"):
        model = _modules(family, config, has_head=checkpoint.task == "classify")
    weights = _weights(checkpoint)
    expected = model.state_dict()
    for name in sorted(expected.keys() & weights.keys()):
        found, weight = weights[name], expected[name]
        if found.shape != weight.shape:
            raise wrong_shape(checkpoint, name, found.shape, weight.shape)
        if not found.is_floating_point():
            raise wrong_type(checkpoint, name, found.dtype)
        weights[name] = found.to(dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    return model, WeightReport(missing, unexpected)


def _activation(config: Any) -> Any:
    return declared(config, "hidden_act") or config.activation  # DistilBERT's name


def _modules(family: _Family, config: Any, *, has_head: bool) -> BareEncoder:
    """Return the modules of an encoder, whose weights are still to be set."""
    hidden, heads, names = config.hidden_size, config.num_attention_heads, family.names
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of the {heads} attention heads")
    inner = config.hidden_dim if config.model_type == "distilbert" else config.intermediate_size
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
        made[_BUCKETS] = _table(buckets, heads)
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


def _weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, with the names that they have without a head.

    Raises UnsupportedModel if two weights have one name.
    """
    family = checkpoint.config["model_type"]
    prefix = _PREFIXES.get(family, family) + "."
    weights: dict[str, torch.Tensor] = {}
    for file in checkpoint.weight_files():
        for written, weight in load_file(file).items():
            name = written.removeprefix(prefix)
            for former, present in _FORMER_NAMES.items():
                name = name.replace(former, present)
            if name in weights and not torch.equal(weights[name], weight):
                raise UnsupportedModel(
                    f"the weights of model {checkpoint.name} have {name} under two names, with other "
                    f"numbers; one of the names is {written}",
                    field="model",
                )
            weights[name] = weight
    return weights
