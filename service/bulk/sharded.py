"""One run over shards: it begins or continues an output, hands out what is missing, and closes the output.

OUTPUT/options.json           what decides the numbers; another run on this output must have the same
OUTPUT/<digest>.parquet       the numbers of one shard
OUTPUT/failed.jsonl           the shards that failed three times, and why; `failed-3-of-100.jsonl` of a part
OUTPUT/manifest.json          written last: the options, and for each shard its input and its output
                              removed as soon as a run finds a shard that is not done
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

import orjson

from attncache_core import InvalidInput
from service.bulk.shards import (
    Due,
    Failure,
    Shard,
    as_line,
    digest_of,
    is_whole,
    options_digest,
    outputs_in,
    read_ahead,
)
from service.bulk.spool import begun_otherwise
from service.objects import Changed, ObjectFolder

OPTIONS, MANIFEST = "options.json", "manifest.json"
_FAILED_NAME = re.compile(r"failed(-\d+-of-\d+)?\.jsonl")


@dataclass(frozen=True, slots=True)
class Part:
    """Which shards a run computes: those of number `number` of `of` parts of about the same size."""

    number: int = 1  # from 1
    of: int = 1

    def holds(self, digest: bytes) -> bool:
        """Return whether a shard is of this part. digest: of the name of its output."""
        return int.from_bytes(digest[:8]) % self.of == self.number - 1

    @property
    def failed_name(self) -> str:
        """The name of the file of failures."""
        return "failed.jsonl" if self.of == 1 else f"failed-{self.number}-of-{self.of}.jsonl"


class Workers(Protocol):
    """What computes shards."""

    def options(self) -> Mapping[str, Any]:
        """Return what decides the numbers."""

    def computed(self, due: Iterator[Due]) -> Iterator[tuple[Due, str | None]]:
        """Yield each shard, in any order, with None or why it failed."""


@dataclass(slots=True)
class Counts:
    """What a run came to."""

    computed: int = 0  # shards
    rows: int = 0  # of these shards
    done_before: int = 0  # shards of this part
    failed: int = 0
    is_complete: bool = False  # the manifest is written
    others: int = 0  # outputs in the folder that the manifest does not name: of inputs that were changed


def run_shards(
    workers: Workers,
    plan: Iterable[Shard | Failure],
    output: str,
    part: Part,
    report: Callable[[Counts], None],
) -> Counts:
    """Compute the shards that the output does not have, and write what failed, and the manifest.

    plan: of the inputs, as shards.plan returns it. report: called after each shard. Raises InvalidInput if
    the output was begun with other options or has files of somebody else that would be replaced, or if the
    workers have written elsewhere, what the plan raises, and OSError if the output cannot be written.
    """
    folder = ObjectFolder(output, "output", writes=True)
    _require_own(folder)
    options = dict(workers.options())
    _begin(folder, options)
    counts = Counts()
    failures: list[Failure] = []
    with tempfile.TemporaryFile() as planned:
        due = _due(plan, folder, options, part, planned, counts, failures)
        for (shard, _), reason in workers.computed(due):
            if reason is None:
                counts.computed += 1
                counts.rows += shard.rows
            else:
                told = shard.told
                failures.append(Failure(told["input"], reason, shard.group, shard.first))
            report(counts)
        counts.failed = len(failures)
        if failures:
            folder.put(part.failed_name, b"".join(map(as_line, failures)))
        else:
            folder.remove(part.failed_name)
            _close(folder, options, part, planned, counts)
    return counts


def _require_own(folder: ObjectFolder) -> None:
    """Raise InvalidInput if no run has begun the output, and it has a file that a run replaces or removes."""
    try:
        folder.about(OPTIONS)
    except FileNotFoundError:
        names = {stored.name for stored in folder.list() if _is_replaced(stored.name)}
        if names and OPTIONS not in names:  # another part may have begun meanwhile
            raise InvalidInput(
                f"--output {folder.url} has a file {min(names)}, which would be replaced or removed, and no "
                f"{OPTIONS} of an earlier run; move {min(names)} away, or choose another folder for --output",
                field="output",
            ) from None


def _is_replaced(name: str) -> bool:
    return name in (OPTIONS, MANIFEST) or _FAILED_NAME.fullmatch(name) is not None


def _begin(folder: ObjectFolder, options: Mapping[str, Any]) -> None:
    """Write the options, or raise InvalidInput if the output was begun with other ones."""
    content = orjson.dumps(options, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)
    try:
        folder.put_if(OPTIONS, content, None)
    except Changed:
        then = None
        with suppress(orjson.JSONDecodeError):
            then = orjson.loads(folder.read(OPTIONS)[0])
        if not isinstance(then, dict):
            raise InvalidInput(
                f"--output {folder.url} has a file {OPTIONS} that holds no options of a run; move it "
                "away, or choose another folder for --output",
                field="output",
            ) from None
        for name in sorted({*options, *then}):
            if options.get(name) != then.get(name):
                told = begun_otherwise(name, then.get(name), options.get(name))
                raise InvalidInput(
                    f"{folder.url} {told}; use the same options, or another output",
                    field="output",
                ) from None


def _due(
    plan: Iterable[Shard | Failure],
    folder: ObjectFolder,
    options: Mapping[str, Any],
    part: Part,
    planned: IO[bytes],
    counts: Counts,
    failures: list[Failure],
) -> Iterator[Due]:
    """Yield the shards of a part that are not done. Notes all shards in `planned`, for the manifest.

    Before the first shard that is not done, of any part, the manifest of an earlier run is removed.
    """
    done, digest = outputs_in(folder), options_digest(options)
    may_have_manifest = True

    def is_done(shard: Shard | Failure) -> bool:
        if isinstance(shard, Failure):
            return False
        name = digest_of(output := shard.output(digest))
        return name in done and (not part.holds(name) or is_whole(folder, output, shard))

    for shard, found in read_ahead(plan, is_done):
        if may_have_manifest and not found.result():
            folder.remove(MANIFEST)
            may_have_manifest = False
        if isinstance(shard, Failure):
            failures.append(shard)
            continue
        output = shard.output(digest)
        planned.write(as_line(shard, output=output))
        if not part.holds(digest_of(output)):
            continue
        if found.result():
            counts.done_before += 1
        else:
            yield shard, output


def _close(
    folder: ObjectFolder, options: Mapping[str, Any], part: Part, planned: IO[bytes], counts: Counts
) -> None:
    """Write the manifest if every shard is done, and note that, and the outputs that it does not name.

    Raises InvalidInput if a shard of this part is not done.
    """
    done = outputs_in(folder)
    others = set(done)
    planned.seek(0)
    is_complete = True
    for line in planned:
        name = digest_of(orjson.loads(line)["output"])
        others.discard(name)
        if name in done:
            continue
        if part.holds(name):
            raise InvalidInput(
                f"outputs are missing in {folder.url}; give a folder that all nodes share, or a URL",
                field="output",
            )
        is_complete = False  # another part is not done
    if not is_complete:
        return
    lists = [stored.name for stored in folder.list() if _FAILED_NAME.fullmatch(stored.name)]
    for failed_name in lists:  # of earlier runs and other parts
        folder.remove(failed_name)
    planned.seek(0)
    folder.put(MANIFEST, _manifest(options, planned))
    folder.remove_unfinished()
    counts.is_complete, counts.others = True, len(others)


def _manifest(options: Mapping[str, Any], planned: IO[bytes]) -> Iterator[bytes]:
    yield b'{"options": %s,\n"shards": [\n' % orjson.dumps(options, option=orjson.OPT_SORT_KEYS)
    separator = b""
    for line in planned:
        yield separator + line.rstrip(b"\n")
        separator = b",\n"
    yield b"\n]}\n"
