"""A database in an object store, and a folder of the cache that follows it. `pushing.py` sends databases.

    URL/database.json     the pointer: id of the database, and size and SHA-256 of each of its files
    URL/<id>/<SHA-256>    the content of a file

An object is named by its content, so it never changes. A server downloads what the pointer names into the
workspace of a folder of the cache, and publishes it there as the next generation, as a renewal does. So
workers and other servers of the machine find it as they find a renewed database.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import SecretStr, TypeAdapter, ValidationError

from attncache_core import (
    AttentionDatabase,
    AttnCacheError,
    BuildFailed,
    Checkpoint,
    CorruptDatabase,
    DatabaseRefused,
)
from attncache_core.reuse.maps.default import databases_folder
from attncache_core.reuse.maps.generations import (
    Generation,
    Renewal,
    Result,
    current_generation,
    kept_generations,
)
from attncache_core.reuse.maps.integrity import file_digest
from attncache_core.reuse.maps.manifest import Manifest
from attncache_core.reuse.maps.policy_state import Tightened, kept_steps, merge_tightened
from attncache_core.reuse.maps.publishing import (
    begin_building,
    building_folder,
    clear_workspace,
    decide,
    is_decided,
    now,
    renewing,
)
from attncache_core.runtime.files import PRIVATE, HeldByAnother
from attncache_core.runtime.stored import Stored
from service.errors import reason_of
from service.objects import RANGE_BYTES, ObjectFolder, without_secrets
from service.settings import Settings
from service.state import FetchFailed, Loaded, Pause

logger = logging.getLogger(__name__)

POINTER = "database.json"
SECONDS_BETWEEN_LOOKS = 30.0
# A server that waits for another process, which downloads the database.
_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 3600.0
_DOWNLOADS = 4  # at once
_SHOWN_STEP = 0.1
# What servers find out. They write it at any time, so it is read once.
FINDINGS = "tightened.json"
FILE_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, slots=True)
class PushedFile:
    """What a file of a database must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Pointer(Stored):
    """The content of the pointer."""

    id: str  # of the database
    files: dict[str, PushedFile]  # path in the folder of the database -> content
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        # The pointer chooses paths on this machine.
        digests = [file.sha256 for file in self.files.values()]
        if not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests):
            raise ValueError("a digest is no SHA-256")
        if not re.fullmatch(r"[0-9a-f]{32}", self.id) or not all(map(FILE_NAME.fullmatch, self.files)):
            raise ValueError("the id or the name of a file is not one of a database")
        if not {"manifest.json", "key"} <= set(self.files):
            raise ValueError("there is no manifest or no key")

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files.values())

    def object_name(self, file: PushedFile) -> str:
        """Return the name of the object with the content of a file."""
        return f"{self.id}/{file.sha256}"


POINTER_CONTENT = TypeAdapter(Pointer)


