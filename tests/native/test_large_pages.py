"""Tests of the memory of packed weights."""

from __future__ import annotations

import errno
import mmap
import os
import re
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked import forked
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput, UnsupportedModel
from attncache_core.native import memory, products
from attncache_core.native.memory import aligned, large_page_bytes, large_pages
from attncache_core.reuse.kv.opening import KeyValueOptions


def test_memory_of_a_thread_is_freed_when_the_thread_ends(tiny_engine: PrefillEngine) -> None:
    """A thread that runs a batch needs some MiB, which a program with a thread for each batch would lose."""
    requests = tiny_engine.requests([[2, *[5, 6] * 20, 3]] * 800, reuse=False)
    tiny_engine.run(requests)

    def run_in_threads(count: int) -> int:
        """Return the bytes of the process afterwards."""
        for _ in range(count):
            thread = threading.Thread(target=tiny_engine.run, args=(requests,))
            thread.start()
            thread.join()
        sizes = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        return 1024 * int(re.search(r"Anonymous: +(\d+) kB", sizes)[1])  # type: ignore[index]

    before = run_in_threads(10)
    assert run_in_threads(20) < before + 32 * 2**20


@given(sizes=st.lists(st.integers(1, 40), max_size=12), dtype=st.sampled_from([torch.float32, torch.int8]))
def test_copies_are_aligned_and_do_not_overlap(sizes: list[int], dtype: torch.dtype) -> None:
    """Each copy keeps its numbers while others are made, also if they need several mappings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_SHARED_BYTES", 512)
        patch.setattr(memory, "_pages", memory._SharedPages())
        rows = [torch.full((size, 3), number).to(dtype).T for number, size in enumerate(sizes)]
        copies = [aligned(each) for each in rows]
        for copy, original in zip(copies, rows, strict=True):
            assert copy.is_contiguous()
            assert copy.data_ptr() % 64 == 0
            assert torch.equal(copy, original)


@pytest.mark.skipif(large_page_bytes() != 2**21, reason="no pages of 2 MiB here")
def test_process_with_more_large_pages_than_memory_can_be_forked() -> None:
    """As long as it does not write to them all."""
    memory_of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kept = [large_pages(memory_of_machine // 4) for _ in range(8)]
    assert forked(len, kept)() == 8


def test_large_pages_are_asked_for_private_memory() -> None:
    """The system's flags of the memory: it may have large pages (hg), and is not shared (sh)."""
    kept = torch.frombuffer(large_pages(8 * 2**20), dtype=torch.uint8)
    inside = kept.data_ptr() + len(kept) // 2
    holds = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(found[1], 16) <= inside < int(found[2], 16)
        elif holds and line.startswith("VmFlags"):
            flags = set(line.split()[1:])
    assert "hg" in flags
    assert "sh" not in flags


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOMEM, "no"), MemoryError(), RuntimeError("[enforce fail] can't allocate memory")],
)
def test_memory_that_runs_out_while_weights_are_packed_is_named(kernel, tiny_checkpoint, error, monkeypatch):
    del kernel  # without it, nothing is packed
    monkeypatch.setattr(products, "aligned", mock.Mock(side_effect=error))
    with pytest.raises(UnsupportedModel, match=r"^memory ran out while .* was read; leave more memory"):
        PrefillEngine.load(tiny_checkpoint)


def test_more_keys_and_values_than_memory_are_refused_at_once(tiny_llama: Path) -> None:
    """Large pages are not reserved, and without a check the process would end when it writes to them."""
    memory_of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        mmap.mmap(-1, 4 * memory_of_machine).close()
        pytest.skip("this system reserves more than it has")
    except OSError:
        options = KeyValueOptions(memory_bytes=4 * memory_of_machine)
    with pytest.raises(InvalidInput, match="bytes of memory for keys and values cannot be reserved"):
        PrefillEngine.load(read_checkpoint(tiny_llama), key_values=options)
