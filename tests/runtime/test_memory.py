"""Freed memory is kept for the next batch unless the operator objects, and mapped weights are released."""

import ctypes
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from attncache_core.engine import loading
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.runtime import memory
from attncache_core.runtime.memory import (
    available_memory,
    release_mapped_weights,
    return_freed_memory,
    tensor_bytes,
)

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
# The C library's numbers of the mallopt parameters.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


class Library(SimpleNamespace):
    """A stand-in for the C library that records the parameters set by mallopt."""

    def __init__(self):
        super().__init__(values={}, largest_threshold=2**31)

    def mallopt(self, parameter, value):
        if parameter == MMAP_THRESHOLD and value > self.largest_threshold:
            return 0
        self.values[parameter] = value
        return 1


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return library


def test_blocks_of_the_size_of_activations_are_kept_or_of_the_largest_accepted_size(library):
    memory.keep_freed_memory()
    assert library.values.keys() == {TRIM_THRESHOLD, MMAP_THRESHOLD}
    # 1024 tokens of 4 x 1024 numbers of 4 bytes, several times.
    assert all(2**26 <= size < 2**31 for size in library.values.values())
    library.largest_threshold = 32 * 2**20  # of an older library
    memory.keep_freed_memory()
    assert library.values[MMAP_THRESHOLD] == 32 * 2**20
    assert library.values[TRIM_THRESHOLD] >= 2**26
    # Any setting ends the library's dynamic thresholds, which are better than a fixed default.
    library.values, library.largest_threshold = {}, 0
    memory.keep_freed_memory()
    assert library.values == {}


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["131072", ""])
def test_settings_of_the_operator_are_kept(library, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    memory.keep_freed_memory()
    assert library.values == {}


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda _: SimpleNamespace()))
    memory.keep_freed_memory()


def test_loading_an_engine_keeps_freed_memory(tiny_checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(loading, "keep_freed_memory", lambda: calls.append(True))
    PrefillEngine.load(tiny_checkpoint, dtype="float32")
    assert calls == [True]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_mapped_weights_are_released_and_read_again(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(2**22, dtype=torch.float32)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on disk yet cannot be released
    weight = load_file(path)["weight"]
    assert float(weight.double().sum()) == sum(range(2**22))
    assert mapped_bytes(path) >= weight.nbytes
    release_mapped_weights()
    assert mapped_bytes(path) < weight.nbytes / 2
    assert float(weight.double().sum()) == sum(range(2**22))


def mapped_bytes(path):
    """Return how many bytes of a mapped file are in this process' memory."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    headings = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    return sum(int(lines[number + 4].split()[1]) * 1024 for number in headings)


def test_bytes_of_tensors_count_each_storage_once_and_only_while_it_is_held():
    before = tensor_bytes()
    held = torch.zeros(1000, 300)
    view = held[10:20]
    assert tensor_bytes() - before == 1000 * 300 * 4
    del held
    assert tensor_bytes() - before == 1000 * 300 * 4  # the view holds the whole storage
    del view
    assert tensor_bytes() == before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not the GNU C library")
def test_freed_memory_is_returned():
    """Also what lies in front of memory that is still used."""
    kept = [torch.ones(16_000) for _ in range(2000)][::500]
    before = resident_bytes()
    more = [torch.ones(16_000) for _ in range(2000)]
    kept.append(more[-1])
    del more
    return_freed_memory()
    assert resident_bytes() < before + 32 * 2**20
    assert all(block.sum() == 16_000 for block in kept)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_available_memory_is_at_most_what_the_ulimit_leaves(monkeypatch):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 2**26
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (most, most))
    assert available_memory() <= 2**26 + 2**24  # the process may have given back a little since
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (1, 1))
    assert available_memory() == 0
