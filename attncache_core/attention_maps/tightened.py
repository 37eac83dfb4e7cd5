"""What servers found out about a database's policy, kept in DIR/tightened.json.

    own steps and new fidelities -> under a lock: read, merge, write -> what all servers go on from

A policy that was found too loose stays tight when a server starts again, and becomes tight in every server on
the database, until it is calibrated anew. The file holds numbers only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from attncache_core.attention_maps.policy import ReusePolicy, Steps
from attncache_core.attention_maps.verification import WINDOW_HITS, Window, windows_of
from attncache_core.errors import CorruptDatabase
from attncache_core.files import locked_within, write_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tightened:
    """How often one policy was tightened, and the fidelities of the last verified hits of each window."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    steps: Steps
    windows: tuple[tuple[Window, tuple[float, ...]], ...] = ()  # fidelities oldest first, at most 1 or nan

    def __post_init__(self) -> None:
        """Raise ValueError for a fidelity that no hit can have."""
        if any(abs(fidelity) > 1 for _, fidelities in self.windows for fidelity in fidelities):
            raise ValueError("a fidelity lies between -1 and 1")

    def merged(self, new: Tightened) -> Tightened:
        """Return the tighter steps of both, and the last fidelities of windows that are as tight.

        new: what one server found out beyond this.
        """
        steps = self.steps.tighter(new.steps)
        now = {(window.place, window.band): window for window in windows_of(steps)}
        windows: dict[Window, tuple[float, ...]] = {}
        for window, fidelities in (*self.windows, *new.windows):
            current = now.get((window.place, window.band))
            if current and not window.is_outdated(current):
                windows[window] = (*windows.get(window, ()), *fidelities)[-WINDOW_HITS:]
        return Tightened(steps, tuple(windows.items()))


@dataclass(frozen=True)
class _File:
    """The content of tightened.json.

    By policy, so that a server that still runs with an older policy of the database and one with a newer
    policy do not overwrite each other's steps.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format_version: Literal[1]
    policies: dict[str, Tightened]  # ReusePolicy.digest of the policy as calibrated -> what was found out


_FILE = TypeAdapter(_File)


class ServedPolicy:
    """A database's policy as one server goes by it: as tight as any server on the database found it must be.

    If tightened.json cannot be read or written, nobody would know of a policy that was found too loose. From
    then on `policy` lets nothing hit, and `reuse_off` says why.
    """

    def __init__(self, folder: Path, calibrated: ReusePolicy, *, search_always: bool = False) -> None:
        """folder: of the database. calibrated: its policy, or one of an operator's that keeps no budget."""
        self._folder, self._calibrated = folder, calibrated
        self._start = calibrated.searched_everywhere() if search_always else calibrated
        self.policy = self._start
        self.reuse_off: list[str] = []  # for people
        try:
            self.policy = self._start.tightened_to(_kept_steps(folder, calibrated))
        except CorruptDatabase as error:
            self._stop(str(error))

    def tighten(self, place: int | None) -> ReusePolicy:
        """Return the policy from now on: group number `place`, or for None the limit, is one step tighter."""
        self.policy = self.policy.tightened(place)
        return self.policy

    def keep(self, new: Mapping[Window, Sequence[float]], patience_seconds: float = 0.0) -> Tightened | None:
        """Merge the policy's steps and new fidelities with what is kept, and adopt tighter steps from there.

        new: fidelities of verified hits that were not kept yet. Returns what is kept now. Returns None, and
        keeps nothing, if the policy keeps no budget, if another process holds the lock for longer than
        `patience_seconds`, or if tightened.json cannot be read or written.
        """
        if self.reuse_off or not self._calibrated.budget.binds:
            return None
        # Other servers need not search because this one was told to.
        steps = self.policy.steps.beyond(self._start.steps)
        own = Tightened(steps, tuple((window, tuple(fidelities)) for window, fidelities in new.items()))
        try:
            kept = merge_tightened(self._folder, self._calibrated, own, patience_seconds)
        except CorruptDatabase as error:
            self._stop(str(error))
            return None
        except OSError as error:
            why = error.strerror or type(error).__name__
            self._stop(
                f"tightened.json cannot be written ({why}), so nothing would remember that the policy was "
                "found too loose; make the database's folder writable and start again"
            )
            return None
        if kept:
            self.policy = self.policy.tightened_to(kept.steps)
        return kept

    def _stop(self, reason: str) -> None:
        logger.warning("attention maps are not reused: %s", reason)
        self.reuse_off.append(reason)
        self.policy = self.policy.switched_off()


def as_tightened(folder: Path, calibrated: ReusePolicy) -> ReusePolicy:
    """Return the policy as tight as servers on the database in `folder` found that it must be.

    A policy that keeps no budget is returned as it is. Raises CorruptDatabase if that cannot be read.
    """
    return calibrated.tightened_to(_kept_steps(folder, calibrated))


def merge_tightened(
    folder: Path, calibrated: ReusePolicy, new: Tightened, patience_seconds: float = 0.0
) -> Tightened | None:
    """Add to DIR/tightened.json what a server found out, and return what all servers go on from.

    calibrated: the policy that the steps count from. new: the server's steps, and the fidelities that it has
    not added yet. Returns None if another process holds the lock for longer than `patience_seconds`: then
    nothing is changed. Raises CorruptDatabase if the file cannot be read, OSError if it cannot be written.
    """
    path = _path(folder)
    with locked_within(path, patience_seconds) as held:
        if not held:
            return None
        policies = _read(path)
        merged = _found(policies, calibrated, path).merged(new)
        content = _File(1, {**policies, calibrated.digest: merged})
        write_whole(path, json.dumps(asdict(content)).encode())
        return merged


def forget_tightened(folder: Path) -> None:
    """Begin anew, for a policy that was just calibrated. Raises OSError."""
    _path(folder).unlink(missing_ok=True)


def _path(folder: Path) -> Path:
    return folder / "tightened.json"


def _read(path: Path) -> dict[str, Tightened]:
    """What was found out about each policy; nothing if there is no file. Raises CorruptDatabase."""
    try:
        return _FILE.validate_json(path.read_bytes(), strict=True).policies
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "its content is damaged or of another version"
        raise _unreadable(path, why) from error


def _kept_steps(folder: Path, calibrated: ReusePolicy) -> Steps:
    if not calibrated.budget.binds:
        return calibrated.steps
    path = _path(folder)
    return _found(_read(path), calibrated, path).steps


def _found(policies: dict[str, Tightened], calibrated: ReusePolicy, path: Path) -> Tightened:
    """What was found out about one policy. Raises CorruptDatabase if it cannot be of this policy."""
    found = policies.get(calibrated.digest, Tightened(calibrated.steps))
    if len(found.steps.groups) != len(calibrated.groups):
        raise _unreadable(path, "its length groups are not those of the policy")
    return found


def _unreadable(path: Path, why: str | None) -> CorruptDatabase:
    return CorruptDatabase(
        f"{path.name} cannot be read ({why}), so nobody knows how tight the policy must be; restore the file "
        "or calibrate the database again",
        field="database",
    )
