"""Define Checkpoint, the description of a model on disk, and its fingerprints.

    description.find_checkpoint -> Checkpoint (no weights are read)
                                -> tokenizer, fingerprints, models.load_model

A Checkpoint holds the task, pooling, template and length limit of a model, and how the model is to be run.
Fingerprints tell whether a database, a classifier or a cached result was made with the same model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from attncache_core.checkpoints.model_files import digest_of, read_json, require_no_pointers
from attncache_core.checkpoints.sources import WEIGHTS
from attncache_core.checkpoints.template import Template
from attncache_core.corpus import default_corpus
from attncache_core.corpus.reading import spread
from attncache_core.errors import InvalidInput, UnsupportedModel, readable

Task = Literal["embed", "classify", "label-logits"]
# What makes a score of the logit of a cross-encoder with one class.
Activation = Literal["sigmoid", "identity"]
# The names of torch.nn classes; heads/embedding.py has the functions.
DenseActivation = Literal["GELU", "Identity", "ReLU", "SiLU", "Sigmoid", "Tanh"]
# What computes, and in which format of numbers: runtime/devices.py has both.
Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float32"]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

# Files from which a tokenizer can be made. The model's family decides which of them are used.
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)
# Other files that change how a text becomes tokens, as glob patterns relative to the model folder.
_TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


# Only the maxima of activations are read from these texts, and more texts hardly change the maxima.
MAX_QUANTIZATION_TEXTS = 100


class Quantization(StrEnum):
    """The number format of a model's linear layers; models/quantized.py implements the formats."""

    INT8 = "int8"  # 8-bit weights and activations: less time and memory
    INT8_WEIGHT_ONLY = "int8-weight-only"  # 8-bit weights: less memory, nearly exact
    INT4 = "int4"  # 4-bit weights: least memory


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the token vectors of a sequence become one vector."""

    modes: tuple[str, ...] = ("mean",)  # the vectors of all modes are concatenated in this order
    include_prompt: bool = True  # False: the vectors of the prompt's tokens are left out


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with an activation, applied to pooled vectors."""

    weights: Path  # safetensors: linear.weight [outputs, inputs] and, with a bias, linear.bias [outputs]
    inputs: int
    outputs: int
    bias: bool
    activation: DenseActivation


@dataclass(frozen=True, slots=True)
class DroppedLayers:
    """Layers that run without attention or not at all; layers are numbered from 0."""

    attention: frozenset[int] = frozenset()  # layers that run without attention
    blocks: frozenset[int] = frozenset()  # layers that are skipped as a whole


