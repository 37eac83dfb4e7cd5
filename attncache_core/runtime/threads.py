"""Limit the threads of torch and Faiss to the available processors, and NumPy to one thread."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import faiss
import torch
from threadpoolctl import ThreadpoolController

from attncache_core.runtime.control_groups import allowed_processors


def available_processors() -> int:
    """Return the number of processors that this process may use.

    The number is the smaller of the CPU affinity and the CPU quota of its control groups, rounded up.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(affinity, allowed_processors())))


def limit_threads(threads: int | None = None) -> int:
    """Set the number of threads of torch and Faiss, and return it. Default, and at most: one per processor.

    More threads than available processors would wait for each other at every layer.
    Matrix products of NumPy and SciPy get one thread. The threads of their pool stay awake for a while after
    each product and take processors from torch's threads: a batch with one such product took three times as
    long.
    """
    processors = available_processors()
    count = int(min(threads or processors, processors))  # torch takes no integer of NumPy
    torch.set_num_threads(count)
    ThreadpoolController().select(internal_api="openblas").limit(limits=1)
    faiss.omp_set_num_threads(count)
    return count


def use_threads(count: int) -> None:
    """Set the number of threads of torch and Faiss for the calling thread.

    OpenMP keeps this number per thread. A new thread starts with the number that any thread has set last in
    torch, which is 1 while another thread is in `one_thread`.
    """
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's operators in the `with` block use only the calling thread.

    Several threads may be in such blocks at once if each of them has called `use_threads` before.
    """
    count = torch.get_num_threads()
    outside = getattr(_outside, "count", None)
    _outside.count = outside or count
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _outside.count = outside


def compiled_threads() -> int:
    """Return the number of threads for compiled code: torch's number, also inside `one_thread`.

    Torch's threads stay awake for a while after each operator, and so take processors from the threads of
    compiled code.
    """
    return getattr(_outside, "count", None) or torch.get_num_threads()


_outside = threading.local()  # .count: the number of torch's threads outside of `one_thread`
