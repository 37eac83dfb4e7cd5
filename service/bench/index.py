"""FeatureIndex alone: how long it takes to build and to ask, what memory it needs, how often it is right."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from attncache_core import Progress
from attncache_core.attention_maps.index import FeatureIndex
from attncache_core.threads import limit_faiss

_QUESTIONS = 1024  # on which recall is measured, and which timed rounds take in turn
_BLOCK = 16384  # vectors that the brute force compares at once: 64 MiB of distances
_ROUNDING = 1e-5  # two vectors whose distances differ by no more than this share are as near
_LENGTH = 16  # of the sequences that the vectors stand for; any would do


class Cloud(StrEnum):
    """How the vectors lie; queries are new draws from the same cloud."""

    RANDOM = "random"  # independent Gaussian numbers: nothing to go by, all distances nearly the same
    SMALL_CLUSTERS = "small clusters"  # some 50 vectors around each centre, half as wide as the whole
    LARGE_CLUSTERS = "large clusters"  # some 5000, a tenth as wide: near ones differ little


_CLUSTERS = {Cloud.SMALL_CLUSTERS: (50, 0.5), Cloud.LARGE_CLUSTERS: (5000, 0.1)}  # vectors, width


@dataclass(frozen=True)
class Milliseconds:
    """Of one call."""

    median: float
    p95: float


@dataclass(frozen=True)
class IndexReport:
    """What was measured of a partition."""

    cloud: Cloud
    vectors: int
    dimensions: int
    partition: str  # "exact" or "compressed"
    build_seconds: float
    index_bytes: int  # as a file
    resident_bytes: int | None  # by which the process grew; None where the system does not tell
    one: Milliseconds  # one query, one thread
    queries: int
    many: Milliseconds  # that many queries at once, on all threads
    recall: float  # share of the questions whose nearest vector was found
    excess: float  # share by which the vectors found are farther than the nearest, on average


def draw(cloud: Cloud, count: int, dimensions: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(vectors [count, dimensions], queries [1024, dimensions]) of a cloud, float32."""
    random = np.random.default_rng(seed)
    everything = random.standard_normal((count + _QUESTIONS, dimensions), dtype=np.float32)
    if cloud in _CLUSTERS:
        size, width = _CLUSTERS[cloud]
        centres = random.standard_normal((-(-count // size), dimensions), dtype=np.float32)
        everything *= np.float32(width)
        everything += centres[random.integers(0, len(centres), len(everything))]
    return everything[:count], everything[count:]


def brute_force(
    vectors: np.ndarray, queries: np.ndarray, on_step: Callable[[int, int], None] = lambda *_: None
) -> np.ndarray:
    """The nearest row of `vectors` for each of the queries, int64 [queries], by comparing with every one."""
    nearest = np.zeros(len(queries), dtype=np.int64)
    least = np.full(len(queries), np.inf, dtype=np.float32)
    for first in range(0, len(vectors), _BLOCK):
        block = vectors[first : first + _BLOCK]
        # |q|² is the same for all and left out.
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
    """Build a partition of `count` vectors of a cloud, ask it, and compare what it finds with brute force."""
    stage = f"{count} {cloud}"
    vectors, questions = draw(cloud, count, dimensions)
    expected = brute_force(
        vectors, questions, lambda done, total: progress(f"{stage}, brute force", done, total)
    )

    limit_faiss(threads)
    progress(f"{stage}, build", 0, count)
    index = FeatureIndex()
    resident = _resident_bytes()
    started = time.perf_counter()
    index.add(_LENGTH, vectors)
    build_seconds = time.perf_counter() - started
    grown = None if resident is None else (_resident_bytes() or resident) - resident
    progress(f"{stage}, build", count, count)

    found, _ = index.nearest(_LENGTH, questions)
    least, distances = (np.linalg.norm(vectors[rows] - questions, axis=1) for rows in (expected, found))
    many = _time(index, questions, queries, rounds)
    limit_faiss(1)
    one = _time(index, questions, 1, rounds)
    return IndexReport(
        cloud=cloud,
        vectors=count,
        dimensions=dimensions,
        partition="exact" if index.is_exact(_LENGTH) else "compressed",
        build_seconds=build_seconds,
        index_bytes=_bytes_on_disk(index),
        resident_bytes=grown,
        one=one,
        queries=queries,
        many=many,
        recall=float((distances <= least * (1 + _ROUNDING)).mean()),
        excess=float(distances.sum() / least.sum() - 1),
    )


def _time(index: FeatureIndex, questions: np.ndarray, queries: int, rounds: int) -> Milliseconds:
    """`rounds` calls of so many queries each, other ones every time."""
    taken = []
    for turn in range(rounds):
        rows = np.arange(turn * queries, (turn + 1) * queries) % len(questions)
        batch = questions[rows]
        started = time.perf_counter()
        index.nearest(_LENGTH, batch)
        taken.append((time.perf_counter() - started) * 1e3)
    median, p95 = np.percentile(taken, (50, 95))
    return Milliseconds(float(median), float(p95))


def _bytes_on_disk(index: FeatureIndex) -> int:
    with tempfile.TemporaryDirectory(prefix="attncache-bench-") as folder:
        return sum(path.stat().st_size for path in index.write(Path(folder)))


def _resident_bytes() -> int | None:
    """Memory of this process that is in use and not elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
