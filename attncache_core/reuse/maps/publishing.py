"""Publish and remove generations of a database, so that a process may be killed at any moment.

    DIR/.renewal/000008          generation 8 while it is built and judged; .000008.partial before it is built
    DIR/.renewal/decision.json   what was decided, until it is done
    DIR/.renewal/removed-000006  a generation that is being removed

A decision is written first, and `settle` does what it says. Every step of `settle` can be repeated:

    1  add the decision to renewals.jsonl
    2  move the generations that are not kept to DIR/.renewal
    3  rename the new generation to its place
    4  write its number to DIR/current
    5  remove DIR/.renewal

So DIR/current names a whole generation at every moment, there are never more than two generations, and the
next renewal finishes a decision that was not done. A download drops the decision if its generation does not
serve yet and the URL names another database by then. Segments that a server has mapped stay readable after
their files were removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from attncache_core.errors import BuildFailed, CorruptDatabase, InvalidInput
from attncache_core.reuse.maps.database import AttentionDatabase, with_remedy
from attncache_core.reuse.maps.generations import (
    RENEWAL,
    Generation,
    Renewal,
    Result,
    current_generation,
    current_path,
    generations_folder,
    kept_generations,
    next_number,
    read_renewals,
    renewals_path,
    require_database,
)
from attncache_core.runtime.files import (
    PRIVATE,
    HeldByAnother,
    locked_at_once,
    move_into_place,
    remove_unfinished,
    write_whole,
)

_SWITCHING = (Result.PUBLISHED, Result.ROLLED_BACK)
# The files of generation 0, which share the folder with the files of this module. The manifest is removed
# first: without it, the rest is no database.
_PLAIN_DATABASE = (
    *("manifest.json", "key", "*.safetensors", "index", "maps", "decisions*"),
    *("gain.json", "calibrated_on.json", "tightened.json", ".gain.json.lock", ".tightened.json.lock"),
)


@contextmanager
def renewing(root: Path, *, begins: bool = False, inputs: bytes | None = None) -> Iterator[Renewal | None]:
    """Be the only process that renews, rolls back or calibrates the database while the `with` block runs.

    Finishes the decision that a killed process left, and yields it; None: there was none. begins: the folder
    may hold no database yet. inputs: drop a decision instead that was about other inputs, and whose
    generation does not serve yet. Raises DatabaseRefused if there is no database, BuildFailed if another
    process does so, and OSError.
    """
    if not begins:
        require_database(root)
    try:
        with locked_at_once(root / ".renewal.lock"):
            yield settle(root, inputs)
    except HeldByAnother as held:
        holder = "another process" if held.process is None else f"process {held.process}"
        raise BuildFailed(
            f"{holder} renews or calibrates {root} at present; wait until it has ended", field="database"
        ) from held


def workspace(root: Path) -> Path:
    """Return the hidden folder in which a renewal works."""
    return root / ".renewal"


def inputs_path(root: Path) -> Path:
    """Return the path of the digest of what the present renewal builds from."""
    return workspace(root) / "inputs"


def has_inputs(root: Path, inputs: bytes) -> bool:
    """Return whether what the workspace holds was made from these inputs."""
    path = inputs_path(root)
    return path.is_file() and path.read_bytes() == inputs


def sampled_path(root: Path) -> Path:
    """Return the path of the texts of the present renewal, if they are of a sample."""
    return workspace(root) / "sampled.log"


def building_folder(root: Path) -> Path:
    """Return the folder in which the next generation is built and judged, before it is published."""
    return workspace(root) / f"{next_number(root):06}"


def decide(root: Path, renewal: Renewal) -> None:
    """Do what was decided about a generation. Call this function inside `renewing`. Raises OSError."""
    workspace(root).mkdir(mode=PRIVATE, exist_ok=True)
    write_whole(_decision_path(root), RENEWAL.dump_json(renewal))
    settle(root)


def roll_back(root: Path) -> Renewal:
    """Let the generation before the one that serves serve again, and return the decision.

    A rollback that was killed is finished, and is not followed by another one.
    Raises InvalidInput if no earlier generation is kept, DatabaseRefused if the earlier generation cannot be
    opened, BuildFailed if another process renews, and OSError.
    """
    with renewing(root) as finished:
        if finished is not None and finished.result is Result.ROLLED_BACK:
            return finished
        before = current_generation(root)
        kept = kept_generations(root)
        earlier = [generation for generation in kept if generation.number < before.number]
        if not earlier:
            numbers = ", ".join(str(generation.number) for generation in kept)
            raise InvalidInput(
                f"{root} holds no generation before generation {before.number}, but only {numbers}; to let a "
                f"generation serve, write its number into {current_path(root)}",
                field="database",
            )
        try:
            AttentionDatabase.open_generation(earlier[-1])
        except CorruptDatabase as error:
            raise CorruptDatabase(with_remedy(error, earlier[-1]), field="database") from error
        chosen = earlier[-1].number
        renewal = Renewal(now(), Result.ROLLED_BACK, before.number, chosen, "rolled back by an operator")
        decide(root, renewal)
    return renewal


def now() -> str:
    """Return the time for a decision, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_decided(root: Path) -> bool:
    """Return whether a decision was begun, and not finished yet."""
    return _decision_path(root).is_file()


