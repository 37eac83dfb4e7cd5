"""A process that runs the kernel on tensors between inaccessible pages; test_native_kernel.py runs it.

    python kernel_at_the_edge.py LEVEL LIBRARY WHAT

Each tensor ends, or begins, directly at the border of an inaccessible page, so that an access beyond the
tensor ends the process. WHAT is records, packed, computed, rows, products, "one row too many" or "one row too
few".
"""

import ctypes
import math
import mmap
import os
import signal
import sys
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from attncache_core.native import AttentionKernel, products
from attncache_core.native.products import MatrixKind, PackedMatrix, unpack_4_bits, unpack_8_bits

PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE, which the module mmap does not define


class Guarded:
    """A maker of tensors between two inaccessible pages."""

    def __init__(self, at_the_end):
        self._at_the_end = at_the_end
        self._regions = []
        self._libc = ctypes.CDLL(None, use_errno=True)

    def tensor(self, values):
        """Return a copy of `values` that ends (or begins) at the border of an inaccessible page."""
        size = values.numel() * values.element_size()
        inside = -(-size // PAGE) * PAGE
        region = mmap.mmap(-1, inside + 2 * PAGE)
        self._regions.append(region)
        start = PAGE + (inside - size if self._at_the_end else 0)
        flat = torch.frombuffer(region, dtype=values.dtype, count=values.numel(), offset=start)
        flat.copy_(values.flatten())
        address = flat.data_ptr() - start
        for page in (address, address + PAGE + inside):
            assert self._libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), NO_ACCESS) == 0
        return flat.view(values.shape)


def records(kernel, heads, width, dtype, map_dtype, lengths, at_the_end, shift=0, packed=False):
    """Multiply maps of each length at the edge; read them `shift` rows after their true address.

    packed: the maps are lower triangles.
    """
    for length in lengths:
        guarded = Guarded(at_the_end)
        maps = torch.rand(heads, length, length, dtype=torch.float32).softmax(-1).to(map_dtype)
        if packed:
            maps = maps.tril()
        held = guarded.tensor(
            maps[:, torch.ones(length, length, dtype=torch.bool).tril()] if packed else maps
        )
        value = guarded.tensor(torch.randn(length, heads, width).to(dtype))
        context = guarded.tensor(torch.zeros(length, heads, width, dtype=dtype))
        address = held.data_ptr() + shift * length * maps.element_size()
        kernel.apply_maps(
            np.array([address], dtype=np.uint64),
            map_dtype,
            np.arange(2),
            value,
            np.array([0, length]),
            context,
            packed=packed,
        )
        expected = torch.einsum("hpq,qhd->phd", maps.double(), value.double())
        torch.testing.assert_close(context.double(), expected, atol=0.02, rtol=0.01)


def computed(kernel, heads, width, dtype, lengths, at_the_end, before=None, after=None):
    for length in lengths:
        guarded = Guarded(at_the_end)
        query, key, value, context = (
            guarded.tensor(torch.randn(length, heads, width).to(dtype)) for _ in range(4)
        )
        kept = guarded.tensor(torch.zeros(heads, length, length, dtype=dtype))
        addresses = np.array([kept.data_ptr()], dtype=np.uint64)
        kernel.attend(
            query,
            key,
            value,
            np.array([0, length]),
            width**-0.5,
            context,
            kept=addresses,
            before=before,
            after=after,
        )
        scores = torch.einsum("phd,qhd->hpq", query.double(), key.double()).mul(width**-0.5)
        inside = torch.ones(length, length, dtype=torch.bool)
        if before is not None:
            inside = inside.triu(-before)
        if after is not None:
            inside = inside.tril(after)
        maps = scores.masked_fill(~inside, float("-inf")).softmax(-1)
        expected = torch.einsum("hpq,qhd->phd", maps, value.double())
        torch.testing.assert_close(context.double(), expected, atol=0.05, rtol=0.02)
        torch.testing.assert_close(kept.double(), maps, atol=0.01, rtol=0.02)


