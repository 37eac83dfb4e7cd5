"""Find a model and describe it: read the JSON files of its folder into a Checkpoint.

    "all-MiniLM-L6-v2" -> sources.find_source -> folder -> read_checkpoint -> Checkpoint

A sentence-transformers folder is interpreted as sentence-transformers does. A plain Hugging Face encoder gets
mean pooling, as in that library, and normalised embeddings. No weights are read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from attncache_core.checkpoints.checkpoint import (
    Activation,
    Checkpoint,
    Dense,
    DenseActivation,
    Pooling,
    PoolingMode,
    Task,
)
from attncache_core.checkpoints.model_files import read_json
from attncache_core.checkpoints.sources import WEIGHTS, find_source
from attncache_core.checkpoints.template import Template
from attncache_core.errors import UnsupportedModel, readable

DEFAULT_MODEL = "all-MiniLM-L6-v2"

# The pooling flags that sentence-transformers wrote before version 6, in the order in which that library
# concatenates the modes.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def find_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Find and describe a model.

    model: a folder, the name of a model in an installed package, or a Hub id.
    revision: a branch, tag or commit of a model on the Hub; by default its main branch.
    Raises ModelNotFound, which lists where the model was searched, UnsupportedModel if the folder cannot be
    read as a model, and InvalidInput if a revision is given for a model that is not from the Hub.
    """
    found = find_source(model, revision)
    checkpoint = read_checkpoint(found.folder, name=model, source=found.description)
    return replace(checkpoint, revision=revision, commit=found.commit)


def read_checkpoint(folder: Path, *, name: str | None = None, source: str = "folder") -> Checkpoint:
    """Describe the model in `folder`, which is a sentence-transformers or a Hugging Face model folder.

    name: by default the name of the folder. source: where the folder was found, for people.
    Raises UnsupportedModel if a file is missing or has unexpected content, or if the model is of a kind that
    is not supported.
    """
    with readable(f"a JSON file of model folder {folder}"):
        return _described(folder, name or folder.name, source)


def _described(folder: Path, name: str, source: str) -> Checkpoint:
    listed = _modules(folder)
    modules = dict(listed)
    transformer = folder / modules.get("Transformer", "")
    config = read_json(transformer / "config.json")
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{transformer / 'config.json'} is not a JSON object", field="model")
    if not any((transformer / weights).is_file() for weights in WEIGHTS):
        raise UnsupportedModel(
            f"model folder {transformer} has no model.safetensors; other weight formats are not read (load "
            "and save the model with sentence-transformers, which writes safetensors)",
            field="model",
        )
    if (transformer / "adapter_config.json").exists():
        raise UnsupportedModel(
            f"model folder {transformer} has an adapter (adapter_config.json), and adapters are not read; "
            "merge the adapter into the weights with peft's merge_and_unload, and save the model",
            field="model",
        )
    # Without modules, sentence-transformers reads none of the folder's settings.
    settings = _settings(transformer) if modules else {}
    prompting = read_json(folder / "config_sentence_transformers.json", {}) if modules else {}
    model_type = prompting.get("model_type") or "SentenceTransformer"
    if model_type not in ("SentenceTransformer", "CrossEncoder"):
        raise UnsupportedModel(
            f"model folder {folder} is a {model_type} of sentence-transformers (model_type in "
            "config_sentence_transformers.json); served are SentenceTransformer and CrossEncoder",
            field="model",
        )
    prompts = {name: text or "" for name, text in (prompting.get("prompts") or {}).items()}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise UnsupportedModel(
            f"config_sentence_transformers.json of model folder {folder} has a prompt that is no string",
            field="model",
        )
    default_prompt = prompting.get("default_prompt_name")
    if default_prompt and default_prompt not in prompts:
        raise UnsupportedModel(
            f"config_sentence_transformers.json of model folder {folder} names a default prompt "
            "(default_prompt_name) that is not among its prompts; add the prompt, or remove the name",
            field="model",
        )
    architectures = config.get("architectures") or []
    if not (isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)):
        raise UnsupportedModel(
            f"architectures in config.json of model folder {folder} must be a list of names", field="model"
        )
    classifier = any("ForSequenceClassification" in name for name in architectures)
    activation = _cross_encoder_activation(config, prompting)
    task: Task = "classify" if classifier and (activation or not modules) else "embed"
    if "LogitScore" in modules:
        # A decoder that scores pairs by the logits of tokens. The operator gives template and labels, so the
        # folder's chat template and prompts are not used.
        pooling = Pooling(("lasttoken",))
        return Checkpoint(name, transformer, source, config, task="label-logits", pooling=pooling)
    _require_usual_outputs(settings, task, transformer)
    if task == "embed" and modules and "Pooling" not in modules:
        raise UnsupportedModel(
            f"modules.json of model folder {folder} has no Pooling, which makes embeddings of token vectors; "
            "add it",
            field="model",
        )
    for kind, path in listed:
        if kind == "Normalize":
            _require_pooled(read_json(folder / path / "config.json", {}), folder / path)
    if task == "classify":
        _require_classes(config, folder)
    if task == "classify" and config.get("problem_type") == "regression" and not activation:
        raise UnsupportedModel(
            f"model folder {folder} predicts a number (problem_type: regression); only models that predict "
            "classes are supported",
            field="model",
        )
    return Checkpoint(
        name=name,
        folder=transformer,
        source=source,
        config=config,
        task=task,
        pooling=_read_pooling(folder / modules["Pooling"]) if "Pooling" in modules else Pooling(),
        # A plain folder has no setting for normalisation, so embeddings get unit length, as in the HTTP API.
        normalize="Normalize" in modules or not modules,
        max_tokens=settings.get("max_seq_length"),
        lowercase=bool(settings.get("do_lower_case", False)),
        template=Template(prefix=prompts[default_prompt] if default_prompt else ""),
        prompts=prompts,
        default_prompt=default_prompt or None,
        dense=tuple(_read_dense(folder / path) for kind, path in listed if kind == "Dense"),
        truncate_dim=_positive(prompting.get("truncate_dim")),
        matryoshka_dimensions=_matryoshka_dimensions(config),
        activation=activation or "sigmoid",
    )


