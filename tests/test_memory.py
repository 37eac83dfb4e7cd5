"""Freed memory is kept for the next batch, unless told otherwise; mapped weights are given back."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from attncache_core import engine, memory
from attncache_core.engine import PrefillEngine
from attncache_core.memory import release_mapped_weights

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


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_mapped_weights_are_given_back_and_read_again(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(2**22, dtype=torch.float32)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what is not on the disk yet stays in memory
    weight = load_file(path)["weight"]
    assert float(weight.double().sum()) == sum(range(2**22))
    assert mapped_bytes(path) >= weight.nbytes
    release_mapped_weights()
    assert mapped_bytes(path) < weight.nbytes / 2
    assert float(weight.double().sum()) == sum(range(2**22))


def mapped_bytes(path):
    """Bytes of the file that are in this process' memory."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    places = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    return sum(int(lines[place + 4].split()[1]) * 1024 for place in places)