def rows(library, dtype, widths, at_the_end):
    """Run the passes over rows, with all inputs and results at the edge."""
    for width in widths:
        guarded = Guarded(at_the_end)
        groups = -(-width // 32)
        signed = guarded.tensor(torch.randint(-128, 128, (3, width), dtype=torch.int8))
        scales = guarded.tensor(torch.rand(3))
        nibbles = guarded.tensor(torch.randint(256, (3, groups, 16), dtype=torch.uint8))
        steps = guarded.tensor(torch.randn(3, groups, 2).bfloat16())

        def at_the_edge(*shape, dtype=torch.float32, guarded=guarded):
            return guarded.tensor(torch.zeros(*shape, dtype=dtype))

        with mock.patch.object(torch, "empty", at_the_edge):
            eight = unpack_8_bits(library, signed, scales, dtype)
            four = unpack_4_bits(library, nibbles, steps, width, dtype)
        torch.testing.assert_close(eight, (signed * scales[:, None]).to(dtype))
        first = (nibbles[:, 0, 0] & 15) * steps[:, 0, 0].float() + steps[:, 0, 1].float()
        torch.testing.assert_close(four[:, 0], first.to(dtype))


def products_of(library, kind, dtype, size, at_the_end):
    """Multiply with packed weights, with all inputs and results at the edge."""
    rows, inputs, outputs = size
    guarded = Guarded(at_the_end)
    weight, bias, smoothing = torch.randn(outputs, inputs), torch.randn(outputs), torch.rand(inputs) + 0.5
    x = guarded.tensor(torch.randn(rows, inputs).to(dtype))
    residual = guarded.tensor(torch.randn(rows, outputs))
    with mock.patch.object(products, "aligned", guarded.tensor):
        smoothing = guarded.tensor(smoothing) if kind is MatrixKind.LEVELS else None
        packed = PackedMatrix(library, kind, weight, bias, smoothing)

    def at_the_edge(shape, dtype):
        return guarded.tensor(torch.zeros(shape, dtype=dtype))

    with mock.patch.object(torch, "empty", at_the_edge):
        found = packed.multiply(x, None, residual)
    expected = x.double() @ weight.double().T + bias + residual
    torch.testing.assert_close(found.double(), expected, atol=1.0, rtol=0.02)


DTYPES = (torch.float32, torch.bfloat16)
# Around whole and half vectors of 4 to 32 numbers, and around whole tiles.
LENGTHS = [*range(1, 10), 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 129]
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# Heads, head width and dtype: every width, with one head or several.
SIZES = [(*size, dtype) for size in ((1, 8), (3, 24), (1, 32), (3, 64)) for dtype in DTYPES]

# Rows, inputs and outputs of products. One number of outputs is one more than a number of whole panels.
PRODUCTS = [(1, 1, 1), (2, 3, 5), (6, 17, 16), (7, 16, 17), (13, 33, 96), (8, 63, 97), (9, 64, 130)]


def main(level, library, *parts):
    kernel = AttentionKernel(level, Path(library))
    torch.set_num_threads(1)  # torch's formulas of small tensors take a multiple of the time on more
    torch.manual_seed(0)
    for part in parts:
        run(kernel, part)


def run(kernel, part):
    match part:
        case "records" | "packed":
            for size, map_dtype, at_the_end in product(SIZES, SIXTEEN_BITS, (True, False)):
                records(kernel, *size, map_dtype, LENGTHS, at_the_end, packed=part == "packed")
        case "computed":
            for size, at_the_end in product(SIZES, (True, False)):
                for before, after in ((None, None), (None, 0), (9, 20)):
                    computed(kernel, *size, LENGTHS, at_the_end, before, after)
        case "rows":
            for dtype, at_the_end in product(DTYPES, (True, False)):
                rows(kernel.library, dtype, LENGTHS, at_the_end)
        case "products":
            pairs = [MatrixKind.PAIRS] if products.has_pairs(kernel.library) else []
            kinds = [MatrixKind.WHOLE, MatrixKind.LEVELS, *pairs]
            for kind, dtype, at_the_end in product(kinds, DTYPES, (True, False)):
                for size in PRODUCTS:
                    products_of(kernel.library, kind, dtype, size, at_the_end)
        case _:
            beyond = part == "one row too many"
            pid = os.fork()
            if pid == 0:
                size = (1, 32, torch.bfloat16, torch.bfloat16)
                records(kernel, *size, [33], beyond, shift=1 if beyond else -1)
                os._exit(0)
            assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV, part


if __name__ == "__main__":
    # A test expects the process to end by a signal, so core files are disabled.
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    assert math.log2(PAGE).is_integer()
    main(*sys.argv[1:])