# The names under which sentence-transformers looks for the settings of its Transformer module, in its order.
_SETTINGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Options that sentence-transformers passes to transformers, under their present and former names, with the
# entries that are accepted: they change no result, or are read here.
_OF_MODEL = {"dtype", "torch_dtype", "attn_implementation", "device_map", "add_pooling_layer"}
_OF_TOKENIZER = {"model_max_length", "padding_side", "use_fast"}
_OF_CONFIG = {"use_cache"}
_PASSED_OPTIONS = {
    "model_kwargs": _OF_MODEL,
    "model_args": _OF_MODEL,
    "processor_kwargs": _OF_TOKENIZER,
    "tokenizer_args": _OF_TOKENIZER,
    "config_kwargs": _OF_CONFIG,
    "config_args": _OF_CONFIG,
}
# Settings of the Transformer module that change no result, or are read here.
_KNOWN_SETTINGS = {*_PASSED_OPTIONS, "processing_kwargs", "max_seq_length", "do_lower_case", "cache_dir"}
_KNOWN_SETTINGS |= {"transformer_task", "modality_config", "module_output_name", "unpad_inputs", "backend"}
# Settings of calls of the tokenizer that change no result.
_OF_CALLS = {"padding", "padding_side", "pad_to_multiple_of", "return_tensors"}
_TRANSFORMER_TASKS = ("feature-extraction", "sequence-classification", "text-generation")


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the Transformer module in `folder`; empty if it has none.

    Raises UnsupportedModel if a setting changes the model that config.json describes.
    """
    name = next((name for name in _SETTINGS if read_json(folder / name, {})), _SETTINGS[0])
    settings: dict[str, Any] = read_json(folder / name, {})
    for option, known in _PASSED_OPTIONS.items():
        # sentence-transformers does not read trust_remote_code from this file.
        if unknown := sorted((settings.get(option) or {}).keys() - known - {"trust_remote_code"}):
            raise UnsupportedModel(
                f"{option} in {name} of model folder {folder} are not supported: {', '.join(unknown)}; write "
                f"them into config.json or tokenizer_config.json, and remove them from {name}",
                field="model",
            )
    processing = settings.get("processing_kwargs") or {}
    of_calls = {**(processing.get("text") or {}), **(processing.get("common") or {})}
    longest = of_calls.pop("max_length", None)
    if of_calls.get("truncation") in (True, "longest_first", "only_first"):
        del of_calls["truncation"]
    others = {key for key, value in settings.items() if value is not None} - _KNOWN_SETTINGS
    if refused := of_calls.keys() - _OF_CALLS | others:
        raise UnsupportedModel(
            f"settings in {name} of model folder {folder} are not supported: {', '.join(sorted(refused))}; "
            "remove them, and write the length of the longest text into max_seq_length",
            field="model",
        )
    task = settings.get("transformer_task", "feature-extraction")
    if task not in _TRANSFORMER_TASKS:
        raise UnsupportedModel(
            f"{name} of model folder {folder} has the transformer_task {task}; supported are: "
            f"{', '.join(_TRANSFORMER_TASKS)}",
            field="model",
        )
    # As in sentence-transformers, a former name replaces the present one, and the last limit is valid.
    tokenizing = settings.get("tokenizer_args", settings.get("processor_kwargs")) or {}
    limits = {"max_seq_length": settings.get("max_seq_length")}
    limits |= {key: limit for key, limit in tokenizing.items() if key == "model_max_length"}
    limits |= {} if longest is None else {"max_length": longest}
    key, limit = limits.popitem()
    if isinstance(limit, float) and limit.is_integer():
        limit = int(limit)
    if not (type(limit) is int and limit >= 1) and (limit, key) != (None, "max_seq_length"):
        raise UnsupportedModel(
            f"{key} in {name} of model folder {folder} must be a whole number, at least 1",
            field="model",
        )
    settings["max_seq_length"] = limit
    return settings


def _require_usual_outputs(settings: dict[str, Any], task: Task, folder: Path) -> None:
    """Raise UnsupportedModel if the settings of the Transformer module take other outputs or a chat template.

    settings: as `_settings` returns them.
    """
    modalities = settings.get("modality_config")
    if modalities is None:
        return
    read, named = ("logits", "scores") if task == "classify" else ("last_hidden_state", "token_embeddings")
    if "message" in modalities:
        raise UnsupportedModel(
            f"the settings of model folder {folder} put each text into the tokenizer's chat template, which "
            "is not done here; to serve texts as they are, remove the entry message of modality_config",
            field="model",
        )
    text = modalities.get("text") or {}
    if (text.get("method"), text.get("method_output_name")) != ("forward", read) or (
        settings.get("module_output_name") != named
    ):
        raise UnsupportedModel(
            f"the settings of model folder {folder} take other outputs of the model than usual "
            f"(modality_config and module_output_name); supported are {read} of forward as {named}",
            field="model",
        )


def _require_classes(config: dict[str, Any], folder: Path) -> None:
    """Raise UnsupportedModel unless the names of the classes, if there are any, are numbered from 0 on."""
    named = config.get("id2label")
    if not named:
        return
    is_numbered = isinstance(named, dict) and set(named) == set(map(str, range(len(named))))
    if not (is_numbered and all(map(_is_name, named.values()))):
        raise UnsupportedModel(
            f"id2label in config.json of model folder {folder} must be an object that names class 0 and all "
            "following ones, each by a string",
            field="model",
        )


def _is_name(name: object) -> bool:
    # JSON may hold half a character, which no answer can hold.
    return isinstance(name, str) and name == name.encode("utf-8", "ignore").decode()


_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}


def _cross_encoder_activation(config: dict[str, Any], described: dict[str, Any]) -> Activation | None:
    """Return what makes a score of a cross-encoder's logit; None for a model that declares nothing.

    described: config_sentence_transformers.json. As in sentence-transformers, a function that is not torch's
    is not loaded, and a sigmoid is used instead. Raises UnsupportedModel for another function of torch.
    """
    is_described = described.get("model_type") == "CrossEncoder"
    declared: str | None = (
        (described.get("activation_fn") if is_described else None)
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    if declared is None:
        return "sigmoid" if is_described else None
    if not declared.startswith("torch."):
        return "sigmoid"
    function = declared.rsplit(".", 1)[-1]
    if function not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"the model's activation_fn {function} is not supported; supported are: "
            f"{', '.join(_ACTIVATIONS)}",
            field="model",
        )
    return _ACTIVATIONS[function]


# The modules that are supported, in the order that is required.
_MODULES = ("Transformer", "LogitScore", "Pooling", "Dense", "Normalize")


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return (kind, subfolder) of each module of a sentence-transformers model; empty for a plain folder."""
    listed = read_json(folder / "modules.json", [])
    if not listed and (folder / "modules.json").exists():
        raise UnsupportedModel(
            f"modules.json of model folder {folder} lists no module; list its modules, or remove the file "
            "to serve the model without them",
            field="model",
        )
    modules = [(module["type"].rsplit(".", 1)[-1], module["path"]) for module in listed]
    kinds = [kind for kind, _ in modules]
    # A publisher's own code is not run, also if its class has the name of a known one.
    types = [module["type"] for module in listed]
    own = {written for written in types if not written.startswith("sentence_transformers.")}
    unknown = sorted(own) or sorted(set(kinds) - set(_MODULES))
    if unknown:
        raise UnsupportedModel(
            f"model folder {folder} has modules that are not supported: {', '.join(unknown)}", field="model"
        )
    is_repeated = any(kinds.count(kind) > 1 for kind in ("Transformer", "LogitScore", "Pooling"))
    is_sorted = kinds == sorted(kinds, key=_MODULES.index) and kinds[:1] in ([], ["Transformer"])
    if is_repeated or not is_sorted or ("Dense" in kinds and "Pooling" not in kinds):
        raise UnsupportedModel(
            f"model folder {folder} has its modules in the order {', '.join(kinds)}; supported are "
            "Transformer, Pooling, Dense and Normalize, in this order, and only Dense more than once",
            field="model",
        )
    return modules


