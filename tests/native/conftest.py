"""The compiled kernel, at every level that was built and that this processor runs."""

import ctypes

import pytest
from kernel_formulas import library

from attncache_core import native


@pytest.fixture(scope="module", params=native._levels())
def kernel(request):
    if not library(request.param).is_file():
        pytest.skip("this level was not built")
    return native.AttentionKernel(request.param, library(request.param))


PARALLEL = ctypes.CFUNCTYPE(
    None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
)


@pytest.fixture
def pool_calls(kernel):
    """The numbers of threads that the kernel asked the pool for; the pool runs them one after another."""
    calls = []

    @PARALLEL
    def pool(work, job, count, _):
        calls.append(count)
        for _ in range(count):
            work(job)

    loaded = ctypes.CDLL(str(library(kernel.level)))
    loaded.set_parallel(pool)
    yield calls
    # A kernel that is made gets torch's pool again.
    native.AttentionKernel(kernel.level, library(kernel.level))
