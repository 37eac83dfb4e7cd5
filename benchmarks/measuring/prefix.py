"""Measure few-shot prompts: texts per second with and without stored keys and values of their prefixes.

The methods run in one process and alternate in each round. Each round has texts of its own, whose prefixes
are those of the other rounds.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attncache_core import InvalidInput, PrefillEngine, Progress
from attncache_core.engine.result import PrefillResult
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from benchmarks.measuring.few_shot import distinct_prompts
from benchmarks.measuring.stores import (
    Exactness,
    alternating,
    drop_from_page_cache,
    open_store,
    settle,
    timed,
)
from benchmarks.measuring.worker import Worker
from service.settings.cluster import SharedAddress
from service.shared.blocks import SharedBlocks

Ids = Sequence[Sequence[int]]

RECOMPUTED = "recomputed"


@dataclass(frozen=True)
class Row:
    """The figures of one method with batches of one size."""

    method: str
    batch: int  # texts in a batch
    texts_per_second: float  # median over all rounds
    speed_up: float  # median of the rounds' ratios to RECOMPUTED with the same batch
    least_speed_up: float  # of all rounds
    # None of another engine:
    computed_tokens: float | None  # mean of a text
    cached_tokens: float | None  # mean of a text
    difference: float | None  # see Exactness
    cosine: float | None


@dataclass(frozen=True)
class Overhead:
    """The price of storing texts that share nothing, with batches of one size."""

    batch: int
    ratio: float  # median of the pairs' ratios: seconds with storing / seconds without a store
    lower_quartile: float  # of the ratios
    upper_quartile: float
    pairs: int


class Method:
    """A way to run texts. The subclasses prepare what is stored."""

    shares = True  # whether sequences of a batch share prefixes

    def __init__(self, engine: PrefillEngine, key_values: KeyValueReuse | None = None) -> None:
        self.engine = replace(engine, share_prefixes=self.shares, key_values=key_values)

    @property
    def key_values(self) -> KeyValueReuse | None:
        """The store of this way."""
        return self.engine.key_values

    def prepare(self, texts: Ids) -> None:
        """Called before the texts of a pass are run."""

    def before_batch(self) -> None:
        """Called before each batch of a pass."""

    def timed(self, texts: Ids) -> tuple[float, PrefillResult | None]:
        """Run texts as one batch. Returns the seconds and the result; None: another engine's."""
        return timed(lambda: self.run(texts))

    def run(self, texts: Ids) -> PrefillResult:
        """Run texts as one batch."""
        return self.engine.run(self.engine.requests(texts))


class Recomputed(Method):
    """Everything is computed."""

    shares = False


class Stored(Method):
    """A store in memory that has nothing before a pass."""

    def prepare(self, texts: Ids) -> None:
        """See Method."""
        del texts
        assert self.key_values
        self.key_values.store.clear()


class Warm(Stored):
    """A store in memory that has the prefixes."""

    def __init__(self, engine: PrefillEngine, key_values: KeyValueReuse, prefixes: Ids) -> None:
        super().__init__(engine, key_values)
        self.prefixes = prefixes

    def prepare(self, texts: Ids) -> None:
        """See Method."""
        super().prepare(texts)
        for prefix in self.prefixes:
            self.run([prefix])


class Known(Stored):
    """A store in memory that has the texts themselves."""

    def prepare(self, texts: Ids) -> None:
        """See Method."""
        super().prepare(texts)
        self.run(texts)


