"""The number of available processors, from control groups that the tests write, and the thread limits."""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest
import torch
from core_models import prefill
from threadpoolctl import threadpool_info, threadpool_limits

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.runtime import threads
from attncache_core.runtime.threads import available_processors, limit_threads, one_thread, use_threads


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch):
    """Let the scheduler give this process eight processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    yield
    torch.set_num_threads(before[0])
    faiss.omp_set_num_threads(before[1])


@pytest.mark.parametrize(
    ("quota", "expected"), [(2, 2), (1.5, 2), (1.00001, 2), (0.01, 1), (16, 8), (math.inf, 8)]
)
def test_quota_is_rounded_up_and_never_above_the_affinity(monkeypatch, quota, expected):
    monkeypatch.setattr(threads, "allowed_processors", lambda: quota)
    assert available_processors() == expected


def test_without_an_affinity_all_processors_count(monkeypatch):
    monkeypatch.setattr(threads, "allowed_processors", lambda: math.inf)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert available_processors() == 5


def blas_threads() -> set[int]:
    """Return the numbers of threads of NumPy's and SciPy's pools."""
    return {pool["num_threads"] for pool in threadpool_info() if pool["internal_api"] == "openblas"}


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (np.int64(3), 3), (999, 8)])
def test_torch_and_faiss_get_the_same_limit_and_numpys_products_one_thread(threads, expected):
    with threadpool_limits(2, user_api="blas"):
        assert blas_threads() == {2}
        assert limit_threads(threads) == expected
        assert blas_threads() == {1}
        assert torch.get_num_threads() == faiss.omp_get_max_threads() == expected


@pytest.mark.usefixtures("restored_threads")
def test_loading_an_engine_leaves_numpy_one_thread(tiny_checkpoint):
    with threadpool_limits(2, user_api="blas"):
        engine = PrefillEngine.load(tiny_checkpoint, dtype="float32", threads=2)
        assert blas_threads() == {1}
        assert torch.get_num_threads() == engine.threads == 2


@pytest.mark.usefixtures("restored_threads")
def test_by_default_every_available_processor_is_used(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    limit_threads(3)
    assert limit_threads(None) == 1
    assert torch.get_num_threads() == faiss.omp_get_max_threads() == 1


@pytest.mark.usefixtures("restored_threads")
def test_faiss_keeps_the_limit_in_a_thread_that_did_not_load_the_engine(tiny_checkpoint):
    engine = PrefillEngine.load(tiny_checkpoint, dtype="float32", threads=1)
    engine.model.__dict__["stack"] = None  # the one call of an exact batch needs neither torch nor Faiss
    faiss.omp_set_num_threads(2)  # for this thread; a new thread starts with the machine's default

    def faiss_threads_while_running():
        prefill(engine, [[1, 2, 3]])
        return faiss.omp_get_max_threads()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(faiss_threads_while_running).result() == 1


@pytest.mark.usefixtures("restored_threads")
def test_engine_run_in_a_thread_that_begins_beside_small_operators_uses_all_threads(tiny_checkpoint):
    engine = PrefillEngine.load(tiny_checkpoint, dtype="float32", threads=2)
    engine.model.__dict__["stack"] = None  # the one call of an exact batch needs neither torch nor Faiss

    def threads_after_running():
        prefill(engine, [[1, 2, 3]])
        return torch.get_num_threads()

    with one_thread(), ThreadPoolExecutor(1) as other:
        assert other.submit(threads_after_running).result() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2


@pytest.mark.usefixtures("restored_threads")
def test_blocks_of_one_thread_that_overlap_leave_all_threads():
    limit_threads(2)
    inside, outside = threading.Barrier(2), threading.Barrier(2)

    def overlap(leaves_first):
        use_threads(2)
        with one_thread():
            inside.wait(timeout=240)
            assert torch.get_num_threads() == 1
            if not leaves_first:
                outside.wait(timeout=240)
        if leaves_first:
            outside.wait(timeout=240)
        return torch.get_num_threads()

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(overlap, [True, False])) == [2, 2]
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2
