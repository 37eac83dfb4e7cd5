"""Find a model and read what it is: where it lies, its task, pooling, prompt and length.

    "all-MiniLM-L6-v2" -> a folder | an installed package | the Hugging Face cache | the Hub
                       -> Checkpoint (no weights read yet) -> tokenizer, fingerprint, models.load_model

A sentence-transformers folder is read as that library reads it; a plain Hugging Face encoder is pooled
by its mean, as that library does too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open

from attncache_core.errors import InvalidInput, ModelNotFound, UnsupportedModel, readable
from attncache_core.prompts import Template

DEFAULT_MODEL = "all-MiniLM-L6-v2"
Task = Literal["embed", "classify", "label-logits"]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]
# Any of them may be what a tokenizer is made from; which, is the family's business.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "added_tokens.json",
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
    def tokenizer_files(self) -> list[Path]:
        """What is there of the files that a tokenizer may be made from."""
        return [path for name in _TOKENIZER_FILES if (path := self.folder / name).is_file()]

    def weight_names(self) -> list[str]:
        """The names of the tensors in its files. Raises UnsupportedModel where these cannot be read."""
        single, index = (self.folder / name for name in _WEIGHTS)
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
        """SHA-256 over what decides the attention maps: architecture, weights, tokenizer and variant.

        Not the compute dtype, the pooling or the template: they leave the maps of given tokens alone.
        Reads every weight file once in the life of the process, and again should it change.
        """
        digest = hashlib.sha256()
        for path in sorted([*self.folder.glob("*.safetensors"), *self.tokenizer_files]):
            if path.is_file():
                state = path.stat()
                digest.update(path.name.encode())
                digest.update(_file_digest(path, state.st_size, state.st_mtime_ns))
        architecture = {key: self.config.get(key) for key in sorted(self.config) if key not in _NOT_THE_MODEL}
        digest.update(json.dumps(architecture, sort_keys=True).encode())
        if self.variant:
            digest.update(json.dumps(self.variant, sort_keys=True).encode())
        return digest.hexdigest()

    def embedding_fingerprint(self) -> str:
        """SHA-256 over what decides a text's embedding: the maps' fingerprint, pooling and template too."""
        way = [self.fingerprint(), self.pooling.modes, self.pooling.include_prompt]
        way += [self.max_tokens, self.lowercase, self.template.prefix]
        # Left out where there is none, so that classifiers fitted before there were suffixes stay good.
        way += [self.template.suffix] if self.template.suffix else []
        return hashlib.sha256(json.dumps(way).encode()).hexdigest()

    def use_fingerprint(self) -> str:
        """SHA-256 over what decides what a text is answered: its embedding's fingerprint, task and labels."""
        way = [self.embedding_fingerprint(), self.task, self.labels]
        return hashlib.sha256(json.dumps(way).encode()).hexdigest()


# Entries of config.json that change when a model is saved again and say nothing about its maps.
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})

# Families that count positions from the number of the padding token + 1.
_POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "mpnet")


def find_checkpoint(model: str) -> Checkpoint:
    """The model named `model`: a folder, a model carried by an installed package, or a Hub id.

    Raises ModelNotFound, which lists what was tried, and UnsupportedModel for a folder of another kind.
    """
    tried = []
    for find in (_in_folder, _in_package, _in_cache, _on_hub):
        found = find(model)
        if isinstance(found, tuple):
            folder, source = found
            return read_checkpoint(folder, name=model, source=source)
        tried.append(found)
    raise ModelNotFound(f"model {model!r} was not found: {'; '.join(tried)}", field="model")


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
    if not any((transformer / weights).is_file() for weights in _WEIGHTS):
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


def _in_folder(model: str) -> tuple[Path, str] | str:
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder, "folder"
    except (OSError, RuntimeError, ValueError):
        pass  # a name that can be no path: too long, of an unknown user, with a null byte
    return "no such folder"


def _in_package(model: str) -> tuple[Path, str] | str:
    """A model folder inside an installed distribution whose name ends with the model's name.

    Only the list of the distribution's files is read; none of its code is run.
    """
    wanted = _normalized(model.rsplit("/", 1)[-1])
    for distribution in metadata.distributions():
        name = _normalized(distribution.metadata["Name"] or "")
        if name != wanted and not name.endswith(f"-{wanted}"):
            continue
        for file in distribution.files or []:
            if file.name in _WEIGHTS:
                folder = Path(str(distribution.locate_file(file))).parent
                return folder, f"package {distribution.metadata['Name']} {distribution.version}"
    return "no installed package carries it"


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _in_cache(model: str) -> tuple[Path, str] | str:
    try:
        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=_HUB_PATTERNS))
        # Another program may have wanted no more of the model than its configuration.
        complete = any(file.name in _WEIGHTS for file in folder.rglob("*.safetensors*"))
        return (folder, "Hugging Face cache") if complete else "not whole in the Hugging Face cache"
    except HFValidationError:
        return "not a Hugging Face id"
    except (LocalEntryNotFoundError, OSError):
        return "not in the Hugging Face cache"


def _on_hub(model: str) -> tuple[Path, str] | str:
    if constants.HF_HUB_OFFLINE:
        return "the Hub was not asked (offline mode)"
    try:
        folder = snapshot_download(model, allow_patterns=_HUB_PATTERNS, etag_timeout=5)
        return Path(folder), "Hugging Face Hub"
    except HFValidationError:
        return "not on the Hub"
    except HfHubHTTPError as error:
        # A repository that is absent or closed answers 401 or 404.
        status = error.response.status_code if error.response is not None else "with an error"
        return f"the Hub answered {status}"
    except Exception:
        # httpx's, ssl's and the socket's errors share no base class; all say that the Hub is out of reach.
        return "the Hub could not be reached"
