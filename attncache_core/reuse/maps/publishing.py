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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from attncache_core.errors import BuildFailed, CorruptDatabase, InvalidInput
from attncache_core.reuse.maps.database import AttentionDatabase, with_remedy
from attncache_core.reuse.maps.generations import (
    CURRENT,
    GENERATIONS,
    RENEWAL,
    RENEWALS,
    Generation,
    Renewal,
    Result,
    current_generation,
    kept_generations,
    next_number,
    read_renewals,
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

# The hidden folder in which a renewal works; in it the digest of what the present renewal builds from, its
# texts, if they are of a sample, and what was decided.
_WORKSPACE = Path(".renewal")
_INPUTS, SAMPLED, _DECISION = _WORKSPACE / "inputs", _WORKSPACE / "sampled.log", _WORKSPACE / "decision.json"
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
        raise BuildFailed(
            f"{held} renews or calibrates {root} at present; wait until it has ended", field="database"
        ) from held


def begin_building(root: Path, inputs: bytes, prepare: Callable[[], None] = lambda: None) -> Path:
    """Return the folder in which the next generation is built, with what was built from equal inputs.

    inputs: a digest. prepare: is called in a new workspace, before it belongs to the inputs. Raises OSError.
    """
    if not _has_inputs(root, inputs):
        clear_workspace(root)
        (root / _WORKSPACE).mkdir(mode=PRIVATE)
        prepare()
        write_whole(root / _INPUTS, inputs)
    return building_folder(root)


def building_folder(root: Path) -> Path:
    """Return the folder in which the next generation is built and judged, before it is published."""
    return root / _WORKSPACE / f"{next_number(root):06}"


def decide(root: Path, renewal: Renewal) -> None:
    """Do what was decided about a generation. Call this function inside `renewing`. Raises OSError."""
    (root / _WORKSPACE).mkdir(mode=PRIVATE, exist_ok=True)
    write_whole(root / _DECISION, RENEWAL.dump_json(renewal))
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
                f"generation serve, write its number into {root / CURRENT}",
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
    return (root / _DECISION).is_file()


def settle(root: Path, inputs: bytes | None = None) -> Renewal | None:
    """Finish a decision that was begun, and remove what no renewal will use.

    inputs: see `renewing`. Returns the decision; None if there was none. Raises OSError.
    """
    path, renewal = root / _DECISION, None
    if path.is_file():
        # A decision that was damaged on the disk is not done, and the next renewal decides again.
        with suppress(ValidationError):
            decided = RENEWAL.validate_json(path.read_bytes())
            is_meant = inputs is None or _has_inputs(root, inputs)
            if is_meant or current_generation(root).number == decided.generation:
                renewal = decided
                _finish(root, renewal)
            elif decided.result is Result.PUBLISHED:
                _take_back(root, decided)
        clear_workspace(root)
    if (root / _WORKSPACE).is_dir():
        kept = building_folder(root).name, _INPUTS.stem, SAMPLED.stem
        for path in (root / _WORKSPACE).iterdir():
            # What a stopped build of the next generation has finished stays: the folder, .partial and .lock.
            if path.name.strip(".").split(".")[0] not in kept:
                _remove(path)
    for written in (CURRENT, RENEWALS):
        remove_unfinished(root, written)
    return renewal


def clear_workspace(root: Path) -> None:
    """Remove DIR/.renewal, if it exists, so that a process may be killed meanwhile. Raises OSError.

    Without `inputs`, nothing goes on with a build that is half removed, and the decision goes last.
    """
    if not (root / _WORKSPACE).is_dir():
        return
    inputs, decision = root / _INPUTS, root / _DECISION
    for path in sorted((root / _WORKSPACE).iterdir(), key=lambda path: (path != inputs, path == decision)):
        _remove(path)
    (root / _WORKSPACE).rmdir()


def _has_inputs(root: Path, inputs: bytes) -> bool:
    """Return whether what the workspace holds was made from these inputs."""
    path = root / _INPUTS
    return path.is_file() and path.read_bytes() == inputs


def _finish(root: Path, renewal: Renewal) -> None:
    """Do what a decision says, except for removing the workspace."""
    _keep_line(root, renewal)
    if renewal.result in _SWITCHING:
        _switch(root, renewal)


def _keep_line(root: Path, renewal: Renewal) -> None:
    """Add a decision to renewals.jsonl, unless it is there."""
    if renewal in read_renewals(root)[-1:]:
        return
    path = root / RENEWALS
    lines = path.read_bytes() if path.is_file() else b""
    if lines and not lines.endswith(b"\n"):
        lines += b"\n"  # behind a line that was cut short
    write_whole(path, lines + RENEWAL.dump_json(renewal) + b"\n", mode=0o600)


def _switch(root: Path, renewal: Renewal) -> None:
    """Let the generation of a decision serve, and keep only it and the generation that served before."""
    chosen, built = Generation(root, renewal.generation), root / _WORKSPACE / f"{renewal.generation:06}"
    if not chosen.exists and not built.is_dir():
        return  # somebody removed the generation by hand
    others = [kept for kept in kept_generations(root) if kept != chosen]
    before = Generation(root, renewal.before)
    if before not in others and others:
        before = others[-1]  # `current` named a generation that is not there
    for generation in others:
        if generation.number not in (0, before.number):
            generation.folder.rename(root / _WORKSPACE / f"removed-{generation.number:06}")
            (root / GENERATIONS / f".{generation.number:06}.lock").unlink(missing_ok=True)
    if 0 not in (before.number, chosen.number):
        _move_plain_database(root, root / _WORKSPACE / "removed-000000")
    if not chosen.exists:
        (root / GENERATIONS).mkdir(mode=PRIVATE, exist_ok=True)
        move_into_place(built, chosen.folder)
    if current_generation(root) != chosen:
        _switch_to(chosen)


def _switch_to(generation: Generation) -> None:
    write_whole(generation.root / CURRENT, f"{generation.number}\n".encode())


def _take_back(root: Path, renewal: Renewal) -> None:
    """Undo the publication of a generation that does not serve yet: remove its line, and move its folder."""
    line, path = RENEWAL.dump_json(renewal) + b"\n", root / RENEWALS
    if path.is_file() and (lines := path.read_bytes()).endswith(line):
        write_whole(path, lines.removesuffix(line), mode=0o600)
    chosen = Generation(root, renewal.generation)
    if chosen.exists:
        chosen.folder.rename(root / _WORKSPACE / f"removed-{chosen.number:06}")


def _move_plain_database(root: Path, aside: Path) -> None:
    aside.mkdir(exist_ok=True)
    for pattern in _PLAIN_DATABASE:
        for path in root.glob(pattern):
            path.rename(aside / path.name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            path.unlink()
