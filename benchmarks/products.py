"""Measure products of rows with packed weights on one thread: this package's and torch's.

    python -m benchmarks products [--rounds 7]

Prints thousand million operations per second (two per multiplication), by the processor time of the process,
for the shapes of MiniLM's layers.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from attncache_core.native import products
from attncache_core.native.products import MatrixKind, PackedMatrix

_SHAPES = ((384, 1152), (384, 384), (384, 1536), (1536, 384))
_ROWS = (1, 16, 64, 512)
_OPERATIONS = 2e8  # of one measurement


def speed(product: Callable[[], torch.Tensor], operations: int, rounds: int) -> float:
    """Return the median speed of a product of so many operations, in 1e9 operations per second."""
    repeat = max(1, int(_OPERATIONS / operations))
    product()
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(repeat):
            product()
        seconds.append((time.process_time() - started) / repeat)
    return operations / statistics.median(seconds) / 1e9


def main() -> None:
    """Print a line per shape and number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="Measurements of each product.")
    rounds = parser.parse_args().rounds
    library = products.library()
    if library is None:
        raise SystemExit("the products were not compiled for this processor")
    torch.set_num_threads(1)
    print(f"{'inputs x outputs':>16} {'rows':>5} {'float32':>8} {'int8':>8} {'torch float32':>14}")
    for inputs, outputs in _SHAPES:
        weight = torch.randn(outputs, inputs)
        packed = [PackedMatrix(library, kind, weight) for kind in (MatrixKind.WHOLE, MatrixKind.LEVELS)]
        for rows in _ROWS:
            x = torch.randn(rows, inputs)
            of_torch = partial(functional.linear, x, weight)
            figures = [
                speed(product, 2 * rows * inputs * outputs, rounds)
                for product in (*(partial(matrix.multiply, x) for matrix in packed), of_torch)
            ]
            shape = f"{inputs} x {outputs}"
            print(f"{shape:>16} {rows:>5} {figures[0]:>8.1f} {figures[1]:>8.1f} {figures[2]:>14.1f}")
