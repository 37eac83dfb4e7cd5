"""What every benchmark says beside its figures, and how they are shown and kept."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from attncache_core.processor import processor_name

_PACKAGES = ("torch", "transformers", "faiss-cpu", "onnxruntime", "openvino", "sentence-transformers")


def machine(threads: int) -> dict[str, str | int]:
    """Processor, threads and versions: what figures have to stand beside."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"processor": processor_name(), "threads": threads, **versions}


def show_machine(facts: Mapping[str, Any]) -> None:
    """One paragraph with all facts."""
    Console(highlight=False).print(", ".join(f"{name} {fact}" for name, fact in facts.items()), style="dim")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on the terminal: the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False).print(table)


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """Keep the report, if a file was asked for."""
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
