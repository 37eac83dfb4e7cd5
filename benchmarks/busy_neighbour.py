"""Measure the latency of a short text beside busy processes, for several limits on OpenMP's spinning.

    python -m benchmarks busy-neighbour [--neighbours 2]

OpenMP reads its settings when its library is loaded, so each setting runs in its own process. "default" is
the default of GNU OpenMP.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys

_MEASURE = """
import statistics, time
from attncache_core import PrefillEngine, find_checkpoint
engine = PrefillEngine.load(find_checkpoint("all-MiniLM-L6-v2"))
requests = engine.requests([list(range(2000, 2016))], reuse=False)
seconds = []
for _ in range(300):
    started = time.perf_counter()
    engine.run(requests)
    seconds.append(time.perf_counter() - started)
print(statistics.median(seconds[50:]) * 1000, sorted(seconds[50:])[-3] * 1000)
"""


def milliseconds(spins: str | None) -> tuple[float, float]:
    """Return the median and 99th percentile of the latency of 16 tokens in ms, measured in a new process."""
    # An empty OMP_WAIT_POLICY has no effect on OpenMP, but keeps attncache_core from setting GOMP_SPINCOUNT.
    setting = {"OMP_WAIT_POLICY": ""} if spins is None else {"GOMP_SPINCOUNT": spins}
    output = subprocess.run(
        [sys.executable, "-c", _MEASURE], env=os.environ | setting, capture_output=True, text=True, check=True
    )
    median, high = map(float, output.stdout.split())
    return median, high


def stay_busy() -> None:
    """Keep a processor busy until the process is killed."""
    while True:
        pass


def main() -> None:
    """Print a line per setting: the latency alone, and beside the busy processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neighbours", type=int, default=2, help="Number of busy processes.")
    arguments = parser.parse_args()
    print(
        f"{'spins':>10} {'alone: median, p99 ms':>24} {f'beside {arguments.neighbours}: median, p99 ms':>28}"
    )
    for spins in (None, "0", "3000", "30000"):
        alone = milliseconds(spins)
        neighbours = [
            multiprocessing.Process(target=stay_busy, daemon=True) for _ in range(arguments.neighbours)
        ]
        for neighbour in neighbours:
            neighbour.start()
        beside = milliseconds(spins)
        for neighbour in neighbours:
            neighbour.kill()
        print(
            f"{spins or 'default':>10} {alone[0]:>15.2f} {alone[1]:>8.2f}",
            f"{beside[0]:>19.2f} {beside[1]:>8.2f}",
            flush=True,
        )
