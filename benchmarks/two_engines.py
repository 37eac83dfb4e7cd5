"""Requests of one sentence on two processors: one engine with two threads, or two engines with one each.

    python benchmarks/two_engines.py [--tokens 16] [--rounds 3]

Each way runs in a process of its own, in turn. Clients wait in one queue, in a closed loop; an engine that is
free takes all that wait, as the server does, and two engines take half of the clients each.
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
WAYS = {"1 engine x 2 threads": (1, 2), "2 engines x 1 thread": (2, 1)}


def serve(threads: int, queue: deque, lock: threading.Lock, most: int, tokens: int, taken: list) -> None:
    """Take what waits, run it, let these clients wait again; note when each was answered after how long."""
    engine = PrefillEngine.load(find_checkpoint("all-MiniLM-L6-v2"), threads=threads)
    torch.set_num_threads(threads)  # each thread has a number of its own
    sentences = np.random.default_rng(0).integers(2000, 20000, (64, tokens)).tolist()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        with lock:
            batch = [queue.popleft() for _ in range(min(most, len(queue)))]
        if not batch:
            time.sleep(0)
            continue
        engine.run(sentences[: len(batch)], [False] * len(batch))
        now = time.perf_counter()
        taken += [(now, now - since) for since in batch]
        with lock:
            queue.extend([now] * len(batch))


def measure(way: str, clients: int, tokens: int) -> tuple[float, float]:
    """Sentences a second, and the median of the milliseconds that a client waits, in the second half."""
    engines, threads = WAYS[way]
    queue, lock, taken = deque([time.perf_counter()] * clients), threading.Lock(), []
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
    """Print medians over the rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for clients in (1, 2, 16):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
            for _ in range(arguments.rounds):
                for way in WAYS:
                    found[way].append(processes.apply(measure, (way, clients, arguments.tokens)))
            for way, rounds in found.items():
                speeds, waits = zip(*rounds, strict=True)
                speed, wait = statistics.median(speeds), statistics.median(waits)
                print(f"{clients:>2} clients, {way}: {speed:.0f} sentences/s, {wait:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
