"""Numbers that are computed row by row, in a file that a killed run leaves ready to be continued.

    OUTPUT.partial    a .npy file, float32 [rows, width]; rows behind the ones that are done may be torn
    OUTPUT.progress   JSON: the rows that are done, and what the run was begun with

`append` flushes the numbers to the disk before it replaces OUTPUT.progress, so every row that is done is
whole after a crash.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from attncache_core import InvalidInput
from attncache_core.runtime.files import remove_unfinished, write_all, write_whole
from service.bulk.rows import NOTHING, Done

FINGERPRINT = "model fingerprint"  # among what an output is begun with
_NUMBER = np.dtype("<f4")


def begun_otherwise(name: str, then: Any, now: Any) -> str:
    """Say what an output was begun with, and what this run has. None: the option was not given."""
    begun, given = (f"without {name}" if value is None else f"with {name} {value}" for value in (then, now))
    changed = " (another model, or options that change its answers)" if name == FINGERPRINT else ""
    return f"was begun {begun}, not {given}{changed}"


class Spool:
    """The open file of a run. `open_spool` makes one."""

    def __init__(self, output: Path, file: FileIO, width: int, begun_with: Mapping[str, Any]) -> None:
        """begun_with: what must not change in a run that is continued."""
        self._output, self._file, self._width, self._begun_with = output, file, width, dict(begun_with)
        self.done = NOTHING
        self._was_removed = False

    def how_to_continue(self, before: str = "") -> str:
        """Return a sentence for people. before: what they must do first."""
        if not self.done.rows or self._was_removed:
            return f"no row is saved; {before}run the same command again"
        saved = f"{self.done.rows:,} rows are saved in {partial(self._output)}"
        return f"{saved}; {before}run the same command again to continue"

    def continue_or_begin(self) -> None:
        """Drop torn rows behind the ones that are done, or begin. Raises InvalidInput; see open_spool."""
        state = self._state()
        if state is None or not state[1].rows:  # a run that saved no row binds nobody to its options
            self._file.truncate(0)
            self._write_header()
            self._write_state(self.done)
            return
        begun_with, done = state
        for name in {**self._begun_with, **begun_with}:
            then, now = begun_with.get(name), self._begun_with.get(name)
            if then != now:
                raise InvalidInput(
                    f"{partial(self._output)} {begun_otherwise(name, then, now)}; use the same options and "
                    "the same version of attncache, or remove this file to begin again",
                    field=name,
                )
        self.done = done
        if self._file.seek(0, os.SEEK_END) < self._end:
            raise InvalidInput(
                f"{partial(self._output)} is damaged: it has fewer than the {self.done.rows:,} rows that "
                "were saved; remove this file to begin again",
                field="output",
            )
        self._file.truncate(self._end)

    def append(self, numbers: np.ndarray, done: Done) -> None:
        """Save the numbers of the next rows, float32 [rows, width]. done: the rows that are done with them.

        Raises OSError, for instance if the disk is full, or if the file was removed. Then the rows are not
        done.
        """
        if not os.fstat(self._file.fileno()).st_nlink:
            self._was_removed = True
            raise OSError(errno.ENOENT, "was removed while it was written", str(partial(self._output)))
        self._file.seek(self._end)
        write_all(self._file, np.ascontiguousarray(numbers, dtype=_NUMBER).reshape(-1).view(np.uint8).data)
        self._sync()
        self._write_state(done)
        self.done = done

    def numbers(self, rows: list[int]) -> np.ndarray:
        """Return the numbers of rows that are done, float32 [rows, width]. Raises OSError."""
        start, size = len(self._header()), self._width * _NUMBER.itemsize
        found = b"".join(os.pread(self._file.fileno(), size, start + row * size) for row in rows)
        if len(found) < len(rows) * size:
            raise OSError(errno.EIO, "was cut while it was written", str(partial(self._output)))
        return np.frombuffer(found, _NUMBER).reshape(len(rows), self._width)

    def finish(self) -> np.ndarray:
        """Complete the file, and return its numbers, float32 [rows, width], mapped from the file."""
        self._write_header()
        self._sync()
        shape = (self.done.rows, self._width)
        return np.memmap(partial(self._output), _NUMBER, "r", len(self._header()), shape)

    @property
    def _end(self) -> int:
        """The size of the file with the rows that are done."""
        return len(self._header()) + self.done.rows * self._width * _NUMBER.itemsize

    def _header(self) -> bytes:
        """Return the header of a .npy file. NumPy pads it, so its size does not depend on the rows."""
        header, shape = io.BytesIO(), (self.done.rows, self._width)
        np.lib.format.write_array_header_1_0(
            header, {"descr": _NUMBER.str, "fortran_order": False, "shape": shape}
        )
        return header.getvalue()

    def _write_header(self) -> None:
        self._file.seek(0)
        write_all(self._file, self._header())

    def _sync(self) -> None:
        os.fsync(self._file.fileno())

    def _state(self) -> tuple[Mapping[str, Any], Done] | None:
        """Return what a run was begun with, and the rows that it has done; None if there was no run."""
        path, numbers = progress(self._output), partial(self._output)
        if not self._file.seek(0, os.SEEK_END):
            return None
        if not path.exists():
            self._file.seek(0)
            if self._file.read(len(self._header()) + 1) == self._header():
                return None  # a run was killed before it saved anything
            raise InvalidInput(
                f"{numbers} exists without {path.name}, which says what it holds; restore this file, or "
                f"remove {numbers} to begin again",
                field="output",
            )
        try:
            state = orjson.loads(path.read_bytes())
            done = state["done"]
            return dict(state["begun_with"]), Done(int(done["rows"]), str(done["digest"]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"{path} is damaged; remove {numbers} to begin again", field="output"
            ) from error

    def _write_state(self, done: Done) -> None:
        state = {"begun_with": self._begun_with, "done": asdict(done)}
        write_whole(progress(self._output), orjson.dumps(state))


@contextmanager
def open_spool(output: Path, width: int, begun_with: Mapping[str, Any]) -> Iterator[Spool]:
    """Open the spool of an output file: continue what an earlier run left, or begin.

    width: numbers per row. At the end, the files are removed if no row is saved. Raises InvalidInput if the
    earlier run was begun with something else, if its files are damaged, and if another process writes to
    them; OSError if the files cannot be written.
    """
    descriptor = os.open(partial(output), os.O_RDWR | os.O_CREAT, 0o666)
    # Not buffered: closing would write again what did not fit, and hide the error that names the file.
    with FileIO(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that ended meanwhile may have renamed the file that was opened.
            if not os.path.samestat(os.fstat(file.fileno()), partial(output).stat()):
                raise BlockingIOError
        except OSError as error:
            raise InvalidInput(
                f"another process writes to {partial(output)}; wait for its end", field="output"
            ) from error
        for left in (output, progress(output)):
            remove_unfinished(output.parent, glob.escape(left.name))
        is_new = not os.fstat(file.fileno()).st_size
        spool = Spool(output, file, width, begun_with)
        try:
            spool.continue_or_begin()
        except OSError as error:
            if is_new:  # the next run could not tell what a torn beginning holds
                remove_spool(output)
            raise OSError(error.errno, error.strerror, error.filename or str(partial(output))) from error
        try:
            yield spool
        finally:
            if not spool.done.rows:
                remove_spool(output)


def partial(output: Path) -> Path:
    """Return the path of the numbers of an unfinished output."""
    return output.with_name(f"{output.name}.partial")


def progress(output: Path) -> Path:
    """Return the path of the state of an unfinished output."""
    return output.with_name(f"{output.name}.progress")


def remove_spool(output: Path) -> None:
    """Remove the files of an output that is complete or was never begun."""
    partial(output).unlink(missing_ok=True)
    progress(output).unlink(missing_ok=True)
