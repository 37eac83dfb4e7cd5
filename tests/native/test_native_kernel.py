"""The kernel: its threads, accesses beyond its tensors, and the choice of its level."""

import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_formulas import (
    SCALE,
    apply_maps,
    assert_near,
    attend,
    joined_projection,
    library,
    made_maps,
    offsets_of,
    own_maps,
    products,
    run_script,
    threads,
)

from attncache_core import native
from attncache_core.native import attention_kernel


def test_concurrent_calls_of_two_python_threads_do_not_interfere(kernel):
    jobs = []
    for seed, lengths in enumerate(([180, 3, 99, 64], [33, 200, 5, 120, 1])):
        parts = joined_projection(sum(lengths), 4, 32, torch.bfloat16, seed=seed)
        maps = made_maps(lengths, 4, torch.bfloat16, seed)
        jobs.append((parts, offsets_of(lengths), maps))

    def results(parts, offsets, maps):
        each = np.arange(len(offsets))
        return attend(kernel, *parts, offsets), apply_maps(kernel, maps, each, parts[2], offsets)

    expected = [results(*job) for job in jobs]
    start = Barrier(2)

    def repeatedly(job):
        start.wait()
        return [results(*job) for _ in range(40)]

    with threads(2), ThreadPoolExecutor(2) as pool:
        for found, (attended, applied) in zip(pool.map(repeatedly, jobs), expected, strict=True):
            assert all(torch.equal(pair[0], attended) and torch.equal(pair[1], applied) for pair in found)


@pytest.mark.parametrize(
    ("length", "count", "calls"), [(200, 1, []), (200, 2, [2]), (200, 3, [3]), (10, 2, [])]
)
def test_large_work_runs_on_as_many_threads_as_torch_has(kernel, pool_calls, length, count, calls):
    query, key, value = joined_projection(3 * length, 2, 64, torch.float32)
    offsets = offsets_of([length] * 3)
    maps = made_maps([length] * 3, 2, torch.float16)
    with threads(count):
        found = attend(kernel, query, key, value, offsets)
        assert pool_calls == calls
        applied = apply_maps(kernel, maps, np.arange(4), value, offsets)
        assert pool_calls == calls * 2
    assert_near(found, *products(own_maps(query, key, offsets, SCALE), value, offsets))
    assert_near(applied, *products(maps, value, offsets))


EDGE_SCRIPT = Path(__file__).with_name("kernel_at_the_edge.py")


def at_the_edge(kernel, *parts):
    """Run these parts of kernel_at_the_edge.py and return its exit status and standard error."""
    return run_script(EDGE_SCRIPT, kernel.level, str(library(kernel.level)), *parts)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected by mprotect")
def test_nothing_is_read_or_written_beyond_a_record_or_a_tensor(kernel):
    # The first two read a row beyond a record on purpose: the guarded memory must end their process.
    noticed = ("one row too many", "one row too few")
    assert at_the_edge(kernel, *noticed, "records", "packed", "computed", "rows", "products") == (0, "")


ALL = {"vnni", "bf16", "amx", "avx_vnni"}


@pytest.mark.parametrize(
    ("capability", "has", "levels"),
    [
        ("AVX512", ALL, ["avx512_amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"]),
        ("AVX512", {"vnni", "bf16"}, ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        ("AVX512", {"vnni", "amx"}, ["avx512_vnni", "avx512", "avx2"]),
        # The level avx512_bf16 multiplies bytes too.
        ("AVX512", {"bf16", "amx"}, ["avx512", "avx2"]),
        ("AVX512", set(), ["avx512", "avx2"]),
        ("AVX2", ALL, ["avx2_vnni", "avx2"]),
        ("AVX2", set(), ["avx2"]),
        ("DEFAULT", ALL, ["neon"]),
    ],
)
def test_levels_are_those_of_the_processor_best_first(monkeypatch, capability, has, levels):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: "vnni" in has)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "bf16" in has)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: "amx" in has)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx_vnni": "avx_vnni" in has}, raising=False)
    assert attention_kernel.levels() == levels


# `kernel` without its cache.
chosen_kernel = native.kernel.__wrapped__


def test_chosen_kernel_is_the_best_that_was_built():
    built = [level for level in attention_kernel.levels() if library(level).is_file()]
    chosen = chosen_kernel()
    assert (chosen.level if chosen else None) == (built[0] if built else None)


@pytest.mark.skipif(
    sys.platform != "linux" or (platform.machine() == "x86_64" and attention_kernel.levels() == ["neon"]),
    reason="kernels are built for Linux, and for x86 from AVX2 on",
)
def test_a_kernel_was_built_for_this_processor():
    assert chosen_kernel() is not None


