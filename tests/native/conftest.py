"""Fixtures for the compiled kernel, at every level that was built and that this processor supports."""

import ctypes
import runpy
from pathlib import Path
from unittest import mock

import pytest
from kernel_formulas import library

from attncache_core import native
from attncache_core.native import attention_kernel
from attncache_core.native.products import MatrixKind, has_pairs


@pytest.fixture(scope="module", params=attention_kernel.levels())
def kernel(request):
    if not library(request.param).is_file():
        pytest.skip("this level was not built")
    return native.AttentionKernel(request.param, library(request.param))


@pytest.fixture(scope="module", params=MatrixKind)
def kind(kernel, request):
    """Each kind of packed matrix that the level multiplies."""
    if request.param is MatrixKind.PAIRS and not has_pairs(kernel.library):
        pytest.skip("this level does not multiply pairs of bfloat16")
    return request.param


@pytest.fixture(scope="session")
def libraries_of_setup():
    """The table of setup.py: machine -> library -> source file and target processor."""
    with mock.patch("setuptools.setup"):
        return runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))["LIBRARIES"]


PARALLEL = ctypes.CFUNCTYPE(
    None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
)


@pytest.fixture
def pool_calls(kernel):
    """The thread counts that the kernel requests from the pool; this pool runs the threads one by one."""
    calls = []

    @PARALLEL
    def pool(work, job, count, _):
        calls.append(count)
        for _ in range(count):
            work(job)

    loaded = ctypes.CDLL(str(library(kernel.level)))
    loaded.set_parallel(pool)
    yield calls
    # Loading the kernel again restores torch's pool.
    native.AttentionKernel(kernel.level, library(kernel.level))
