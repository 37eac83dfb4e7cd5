"""The environment of a test process, imported before anything that loads torch."""

import gc
import os

# Until all tests are collected: what modules make stays, and the collector would look at it again and again.
gc.disable()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The value that attncache_core sets, which the tests import after torch: too late.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Each worker of pytest-xdist, with its threads and children, stays on one processor of its own. Threads of
# several workers that wait for each other on the same processors slow the whole run down many times.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if WORKER:
    PROCESSORS = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {PROCESSORS[int(WORKER) % len(PROCESSORS)]})
