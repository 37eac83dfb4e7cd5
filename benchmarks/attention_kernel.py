"""The attention kernel beside torch's operators, and what the machine does at best.

    python benchmarks/attention_kernel.py [--threads 2] [--layers 6]

Milliseconds of the attention of all layers, 12 heads of 32, for batches of one length: torch's explicit
softmax (in the model's dtype and in float32) and SDPA, each level of the kernel that was built, and maps @ V
from given maps. Every way in turn, medians of 21 rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from attncache_core import native
from attncache_core.memory import keep_freed_memory

SHAPES = ((1, 16), (32, 16), (32, 32), (8, 128), (2, 512))
HEADS, WIDTH, ROUNDS = 12, 32, 21
Ways = dict[str, Callable[[], object]]


def milliseconds(ways: Ways) -> dict[str, float]:
    """The median of each way, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 3):
        for name, way in ways.items():
            way()  # what the way before left in the cache is not this one's
            started = time.perf_counter()
            way()
            if number >= 3:
                taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) * 1e3 for name, seconds in taken.items()}


def explicit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """softmax(Q Kᵀ / sqrt(d)) V in `dtype`, for [n, L, h, d]."""
    query, key, value = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    return ((query * WIDTH**-0.5) @ key.transpose(2, 3)).softmax(-1) @ value


def ways_of(count: int, length: int, kernels: list[native.AttentionKernel]) -> Ways:
    """Everything that is compared at one shape."""
    joined = torch.randn(count * length, 3 * HEADS, WIDTH).bfloat16()
    query, key, value = joined.split(HEADS, dim=1)
    side_by_side = [x.unflatten(0, (count, length)) for x in (query, key, value)]
    offsets, runs = np.arange(count + 1) * length, np.arange(count + 1)
    context = torch.empty(value.shape, dtype=value.dtype)
    maps = torch.rand(count, HEADS, length, length).bfloat16()
    addresses = maps.data_ptr() + np.arange(count) * maps[0].numel() * 2
    ways: Ways = {
        "torch, explicit, bf16": partial(explicit, *side_by_side, torch.bfloat16),
        "torch, explicit, fp32": partial(explicit, *side_by_side, torch.float32),
        "torch, SDPA, bf16": lambda: functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in side_by_side)
        ),
    }
    for kernel in kernels:
        ways[f"kernel, {kernel.level}"] = partial(
            kernel.attend, query, key, value, offsets, WIDTH**-0.5, context
        )
    ways["maps given, best kernel"] = partial(
        kernels[0].apply_maps, addresses, torch.bfloat16, runs, value, offsets, context
    )
    return ways


def show_peaks() -> None:
    """What the machine multiplies and reads at best."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(2048, 2048).to(dtype)
        best = milliseconds({"product": partial(torch.mm, x, x)})["product"]
        print(f"product of 2048 x 2048 matrices, {dtype}: {2 * 2048**3 / best / 1e6:.0f} GFLOP/s")
    numbers = torch.ones(2**26)
    seconds = milliseconds({"sum": numbers.sum})["sum"] / 1e3
    print(f"reading memory: {numbers.numel() * 4 / seconds / 1e9:.0f} GB/s")


@torch.inference_mode()
def main() -> None:
    """Print the machine's peaks and a line per way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    show_peaks()
    folder = Path(native.__file__).parent
    kernels = [
        native.AttentionKernel(level, folder / f"attention_{level}{EXTENSION_SUFFIXES[0]}")
        for level in native._levels()
    ]
    found = {shape: milliseconds(ways_of(*shape, kernels)) for shape in SHAPES}
    print(f"{'':26}" + "".join(f"{f'{count}x{length}':>9}" for count, length in SHAPES))
    for name in found[SHAPES[0]]:
        figures = "".join(f"{arguments.layers * found[shape][name]:>9.2f}" for shape in SHAPES)
        print(f"{name:26}{figures}")


if __name__ == "__main__":
    main()
