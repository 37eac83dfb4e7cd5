"""Read what a model is: its task, pooling, prompt and length.

    "all-MiniLM-L6-v2" -> sources.find_source -> a folder
                       -> Checkpoint (no weights read yet) -> tokenizer, fingerprint, models.load_model

A sentence-transformers folder is read as that library reads it; a plain Hugging Face encoder is pooled
by its mean, as that library does too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import safe_open

from attncache_core.errors import InvalidInput, UnsupportedModel, readable
from attncache_core.prompts import Template
from attncache_core.sources import WEIGHTS, find_source

DEFAULT_MODEL = "all-MiniLM-L6-v2"
Task = Literal["embed", "classify", "label-logits"]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

# Any of these files may be what a tokenizer is made from. Which one depends on the family.
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
# What else changes how a text becomes tokens. Patterns, relative to the folder.
_TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
# The flags that sentence-transformers wrote before version 6, in the order in which it joins the modes.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Quantization(StrEnum):
    """In how many bits a model's linear layers are kept and multiplied; models/quantized.py says how."""

    INT8 = "int8"  # weights and activations: less time and memory
    INT8_WEIGHT_ONLY = "int8-weight-only"  # less memory, nearly exact
    INT4 = "int4"  # weights: least memory


@dataclass(frozen=True, slots=True)
class Pooling:
    """How token vectors become one: the modes, joined in this order."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True  # False: the prompt's tokens are left out


@dataclass(frozen=True, slots=True)
class DroppedLayers:
    """Layers that are run without their attention, or left out as a whole; numbered from 0."""

    attention: frozenset[int] = frozenset()
    blocks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, described, and how it is to be run. Nothing of its weights has been read."""

    name: str
    folder: Path  # of config.json, the tokenizer and the weights
    source: str  # where it was found, for people
    config: dict[str, Any]
    task: Task
    pooling: Pooling
    normalize: bool  # the model's own way; a request may say otherwise
    max_tokens: int | None  # None: what the tokenizer and the positions allow
    lowercase: bool
    template: Template  # what stands round every text, unless a request says otherwise
    prompts: Mapping[str, str]  # by the names that a request may give; each stands before a text
    labels: tuple[str, ...] = ()  # an operator's, to choose from
    dropped: DroppedLayers = DroppedLayers()
    quantization: Quantization | None = None  # of the layers' linear weights, once they are read
    revision: str | None = None  # on the Hub, as it was asked for
    commit: str | None = None  # what that was when the model was found; None if it is not from the Hub

    @property
    def variant(self) -> dict[str, Any]:
        """What is run otherwise than the model on disk says, for JSON and people; empty for that model."""
        layers = {"dropped_attention": self.dropped.attention, "dropped_blocks": self.dropped.blocks}
        variant: dict[str, Any] = {name: sorted(numbers) for name, numbers in layers.items() if numbers}
        return variant | ({"quantization": self.quantization} if self.quantization else {})

    @property
    def position_limit(self) -> int | None:
        """The most tokens that the model has positions for; None if config.json names no limit."""
        positions: int | None = self.config.get("max_position_embeddings")
        family = self.config.get("model_type")
        if positions is None or family not in _POSITIONS_AFTER_PADDING:
            return positions
        # The model of MPNet takes 1 whatever its configuration says.
        padding = 1 if family == "mpnet" else self.config.get("pad_token_id", 1)
        return positions - padding - 1

    @property
    def vocabularies(self) -> list[Path]:
        """The files in the folder that a tokenizer can be made from; empty if it has no tokenizer."""
        return self._files(_VOCABULARIES)

    @property
    def tokenizer_files(self) -> list[Path]:
        """All files in the folder that decide how a text becomes tokens, chat templates included."""
        return self._files(_VOCABULARIES + _TOKENIZER_SETTINGS)

    def weight_names(self) -> list[str]:
        """The names of the tensors in its files. Raises UnsupportedModel where these cannot be read."""
        single, index = (self.folder / name for name in WEIGHTS)
        with readable(f"the weights of model {self.name}"):
            if not single.is_file():
                return list(_read_json(index)["weight_map"])
            with safe_open(single, "pt") as file:
                return list(file.keys())

    def adapted(
        self,
        *,
        template: Template | None = None,
        pooling: PoolingMode | None = None,
        label_logits: bool = False,
        labels: Sequence[str] = (),
    ) -> Checkpoint:
        """The same model used in another way than its folder says; None leaves a matter as it is.

        label_logits: choose among labels by the logits that a decoder gives their tokens after the text;
        labels: to choose from, by default; without label_logits, by the nearest embedding.
        Raises InvalidInput where the model has no such choice.
        """
        if label_logits and self.task == "classify":
            raise InvalidInput(
                f"model {self.name} has classes of its own and no language head; leave out task label-logits",
                field="task",
            )
        task: Task = "label-logits" if label_logits else self.task
        if pooling and task != "embed":
            raise InvalidInput(
                f"pooling is of embeddings, and model {self.name} is to classify; leave it out",
                field="pooling",
            )
        if labels and task == "classify":
            raise InvalidInput(
                f"model {self.name} is a classifier and has labels of its own; leave them out", field="labels"
            )
        if labels and (len(labels) < 2 or len(set(labels)) < len(labels) or not all(labels)):
            raise InvalidInput("labels must be two or more different names", field="labels")
        used = Pooling(("lasttoken",)) if label_logits else self.pooling
        return replace(
            self,
            task=task,
            template=template or self.template,
            pooling=replace(used, modes=(pooling,)) if pooling else used,
            normalize=self.normalize and not label_logits,
            labels=tuple(labels),
        )

    def fingerprint(self) -> str:
        """SHA-256 over what decides the attention maps: architecture, weights, tokenizer files and variant.

        Not the compute dtype, the pooling or the template: they leave the maps of given tokens alone.
        Reads every weight file once in the life of the process, and again should it change.
        """
        digest = hashlib.sha256()
        for path in sorted([*self.folder.glob("*.safetensors"), *self.tokenizer_files]):
            if path.is_file():
                state = path.stat()
                digest.update(path.relative_to(self.folder).as_posix().encode())
                digest.update(_file_digest(path, state.st_size, state.st_mtime_ns))
        architecture = {key: self.config.get(key) for key in sorted(self.config) if key not in _NOT_THE_MODEL}
        digest.update(json.dumps(architecture, sort_keys=True).encode())
        if self.variant:
            digest.update(json.dumps(self.variant, sort_keys=True).encode())
        return digest.hexdigest()

    def embedding_fingerprint(self) -> str:
        """SHA-256 over what decides a text's embedding: the maps' fingerprint, pooling and template too."""
        way = [self.fingerprint(), self.pooling.modes, self.pooling.include_prompt]
        way += [self.max_tokens, self.lowercase, self.template.prefix, self.template.suffix]
        return hashlib.sha256(json.dumps(way).encode()).hexdigest()

    def use_fingerprint(self) -> str:
        """SHA-256 over what decides the answer to a text: embedding_fingerprint, prompts, task and labels."""
        way = [self.embedding_fingerprint(), sorted(self.prompts.items()), self.task, self.labels]
        return hashlib.sha256(json.dumps(way).encode()).hexdigest()

    def _files(self, patterns: Sequence[str]) -> list[Path]:
        return [path for pattern in patterns for path in self.folder.glob(pattern) if path.is_file()]