class RemoteDatabase:
    """Owns the folder of the cache that follows a database in a store."""

    def __init__(self, url: str, cache_dir: Path | None, checkpoint: Checkpoint) -> None:
        """Raises InvalidInput if the URL cannot be used, and OSError."""
        self._store, self._checkpoint = ObjectFolder(url, "database"), checkpoint
        # Without secrets, so that a new password does not download the database again.
        shown = without_secrets(url).rstrip("/")
        name = re.sub(r"[^\w.-]+", "-", shown.rpartition("/")[2])
        digest = hashlib.sha256(shown.encode()).hexdigest()[:12]
        self.root = databases_folder(cache_dir) / f"{name}-{digest}"

    @property
    def url(self) -> str:
        """The URL without secrets."""
        return self._store.url

    @property
    def is_there(self) -> bool:
        """Whether a database was downloaded."""
        return current_generation(self.root).number > 0

    def fetch(self, *, waits: bool) -> Iterator[str]:
        """Let the database that the pointer names serve in the folder, unless it does. Yields what is done.

        waits: for another process that downloads; False: leave it to that process. Raises AttnCacheError, and
        OSError. Both leave what serves.
        """
        pointer = self._pointer()
        last, is_told = time.monotonic() + _LONGEST_WAIT_SECONDS, False
        # A process that was killed while it published may have left another database that is to serve next.
        while not self._serves(pointer) or is_decided(self.root):
            try:
                yield from self._downloaded(pointer)
            except BuildFailed as held:
                if not isinstance(held.__cause__, HeldByAnother) or time.monotonic() > last:
                    raise
                if not waits:
                    return
                if not is_told:
                    yield f"another process downloads the database from {self.url}"
                is_told = True
                time.sleep(_WAIT_SECONDS)

    def _pointer(self) -> Pointer:
        content, about = self._store.read(POINTER)
        try:
            return POINTER_CONTENT.validate_json(content)
        except ValidationError as error:
            raise CorruptDatabase(
                f"{self._store.url_of(about.name)} is no pointer of attncache push", field="database"
            ) from error

    def _serves(self, pointer: Pointer) -> bool:
        try:
            return _is_named(current_generation(self.root), pointer)
        except CorruptDatabase:
            return False

    def _kept(self, pointer: Pointer) -> Generation | None:
        """Return a sound generation that the pointer names, with what was found out about it here, or None.

        Raises DatabaseRefused if it is of another model.
        """
        for generation in kept_generations(self.root):
            if _is_named(generation, pointer):
                with self._refused_by_url(generation.folder), suppress(CorruptDatabase):
                    database = AttentionDatabase.open_generation(generation)
                    database.require_fingerprint(self._checkpoint)
                    return generation
        return None

    def _tighten(self, kept: Generation, pointer: Pointer) -> None:
        """Make the policy of a kept generation as tight as the findings that were pushed say."""
        if FINDINGS in pointer.files:
            clear_workspace(self.root)
            pushed = building_folder(self.root)
            self._file(pointer, FINDINGS, pushed)
            policy = Manifest.read(kept.folder).policy
            steps = kept_steps(pushed, policy)
            merge_tightened(kept.folder, policy, Tightened(steps), _LONGEST_WAIT_SECONDS)

    def _downloaded(self, pointer: Pointer) -> Iterator[str]:
        self.root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        inputs = hashlib.sha256(POINTER_CONTENT.dump_json(pointer)).hexdigest().encode()
        with renewing(self.root, begins=True, inputs=inputs):
            if self._serves(pointer):
                return
            before = current_generation(self.root).number
            if kept := self._kept(pointer):
                self._tighten(kept, pointer)
                reason = f"named again by {self.url}"
                decide(self.root, Renewal(now(), Result.ROLLED_BACK, before, kept.number, reason))
                return
            target = begin_building(self.root, inputs)
            try:
                # A database of another model is refused before the rest is downloaded.
                self._file(pointer, "manifest.json", target)
                with self._refused_by_url(target):
                    manifest = Manifest.read(target)
                    manifest.require_fingerprint(target, self._checkpoint)
                yield from self._download(pointer, target)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    clear_workspace(self.root)
                raise
            with self._refused_by_url(target):
                AttentionDatabase.open(target)
            reason = f"downloaded from {self.url}"
            decide(self.root, Renewal(now(), Result.PUBLISHED, before, int(target.name), reason))

    @contextmanager
    def _refused_by_url(self, target: Path) -> Iterator[None]:
        """Let an error name the URL, and not a folder of the cache and what to do with it."""
        try:
            yield
        except DatabaseRefused as error:
            reason = str(error).partition(";")[0].replace(str(target), self.url)
            raise DatabaseRefused(reason, field="database") from error

    def _download(self, pointer: Pointer, target: Path) -> Iterator[str]:
        """Download what is missing, and check every file."""
        missing = pointer.bytes - sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        free = shutil.disk_usage(target).free
        if missing > free:
            raise OSError(
                errno.ENOSPC, f"the database needs {missing:,} bytes, and {free:,} are free", str(self.root)
            )
        yield f"downloading the database from {self.url}: {pointer.bytes:,} bytes"
        done, shown = 0, 0.0
        with ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="download") as pool:
            running = {
                pool.submit(self._file, pointer, name, target): file for name, file in pointer.files.items()
            }
            try:
                for finished in as_completed(running):
                    finished.result()
                    done += running[finished].bytes
                    if done / pointer.bytes >= shown + _SHOWN_STEP:
                        shown = done / pointer.bytes
                        yield f"downloading the database from {self.url}: {shown:.0%}"
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _file(self, pointer: Pointer, path_in: str, target: Path) -> None:
        """Download the rest of a file, and check it. A file that is not right is removed."""
        file, path = pointer.files[path_in], target / path_in
        name = pointer.object_name(file)
        path.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        stored = self._store.about(name)
        if stored.bytes != file.bytes:
            raise CorruptDatabase(
                f"{self._store.url_of(name)} has {stored.bytes:,} bytes instead of {file.bytes:,}; push the "
                "database again",
                field="database",
            )
        with open(path, "ab", opener=_private) as opened:
            if opened.tell() > file.bytes:
                opened.truncate(0)
            while (start := opened.seek(0, 2)) < file.bytes:
                opened.write(self._store.read_range(name, start, min(RANGE_BYTES, file.bytes - start)))
        if file_digest(path) != file.sha256:
            path.unlink()
            raise CorruptDatabase(
                f"{self._store.url_of(name)} holds other bytes than were pushed; push the database again",
                field="database",
            )


def _is_named(generation: Generation, pointer: Pointer) -> bool:
    # A pointer that differs in findings only names the same database.
    try:
        digest = file_digest(generation.folder / "manifest.json")
    except OSError:
        return False
    return digest == pointer.files["manifest.json"].sha256


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def with_remote_database(
    settings: Settings,
    checkpoint: Checkpoint,
    load: Callable[[Settings], Iterator[Loaded]],
    *,
    leads: bool,
) -> Iterator[Loaded]:
    """Yield what `load` loads with the local folder of a database by URL; without a URL, only what it loads.

    leads: look at the pointer every 30 s; False: another worker does. Raises DatabaseRefused with the URL if
    no database can be downloaded and none was downloaded before, and what `load` raises.
    """
    if not (settings.reuse and settings.maps and isinstance(settings.database, SecretStr)):
        yield from load(settings)
        return
    remote = RemoteDatabase(settings.database.get_secret_value(), settings.cache_dir, checkpoint)
    last: str | None = None  # the failure that was logged last

    def failed(error: Exception) -> FetchFailed:
        """Log each failure once."""
        nonlocal last
        before, last = last, _told(error, remote)
        if last != before:
            logger.error("%s; the database that was downloaded last serves on", last)
        return FetchFailed()

    try:
        yield from remote.fetch(waits=True)
    except (AttnCacheError, OSError) as error:
        if not remote.is_there:
            raise DatabaseRefused(_told(error, remote), field="database") from error
        yield failed(error)
    next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
    for loaded in load(settings.model_copy(update={"database": remote.root})):
        yield loaded
        if not leads or not isinstance(loaded, Pause) or time.monotonic() < next_look:
            continue
        try:
            yield from remote.fetch(waits=False)
            last = None
        except Exception as error:
            yield failed(error)
        next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS


def _told(error: Exception, remote: RemoteDatabase) -> str:
    return f"the database of {remote.url} cannot be used: {reason_of(error)}"
