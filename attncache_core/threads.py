"""One limit on threads for torch and Faiss, from what the process may really use; one thread for NumPy."""

from __future__ import annotations

import math
import os
from pathlib import Path

import faiss
import torch
from threadpoolctl import ThreadpoolController


def available_processors(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors this process may use: its affinity, and its container's CPU quota, rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def limit_threads(threads: int | None = None) -> int:
    """Give torch and Faiss the same number of threads (default: all available); returns that number.

    NumPy's and SciPy's products get one thread: their pool's would stay awake for a while after each product
    and take the processors from torch's. (A batch with one such product took three times as long.)
    """
    count = threads or available_processors()
    torch.set_num_threads(count)
    ThreadpoolController().select(internal_api="openblas").limit(limits=1)
    limit_faiss(count)
    return count


def limit_faiss(count: int) -> None:
    """Give Faiss this many threads in the thread that calls: OpenMP keeps the number per thread."""
    faiss.omp_set_num_threads(count)


def _quota(cgroup: Path) -> float | None:
    """Processors allowed by control groups, version 2 or 1; None where there is no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
        period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError):
        return None
