"""One short text's latency beside busy processes, for several settings of OpenMP's spinning.

    python benchmarks/busy_neighbour.py [--neighbours 2]

Each setting runs in a process of its own, since OpenMP reads it when it is loaded. "default" is GNU OpenMP's.
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
sequence = [list(range(2000, 2016))]
seconds = []
for _ in range(300):
    started = time.perf_counter()
    engine.run(sequence, [False])
    seconds.append(time.perf_counter() - started)
print(statistics.median(seconds[50:]) * 1000, sorted(seconds[50:])[-3] * 1000)
"""


def milliseconds(spins: str | None) -> tuple[float, float]:
    """Median and 99th percentile of the milliseconds for one sequence of 16 tokens, in a new process."""
    # OMP_WAIT_POLICY without a value changes nothing, but keeps attncache_core from setting the spins.
    setting = {"OMP_WAIT_POLICY": ""} if spins is None else {"GOMP_SPINCOUNT": spins}
    output = subprocess.run(
        [sys.executable, "-c", _MEASURE], env=os.environ | setting, capture_output=True, text=True, check=True
    )
    median, high = map(float, output.stdout.split())
    return median, high


def stay_busy() -> None:
    """Keep a processor busy until the process is ended."""
    while True:
        pass


def main() -> None:
    """Print a line per setting: alone and beside the neighbours, medians of three processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neighbours", type=int, default=2, help="Busy processes.")
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


if __name__ == "__main__":
    main()
