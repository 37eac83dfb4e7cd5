"""Measure FeatureIndex alone: build time, search time, memory and recall."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import faiss
import numpy as np

from attncache_core import Progress
from attncache_core.reuse.maps.index import EXACT_BELOW, FeatureIndex

_QUERIES = 1024  # queries that recall is measured on, and that timed rounds use in turn
_BLOCK = 16384  # vectors that the brute force compares at once: 64 MiB of distances
_ROUNDING = 1e-5  # two distances that differ by at most this share count as equal
_LENGTH = 16  # length in tokens of the sequences of the vectors; any length would do


class Cloud(StrEnum):
    """The distribution of the vectors. Queries are new draws from the same distribution."""

    RANDOM = "random"  # independent Gaussian numbers: all distances are nearly the same
    SMALL_CLUSTERS = "small clusters"  # about 50 vectors around each centre, half as wide as the whole
    LARGE_CLUSTERS = "large clusters"  # about 5000 vectors, a tenth as wide: near vectors differ little


_CLUSTERS = {Cloud.SMALL_CLUSTERS: (50, 0.5), Cloud.LARGE_CLUSTERS: (5000, 0.1)}  # vectors, width


@dataclass(frozen=True)
class Milliseconds:
    """The milliseconds of one search."""

    median: float
    p95: float


@dataclass(frozen=True)
class IndexReport:
    """The figures of one partition."""

    cloud: Cloud
    vectors: int
    dimensions: int
    partition: str  # "exact" or "compressed"
    build_seconds: float
    index_bytes: int  # size of the file
    resident_bytes: int | None  # growth of the process; None if the system does not report its memory
    one: Milliseconds  # a search for one query on one thread
    queries: int
    many: Milliseconds  # a search for `queries` queries on all threads
    recall: float  # share of the queries for which the search finds the nearest vector
    excess: float  # mean excess of the distance found over the least distance, as a share


def draw(cloud: Cloud, count: int, dimensions: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw vectors [count, dimensions] and queries [1024, dimensions] from a cloud, float32."""
    random = np.random.default_rng(seed)
    everything = random.standard_normal((count + _QUERIES, dimensions), dtype=np.float32)
    if cloud in _CLUSTERS:
        size, width = _CLUSTERS[cloud]
        centres = random.standard_normal((-(-count // size), dimensions), dtype=np.float32)
        everything *= np.float32(width)
        everything += centres[random.integers(0, len(centres), len(everything))]
    return everything[:count], everything[count:]


def brute_force(
    vectors: np.ndarray, queries: np.ndarray, on_step: Callable[[int, int], None] = lambda *_: None
) -> np.ndarray:
    """Return the index of the nearest vector for each query, int64 [queries], by comparing all vectors.

    on_step: called with (done, total) vectors.
    """
    nearest = np.zeros(len(queries), dtype=np.int64)
    least = np.full(len(queries), np.inf, dtype=np.float32)
    for first in range(0, len(vectors), _BLOCK):
        block = vectors[first : first + _BLOCK]
        # |q|² is the same for all vectors and is left out.
        distances = np.square(block).sum(axis=1) - 2 * (queries @ block.T)
        best = distances.argmin(axis=1)
        distance = distances[np.arange(len(queries)), best]
        nearer = distance < least
        nearest[nearer], least[nearer] = first + best[nearer], distance[nearer]
        on_step(min(first + _BLOCK, len(vectors)), len(vectors))
    return nearest


def measure(
    cloud: Cloud, count: int, dimensions: int, queries: int, threads: int, rounds: int, progress: Progress
) -> IndexReport:
    """Build a partition of `count` vectors of a cloud, search it, and compare it with brute force.

    queries: the number of queries of one search. rounds: the number of timed searches.
    """
    stage = f"{count} {cloud}"
    vectors, drawn = draw(cloud, count, dimensions)
    expected = brute_force(vectors, drawn, lambda done, total: progress(f"{stage}, brute force", done, total))

    faiss.omp_set_num_threads(threads)
    progress(f"{stage}, build", 0, count)
    index = FeatureIndex()
    resident = resident_bytes()
    started = time.perf_counter()
    index.add(_LENGTH, vectors)
    build_seconds = time.perf_counter() - started
    grown = None if resident is None else (resident_bytes() or resident) - resident
    progress(f"{stage}, build", count, count)

    found, _ = index.nearest(_LENGTH, drawn)
    least, distances = (np.linalg.norm(vectors[rows] - drawn, axis=1) for rows in (expected, found))
    many = _time(index, drawn, queries, rounds)
    faiss.omp_set_num_threads(1)
    one = _time(index, drawn, 1, rounds)
    return IndexReport(
        cloud=cloud,
        vectors=count,
        dimensions=dimensions,
        partition="exact" if count < EXACT_BELOW else "compressed",
        build_seconds=build_seconds,
        index_bytes=_bytes_on_disk(index),
        resident_bytes=grown,
        one=one,
        queries=queries,
        many=many,
        recall=float((distances <= least * (1 + _ROUNDING)).mean()),
        excess=float(distances.sum() / least.sum() - 1),
    )


def _time(index: FeatureIndex, drawn: np.ndarray, queries: int, rounds: int) -> Milliseconds:
    """Time `rounds` searches for `queries` of the drawn queries, with other queries in each round."""
    taken = []
    for turn in range(rounds):
        rows = np.arange(turn * queries, (turn + 1) * queries) % len(drawn)
        batch = drawn[rows]
        started = time.perf_counter()
        index.nearest(_LENGTH, batch)
        taken.append((time.perf_counter() - started) * 1e3)
    median, p95 = np.percentile(taken, (50, 95))
    return Milliseconds(float(median), float(p95))


def _bytes_on_disk(index: FeatureIndex) -> int:
    with tempfile.TemporaryDirectory(prefix="attncache-bench-") as folder:
        return sum(path.stat().st_size for path in index.write(Path(folder)))


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes, or None if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
