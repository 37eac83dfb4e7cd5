"""Measure the plain executor, which serves where nothing was compiled, beside the compiled stack.

    python -m benchmarks plain-executor [--rounds 15] [--threads 1]

Both compute the default model in float32, in one process, alternating pass by pass. Processor time is
measured, because it hardly depends on what else the machine does. Prints medians of milliseconds per text.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from attncache_core import DEFAULT_MODEL, PrefillEngine, default_corpus, find_checkpoint, native
from attncache_core.native import products

BATCHES = {"32 texts": 32, "1 text": 1}


@contextmanager
def computing(plain: bool) -> Iterator[None]:
    """Load and run engines on torch's operators, if `plain`, or on compiled code."""
    kernel = None if plain else native.kernel()
    with mock.patch.object(native, "kernel", return_value=kernel):
        products.library.cache_clear()
        yield


def milliseconds(engine: PrefillEngine, plain: bool, texts: list[str]) -> float:
    """Return the processor time of one text in this batch."""
    with computing(plain):
        started = time.process_time()
        engine.embed(texts)
        return (time.process_time() - started) / len(texts) * 1e3


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    corpus = [sentence.text for sentence in default_corpus()]
    engines = {}
    for plain in (False, True):
        with computing(plain):
            engine = PrefillEngine.load(
                find_checkpoint(DEFAULT_MODEL), dtype="float32", threads=arguments.threads
            )
            assert (engine.model.stack is None) is plain
            engines[plain] = engine
    for name, count in BATCHES.items():
        texts = corpus[:: len(corpus) // count][:count]
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(arguments.rounds + 1):
            for plain, engine in engines.items():
                taken[plain].append(milliseconds(engine, plain, texts))
        compiled, slow = (statistics.median(taken[plain][1:]) for plain in (False, True))
        times = f"{slow / compiled:.2f} times as long"
        print(f"{name}: compiled {compiled:.2f} ms per text, plain {slow:.2f} ms, {times}")
