"""A process that reads a truncated mapped file; test_guard.py runs it.

argv: the path of guard.py and the name of a function below. The exit code is 0 if all assertions hold;
otherwise the process ends by a signal or with a traceback.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import mmap
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

PAGE = mmap.PAGESIZE
PAGES = 8


def load(path: str) -> ModuleType:
    """Load a module without its package. The process starts fast, because the package would import torch."""
    specification = importlib.util.spec_from_file_location("guard", path)
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def guard_of(path: str):
    found = load(path).guard()
    assert found is not None
    return found


class Mapped:
    """A mapped file of whole pages; every byte of a page is the page's number, counted from 1."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._file.write(b"".join(bytes([number + 1]) * PAGE for number in range(PAGES)))
        self._file.flush()
        self.size = PAGES * PAGE
        self.map = mmap.mmap(self._file.fileno(), self.size, mmap.MAP_PRIVATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def cut(self, pages: int) -> None:
        os.ftruncate(self._file.fileno(), pages * PAGE)

    def page(self, number: int) -> int:
        """Read the byte in the middle of a page from memory."""
        return ctypes.c_ubyte.from_address(self.address + number * PAGE + PAGE // 2).value


def reads_zeros_behind_the_cut(guard) -> None:
    mapped = Mapped()
    watched = guard.watch(mapped.address, mapped.size)
    assert [mapped.page(number) for number in range(PAGES)] == list(range(1, PAGES + 1))
    mapped.cut(3)
    assert mapped.page(2) == 3
    assert not watched.has_faulted
    assert mapped.page(5) == 0
    assert watched.has_faulted
    # Zeros from page 5, which faulted, to the end. Pages 3 and 4 fault when they are read here.
    assert [mapped.page(number) for number in range(PAGES)] == [1, 2, 3, 0, 0, 0, 0, 0]


def marks_the_range_that_faulted_alone(guard) -> None:
    files = [Mapped() for _ in range(600)]  # more than one chunk of the guard's table
    ranges = [guard.watch(mapped.address, mapped.size) for mapped in files]
    for index in (0, 255, 256, 599):
        files[index].cut(1)
        assert files[index].page(7) == 0
    assert [index for index, each in enumerate(ranges) if each.has_faulted] == [0, 255, 256, 599]
    for each in ranges:
        each.forget()
    again = guard.watch(files[1].address, files[1].size)
    assert not again.has_faulted


def reads_while_others_watch_and_forget(guard) -> None:
    """Cause faults on two threads while two other threads change the guard's table."""
    done = threading.Event()

    def change() -> None:
        # Addresses that nobody reads, below and above all memory of this process.
        while not done.is_set():
            first = guard.watch(PAGE, PAGE)
            second = guard.watch(2**47, 2**40)
            first.forget()
            second.forget()

    def read() -> None:
        for _ in range(300):
            mapped = Mapped()
            watched = guard.watch(mapped.address, mapped.size)
            mapped.cut(0)
            assert [mapped.page(number) for number in range(PAGES)] == [0] * PAGES
            assert watched.has_faulted
            watched.forget()
            finished.append(1)

    finished: list[int] = []
    changing = [threading.Thread(target=change) for _ in range(2)]
    reading = [threading.Thread(target=read) for _ in range(2)]
    for thread in changing + reading:
        thread.start()
    for thread in reading:
        thread.join()
    done.set()
    for thread in changing:
        thread.join()
    assert len(finished) == 600


def is_installed_once(guard) -> None:
    """Two handlers would call each other forever on a foreign fault."""
    assert type(guard)(Path(guard._library._name)) is not guard
    foreign_fault(guard)


def foreign_fault(guard) -> None:
    mapped, foreign = Mapped(), Mapped()
    guard.watch(mapped.address, mapped.size)
    foreign.cut(0)
    foreign.page(0)


def fault_of_a_forgotten_range(guard) -> None:
    mapped = Mapped()
    guard.watch(mapped.address, mapped.size).forget()
    mapped.cut(0)
    mapped.page(0)


def sent_signal(guard) -> None:
    mapped = Mapped()
    guard.watch(mapped.address, mapped.size)
    os.kill(os.getpid(), signal.SIGBUS)


def foreign_fault_with_a_handler_of_python(guard) -> None:
    faulthandler.enable()
    foreign_fault(guard)


def sent_signal_with_a_handler_of_python(guard) -> None:
    """After a sent signal, whose previous handler returns, the guard still handles the next fault."""
    mapped = Mapped()
    guard.watch(mapped.address, mapped.size)
    os.kill(os.getpid(), signal.SIGBUS)
    mapped.cut(0)
    assert mapped.page(0) == 0
    assert seen == [signal.SIGBUS]


seen: list[int] = []


if __name__ == "__main__":
    path, name = sys.argv[1:]
    if name == "foreign_fault_with_a_handler_of_python":
        faulthandler.enable()
    if name == "sent_signal_with_a_handler_of_python":
        signal.signal(signal.SIGBUS, lambda number, _: seen.append(number))
    globals()[name](guard_of(path))
