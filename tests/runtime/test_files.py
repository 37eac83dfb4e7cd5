"""Files are complete or absent, even with concurrent writers and after an interrupted write."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from full_disk import largest_file

from attncache_core.runtime import files
from attncache_core.runtime.files import (
    locked,
    locked_at_once,
    move_into_place,
    remove_unfinished,
    when_written,
    write_whole,
)

CONTENT_BYTES = 300_000


def content_of(writer: int) -> bytes:
    """Return the content of one writer: unique to the writer, and longer than one write of the system."""
    return bytes([writer]) * (CONTENT_BYTES + writer)


# Imports files.py without the package. argv: folder of files.py, path to write, writer, number of writes.
WRITER = f"""
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from files import write_whole
writer = int(sys.argv[3])
for _ in range(int(sys.argv[4])):
    write_whole(Path(sys.argv[2]), bytes([writer]) * ({CONTENT_BYTES} + writer))
"""


def test_concurrent_writers_leave_one_complete_file_and_no_other(tmp_path):
    path, writers = tmp_path / "a.json", [1, 2, 3]
    write_whole(path, content_of(1))
    command = [sys.executable, "-c", WRITER, Path(files.__file__).parent, path]
    running = [subprocess.Popen([*map(str, command), str(writer), "40"]) for writer in writers]
    wholes, seen = {content_of(writer) for writer in writers}, set()
    while any(process.poll() is None for process in running):
        seen.add(path.read_bytes())
    assert [process.returncode for process in running] == [0, 0, 0]
    assert seen | {path.read_bytes()} <= wholes
    assert list(tmp_path.iterdir()) == [path]


def test_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    with largest_file(1000), pytest.raises(OSError, match="too large") as failed:
        write_whole(path, content_of(1))
    assert failed.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    lock = tmp_path / "a.lock"
    with largest_file(0), pytest.raises(OSError, match="too large") as failed, locked_at_once(lock):
        pass
    assert failed.value.filename == str(lock)


def test_file_system_without_locks_is_named_with_the_file(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks") as failed, locked(tmp_path / "a.db", lambda: None):
        pass
    assert failed.value.filename == str(tmp_path / ".a.db.lock")


@contextmanager
def interrupted_after(seconds: float):
    """Raise KeyboardInterrupt after this many seconds, wherever the program is then."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupted_write_leaves_a_complete_file_and_no_other(tmp_path):
    path, old, new = tmp_path / "a.json", b"old", bytes(20_000_000)
    write_whole(path, old)
    interrupted = 0
    for milliseconds in range(1, 40):
        try:
            with interrupted_after(milliseconds / 1000):
                write_whole(path, new)
        except KeyboardInterrupt:
            interrupted += 1
        assert path.read_bytes() in (old, new)
        assert list(tmp_path.iterdir()) == [path]
    assert interrupted


@pytest.fixture
def synced(monkeypatch):
    """The calls of fsync, as (path of the file at that time, names in its folder at that time)."""
    seen, fsync = [], os.fsync

    def recorded(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        folder = path if path.is_dir() else path.parent
        seen.append((path, sorted(entry.name for entry in folder.iterdir())))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="the names of open files are read from /proc")
def test_content_is_on_disk_before_the_name_and_the_name_before_the_call_returns(tmp_path, synced):
    write_whole(tmp_path / "a.json", b"new")
    (file, (unfinished,)), (folder, names) = synced
    assert file == tmp_path / unfinished
    assert unfinished != "a.json"
    assert (folder, names) == (tmp_path, ["a.json"])


@pytest.mark.skipif(sys.platform != "linux", reason="the names of open files are read from /proc")
def test_folder_is_on_disk_with_its_content_before_it_gets_its_name(tmp_path, synced):
    (tmp_path / "unfinished" / "inner").mkdir(parents=True)
    (tmp_path / "unfinished" / "a").write_bytes(b"a")
    (tmp_path / "unfinished" / "inner" / "b").write_bytes(b"b")
    move_into_place(tmp_path / "unfinished", tmp_path / "finished")
    *before, (last, names) = synced
    assert {path for path, _ in before} == {
        tmp_path / "unfinished" / name for name in ("", "a", "inner", "inner/b")
    }
    assert (last, names) == (tmp_path, ["finished"])


def test_unfinished_files_are_removed_but_not_what_is_being_written(tmp_path, monkeypatch):
    def content():
        yield b"ne"
        remove_unfinished(tmp_path)
        yield b"w"

    lock, begun = fcntl.flock, []

    def late(file, how):
        if how == fcntl.LOCK_EX and not begun:
            begun.append(True)
            remove_unfinished(tmp_path)  # before the file is locked
        lock(file, how)

    (tmp_path / ".b.json.0.unfinished").touch()  # of a killed process
    monkeypatch.setattr(fcntl, "flock", late)
    write_whole(tmp_path / "a.json", content())
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"new"
    assert begun


@pytest.mark.parametrize(("mode", "umask", "expected"), [(0o600, 0o000, 0o600), (0o666, 0o027, 0o640)])
def test_file_has_the_given_mode_minus_the_umask(tmp_path, mode, umask, expected):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "a", b"a", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == expected


def test_file_written_in_place_is_noticed_though_its_size_and_time_are_as_before(tmp_path):
    path = tmp_path / "certificate.pem"
    assert when_written(path) is None
    path.write_bytes(b"before")
    before, state = when_written(path), path.stat()
    time.sleep(0.05)  # the clock of files has ticks of some milliseconds
    path.write_bytes(b"after.")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns
    assert when_written(path) != before
