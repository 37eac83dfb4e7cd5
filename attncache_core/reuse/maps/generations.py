"""Find the generations of a database, the number of the one that serves, and what renewals decided.

    DIR/current                 number of the generation that serves; 0 without this file
    DIR/manifest.json, ...      generation 0: the plain database that was renewed first
    DIR/generations/000007/     generation 7, a database like any other
    DIR/renewals.jsonl          one line for each renewal and rollback: what was measured and decided
    DIR/.renewal/               what a renewal builds, decides and removes; see publishing.py
    DIR/.renewal.lock           locked by the process that renews; holds the id of the process

A plain database is a folder whose generation 0 serves. This module only reads; publishing.py writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from attncache_core.errors import CorruptDatabase, DatabaseRefused
from attncache_core.runtime.files import when_written
from attncache_core.runtime.stored import Stored

# In the folder of a database; see above.
CURRENT, GENERATIONS, RENEWALS = "current", "generations", "renewals.jsonl"
# The generation that serves, and the one before it.
KEPT_GENERATIONS = 2
_FOLDER_NAME = re.compile(r"\d{6,}")


class Generation(NamedTuple):
    """One generation of the database in the folder `root`."""

    root: Path
    number: int

    @property
    def folder(self) -> Path:
        """The folder with the files of the generation."""
        return self.root / GENERATIONS / f"{self.number:06}" if self.number else self.root

    @property
    def exists(self) -> bool:
        """Whether the generation was published, or is a plain database, and was not removed."""
        return self.folder.is_dir() if self.number else (self.root / "manifest.json").is_file()


class Result(StrEnum):
    """What a renewal or a rollback came to."""

    PUBLISHED = "published"  # the new generation is better, and serves
    REFUSED = "refused"  # the new generation is not better, and was removed
    NO_GAIN = "no_gain"  # reuse does not pay for the model on this machine; nothing was built
    ROLLED_BACK = "rolled_back"  # the generation before serves again


@dataclass(frozen=True)
class Renewal(Stored):
    """One line of renewals.jsonl. It holds figures, a digest of corpus and options, and nothing of a text."""

    time: str  # UTC
    result: Result
    before: int  # number of the generation that served before
    generation: int  # number of the generation that was judged, or that serves after a rollback
    reason: str  # for people
    measured: dict[str, Any] = field(default_factory=dict)

    def told(self) -> str:
        """Return what was decided, for people."""
        match self.result:
            case Result.PUBLISHED:
                return f"generation {self.generation} is published: {self.reason}"
            case Result.REFUSED:
                return (
                    f"generation {self.generation} is removed, and generation {self.before} serves on: "
                    f"{self.reason}"
                )
            case Result.NO_GAIN:
                return f"generation {self.before} serves on: {self.reason}"
            case Result.ROLLED_BACK:
                return f"generation {self.generation} serves again, instead of generation {self.before}"


RENEWAL = TypeAdapter(Renewal)


def current_generation(root: Path) -> Generation:
    """Return the generation that serves; number 0 if the folder was never renewed.

    Raises CorruptDatabase if DIR/current cannot be read or holds no number.
    """
    path = root / CURRENT
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Generation(root, 0)
    except OSError as error:
        raise CorruptDatabase(f"{path} cannot be read: {error.strerror}", field="database") from error
    if not re.fullmatch(rb"\d{1,9}\n", content):
        raise CorruptDatabase(
            f"{path} is damaged; write the number of a folder in {root / GENERATIONS} into it, or 0 "
            f"for the database that {root} was built as",
            field="database",
        )
    return Generation(root, int(content))


def require_database(root: Path) -> None:
    """Raise DatabaseRefused if the folder holds no database, neither a plain nor a renewed one."""
    if not ((root / CURRENT).is_file() or Generation(root, 0).exists):
        if kept := kept_generations(root):
            raise DatabaseRefused(
                f"{root / CURRENT} is missing; write the number of a folder in "
                f"{root / GENERATIONS}, such as {kept[-1].number}, and a line break into it",
                field="database",
            )
        raise DatabaseRefused(f"there is no database in {root}: no manifest.json", field="database")


def require_there(generation: Generation) -> None:
    """Raise CorruptDatabase if the generation that DIR/current names is not in the folder."""
    if generation.number and not generation.exists:
        raise CorruptDatabase(
            f"{generation.root / CURRENT} names generation {generation.number}, which is not there",
            field="database",
        )


def kept_generations(root: Path) -> list[Generation]:
    """Return the generations that are in the folder, with rising numbers."""
    numbers = [int(name) for name in _names(root) if _FOLDER_NAME.fullmatch(name)]
    found = [Generation(root, number) for number in sorted({0, *numbers})]
    return [generation for generation in found if generation.exists]


def next_number(root: Path) -> int:
    """Return the number of the next generation. It is larger than the number of any generation before."""
    known = [generation.number for generation in (current_generation(root), *kept_generations(root))]
    return 1 + max([*known, *(renewal.generation for renewal in read_renewals(root))])


def read_renewals(root: Path) -> tuple[Renewal, ...]:
    """Return the decisions of all renewals, oldest first, without lines that cannot be read."""
    path = root / RENEWALS
    try:
        return _renewals(path, when_written(path))
    except OSError:
        return ()


def structural_faults(root: Path) -> Iterator[str]:
    """Yield a sentence for each thing in the folder that no renewal leaves, even if it is killed."""
    try:
        require_there(current_generation(root))
    except CorruptDatabase as error:
        yield str(error)
    kept = kept_generations(root)
    if len(kept) > KEPT_GENERATIONS:
        numbers = ", ".join(str(generation.number) for generation in kept)
        yield f"{root} has more than {KEPT_GENERATIONS} generations: {numbers}"
    for name in _names(root):
        # Hidden files are the locks of processes that build or calibrate a generation.
        if not name.startswith(".") and not _FOLDER_NAME.fullmatch(name):
            yield f"{root / GENERATIONS / name} is no generation"
    if (path := root / RENEWALS).is_file():
        lines = len(path.read_bytes().splitlines())
        if (readable := len(read_renewals(root))) != lines:
            yield f"{lines - readable} of {lines} lines of {path} cannot be read"


def _names(root: Path) -> list[str]:
    folder = root / GENERATIONS
    return sorted(os.listdir(folder)) if folder.is_dir() else []


# Metrics read the decisions every few seconds, and the file changes once a day.
@lru_cache(maxsize=4)
def _renewals(path: Path, _written: object) -> tuple[Renewal, ...]:
    return tuple(_readable(path.read_bytes().splitlines()))


def _readable(lines: list[bytes]) -> Iterator[Renewal]:
    for line in lines:
        try:
            yield RENEWAL.validate_json(line)
        except ValidationError:
            continue
