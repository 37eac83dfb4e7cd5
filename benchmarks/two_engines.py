"""Compare one engine with two threads and two engines with one thread each, for requests of one sentence.

    python -m benchmarks two-engines [--tokens 16] [--rounds 3]

Each setup runs in its own process; the setups alternate. Clients wait in one queue, in a closed loop: a
client sends its next request as soon as it has an answer. One engine takes all waiting requests as a batch,
as the server does. Each of two engines takes at most half of the clients per batch.
"""

import argparse
import multiprocessing
import statistics
import threading
import time
from collections import deque

import numpy as np
import torch

from attncache_core import PrefillEngine, find_checkpoint

SECONDS = 4.0
SETUPS = {"1 engine x 2 threads": (1, 2), "2 engines x 1 thread": (2, 1)}


def serve(
    threads: int,
    queue: deque[float],
    lock: threading.Lock,
    maximum: int,
    tokens: int,
    taken: list[tuple[float, float]],
) -> None:
    """Answer batches of waiting clients until the time is up.

    queue: the time at which each waiting client began to wait. maximum: the largest batch.
    taken: receives (time of the answer, seconds waited) for each request.
    """
    engine = PrefillEngine.load(find_checkpoint("all-MiniLM-L6-v2"), threads=threads)
    torch.set_num_threads(threads)  # torch keeps the number of threads per calling thread
    sentences = np.random.default_rng(0).integers(2000, 20000, (64, tokens)).tolist()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        with lock:
            batch = [queue.popleft() for _ in range(min(maximum, len(queue)))]
        if not batch:
            time.sleep(0)
            continue
        engine.run(engine.requests(sentences[: len(batch)], reuse=False))
        now = time.perf_counter()
        taken += [(now, now - since) for since in batch]
        with lock:
            queue.extend([now] * len(batch))


def measure(setup: str, clients: int, tokens: int) -> tuple[float, float]:
    """Return sentences per second and the median latency in ms, both over the second half of the time."""
    engines, threads = SETUPS[setup]
    queue, lock = deque([time.perf_counter()] * clients), threading.Lock()
    taken: list[tuple[float, float]] = []
    workers = [
        threading.Thread(target=serve, args=(threads, queue, lock, -(-clients // engines), tokens, taken))
        for _ in range(engines)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    half = taken[-1][0] - SECONDS / 2
    waited = [seconds for at, seconds in taken if at > half]
    return len(waited) / (SECONDS / 2), statistics.median(waited) * 1e3


def main() -> None:
    """Print the medians of the rounds for each setup and number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16, help="Tokens per sentence.")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for clients in (1, 2, 16):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in SETUPS}
            for _ in range(arguments.rounds):
                for setup in SETUPS:
                    found[setup].append(processes.apply(measure, (setup, clients, arguments.tokens)))
            for setup, rounds in found.items():
                speeds, waits = zip(*rounds, strict=True)
                speed, wait = statistics.median(speeds), statistics.median(waits)
                print(f"{clients:>2} clients, {setup}: {speed:.0f} sentences/s, {wait:.2f} ms", flush=True)