def _matryoshka_dimensions(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the dimensions that config.json says the model was trained for; empty if it says nothing."""
    listed = config.get("matryoshka_dimensions") or config.get("matryoshka_dims") or []
    return tuple(sorted({number for each in listed if (number := _positive(each))}))


def _positive(number: object) -> int | None:
    """Return a positive number of dimensions as it is; None stays None. Raises ValueError for all others."""
    if number is None or (type(number) is int and number > 0):
        return number
    raise ValueError(f"{number!r} dimensions")


def _read_pooling(folder: Path) -> Pooling:
    config = read_json(folder / "config.json")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    unknown = sorted(set(modes) - set(get_args(PoolingMode)))
    if unknown:
        raise UnsupportedModel(f"pooling {', '.join(unknown)} of {folder} is not supported", field="model")
    if not modes:
        raise UnsupportedModel(f"{folder / 'config.json'} names no pooling_mode; name one", field="model")
    return Pooling(modes, bool(config.get("include_prompt", True)))


def _read_dense(folder: Path) -> Dense:
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
    _require_pooled(config, folder)
    return Dense(
        weights=weights,
        inputs=int(config["in_features"]),
        outputs=int(config["out_features"]),
        bias=bool(config.get("bias", True)),
        activation=_dense_activation(config.get("activation_function", "torch.nn.Tanh"), folder),
    )


def _require_pooled(config: dict[str, Any], folder: Path) -> None:
    """Raise UnsupportedModel unless a module behind the pooling is a plain one, on pooled vectors."""
    names = {config.get(name) or "sentence_embedding" for name in ("module_input_name", "module_output_name")}
    if config.get("use_residual") or names != {"sentence_embedding"}:
        raise UnsupportedModel(
            f"module {folder} is not a plain one on pooled vectors (use_residual, module_input_name or "
            "module_output_name in its config.json); such modules are not supported",
            field="model",
        )


def _dense_activation(written: object, folder: Path) -> DenseActivation:
    """Return the class name in a dotted name such as torch.nn.modules.linear.Identity."""
    named = str(written).split(".")
    for known in get_args(DenseActivation):
        if named[:2] == ["torch", "nn"] and named[-1] == known:
            return known
    raise UnsupportedModel(
        f"the activation_function of Dense module {folder} is not supported; supported are: "
        f"{', '.join(get_args(DenseActivation))} of torch.nn",
        field="model",
    )
