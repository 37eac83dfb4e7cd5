"""Compare the attention kernel with torch's operators, and measure the machine's peak speed.

    python -m benchmarks attention-kernel [--threads 2] [--layers 6] [--heads 12] [--width 32]

The table shows milliseconds for the attention of all layers, for batches of equal lengths. It compares
torch's explicit softmax (in the model's dtype and in float32), torch's SDPA, each level of the kernel that
was built, maps @ V from reused maps, the best kernel's causal attention, and its products with causal maps,
square and packed. Times are medians of 21 rounds, in which the methods alternate.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from attncache_core import native
from attncache_core.native import attention_kernel
from attncache_core.runtime.memory import keep_freed_memory
from benchmarks.measuring.breakdown import median_seconds

SHAPES = ((1, 16), (32, 16), (32, 32), (8, 128), (2, 512))
ROUNDS = 21
Methods = dict[str, Callable[[], object]]


def milliseconds(methods: Methods) -> dict[str, float]:
    """Return the median time of each function in ms. The functions alternate."""
    return {name: 1e3 * seconds for name, seconds in median_seconds(methods, ROUNDS).items()}


def explicit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute softmax(Q Kᵀ / sqrt(d)) V in `dtype`, for Q, K and V of shape [n, L, h, d]."""
    query, key, value = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    return ((query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)).softmax(-1) @ value


def methods_of(
    count: int, length: int, heads: int, width: int, kernels: list[native.AttentionKernel]
) -> Methods:
    """Return name -> function for all methods, for a batch of `count` sequences of `length` tokens."""
    joined = torch.randn(count * length, 3 * heads, width).bfloat16()
    query, key, value = joined.split(heads, dim=1)
    first, second, third = (x.unflatten(0, (count, length)) for x in (query, key, value))
    side_by_side = first, second, third
    offsets, runs = np.arange(count + 1) * length, np.arange(count + 1)
    context, scale = torch.empty(value.shape, dtype=value.dtype), width**-0.5
    maps = torch.rand(count, heads, length, length).bfloat16()
    triangles = maps[..., torch.ones(length, length, dtype=torch.bool).tril()]
    methods: Methods = {
        "torch, explicit, bf16": lambda: explicit(*side_by_side, torch.bfloat16),
        "torch, explicit, fp32": lambda: explicit(*side_by_side, torch.float32),
        "torch, SDPA, bf16": lambda: functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in side_by_side)
        ),
    }
    for kernel in kernels:
        methods[f"kernel, {kernel.level}"] = partial(
            kernel.attend, query, key, value, offsets, scale, context
        )
    best = kernels[0]

    def given(held: torch.Tensor, **more: Any) -> None:
        addresses = held.data_ptr() + np.arange(count) * held[0].nbytes
        best.apply_maps(addresses, held.dtype, runs, value, offsets, context, **more)

    methods["maps given, best kernel"] = partial(given, maps)
    methods["causal, best kernel"] = partial(best.attend, query, key, value, offsets, scale, context, after=0)
    methods["causal maps, square"] = partial(given, maps.tril(), after=0)
    methods["causal maps, packed"] = partial(given, triangles, packed=True)
    return methods


def show_peaks() -> None:
    """Print the machine's peak speed for matrix products and for reading memory."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(2048, 2048).to(dtype)
        best = milliseconds({"product": partial(torch.mm, x, x)})["product"]
        print(f"product of 2048 x 2048 matrices, {dtype}: {2 * 2048**3 / best / 1e6:.0f} GFLOP/s")
    numbers = torch.ones(2**26)
    seconds = milliseconds({"sum": numbers.sum})["sum"] / 1e3
    print(f"reading memory: {numbers.numel() * 4 / seconds / 1e9:.0f} GB/s")


@torch.inference_mode()
def main() -> None:
    """Print the machine's peak speed and a line per method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    show_peaks()
    folder = Path(attention_kernel.__file__).parent
    kernels = [
        native.AttentionKernel(level, folder / f"attention_{level}.so") for level in attention_kernel.levels()
    ]
    found = {
        shape: milliseconds(methods_of(*shape, arguments.heads, arguments.width, kernels)) for shape in SHAPES
    }
    print(f"{'':26}" + "".join(f"{f'{count}x{length}':>9}" for count, length in SHAPES))
    for name in found[SHAPES[0]]:
        figures = "".join(f"{arguments.layers * found[shape][name]:>9.2f}" for shape in SHAPES)
        print(f"{name:26}{figures}")