# Entries of config.json that change when a model is saved again and say nothing about its maps.
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})

# Families that count positions from the number of the padding token + 1.
_POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "mpnet")


def find_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """The model named `model`: a folder, a model carried by an installed package, or a Hub id.

    revision: a branch, tag or commit of a model on the Hub; None: its main branch.
    Raises ModelNotFound, which lists what was tried, UnsupportedModel for a folder of another kind, and
    InvalidInput for a revision of what does not come from the Hub.
    """
    found = find_source(model, revision)
    checkpoint = read_checkpoint(found.folder, name=model, source=found.description)
    return replace(checkpoint, revision=revision, commit=found.commit)


def read_checkpoint(folder: Path, *, name: str | None = None, source: str = "folder") -> Checkpoint:
    """Describe the model in `folder`, a sentence-transformers or a Hugging Face one.

    Raises UnsupportedModel where a file is not there, or something else stands in it.
    """
    with readable(f"a JSON file of model folder {folder}"):
        return _described(folder, name or folder.name, source)


def _described(folder: Path, name: str, source: str) -> Checkpoint:
    modules = _modules(folder)
    transformer = folder / modules.get("Transformer", "")
    config = _read_json(transformer / "config.json")
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{transformer / 'config.json'} is no JSON object", field="model")
    if not any((transformer / weights).is_file() for weights in WEIGHTS):
        raise UnsupportedModel(
            f"model folder {transformer} has no model.safetensors; other weight formats are not read",
            field="model",
        )
    settings = _read_json(transformer / "sentence_bert_config.json", {})
    prompting = _read_json(folder / "config_sentence_transformers.json", {})
    prompts = prompting.get("prompts") or {}
    classifier = any("ForSequenceClassification" in name for name in config.get("architectures") or [])
    task: Task = "classify" if classifier and not modules else "embed"
    if task == "classify" and config.get("problem_type") == "regression":
        raise UnsupportedModel(
            f"model folder {folder} predicts a number (problem_type: regression), and models of classes are "
            "served only",
            field="model",
        )
    return Checkpoint(
        name=name,
        folder=transformer,
        source=source,
        config=config,
        task=task,
        pooling=_read_pooling(folder / modules["Pooling"]) if "Pooling" in modules else Pooling(),
        normalize="Normalize" in modules,
        max_tokens=settings.get("max_seq_length"),
        lowercase=bool(settings.get("do_lower_case", False)),
        template=Template(prefix=prompts.get(prompting.get("default_prompt_name") or "", "")),
        prompts=prompts,
    )


@cache
def _file_digest(path: Path, size: int, changed: int) -> bytes:  # noqa: ARG001
    """SHA-256 of a file; size in bytes and time of change in ns tell another content apart."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _modules(folder: Path) -> dict[str, str]:
    """Kind -> subfolder of a sentence-transformers model's modules; empty for a plain folder."""
    listed = _read_json(folder / "modules.json", [])
    modules = {module["type"].rsplit(".", 1)[-1]: module["path"] for module in listed}
    unknown = sorted(set(modules) - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        raise UnsupportedModel(
            f"model folder {folder} has modules that are not served: {', '.join(unknown)}", field="model"
        )
    return modules


def _read_pooling(folder: Path) -> Pooling:
    config = _read_json(folder / "config.json")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    unknown = sorted(set(modes) - set(get_args(PoolingMode)))
    if unknown:
        raise UnsupportedModel(f"pooling {', '.join(unknown)} of {folder} is not served", field="model")
    return Pooling(modes, bool(config.get("include_prompt", True)))


def _read_json(path: Path, default: Any = None) -> Any:
    """The JSON in `path`, or `default`, where one is given, if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if default is not None:
            return default
        raise UnsupportedModel(f"model folder {path.parent} has no {path.name}", field="model") from error
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read as JSON", field="model") from error