@dataclass(frozen=True)
class Checkpoint:
    """The description of a model on disk, and how to run the model. Contains no weights."""

    name: str
    folder: Path  # contains config.json, the tokenizer and the weights
    source: str  # where the model was found, for people
    config: dict[str, Any]
    task: Task
    pooling: Pooling
    normalize: bool = False  # whether embeddings get unit length by default; a request may override it
    max_tokens: int | None = None  # None: as many as the tokenizer and the position embeddings allow
    lowercase: bool = False  # whether the tokenizer lowercases texts
    template: Template = field(default_factory=Template)  # around every text, unless a request overrides it
    prompts: Mapping[str, str] = field(default_factory=dict)  # a name that a request may give -> its prefix
    default_prompt: str | None = None  # the name of the prompt that `template` holds; None: of no prompt
    labels: tuple[str, ...] = ()  # the operator's labels to choose from
    dense: tuple[Dense, ...] = ()  # layers between pooling and normalisation
    truncate_dim: int | None = None  # embeddings have at most this many dimensions; None: no limit
    matryoshka_dimensions: tuple[int, ...] = ()  # a request may ask for these; empty: for any number
    activation: Activation = "sigmoid"  # of the score of a pair, if the model has one class
    dropped: DroppedLayers = DroppedLayers()
    quantization: Quantization | None = None  # of the linear layers' weights, applied while they are loaded
    quantization_texts: tuple[str, ...] = ()  # to calibrate int8 with; empty: texts of the shipped corpus
    revision: str | None = None  # the requested branch, tag or commit on the Hub
    commit: str | None = None  # the commit of that revision; None if the model is not from the Hub
    # SHA-256 of each file that decides the answers, as the model was loaded; None: as the files are now.
    digests: Mapping[Path, bytes] | None = None

    @property
    def variant(self) -> dict[str, Any]:
        """The differences to the model on disk, as JSON values; empty if the model runs unchanged."""
        layers = {"dropped_attention": self.dropped.attention, "dropped_blocks": self.dropped.blocks}
        variant: dict[str, Any] = {name: sorted(numbers) for name, numbers in layers.items() if numbers}
        if self.quantization:
            variant["quantization"] = self.quantization
        if self.quantization is Quantization.INT8:
            # Other maxima are read if the calibration texts stand in another template, or are lowercased.
            template = self.template
            texts = [template.around(template.sample(text)) for text in self.calibration_texts]
            texts = [text.lower() for text in texts] if self.lowercase else texts
            variant["quantization_texts"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
        return variant

    @property
    def behind_pooling(self) -> list[Any]:
        """What makes embeddings of pooled vectors, as JSON values; empty if they are the embeddings.

        Reads the weights, as `fingerprint` does.
        """
        digests = self._digests if self.dense else {}
        layers: list[Any] = [
            [digests[dense.weights].hex(), dense.inputs, dense.outputs, dense.bias, dense.activation]
            for dense in self.dense
        ]
        return layers if self.truncate_dim is None else [*layers, self.truncate_dim]

    @property
    def calibration_texts(self) -> tuple[str, ...]:
        """The texts that int8 is calibrated with; see models/smoothing.py."""
        return self.quantization_texts or _default_texts()

    @property
    def position_limit(self) -> int | None:
        """The most tokens for which the model has position embeddings; None if config.json names no limit.

        Raises UnsupportedModel if positions are numbered from the padding token on, and there is none.
        """
        family = self.config.get("model_type")
        usual = _USUAL_POSITIONS if family in _LEARNED_POSITIONS else None
        # The second name is that of NomicBERT's files.
        usual = self.config.get("n_positions", usual) if family == "nomic_bert" else usual
        positions: int | None = self.config.get("max_position_embeddings", usual)
        if positions is None or family not in _POSITIONS_AFTER_PADDING:
            return positions
        # transformers' MPNet model always uses 1, whatever config.json says.
        padding = 1 if family == "mpnet" else self.config.get("pad_token_id", 1)
        if padding is None:
            raise UnsupportedModel(
                f"pad_token_id in config.json of model {self.name} must be a number, from which {family} "
                "numbers positions",
                field="model",
            )
        if positions - padding < 2:
            raise UnsupportedModel(
                f"config.json of model {self.name} leaves no position for a token: max_position_embeddings "
                f"is {positions}, and {family} numbers positions from pad_token_id, {padding}, on",
                field="model",
            )
        return positions - padding - 1

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes of a model with a classification head, in the order of its logits."""
        # Hugging Face saves neither the names of unnamed classes nor their number if it is two.
        names = self.config.get("id2label") or {
            row: f"LABEL_{row}" for row in range(self.config.get("num_labels", 2))
        }
        return tuple(names[key] for key in sorted(names, key=int))

    @property
    def is_for_pairs(self) -> bool:
        """Whether the model is made for pairs of texts, as far as its template or its one class tells."""
        return self.template.is_for_pairs or (self.task == "classify" and len(self.classes) == 1)

    @property
    def token_types(self) -> int:
        """The number of types that a token may have; 0 or 1 if the model does not tell tokens apart."""
        default = 2 if self.config.get("model_type") in _TWO_TYPES else 0
        return int(self.config.get("type_vocab_size", default) or 0)

    @property
    def vocabularies(self) -> list[Path]:
        """The files from which the tokenizer can be made; empty if the folder has no tokenizer."""
        return self._files(_VOCABULARIES)

    @property
    def tokenizer_files(self) -> list[Path]:
        """All files that decide how a text becomes tokens, including chat templates."""
        return self._files(_VOCABULARIES + _TOKENIZER_SETTINGS)

    def weight_names(self) -> list[str]:
        """Return the names of the tensors in the weight files.

        Raises UnsupportedModel if a weight file cannot be read.
        """
        single, index = (self.folder / name for name in WEIGHTS)
        with readable(f"the weights of model {self.name}"):
            if not single.is_file():
                return list(read_json(index)["weight_map"])
            with safe_open(single, "pt") as file:
                return list(file.keys())

    def weight_files(self) -> list[Path]:
        """Return the files that hold the tensors.

        Raises UnsupportedModel if their index cannot be read, or names what is no safetensors file in the
        model's folder.
        """
        single, index = (self.folder / name for name in WEIGHTS)
        if single.is_file():
            return [single]
        with readable(f"the weights of model {self.name}"):
            names = sorted(set(read_json(index, {"weight_map": {}})["weight_map"].values()))
            for name in names:
                if not name.endswith(".safetensors") or Path(name).is_absolute() or ".." in Path(name).parts:
                    raise UnsupportedModel(
                        f"{index.name} of model {self.name} names {name!r}, and weights are read only from "
                        ".safetensors files in the model's folder",
                        field="model",
                    )
        return [self.folder / name for name in names]

    def adapted(
        self,
        *,
        template: Template | None = None,
        pooling: PoolingMode | None = None,
        label_logits: bool = False,
        labels: Iterable[str] = (),
    ) -> Checkpoint:
        """Return the same model with other settings than its folder gives; None keeps a setting.

        label_logits: choose among labels by the logits that a decoder gives the labels' tokens after a text.
        labels: the default labels; without label_logits, the label with the nearest embedding is chosen.
        Raises InvalidInput if the model does not support a setting, and if labels are not two or more
        different names.
        """
        labels = labels if isinstance(labels, str) else tuple(labels)
        if label_logits and self.task == "classify":
            raise InvalidInput(
                f"model {self.name} has classes of its own and no language head; leave out task label-logits",
                field="task",
            )
        task: Task = "label-logits" if label_logits else self.task
        if pooling and task != "embed":
            raise InvalidInput(
                f"pooling is for embeddings, and model {self.name} classifies; leave pooling out",
                field="pooling",
            )
        if template and template.is_for_pairs and task == "embed":
            raise InvalidInput(
                f"a template with {{query}} and {{document}} is for models that score pairs, and model "
                f"{self.name} gives embeddings; give a template with {{}}, or task label-logits for a "
                "decoder",
                field="template",
            )
        if labels and task == "classify":
            raise InvalidInput(
                f"model {self.name} is a classifier and has labels of its own; leave labels out",
                field="labels",
            )
        if isinstance(labels, str) or (
            labels
            and (
                len(labels) < 2
                or len(set(labels)) < len(labels)
                or not all(isinstance(label, str) and label for label in labels)
            )
        ):
            raise InvalidInput("labels must be two or more different names", field="labels")
        used = Pooling(("lasttoken",)) if label_logits else self.pooling
        return replace(
            self,
            task=task,
            template=template or self.template,
            default_prompt=None if template else self.default_prompt,
            pooling=replace(used, modes=(pooling,)) if pooling else used,
            normalize=self.normalize and not label_logits,
            dense=() if label_logits else self.dense,
            truncate_dim=None if label_logits else self.truncate_dim,
            labels=labels,
        )

    def as_it_is(self) -> Checkpoint:
        """Return the checkpoint with the digests of its files as they are now, which its fingerprints keep.

        Every file is read once per process, and again if it changes. Raises UnsupportedModel if a file cannot
        be read, if the checkpoint has the digests of other files, or if config.json is not what it was.
        """
        weights = {*self.folder.glob("*.safetensors"), *self.weight_files()}
        files = [*weights, *self.tokenizer_files, *self._not_named]
        with readable(f"the files of model {self.name}"):
            require_no_pointers([*self.weight_files(), *self.tokenizer_files, *self._not_named])
            digests = {path: digest_of(path) for path in files if path.is_file()}
        described = json.dumps(read_json(self.folder / "config.json"))
        if self.digests not in (None, digests) or described != json.dumps(self.config):
            raise UnsupportedModel(
                f"the files of model {self.name} were changed since they were first read; put them back, or "
                "load the model anew",
                field="model",
            )
        return replace(self, digests=digests)

    def fingerprint(self) -> str:
        """Return the SHA-256 of everything that decides the attention maps, in hexadecimal.

        Architecture, weights, tokenizer files, variant and the mends of AttnCache decide the maps. Compute
        dtype and pooling do not change the maps of given tokens, and the template only changes the weights of
        int8, which are calibrated in the template. Without `digests`, reads the files as `as_it_is` does.
        """
        digest, digests = hashlib.sha256(), self._digests
        for path in sorted(digests.keys() - self._not_named):
            digest.update(path.relative_to(self.folder).as_posix().encode())
            digest.update(digests[path])
        architecture = {key: self.config.get(key) for key in sorted(self.config) if key not in _NOT_THE_MODEL}
        digest.update(json.dumps(architecture, sort_keys=True).encode())
        for changed in (self.variant, _mends(self.config)):
            if changed:
                digest.update(json.dumps(changed, sort_keys=True).encode())
        return digest.hexdigest()

    def embedding_fingerprint(self) -> str:
        """Return the SHA-256 of everything that decides the embedding of a text, in hexadecimal.

        The fingerprint, pooling, Dense modules, truncation, length limit, lowercasing and template decide the
        embedding.
        """
        parts = [self.fingerprint(), self.pooling.modes, self.pooling.include_prompt]
        parts += [self.max_tokens, self.lowercase, self.template.prefix, self.template.suffix]
        parts += self.behind_pooling
        if self.template.is_for_pairs:
            parts.append(["pairs", self.template.middle])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def use_fingerprint(self) -> str:
        """Return the SHA-256 of everything that decides the answer to a text, in hexadecimal.

        The embedding fingerprint, named prompts, task and labels decide the answer, and whether embeddings
        get unit length.
        """
        parts = [self.embedding_fingerprint(), sorted(self.prompts.items()), self.task, self.labels]
        parts += ["no unit length"] if self.task == "embed" and not self.normalize else []
        parts += [] if self.activation == "sigmoid" else [self.activation]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def _not_named(self) -> set[Path]:
        """The files that must stay as they are, and whose digests are not in `fingerprint`."""
        # The fingerprints have `config`, and the models are made from the file.
        files = {self.folder / name for name in ("config.json", WEIGHTS[1])}
        return files | {dense.weights for dense in self.dense}

    @property
    def _digests(self) -> Mapping[Path, bytes]:
        return (self if self.digests else self.as_it_is()).digests or {}

    def _files(self, patterns: Sequence[str]) -> list[Path]:
        return [path for pattern in patterns for path in self.folder.glob(pattern) if path.is_file()]


# Entries of config.json that may change when a model is saved again and do not change its maps.
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def _mends(config: Mapping[str, Any]) -> list[str]:
    """Return the mends of AttnCache that changed what a model with this config.json computes.

    What was stored before such a mend (maps, keys and values, classifiers, gates) is of another computation,
    so each mend that changes answers of models that were served adds a line here.
    """
    family = config.get("model_type")
    activations = [config.get(name) for name in ("hidden_act", "hidden_activation", "activation")]
    mends = {
        "weights of activations are read": "prelu" in activations or "xielu" in activations,
        "Mixtral has no layer_types": family == "mixtral" and bool(config.get("layer_types")),
        "Gemma 3 has no attn_logit_softcapping": (
            family == "gemma3_text" and config.get("attn_logit_softcapping") is not None
        ),
        "Gemma 3 puts is_causal first": family == "gemma3_text" and config.get("is_causal") is False,
        "rope_interleave of null is false": (
            family == "deepseek_v3" and config.get("rope_interleave", True) is None
        ),
    }
    return [mend for mend, applies in mends.items() if applies]


# Families of two token types, unless config.json names another number.
_TWO_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "nomic_bert")

# Families that have an embedding for each position, and the number of positions if config.json names none.
_LEARNED_POSITIONS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "deberta-v2")
_USUAL_POSITIONS = 512

# Families that number positions from the id of the padding token + 1.
_POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")


@cache
def _default_texts() -> tuple[str, ...]:
    """Return equally spaced texts of the shipped corpus, so texts of all topics."""
    return tuple(spread([sentence.text for sentence in default_corpus()], MAX_QUANTIZATION_TEXTS))
