"""Write settings to a TOML file that `serve --config` reads.

{"quantize": "int8", "maps": False}   ->   # a comment
                                           maps = false
                                           quantize = "int8"
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from attncache_core.runtime.files import write_whole
from service.settings.reading import read_settings
from service.settings.settings import Settings


def write_settings(path: Path, values: Mapping[str, object], comment: Sequence[str]) -> Settings:
    """Write settings by field name, below the lines of a comment, and return them as `serve` reads them.

    values: texts, numbers, truth values and paths. A relative path of a file is relative to the folder in
    which `serve` runs. Raises InvalidSettings if `serve` would refuse a value, and OSError.
    """
    settings = read_settings(values)
    lines = [f"# {_printable(line)}".rstrip() for line in comment]
    lines += [f"{name} = {_toml(values[name])}" for name in Settings.model_fields if name in values]
    write_whole(path, ("\n".join(lines) + "\n").encode())
    return settings


def _printable(line: str) -> str:
    """Return a line without control characters, such as line breaks."""
    return "".join(character if character.isprintable() else " " for character in line)


def _toml(value: object) -> str:
    """Return a value in TOML, whose numbers, truth values and texts look like those of JSON."""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    # JSON leaves the character DEL as it is, and TOML does not allow it.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