class Saved(Method):
    """A store that has the prefixes behind its memory alone, before each batch. The subclasses say where."""

    def __init__(self, engine: PrefillEngine, prefixes: Ids, prefill_speed: float) -> None:
        super().__init__(engine)
        self.prefixes = prefixes
        self._prefill_speed = prefill_speed

    def options(self) -> dict[str, Any]:
        """Return the options of the store."""
        raise NotImplementedError

    def empty(self) -> None:
        """Remove what is saved. No store is open."""
        raise NotImplementedError

    def prepare(self, texts: Ids) -> None:
        """See Method."""
        del texts
        self.close()
        self.empty()
        self._open()
        for prefix in self.prefixes:
            self.run([prefix])
            settle(self.key_values)  # before the next prefix, so that the write buffer suffices

    def before_batch(self) -> None:
        """See Method."""
        self.close()
        self._open()

    def close(self) -> None:
        """End the threads of the store."""
        if self.key_values:
            self.key_values.store.close()
            self.engine = replace(self.engine, key_values=None)

    def _open(self) -> None:
        opened = open_store(self.engine, self._prefill_speed, **self.options())
        self.engine = replace(self.engine, key_values=opened)


class OnDisk(Saved):
    """Saved on disk, outside the page cache."""

    def __init__(
        self, engine: PrefillEngine, prefixes: Ids, folder: Path, disk_bytes: int, prefill_speed: float
    ) -> None:
        super().__init__(engine, prefixes, prefill_speed)
        self._folder, self._disk_bytes = folder, disk_bytes

    def options(self) -> dict[str, Any]:
        """See Saved."""
        return {"folder": self._folder, "disk_bytes": self._disk_bytes}

    def empty(self) -> None:
        """See Saved."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def before_batch(self) -> None:
        """See Method."""
        self.close()
        drop_from_page_cache(self._folder)
        self._open()


class InSharedStore(Saved):
    """Saved in the shared store, and asked for by a server that is new to the prefixes."""

    def __init__(
        self, engine: PrefillEngine, prefixes: Ids, address: SharedAddress, prefill_speed: float
    ) -> None:
        super().__init__(engine, prefixes, prefill_speed)
        self._address = address

    def options(self) -> dict[str, Any]:
        """See Saved."""
        return {"shared": SharedBlocks(self._address)}

    def empty(self) -> None:
        """See Saved."""
        blocks = SharedBlocks(self._address)
        blocks.clear()
        blocks.close()


class Peer(Method):
    """Another engine in a process of its own, which has kept the prefixes."""

    def __init__(self, engine: PrefillEngine, worker: Worker, prefixes: Ids) -> None:
        super().__init__(engine)
        self._worker = worker
        for prefix in prefixes:
            worker.embeddings(tokens=[prefix])

    def timed(self, texts: Ids) -> tuple[float, None]:
        """See Method. Raises InvalidInput if the engine fails."""
        seconds = self._worker.seconds(1, tokens=texts)
        if not seconds:
            raise InvalidInput(f"{self._worker.peer} failed: {self._worker.absent}", field="peer")
        return seconds[0], None


def methods(
    engine: PrefillEngine,
    prefixes: Ids,
    memory_bytes: int | None,
    folder: Path,
    disk_bytes: int,
    prefill_speed: float = 0.0,
    shared: SharedAddress | None = None,
) -> dict[str, Method]:
    """Return the methods by name.

    folder: does not exist; the disk tier is written there. prefill_speed: see open_store. shared: where the
    shared store is; None: it is not measured.
    """
    memory = open_store(engine, memory_bytes=memory_bytes)
    found: dict[str, Method] = {
        RECOMPUTED: Recomputed(engine),
        "shared in the batch": Method(engine),
        "first visit, stored": Stored(engine, memory),
        "from memory": Warm(engine, memory, prefixes),
        "from disk": OnDisk(engine, prefixes, folder, disk_bytes, prefill_speed),
        "known texts": Known(engine, memory),
    }
    if shared is not None:
        found["from the shared store"] = InSharedStore(engine, prefixes, shared, prefill_speed)
    return found


def shared_bytes_per_second(chosen: dict[str, Method]) -> float | None:
    """Return how fast the store of the last batch has measured the shared store to be; None without one."""
    for method in chosen.values():
        if isinstance(method, InSharedStore) and method.key_values and method.key_values.store.transfers:
            return method.key_values.store.transfers.remote_speed
    return None


def measure(
    chosen: dict[str, Method], rounds: Sequence[Ids], sizes: Sequence[int], report: Progress
) -> list[Row]:
    """Measure the methods on the texts of each round, in batches of each size.

    chosen: with RECOMPUTED. report: called with the stage and (done, total) rounds.
    """
    passes: dict[tuple[str, int], list[_Pass]] = {}
    for method in chosen.values():
        method.prepare(rounds[0])
        method.before_batch()
        method.timed(rounds[0][:2])  # warms up
    for number, texts in enumerate(rounds):
        for size in sizes:
            for name in alternating(list(chosen), number):
                passes.setdefault((name, size), []).append(_run(chosen[name], texts, size))
        report("rounds", number + 1, len(rounds))
    return [_row(name, size, passes) for size in sizes for name in chosen]


def measure_overhead(
    engine: PrefillEngine,
    rounds: Sequence[Ids],
    sizes: Sequence[int],
    vocabulary: int,
    memory_bytes: int | None,
    report: Progress,
) -> list[Overhead]:
    """Measure storing where nothing is shared: random texts, as long as those of the rounds.

    Each batch runs with a store and without, in an order that alternates.
    """
    plain, stored = Method(engine), Method(engine, open_store(engine, memory_bytes=memory_bytes))
    ratios: dict[int, list[float]] = {size: [] for size in sizes}
    for number, like in enumerate(rounds):
        for size in sizes:
            texts = distinct_prompts(like, vocabulary, seed=1 + number * len(sizes) + list(sizes).index(size))
            for first in range(0, len(texts), size):
                ratios[size].append(_ratio(plain, stored, texts[first : first + size], len(ratios[size])))
        report("overhead", number + 1, len(rounds))
    return [_overhead(size, found) for size, found in ratios.items()]


@dataclass(frozen=True)
class _Pass:
    """All texts of a round, run by one method."""

    texts: int
    seconds: float
    results: list[PrefillResult]  # of all batches; none of another engine

    @property
    def speed(self) -> float:
        return self.texts / self.seconds

    @property
    def outputs(self) -> np.ndarray:
        """The outputs of all texts, float32 [texts, d]."""
        return np.concatenate([result.outputs for result in self.results])


def _run(method: Method, texts: Ids, size: int) -> _Pass:
    """Run texts in batches of one size. What prepares a batch is not timed."""
    method.prepare(texts)
    batches = []
    for first in range(0, len(texts), size):
        method.before_batch()
        batches.append(method.timed(texts[first : first + size]))
    results = [result for _, result in batches if result]
    return _Pass(len(texts), sum(seconds for seconds, _ in batches), results)


def _row(name: str, size: int, passes: dict[tuple[str, int], list[_Pass]]) -> Row:
    measured, recomputed = passes[name, size], passes[RECOMPUTED, size]
    ratios = [found.speed / expected.speed for found, expected in zip(measured, recomputed, strict=True)]
    speed = statistics.median(found.speed for found in measured)
    results = [result for found in measured for result in found.results]
    if not results:
        return Row(name, size, speed, statistics.median(ratios), min(ratios), None, None, None, None)
    texts = sum(found.texts for found in measured)
    exactness = Exactness()
    for found, expected in zip(measured, recomputed, strict=True):
        exactness.add(found.outputs, expected.outputs)
    return Row(
        name,
        size,
        speed,
        statistics.median(ratios),
        min(ratios),
        sum(result.report.tokens for result in results) / texts,
        sum(int(result.cached_tokens.sum()) for result in results) / texts,
        exactness.difference,
        exactness.cosine,
    )


def _overhead(size: int, ratios: Sequence[float]) -> Overhead:
    lower, middle, upper = np.percentile(ratios, [25, 50, 75]).tolist()
    return Overhead(size, middle, lower, upper, len(ratios))


def _ratio(plain: Method, stored: Method, texts: Ids, number: int) -> float:
    """Return seconds with storing / seconds without. number: an even one begins without."""
    seconds = {}
    for method in (plain, stored) if number % 2 == 0 else (stored, plain):
        seconds[method] = method.timed(texts)[0]
    return seconds[stored] / seconds[plain]
