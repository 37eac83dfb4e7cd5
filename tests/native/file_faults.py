"""A process that reads a mapped file whose bytes are gone; run by test_guard.py.

argv: what to do (see below). Ends with code 0 when all is as promised; else a signal or a traceback ends it.
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
    """A module by itself: without its package, and torch with it, this process starts in no time."""
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
    """A file of whole pages, each filled with its number from 1 on, and its mapping."""

    def __init__(self, pages: int = PAGES) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._file.write(b"".join(bytes([number + 1]) * PAGE for number in range(pages)))
        self._file.flush()
        self.pages = pages
        self.map = mmap.mmap(self._file.fileno(), pages * PAGE, mmap.MAP_PRIVATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.size = pages * PAGE

    def cut(self, pages: int) -> None:
        os.ftruncate(self._file.fileno(), pages * PAGE)

    def page(self, number: int) -> int:
        """The byte in the middle of a page, read from memory."""
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
    # Zeros from the page that was read to the end; what comes before is the file's or, read too, zeros.
    assert [mapped.page(number) for number in range(PAGES)] == [1, 2, 3, 0, 0, 0, 0, 0]


def marks_the_range_that_faulted_alone(guard) -> None:
    files = [Mapped() for _ in range(600)]  # more than one chunk of the table holds
    ranges = [guard.watch(mapped.address, mapped.size) for mapped in files]
    for place in (0, 255, 256, 599):
        files[place].cut(1)
        assert files[place].page(7) == 0
    assert [place for place, each in enumerate(ranges) if each.has_faulted] == [0, 255, 256, 599]
    for each in ranges:
        each.forget()
    again = guard.watch(files[1].address, files[1].size)
    assert not again.has_faulted


def reads_while_others_watch_and_forget(guard) -> None:
    """Faults on two threads while two others change the table as fast as they can."""
    done = threading.Event()

    def change() -> None:
        # Addresses that nobody reads, above and below all that this process has.
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
    """Two of them would call each other for ever over a fault that is nobody's."""
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
    """A handler that returns: the guard stays, and the next fault is handled too."""
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
