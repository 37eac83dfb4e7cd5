"""The number of available processors, from control groups that the tests write, and the thread limits."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import faiss
import pytest
import torch
from core_models import prefill
from threadpoolctl import threadpool_info, threadpool_limits

from attncache_core.engine.prefill import PrefillEngine
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


def version_2(folder, content):
    (folder / "cpu.max").write_text(content)
    return folder


def version_1(folder, quota, period="100000\n"):
    (folder / "cpu").mkdir()
    (folder / "cpu/cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu/cpu.cfs_period_us").write_text(period)
    return folder


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("100001 100000\n", 2),
        ("50000 100000\n", 1),
        ("1000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("max 100000\n", 8),
        ("not a limit\n", 8),
        ("", 8),
    ],
)
def test_quota_of_version_2_is_rounded_up_and_never_above_the_affinity(tmp_path, limit, expected):
    assert available_processors(version_2(tmp_path, limit)) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("300000\n", 3), ("250000\n", 3), ("-1\n", 8), ("0\n", 8), ("1600000\n", 8)]
)
def test_quota_of_version_1_is_read_if_version_2_is_absent(tmp_path, quota, expected):
    assert available_processors(version_1(tmp_path, quota)) == expected


def test_period_of_version_1_counts(tmp_path):
    assert available_processors(version_1(tmp_path, "100000\n", period="50000\n")) == 2


def test_version_2_takes_precedence_over_version_1(tmp_path):
    version_2(tmp_path, "200000 100000\n")
    assert available_processors(version_1(tmp_path, "500000\n")) == 2


def test_without_control_groups_the_affinity_decides(tmp_path):
    assert available_processors(tmp_path) == 8


def test_without_an_affinity_all_processors_count(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert available_processors(tmp_path) == 5


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 3])
def test_torch_and_faiss_get_the_same_limit(threads):
    assert limit_threads(threads) == threads
    assert torch.get_num_threads() == faiss.omp_get_max_threads() == threads


def blas_threads() -> set[int]:
    """Return the numbers of threads of NumPy's and SciPy's pools."""
    return {pool["num_threads"] for pool in threadpool_info() if pool["internal_api"] == "openblas"}


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 3])
def test_numpys_products_get_one_thread_whatever_torch_has(threads):
    with threadpool_limits(2, user_api="blas"):
        assert blas_threads() == {2}
        limit_threads(threads)
        assert blas_threads() == {1}
        assert torch.get_num_threads() == faiss.omp_get_max_threads() == threads


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
            inside.wait(timeout=10)
            assert torch.get_num_threads() == 1
            if not leaves_first:
                outside.wait(timeout=10)
        if leaves_first:
            outside.wait(timeout=10)
        return torch.get_num_threads()

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(overlap, [True, False])) == [2, 2]
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2
