"""Files that are there whole or not at all, and a folder that one process builds at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_LOCK_POLL_SECONDS = 0.01

# The mode of folders that hold databases: what is recorded tells of texts.
PRIVATE = 0o700


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock for building `folder`; calls `on_wait` and waits while another process has it.

    The folder around it is created, if it is missing, for its owner alone.
    """
    folder.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_within(path: Path, seconds: float) -> Iterator[bool]:
    """Try for so many seconds to hold the lock of the file `path`; yields whether it is held.

    Tries once for 0 seconds. Raises OSError if the folder of the file is missing or cannot be written to.
    """
    last_try = time.monotonic() + seconds
    with (path.parent / f".{path.name}.lock").open("w") as file:
        while not (held := _try_lock(file)) and time.monotonic() < last_try:
            time.sleep(_LOCK_POLL_SECONDS)
        yield held


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that is whole or absent, for every reader and after a power failure. Raises OSError.

    A file that `path` names already is replaced. Of several writers at once, the last one's content stays.
    mode: permissions of the file, before the process' umask.
    """
    # In the folder of the file, since a rename within a folder is atomic; of a name that no other writer has.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.unfinished")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            # Else a power failure may leave the name on an empty file.
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def left_unfinished(folder: Path) -> list[Path]:
    """The temporary files in `folder` of calls of `write_whole` whose process was killed."""
    return list(folder.glob(".*.unfinished"))


def is_whole(path: Path) -> bool:
    """Whether a file that `write_whole` writes is there."""
    return path.is_file() and path.stat().st_size > 0


def move_into_place(finished: Path, folder: Path) -> None:
    """Rename a folder whose content is complete; all of it is on disk before the name that says so is."""
    for path in (finished, *finished.rglob("*")):
        _sync(path)
    finished.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