def settle(root: Path, inputs: bytes | None = None) -> Renewal | None:
    """Finish a decision that was begun, and remove what no renewal will use.

    inputs: see `renewing`. Returns the decision; None if there was none. Raises OSError.
    """
    path, renewal = _decision_path(root), None
    if path.is_file():
        # A decision that was damaged on the disk is not done, and the next renewal decides again.
        with suppress(ValidationError):
            decided = RENEWAL.validate_json(path.read_bytes())
            is_meant = inputs is None or has_inputs(root, inputs)
            if is_meant or current_generation(root).number == decided.generation:
                renewal = decided
                _finish(root, renewal)
            elif decided.result is Result.PUBLISHED:
                _take_back(root, decided)
        clear_workspace(root)
    if workspace(root).is_dir():
        number = building_folder(root).name
        for path in workspace(root).iterdir():
            # What a stopped build of the next generation has finished stays: the folder, .partial and .lock.
            if path.name.strip(".").split(".")[0] not in (
                number,
                inputs_path(root).name,
                sampled_path(root).stem,
            ):
                _remove(path)
    for written in (current_path(root), renewals_path(root)):
        remove_unfinished(root, written.name)
    return renewal


def clear_workspace(root: Path) -> None:
    """Remove DIR/.renewal, if it exists, so that a process may be killed meanwhile. Raises OSError.

    Without `inputs`, nothing goes on with a build that is half removed, and the decision goes last.
    """
    if not workspace(root).is_dir():
        return
    inputs, decision = inputs_path(root), _decision_path(root)
    for path in sorted(workspace(root).iterdir(), key=lambda path: (path != inputs, path == decision)):
        _remove(path)
    workspace(root).rmdir()


def _finish(root: Path, renewal: Renewal) -> None:
    """Do what a decision says, except for removing the workspace."""
    _keep_line(root, renewal)
    if renewal.result in _SWITCHING:
        _switch(root, renewal)


def _keep_line(root: Path, renewal: Renewal) -> None:
    """Add a decision to renewals.jsonl, unless it is there."""
    if renewal in read_renewals(root)[-1:]:
        return
    path = renewals_path(root)
    lines = path.read_bytes() if path.is_file() else b""
    if lines and not lines.endswith(b"\n"):
        lines += b"\n"  # behind a line that was cut short
    write_whole(path, lines + RENEWAL.dump_json(renewal) + b"\n", mode=0o600)


def _switch(root: Path, renewal: Renewal) -> None:
    """Let the generation of a decision serve, and keep only it and the generation that served before."""
    chosen, built = Generation(root, renewal.generation), workspace(root) / f"{renewal.generation:06}"
    if not chosen.exists and not built.is_dir():
        return  # somebody removed the generation by hand
    others = [kept for kept in kept_generations(root) if kept != chosen]
    before = Generation(root, renewal.before)
    if before not in others and others:
        before = others[-1]  # `current` named a generation that is not there
    for generation in others:
        if generation.number not in (0, before.number):
            generation.folder.rename(workspace(root) / f"removed-{generation.number:06}")
            (generations_folder(root) / f".{generation.number:06}.lock").unlink(missing_ok=True)
    if 0 not in (before.number, chosen.number):
        _move_plain_database(root, workspace(root) / "removed-000000")
    if not chosen.exists:
        generations_folder(root).mkdir(mode=PRIVATE, exist_ok=True)
        move_into_place(built, chosen.folder)
    if current_generation(root) != chosen:
        _switch_to(chosen)


def _switch_to(generation: Generation) -> None:
    write_whole(current_path(generation.root), f"{generation.number}\n".encode())


def _take_back(root: Path, renewal: Renewal) -> None:
    """Undo the publication of a generation that does not serve yet: remove its line, and move its folder."""
    line, path = RENEWAL.dump_json(renewal) + b"\n", renewals_path(root)
    if path.is_file() and (lines := path.read_bytes()).endswith(line):
        write_whole(path, lines.removesuffix(line), mode=0o600)
    chosen = Generation(root, renewal.generation)
    if chosen.exists:
        chosen.folder.rename(workspace(root) / f"removed-{chosen.number:06}")


def _move_plain_database(root: Path, aside: Path) -> None:
    aside.mkdir(exist_ok=True)
    for pattern in _PLAIN_DATABASE:
        for path in root.glob(pattern):
            path.rename(aside / path.name)


def _decision_path(root: Path) -> Path:
    return workspace(root) / "decision.json"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            path.unlink()
