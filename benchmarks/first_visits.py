"""Measure the first visit of each number of tokens against later visits, and memory over many mixed texts.

    python -m benchmarks first-visits [--texts 60000] [--quantize int8]

The first part runs one text of each length from 3 to 200 tokens, in random order, three times round. The
first visit of a length is divided by the faster of its later visits. The second part embeds batches of 1 to
32 texts of mixed lengths, and prints the memory of the process.
"""

import argparse
import statistics
import time

import numpy as np

from attncache_core import DEFAULT_MODEL, PrefillEngine, Quantization, find_variant
from benchmarks.measuring.index import resident_bytes
from service.commands.report import machine, show_machine

LENGTHS = range(3, 201)
ROUNDS = 3
REPORTS = 6


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=int, default=60000)
    parser.add_argument("--quantize", choices=["int8"])
    arguments = parser.parse_args()
    quantization = arguments.quantize and Quantization(arguments.quantize)
    engine = PrefillEngine.load(find_variant(DEFAULT_MODEL, quantization=quantization))
    show_machine(machine(engine.threads))
    random = np.random.default_rng(0)

    def sequence(length: int) -> list[int]:
        return random.integers(2000, 20000, length).tolist()

    engine.run(engine.requests([sequence(250)]))
    visits: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(ROUNDS):
        for length in random.permutation(LENGTHS).tolist():
            requests = engine.requests([sequence(length)])
            started = time.perf_counter()
            engine.run(requests)
            visits[length].append(time.perf_counter() - started)
    ratios = sorted(seconds[0] / min(seconds[1:]) for seconds in visits.values())
    print(
        f"first visit of a length to its later visits: median {statistics.median(ratios):.2f}, "
        f"95th percentile {ratios[len(ratios) * 95 // 100]:.2f}"
    )
    done = 0
    for report in range(REPORTS + 1):
        while done < arguments.texts * report // REPORTS:
            batch = [sequence(int(length)) for length in random.integers(3, 120, random.integers(1, 33))]
            engine.run(engine.requests(batch))
            done += len(batch)
        print(f"{done:>7} texts: {(resident_bytes() or 0) / 1e6:.0f} MB")
