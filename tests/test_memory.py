"""Freed memory is kept for the next batch, unless the operator has said what becomes of it."""

from types import SimpleNamespace

import pytest

from attncache_core import engine, memory
from attncache_core.engine import PrefillEngine

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
# The C library's numbers of what mallopt sets.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


class Library(SimpleNamespace):
    """A C library that notes what mallopt has set."""

    def __init__(self):
        super().__init__(asked={}, largest_threshold=2**31)

    def mallopt(self, parameter, value):
        if parameter == MMAP_THRESHOLD and value > self.largest_threshold:
            return 0
        self.asked[parameter] = value
        return 1


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return library


def test_blocks_of_the_size_of_activations_are_kept(library):
    memory.keep_freed_memory()
    assert library.asked.keys() == {TRIM_THRESHOLD, MMAP_THRESHOLD}
    # 1024 tokens of 4 x 1024 numbers of 4 bytes, several times.
    assert all(2**26 <= size < 2**31 for size in library.asked.values())


def test_an_older_library_that_refuses_large_blocks_keeps_what_it_can(library):
    library.largest_threshold = 32 * 2**20
    memory.keep_freed_memory()
    assert library.asked[MMAP_THRESHOLD] == 32 * 2**20
    assert library.asked[TRIM_THRESHOLD] >= 2**26


def test_a_library_that_refuses_every_size_is_left_alone(library):
    # Any setting ends the library's own adjustment of sizes, which is better than none.
    library.largest_threshold = 0
    memory.keep_freed_memory()
    assert library.asked == {}


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["131072", ""])
def test_what_the_operator_has_set_is_left_alone(library, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    memory.keep_freed_memory()
    assert library.asked == {}


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda _: SimpleNamespace()))
    memory.keep_freed_memory()


def test_an_engine_that_is_loaded_keeps_freed_memory(tiny_checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(engine, "keep_freed_memory", lambda: calls.append(True))
    PrefillEngine.load(tiny_checkpoint, dtype="float32")
    assert calls == [True]
