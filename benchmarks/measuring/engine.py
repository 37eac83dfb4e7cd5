"""Compare the engine with other engines: thousand tokens per second, and milliseconds of one short sentence.

Each engine runs in its own process. The engines alternate in each round; figures are medians over all rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from attncache_core.heads.vectors import cosines
from benchmarks.measuring.worker import Variant, Worker

SHAPES = ((32, 16), (32, 32), (8, 128), (2, 512), (1, 16))
# A GPU needs larger batches.
GPU_SHAPES = ((32, 32), (1024, 32), (128, 128), (32, 512), (1, 16))
TEXTS, GPU_TEXTS = 32, 1024  # texts in a batch
_REPEAT = 5


@dataclass(frozen=True)
class Row:
    """The figures of one peer."""

    peer: str
    milliseconds: dict[str, float]  # shape such as "32x16", or "texts" -> median of a batch
    cosine: float | None  # mean cosine to the float32 model, over one batch of each shape


def name_of(shape: tuple[int, int]) -> str:
    """Return the name of a shape: (32, 16) -> 32x16."""
    return f"{shape[0]}x{shape[1]}"


@contextmanager
def started(
    peers: Sequence[str],
    variant: Variant,
    threads: int,
    shapes: Sequence[tuple[int, int]],
    on_absent: Callable[[str, str], None],
) -> Iterator[list[Worker]]:
    """Start a worker for each peer that can run here, and yield the workers.

    on_absent: called with the name of each other peer and the reason.
    """
    workers: list[Worker] = []
    try:
        for peer in peers:
            worker = Worker(peer, variant, threads, shapes)
            workers.append(worker)
            worker.load()
            if worker.absent:
                on_absent(peer, worker.absent)
        yield [worker for worker in workers if not worker.absent]
    finally:
        for worker in workers:
            worker.close()


def measure(
    workers: Sequence[Worker],
    shapes: Sequence[tuple[int, int]],
    texts: Sequence[str],
    rounds: int,
    on_round: Callable[[int, int], None],
    batch: int = TEXTS,
) -> list[Row]:
    """Time all workers on all shapes, and on batches of the texts if there are texts.

    rounds: the number of repetitions; the workers alternate. on_round: called with (done, total) rounds.
    batch: the number of texts in a batch.
    """
    random = np.random.default_rng(0)
    batches = {name_of(shape): {"tokens": random.integers(2000, 20000, shape).tolist()} for shape in shapes}
    batches |= {
        f"texts {number}": {"texts": list(texts[first : first + batch])}
        for number, first in enumerate(range(0, len(texts) - batch + 1, batch))
    }
    taken: dict[tuple[str, str], list[float]] = {}
    for done in range(rounds):
        for name, inputs in batches.items():
            for worker in workers:
                if not worker.absent and _takes(worker.peer, inputs):
                    taken.setdefault((worker.peer, name), []).extend(worker.seconds(_REPEAT, **inputs))
        on_round(done + 1, rounds)
    cosine = _cosines(workers, [batches[name_of(shape)] for shape in shapes])
    present = [worker.peer for worker in workers if not worker.absent]
    return [Row(peer, _medians(taken, peer, batches), cosine.get(peer)) for peer in present]


def _takes(peer: str, batch: dict[str, list[object]]) -> bool:
    """Return whether a peer can run a batch.

    sentence-transformers runs texts only. The other peers run tokens, and AttnCache runs texts too.
    """
    if peer.startswith("sentence-transformers"):
        return "texts" in batch
    return "tokens" in batch or (peer.startswith("attncache ") and "hit" not in peer)


def _medians(
    taken: dict[tuple[str, str], list[float]], peer: str, batches: dict[str, dict[str, list[object]]]
) -> dict[str, float]:
    """Return the median milliseconds of each batch of tokens, and the sum of the medians of the texts."""
    medians = {name: statistics.median(taken[peer, name]) * 1e3 for name in batches if (peer, name) in taken}
    texts = [medians.pop(name) for name in list(medians) if name.startswith("texts")]
    return medians | ({"texts": sum(texts)} if texts else {})


def _cosines(workers: Sequence[Worker], batches: Sequence[dict[str, list[object]]]) -> dict[str, float]:
    workers = [worker for worker in workers if not worker.absent]
    reference = next((worker for worker in workers if worker.peer.startswith("transformers fp32")), None)
    if reference is None:
        return {}
    expected = [np.array(reference.embeddings(**batch)) for batch in batches]
    return {
        worker.peer: float(
            np.mean(
                [
                    cosines(np.array(worker.embeddings(**batch)), right).mean()
                    for batch, right in zip(batches, expected, strict=True)
                ]
            )
        )
        for worker in workers
        if _takes(worker.peer, batches[0]) and "hit" not in worker.peer
    }
