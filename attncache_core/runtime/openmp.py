"""Limit the spinning of OpenMP threads and enlarge oneDNN's kernel cache. Import this module before torch.

OpenMP and oneDNN read their environment variables when their libraries are loaded, so the variables must be
set before torch is imported. Values that the operator has set are kept.

Idle threads of GNU OpenMP spin for milliseconds. This is harmless on an idle machine. Beside busy processes,
a spinning thread occupies the processor that the thread it waits for needs. Latency of one sentence of 16
tokens on 2 cores beside two busy processes: 99th percentile 117 ms by default, and 11 ms with 3,000 spins
(about 10 µs, long enough from one operator to the next). 3,000 spins cost no time on an idle machine
(benchmarks/busy_neighbour.py).

oneDNN builds a kernel for each shape of a matrix product, and by default keeps the last 1,024 kernels.
Batches have some hundred different (rounded) numbers of tokens, and layers have different numbers of computed
heads, which together are more than 1,024 shapes.
"""

import os

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "3000"
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")
