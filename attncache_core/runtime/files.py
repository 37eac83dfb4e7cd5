"""Write files and folders atomically, and lock files and folders between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

_LOCK_POLL_SECONDS = 0.01

# Error numbers with which the system refuses to read a file. The content of the file may be sound.
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)

# Error numbers of a write to a disk, or to a file, that is full. They come without the file's name.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# The mode of folders that contain databases: records reveal something about the recorded texts.
PRIVATE = 0o700


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `folder` while the `with` block runs.

    If another process holds the lock, call `on_wait` and wait. The parent folder is created if it is missing,
    with access for its owner only.
    """
    folder.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        if not _try_lock(file):
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_within(path: Path, seconds: float) -> Iterator[bool]:
    """Try to get the lock of the file `path`, and yield whether the lock is held.

    seconds: how long to keep trying; 0 means one attempt.
    Raises OSError if the folder of the file is missing or cannot be written to.
    """
    last_try = time.monotonic() + seconds
    with (path.parent / f".{path.name}.lock").open("w") as file:
        while not (held := _try_lock(file)) and time.monotonic() < last_try:
            time.sleep(_LOCK_POLL_SECONDS)
        yield held


class HeldByAnother(Exception):
    """Who holds a lock: `process 123`, or `another process`, which has not written its id yet."""


@contextmanager
def locked_at_once(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which then holds the id of this process.

    The file stays, because a file that is removed can be locked by two processes. Raises HeldByAnother at
    once if another process holds the lock, and OSError if the file cannot be written.
    """
    # Not "w", which would erase the id that the holder has written.
    with path.open("a+", encoding="ascii") as file:
        if not _try_lock(file):
            file.seek(0)
            content = file.read()
            raise HeldByAnother(f"process {content}" if content.isdigit() else "another process")
        try:
            file.truncate(0)
            # Nothing stays in a buffer, because closing the file would fail again, without its name.
            os.write(file.fileno(), b"%d" % os.getpid())
        except OSError as error:
            error.filename = str(path)
            raise
        yield


def _try_lock(file: IO[Any]) -> bool:
    """Try once to lock an open file; return whether the lock is held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        error.filename = file.name
        raise
    return True


def write_whole(path: Path, content: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Write a file atomically: readers, and restarts after a power failure, see it whole or not at all.

    An existing file is replaced. If several processes write at the same time, the last content stays.
    content: or its parts, in order; what they raise leaves the file as it was. mode: permissions of the file,
    before the umask is applied. Raises OSError.
    """
    # Only a rename within a folder is atomic, so the temporary file is in the same folder. Its random name
    # keeps several writers apart.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.unfinished")
    try:
        with _begun(unfinished, mode) as file:
            file.writelines((content,) if isinstance(content, bytes) else content)
            file.flush()
            # Without fsync, the renamed file may be empty after a power failure.
            os.fsync(file.fileno())
            unfinished.replace(path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            error.filename = str(path)
        raise
    _sync(path.parent)


@contextmanager
def _begun(unfinished: Path, mode: int) -> Iterator[IO[bytes]]:
    """Yield a new file that is locked, so that nobody takes it for one of a killed process."""
    while True:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # it was not removed before it was locked
                yield file
                return


def write_all(file: FileIO, content: bytes | memoryview) -> None:
    """Write everything, although one call may write less, as on a disk that fills up. Raises OSError."""
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def move_to_new(path: Path, target: Path) -> None:
    """Rename a file. Raises FileExistsError if another file has the name `target`, and OSError.

    On a disk that fails meanwhile, the file may have both names.
    """
    try:
        os.link(path, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        path.replace(target)
        return
    with suppress(OSError):
        path.unlink()


def refused_read(error: BaseException | None) -> OSError | None:
    """Return the OSError by which the system refused to read a file, if it caused this error; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            return error
        error = error.__cause__
    return None


def when_written(path: Path) -> tuple[int, ...] | None:
    """Return what differs whenever a file was written anew; None if there is none.

    A copy can keep the modification time, but not the time of the last change of the inode.
    """
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def left_unfinished(folder: Path, name: str = "*") -> list[Path]:
    """Return the temporary files in `folder` that `write_whole` left because its process was killed.

    name: of the file that was to be written, as a pattern.
    """
    return list(folder.glob(f".{name}.*.unfinished"))


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what `left_unfinished` returns, but not what a process is writing."""
    for path in left_unfinished(folder, name):
        with suppress(OSError), path.open("rb") as file:  # also if somebody else removes it
            if _try_lock(file):
                path.unlink()


def move_into_place(finished: Path, folder: Path, without: Iterable[Path] = ()) -> None:
    """Rename the folder `finished` to `folder`, after all of its content has reached the disk.

    without: files and folders in it that do not move. They are removed last, because a process that is
    stopped before that needs them to go on.
    """
    for path in (finished, *finished.rglob("*")):
        _sync(path)
    for path in without:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    finished.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
