"""Read the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attncache_core.errors import UnsupportedModel


def read_json(path: Path, default: Any = None) -> Any:
    """Return the parsed JSON of a file, or `default` if the file does not exist and a default is given.

    Raises UnsupportedModel if the file is missing without a default, or cannot be read as JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if default is not None:
            return default
        raise UnsupportedModel(f"model folder {path.parent} has no {path.name}", field="model") from error
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read as JSON", field="model") from error
