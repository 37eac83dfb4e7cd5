"""Find a model and describe it: read the JSON files of its folder into a Checkpoint.

    "all-MiniLM-L6-v2" -> sources.find_source -> folder -> read_checkpoint -> Checkpoint

A sentence-transformers folder is interpreted as sentence-transformers does. A plain Hugging Face encoder gets
mean pooling, as in that library, and normalised embeddings. No weights are read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from attncache_core.checkpoints.checkpoint import Checkpoint, Pooling, PoolingMode, Task
from attncache_core.checkpoints.json_files import read_json
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
    modules = _modules(folder)
    transformer = folder / modules.get("Transformer", "")
    config = read_json(transformer / "config.json")
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{transformer / 'config.json'} is not a JSON object", field="model")
    if not any((transformer / weights).is_file() for weights in WEIGHTS):
        raise UnsupportedModel(
            f"model folder {transformer} has no model.safetensors; other weight formats are not read",
            field="model",
        )
    settings = read_json(transformer / "sentence_bert_config.json", {})
    prompting = read_json(folder / "config_sentence_transformers.json", {})
    prompts = prompting.get("prompts") or {}
    classifier = any("ForSequenceClassification" in name for name in config.get("architectures") or [])
    task: Task = "classify" if classifier and not modules else "embed"
    if task == "classify" and config.get("problem_type") == "regression":
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
        template=Template(prefix=prompts.get(prompting.get("default_prompt_name") or "", "")),
        prompts=prompts,
    )


def _modules(folder: Path) -> dict[str, str]:
    """Return kind -> subfolder of the modules of a sentence-transformers model; empty for a plain folder."""
    listed = read_json(folder / "modules.json", [])
    modules = {module["type"].rsplit(".", 1)[-1]: module["path"] for module in listed}
    unknown = sorted(set(modules) - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        raise UnsupportedModel(
            f"model folder {folder} has modules that are not supported: {', '.join(unknown)}", field="model"
        )
    return modules


def _read_pooling(folder: Path) -> Pooling:
    config = read_json(folder / "config.json")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    unknown = sorted(set(modes) - set(get_args(PoolingMode)))
    if unknown:
        raise UnsupportedModel(f"pooling {', '.join(unknown)} of {folder} is not supported", field="model")
    return Pooling(modes, bool(config.get("include_prompt", True)))
