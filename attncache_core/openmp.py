"""Imported before torch: OpenMP threads that wait a moment and then sleep, and a large cache of kernels.

GNU OpenMP's idle threads spin for milliseconds. Alone on a machine that costs nothing; beside a busy
neighbour every spinning thread takes the processor from the one it waits for. On 2 cores beside two busy
processes, one sentence of 16 tokens: 99th percentile 117 ms; with 3,000 spins (some 10 µs, enough from one
operator to the next) 11 ms, and nothing lost alone (benchmarks/busy_neighbour.py). OpenMP reads this
variable when its library is loaded, so it has to be set first; what an operator has set stays.

oneDNN builds a kernel for every shape of a product and keeps the last 1,024. Batches of some hundred round
numbers of tokens, and layers of different numbers of computed heads, are more shapes than that.
"""

import os

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "3000"
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")
