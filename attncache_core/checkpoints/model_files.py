"""Read the files of a model's folder: JSON, and digests of what decides the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attncache_core.errors import UnsupportedModel
from attncache_core.runtime.files import when_written

# What files are that were cloned without Git LFS.
_LFS_POINTER = b"version https://git-lfs"


def require_no_pointers(files: Sequence[Path]) -> None:
    """Raise UnsupportedModel if the folder was cloned without Git LFS, which keeps large files elsewhere."""
    for path in filter(Path.is_file, files):
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UnsupportedModel(
                    f"{path} is only a pointer of Git LFS to the file; install git-lfs, and run git lfs pull "
                    "in the model's folder",
                    field="model",
                )


def digest_of(path: Path) -> bytes:
    """Return the SHA-256 of a file, which is read once per process, and again if it changes."""
    return _file_digest(path, when_written(path))


@cache
def _file_digest(path: Path, _written: tuple[int, ...] | None) -> bytes:
    """Return the SHA-256 of a file. _written: changes with the file, and invalidates the cache."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def read_json(path: Path, default: Any = None) -> Any:
    """Return the parsed JSON of a file, or `default` if the file does not exist and a default is given.

    Raises UnsupportedModel if the file is missing without a default, cannot be read as JSON, or is a pointer
    of Git LFS.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if default is not None:
            return default
        raise UnsupportedModel(f"model folder {path.parent} has no {path.name}", field="model") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            require_no_pointers([path])
        raise UnsupportedModel(f"{path} cannot be read as JSON", field="model") from error
