"""Describe the machine of a benchmark, print tables, and write reports."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attncache_core.errors import InvalidInput
from attncache_core.runtime.files import write_whole
from attncache_core.runtime.processor import processor_name

if TYPE_CHECKING:
    from attncache_core import PrefillEngine

_PACKAGES = (
    "torch",
    "transformers",
    "faiss-cpu",
    "onnxruntime",
    "openvino",
    "nncf",
    "ctranslate2",
    "llama-cpp-python",
    "sentence-transformers",
)


def machine(threads: int) -> dict[str, str | int]:
    """Return processor, threads and versions, to report with the figures of a benchmark."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"processor": processor_name(), "threads": threads, **versions}


def machine_and_model(engine: PrefillEngine) -> dict[str, Any]:
    """Return the facts of `machine`, and the engine's model, its variant and its dtype."""
    checkpoint, dtype = engine.checkpoint, str(engine.dtype).removeprefix("torch.")
    return {**machine(engine.threads), "model": checkpoint.name, **checkpoint.variant, "dtype": dtype}


def show_machine(facts: Mapping[str, Any]) -> None:
    """Print all facts in one paragraph."""
    console = Console(highlight=False, markup=False)
    console.print(", ".join(f"{name} {fact}" for name, fact in facts.items()), style="dim")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. The first column is text; the other columns are figures.

    Where the screen is narrow, cells are divided between words, and never within a word.
    """
    cells = [columns, *([str(cell) for cell in row] for row in rows)]
    console, table = Console(highlight=False), Table(title=escape(title), title_justify="left")
    around = 3 * len(columns) + 1  # lines and spaces
    widths = _widths(list(zip(*cells, strict=True)), console.width - around)
    if sum(widths) + around > console.width:
        console = Console(highlight=False, width=sum(widths) + around)
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(escape(column), justify="right" if number else "left", width=width)
    for row in cells[1:]:
        table.add_row(*map(escape, row))
    console.print(table)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return the widths of columns. The widest ones become narrower to fit into the room, down to a word."""
    widths = [max(map(len, cells)) for cells in columns]
    least = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    while sum(widths) > room and widths != least:
        wide = [number for number, width in enumerate(widths) if width > least[number]]
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def require_writable(path: Path, option: str) -> None:
    """Raise InvalidInput unless the running command can write `path`, which `option` names.

    Its folder must exist and be writable, and no other option may name it, alone or as FILE:column.
    """
    field = option.lstrip("-")
    if not path.parent.is_dir():
        raise InvalidInput(f"the folder of {option} {path} does not exist; make it first", field=field)
    if path.is_dir():
        raise InvalidInput(f"{option} {path} is a folder; name a file", field=field)
    written, what = (path, "") if _is_special(path) else (path.parent, "the folder of ")
    if not os.access(written, os.W_OK):
        raise InvalidInput(f"{what}{option} {path} cannot be written to; choose another one", field=field)
    for other, named in _named_paths():
        if other != option and os.path.exists(path) and os.path.exists(named) and path.samefile(named):
            raise InvalidInput(
                f"{option} would overwrite {path}, which {other} names; choose another file", field=field
            )


def _named_paths() -> Iterator[tuple[str, Path]]:
    """Yield what may be a path among the options of the running command: (option, path)."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.params.get(parameter.name or "")
        for name in given if isinstance(given, tuple) else (given,):
            if isinstance(name, str | Path):
                yield parameter.opts[0], Path(name)
                yield parameter.opts[0], Path(str(name).rpartition(":")[0])  # of FILE:column


def require_writable_reports() -> None:
    """Raise InvalidInput as `require_writable`, for --json and --markdown of the running command."""
    for name, option in (("json_file", "--json"), ("markdown", "--markdown")):
        if path := click.get_current_context().params.get(name):
            require_writable(path, option)


def _is_special(path: Path) -> bool:
    """Return whether a path is a pipe or a device."""
    return path.exists() and not path.is_file()


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report as JSON; does nothing without a path."""
    if path:
        write_report(path, json.dumps(report, indent=1))


def write_report(path: Path, text: str) -> None:
    """Write a report and a line end, whole or not at all unless `path` is a pipe or a device."""
    if _is_special(path):
        path.write_text(f"{text}\n", encoding="utf-8")
    else:
        write_whole(path, f"{text}\n".encode())
