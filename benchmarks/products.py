"""Measure products of rows with packed weights on one thread: this package's and torch's.

    python -m benchmarks products [--rounds 7]

Prints thousand million operations per second (two per multiplication), by the processor time of the process,
for the shapes of MiniLM's layers. As in a model, other weights are read between two visits of a matrix, so
few rows wait for the memory. torch multiplies in float32.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from attncache_core.native import products
from attncache_core.native.products import MatrixKind, PackedMatrix

_SHAPES = ((384, 1152), (384, 384), (384, 1536), (1536, 384))
_ROWS = (1, 4, 8, 16, 64, 512)
_KINDS = {"float32": MatrixKind.WHOLE, "bfloat16": MatrixKind.PAIRS, "int8": MatrixKind.LEVELS}
_MODEL_NUMBERS = 10_616_832  # in the layers of MiniLM: so many weights pass between two visits of a matrix


def speed(products: Sequence[Callable[[], torch.Tensor]], operations: int, rounds: int) -> float:
    """Return the median speed of products of so many operations each, in 1e9 operations per second."""
    seconds = []
    for _ in range(rounds + 1):
        started = time.process_time()
        for product in products:
            product()
        seconds.append((time.process_time() - started) / len(products))
    return operations / statistics.median(seconds[1:]) / 1e9


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
    kinds = {name: kind for name, kind in _KINDS.items() if name != "bfloat16" or products.has_pairs(library)}
    print(f"{'inputs x outputs':>16} {'rows':>5}" + "".join(f" {name:>9}" for name in (*kinds, "torch")))
    for inputs, outputs in _SHAPES:
        weights = [torch.randn(outputs, inputs) for _ in range(_MODEL_NUMBERS // (inputs * outputs))]
        packed = [[PackedMatrix(library, kind, weight) for weight in weights] for kind in kinds.values()]
        for rows in _ROWS:
            x = torch.randn(rows, inputs)
            computed = [[partial(matrix.multiply, x) for matrix in matrices] for matrices in packed]
            computed.append([partial(functional.linear, x, weight) for weight in weights])
            figures = [speed(ways, 2 * rows * inputs * outputs, rounds) for ways in computed]
            shape = f"{inputs} x {outputs}"
            print(f"{shape:>16} {rows:>5}" + "".join(f" {figure:>9.1f}" for figure in figures))
