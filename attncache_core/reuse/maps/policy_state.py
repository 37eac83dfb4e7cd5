"""Share the findings of all servers about a database's policy, in the file DIR/tightened.json.

    a server's steps and new fidelities -> under a lock: read, merge, write -> the findings of all servers
    a look, once a second               -> read, if another server has written -> its tighter steps

If one server finds the policy too loose and tightens it, the policy stays tight after a restart and becomes
tight in every server on the database, until the database is calibrated again. The file holds numbers only.

Servers on other machines have a copy of the database and a file of their own. They merge their findings in
the same way under the policy's digest, where all of them find it (SharedFindings).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import orjson
from pydantic import TypeAdapter

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.maps.policy import ReusePolicy, Steps
from attncache_core.reuse.maps.verification import WINDOW_HITS, Window, windows_of
from attncache_core.runtime.files import locked_within, remove_unfinished, when_written, write_whole
from attncache_core.runtime.stored import Stored

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tightened(Stored):
    """The findings about one policy: its steps, and the last verified hits of each window."""

    steps: Steps
    windows: tuple[tuple[Window, tuple[float, ...]], ...] = ()  # fidelities, oldest first

    def __post_init__(self) -> None:
        """Raise ValueError if a fidelity is outside [-1, 1]."""
        if any(abs(fidelity) > 1 for _, fidelities in self.windows for fidelity in fidelities):
            raise ValueError("a fidelity lies between -1 and 1")

    def merged(self, new: Tightened) -> Tightened:
        """Return the findings after one server has added its new findings.

        The steps are the larger ones of both. Fidelities of hits that a looser policy let hit are dropped. A
        nan, which JSON does not have, becomes -1.
        """
        steps = self.steps.tighter(new.steps)
        now = {(window.place, window.band): window for window in windows_of(steps)}
        windows: dict[Window, tuple[float, ...]] = {}
        for window, fidelities in (*self.windows, *new.windows):
            current = now.get((window.place, window.band))
            if current and not window.is_outdated(current):
                known = [-1.0 if math.isnan(fidelity) else fidelity for fidelity in fidelities]
                windows[window] = (*windows.get(window, ()), *known)[-WINDOW_HITS:]
        return Tightened(steps, tuple(windows.items()))


@dataclass(frozen=True)
class _File(Stored):
    """The content of tightened.json.

    Findings are stored per policy, so a server that still runs with an older policy of the database and a
    server with a newer policy do not overwrite each other's steps.
    """

    format_version: Literal[1]
    policies: dict[str, Tightened]  # ReusePolicy.digest of the calibrated policy -> findings


_FILE = TypeAdapter(_File)
_OF_ONE_POLICY = TypeAdapter(Tightened)


class SharedFindings(Protocol):
    """Findings of servers on several machines, by the digest of the policy."""

    def change(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """Replace the content under a name by what `change` makes of it, without another server in between.

        Raises OSError if they cannot be had in time, and what `change` raises.
        """


class ServedPolicy:
    """A database's policy in one server, with the tightest steps that any server on the database found.

    If tightened.json cannot be read or written, findings would be lost and a policy might be too loose. From
    then on `policy` lets nothing hit, and `reuse_off` says why. If the findings of other machines cannot be
    read or written, the same holds until they can.
    """

    def __init__(self, folder: Path, calibrated: ReusePolicy) -> None:
        """Start from the findings in the folder of a database.

        calibrated: the database's policy, or a policy with an operator's thresholds and no budget.
        """
        self._folder, self._calibrated = folder, calibrated
        self.shared: SharedFindings | None = None  # None: other machines are not asked
        self._tightest = calibrated  # `policy` where nothing is off
        self._seen = when_written(_path(folder))  # what the last look found; taken before the file is read
        self._away: str | None = None  # the reason in `reuse_off`, while other machines cannot be asked
        self.policy = calibrated
        self.reuse_off: list[str] = []  # reasons why reuse is off although a database is set
        try:
            self._tightest = self.policy = calibrated.tightened_to(kept_steps(folder, calibrated))
        except CorruptDatabase as error:
            self._stop(str(error))

    @property
    def lasting(self) -> ReusePolicy:
        """The policy without the pause in which other machines cannot be asked."""
        return self.policy if self._is_stopped else self._tightest

    def tighten(self, index: int | None) -> ReusePolicy:
        """Make length group `index` one step tighter; None: the limit. Returns the new policy."""
        self._serve(self._tightest.tightened(index))
        return self.policy

    def look(self) -> bool:
        """Adopt tighter steps that another server has written into tightened.json since the last look.

        If the file cannot be read any more, nothing hits from then on. Returns whether `policy` has changed.
        """
        written = when_written(_path(self._folder))
        if written == self._seen or self._is_stopped:
            return False
        self._seen = written
        try:
            tightest = self._tightest.tightened_to(kept_steps(self._folder, self._calibrated))
        except CorruptDatabase as error:
            self._stop(str(error))
            return True
        if tightest == self._tightest:
            return False
        logger.warning("another server has found the policy of the database too loose; it is tighter now")
        self._serve(tightest)
        return True

    def keep(self, new: Mapping[Window, Sequence[float]], patience_seconds: float = 0.0) -> Tightened | None:
        """Add this server's findings to tightened.json, and adopt tighter steps from there.

        new: fidelities of verified hits that were not kept yet. Returns the findings of all servers. Returns
        None, and keeps no fidelities, if the policy has no budget, if another process holds the lock for
        longer than `patience_seconds`, or if tightened.json or the findings of other machines cannot be read
        or written.
        """
        if self._is_stopped or not self._calibrated.budget.binds:
            return None
        windows = tuple((window, tuple(fidelities)) for window, fidelities in new.items())
        tightened = Tightened(self._tightest.steps, windows)
        of_all = None
        if self.shared is not None and (of_all := self._merged_with_all(self.shared, tightened)) is None:
            # The fidelities are added later. The steps hold at the next start also if they never are.
            tightened = Tightened(self._tightest.steps)
        try:
            kept = merge_tightened(self._folder, self._calibrated, tightened, patience_seconds)
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
        kept = kept if self.shared is None else of_all
        if kept:
            self._serve(self._tightest.tightened_to(kept.steps))
        return kept

    def _merged_with_all(self, shared: SharedFindings, new: Tightened) -> Tightened | None:
        """Add findings to those of all machines, and return these; None, and nothing hits, if that fails."""
        merged = new

        def merge(content: bytes | None) -> bytes:
            nonlocal merged
            known = Tightened(self._calibrated.steps)
            if content is not None:
                known = _OF_ONE_POLICY.validate_json(content, strict=True)
            if len(known.steps.groups) != len(self._calibrated.groups):
                raise ValueError("the policies have other groups")
            merged = known.merged(new)
            return orjson.dumps(merged)

        try:
            shared.change(self._calibrated.digest, merge)
        except (OSError, ValueError) as error:
            if self._away is None:
                why = str(error) if isinstance(error, OSError) else "its content is damaged"
                self._away = f"the findings of other servers cannot be read or written ({why})"
                self._stop(self._away)
            return None
        if self._away is not None:
            self.reuse_off.remove(self._away)
            self._away = None
        return merged

    @property
    def _is_stopped(self) -> bool:
        return any(reason != self._away for reason in self.reuse_off)

    def _serve(self, tightest: ReusePolicy) -> None:
        self._tightest = tightest
        self.policy = tightest.switched_off() if self.reuse_off else tightest

    def _stop(self, reason: str) -> None:
        logger.warning("attention maps are not reused: %s", reason)
        self.reuse_off.append(reason)
        self.policy = self.policy.switched_off()


def merge_tightened(
    folder: Path, calibrated: ReusePolicy, new: Tightened, patience_seconds: float = 0.0
) -> Tightened | None:
    """Add a server's findings to DIR/tightened.json, and return the findings of all servers.

    The file is written only if its content changes.
    calibrated: the policy from which steps are counted. new: the server's steps, and the fidelities that the
    server has not added yet. Returns None, and changes nothing, if another process holds the lock for longer
    than `patience_seconds`. Raises CorruptDatabase if the file cannot be read, and OSError if the file cannot
    be written.
    """
    path = _path(folder)
    with locked_within(path, patience_seconds) as held:
        if not held:
            return None
        policies = _read(path)
        merged = _findings(policies, calibrated, path).merged(new)
        # Servers on several machines exchange findings every few seconds, and mostly have no new ones.
        if policies.get(calibrated.digest) != merged:
            remove_unfinished(folder, path.name)
            write_whole(path, orjson.dumps(_File(1, {**policies, calibrated.digest: merged})))
        return merged


def forget_tightened(folder: Path) -> None:
    """Delete all findings, after the database was calibrated. Raises OSError."""
    _path(folder).unlink(missing_ok=True)


def _path(folder: Path) -> Path:
    return folder / "tightened.json"


def _read(path: Path) -> dict[str, Tightened]:
    """Return the findings about each policy; none if there is no file. Raises CorruptDatabase."""
    try:
        return _FILE.validate_json(path.read_bytes(), strict=True).policies
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "its content is damaged or of another version"
        raise _unreadable(path, why) from error


def kept_steps(folder: Path, calibrated: ReusePolicy) -> Steps:
    """Return the steps that are kept for a policy; a policy without a budget keeps none.

    Raises CorruptDatabase if tightened.json cannot be read.
    """
    if not calibrated.budget.binds:
        return calibrated.steps
    path = _path(folder)
    return _findings(_read(path), calibrated, path).steps


def _findings(policies: dict[str, Tightened], calibrated: ReusePolicy, path: Path) -> Tightened:
    """Return the findings about one policy. Raises CorruptDatabase if the numbers of groups differ."""
    findings = policies.get(calibrated.digest, Tightened(calibrated.steps))
    if len(findings.steps.groups) != len(calibrated.groups):
        raise _unreadable(path, "it has another number of length groups than the policy")
    return findings


def _unreadable(path: Path, why: str | None) -> CorruptDatabase:
    return CorruptDatabase(
        f"{path.name} cannot be read ({why}), so the required thresholds are unknown; restore the file "
        "or calibrate the database again",
        field="database",
    )