@pytest.mark.parametrize("content", [b"", b"no library", bytes(5000)], ids=["empty", "text", "zeros"])
def test_library_that_cannot_be_loaded_is_skipped(kernel, monkeypatch, tmp_path, content):
    damaged, whole = (tmp_path / library(level).name for level in ("damaged", kernel.level))
    damaged.write_bytes(content)
    monkeypatch.setattr(attention_kernel, "__file__", str(tmp_path / "attention_kernel.py"))
    monkeypatch.setattr(attention_kernel, "levels", lambda: ["damaged", kernel.level])
    assert chosen_kernel() is None
    shutil.copy(library(kernel.level), whole)
    assert chosen_kernel().level == kernel.level


@pytest.mark.skipif(
    not library("avx512_amx").is_file() or torch.cpu._init_amx(),
    reason="the library was not built, or there is AMX",
)
def test_library_for_amx_is_refused_without_amx():
    with pytest.raises(OSError, match="does not allow AMX"):
        native.AttentionKernel("avx512_amx", library("avx512_amx"))


def test_level_that_was_not_built_is_skipped(monkeypatch):
    built = [level for level in attention_kernel.levels() if library(level).is_file()]
    monkeypatch.setattr(attention_kernel, "levels", lambda: ["never_built", *built[-1:]])
    chosen = chosen_kernel()
    assert [chosen.level if chosen else None] == (built[-1:] or [None])


@pytest.mark.parametrize(("compiled", "level"), [(SimpleNamespace(level="avx2"), "avx2"), (None, None)])
def test_level_is_the_chosen_kernels(monkeypatch, compiled, level):
    monkeypatch.setattr(attention_kernel, "kernel", lambda: compiled)
    assert native.level() == level


@pytest.mark.parametrize(
    ("dtype", "device", "supported"),
    [
        (torch.float32, "cpu", True),
        (torch.bfloat16, "cpu", True),
        (torch.float16, "cpu", False),
        (torch.float64, "cpu", False),
        (torch.float32, "meta", False),
    ],
)
def test_kernel_reports_the_tensors_that_it_supports(kernel, dtype, device, supported):
    assert kernel.supports(torch.empty(1, 1, 8, dtype=dtype, device=device)) is supported


@pytest.fixture
def without_kernel(monkeypatch):
    """No kernel on Linux, on x86-64; the tests change the reason."""
    monkeypatch.setattr(attention_kernel, "kernel", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(attention_kernel, "levels", lambda: ["never_built"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return monkeypatch


def test_with_a_kernel_nothing_is_off(kernel, monkeypatch):
    monkeypatch.setattr(attention_kernel, "kernel", lambda: kernel)
    assert native.compiled_off() is None


@pytest.mark.usefixtures("without_kernel")
def test_library_that_was_not_compiled_is_named_with_the_remedy():
    reason = native.compiled_off()
    assert reason.startswith("it was not compiled at installation; `pip install --verbose")


def test_library_that_cannot_be_loaded_is_named_with_the_remedy(without_kernel, tmp_path):
    without_kernel.setattr(attention_kernel, "__file__", str(tmp_path / "attention_kernel.py"))
    path = tmp_path / library("never_built").name
    path.write_bytes(b"no library")
    assert native.compiled_off().startswith(f"{path.name} cannot be loaded; `pip install --verbose")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, "compiled code needs a processor with AVX2"),
        ({"ATEN_CPU_CAPABILITY": "default"}, "ATEN_CPU_CAPABILITY=default switches the compiled code off"),
    ],
)
def test_processor_without_a_level_and_the_variable_that_hides_its_levels_are_named(
    without_kernel, variables, reason
):
    without_kernel.setattr(attention_kernel, "levels", lambda: ["neon"])
    for name, value in variables.items():
        without_kernel.setenv(name, value)
    assert native.compiled_off().startswith(reason)


@pytest.mark.parametrize(
    ("system", "machine", "named"),
    [("darwin", "arm64", "macOS on arm64"), ("linux", "riscv64", "Linux on riscv64")],
)
def test_machine_that_nothing_is_compiled_for_is_named(without_kernel, system, machine, named):
    without_kernel.setattr(sys, "platform", system)
    without_kernel.setattr(platform, "machine", lambda: machine)
    assert native.compiled_off().endswith(f"and this is {named}")


def test_setup_compiles_for_the_machines_that_are_not_named_as_foreign(libraries_of_setup):
    assert set(attention_kernel._MACHINES) == set(libraries_of_setup)
