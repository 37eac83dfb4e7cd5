"""Freed memory is kept for the next batch, unless the operator has said what becomes of it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from attncache_core import engine, memory
from attncache_core.engine import PrefillEngine

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
# The C library's numbers of what mallopt sets.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


class Library(SimpleNamespace):
    """A C library that notes what mallopt is asked for."""

    def __init__(self):
        super().__init__(asked={})

    def mallopt(self, parameter, value):
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


# A batch's worth of tensors, made, written to and freed again and again; prints the page faults of a round.
ROUNDS = """
import resource, sys
import torch
from attncache_core.memory import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def one_round():
    tensors = [torch.zeros(2**21) for _ in range(8)]  # 8 MB each

one_round()
before = faults()
for _ in range(10):
    one_round()
print((faults() - before) / 10)
"""


def faults_a_round(what):
    command = [sys.executable, "-c", ROUNDS, what]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is the GNU C library's")
def test_repeated_allocations_fault_far_fewer_pages(monkeypatch):
    if not hasattr(memory.ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library has no mallopt")
    for name in (*VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    kept, plain = (faults_a_round(what) for what in ("keep", "leave"))
    assert kept < plain / 5
