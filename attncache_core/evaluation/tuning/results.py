"""The results file of a tuning: every measured way, so that a stopped tuning continues where it was.

The file is bound to its inputs: model, texts, machine, versions and rounds. It holds no text. A file with
other inputs is begun anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from attncache_core.errors import InvalidInput
from attncache_core.evaluation.tuning.databases import Built
from attncache_core.evaluation.tuning.measuring import MeasuredWay
from attncache_core.evaluation.tuning.ways import Way
from attncache_core.reuse.maps.policy import Budget
from attncache_core.runtime.files import write_whole
from attncache_core.runtime.stored import Stored

_FORMAT_VERSION = 2  # raised too if a figure is computed in another way


@dataclass(frozen=True)
class Kept(Stored):
    """A measured way, and the database that was built for it."""

    measured: MeasuredWay
    of_maps: Budget | None = None  # None: the way reuses no maps, or those of the operator's database
    built: Built | None = None  # None: as for of_maps

    @property
    def question(self) -> tuple[Way, Budget | None]:
        """What was measured, whatever came out."""
        return self.measured.way, self.of_maps


@dataclass
class _Content(Stored):
    """The content of the file."""

    inputs: dict[str, Any]
    # kind of part -> layers, the least important first
    least_important: dict[str, list[int]] = field(default_factory=dict)
    measured: list[Kept] = field(default_factory=list)
    format_version: int = _FORMAT_VERSION


_FILE = TypeAdapter(_Content)


class Results:
    """What was measured so far. Every change is written to the file at once."""

    def __init__(self, path: Path, content: _Content, changed: tuple[str, ...]) -> None:
        self._path, self._content = path, content
        self.changed = changed  # inputs that differ from the file's, which was therefore begun anew

    @classmethod
    def open(cls, path: Path, inputs: Mapping[str, Any]) -> Results:
        """Open the results in a file, or begin anew if there is no file or if its inputs differ.

        inputs: JSON values by name. Raises InvalidInput if the file is no results file, and OSError.
        """
        anew = _Content(dict(inputs))
        try:
            content = _FILE.validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls(path, anew, ())
        except ValidationError as error:
            raise InvalidInput(
                f"{path} is not a results file of tune; remove it, or choose another --output",
                field="output",
            ) from error
        names = {**inputs, **content.inputs, "format_version": None}
        then = {**content.inputs, "format_version": content.format_version}
        now = {**inputs, "format_version": _FORMAT_VERSION}
        changed = tuple(name for name in names if then.get(name) != now.get(name))
        return cls(path, anew if changed else content, changed)

    @property
    def measured(self) -> int:
        """The number of ways in the file."""
        return len(self._content.measured)

    def find(self, way: Way, of_maps: Budget | None, databases: Path) -> MeasuredWay | None:
        """Return the figures of a way; None if it was not measured with a database for this budget.

        Also None if the database is not in the folder `databases` any more, or has changed: the figures are
        of another one then.
        """
        for kept in self._content.measured:
            if kept.question == (way, of_maps):
                is_there = kept.built.is_in(databases) if kept.built else of_maps is None
                return kept.measured if is_there else None
        return None

    def add(self, kept: Kept) -> None:
        """Keep the figures of a way, and no others of it. Raises OSError if the file cannot be written."""
        others = (other for other in self._content.measured if other.question != kept.question)
        self._content.measured = [*others, kept]
        self._write()

    def least_important(self, kind: str, rank: Callable[[], Mapping[str, list[int]]]) -> list[int]:
        """Return the layers whose part of this kind matters least, the least important first.

        rank: ranks the layers for all kinds; called if no ranking is kept.
        """
        if not self._content.least_important:
            self._content.least_important = dict(rank())
            self._write()
        return self._content.least_important[kind]

    def _write(self) -> None:
        write_whole(self._path, _FILE.dump_json(self._content, indent=1) + b"\n")
