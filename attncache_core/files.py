"""Files that are there whole or not at all, and a folder that one process builds at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock for building `folder`; calls `on_wait` and waits while another process has it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    # Else a power failure may leave the name on an empty file.
    _sync(unfinished)
    unfinished.rename(path)


def is_whole(path: Path) -> bool:
    """Whether a file that `write_whole` writes is there."""
    return path.is_file() and path.stat().st_size > 0


def move_into_place(finished: Path, folder: Path) -> None:
    """Rename a folder whose content is complete; all of it is on disk before the name that says so is."""
    for path in finished.rglob("*"):
        _sync(path)
    finished.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
