"""Measure prompts of chunks in any order: time to answer with and without the chunks' keys and values.

The methods run in one process and alternate in each round. Each round has a prompt of its own: some of the
pool's chunks in another order, and a new query.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from attncache_core import PrefillEngine, Progress
from attncache_core.heads.vectors import cosines
from attncache_core.reuse.blend.chunks import Recomputation
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.text.segments import Segmented
from benchmarks.measuring.stores import alternating, drop_from_page_cache, open_store, settle, timed
from benchmarks.papers.blend_cases import Case
from benchmarks.papers.blending import PREFIX_CACHING, RECOMPUTED, Answer, Way, Ways, method_name

FIRST_VISIT, MEMORY, DISK = "first visit", "memory", "disk"

# Tokens below are special tokens in most vocabularies.
_FIRST_TOKEN = 3
# Chunks of the pool that a prompt does not have.
_OTHER_CHUNKS = 2


@dataclass(frozen=True)
class Row:
    """The figures of one method."""

    method: str
    source: str | None  # where the keys and values of the chunks are before a prompt; None: nowhere
    seconds: float  # median time to answer
    time_ratio: float  # median of the rounds' ratios to recomputing
    most_time_ratio: float  # of all rounds
    computed_tokens: float  # mean of a prompt
    cosine: float  # the least cosine of an output to the recomputed one


class Method:
    """A way to answer prompts, and what is stored before a prompt. The subclasses store chunks."""

    source: str | None = None

    def __init__(self, engine: PrefillEngine, way: Callable[[Ways], Way], key_values: KeyValueReuse) -> None:
        """way: chooses the way to answer among the ways of the engine."""
        self._engine, self._way, self.key_values = engine, way, key_values

    def prepare(self, case: Case) -> None:
        """Called before each prompt; not timed."""

    def run(self, case: Case) -> Answer:
        """Answer a prompt."""
        (answer,) = self._way(self.ways())(case).values()
        return answer

    def ways(self) -> Ways:
        """Return the ways of the engine, with the store of this method."""
        return Ways(replace(self._engine, key_values=self.key_values))


class FirstVisit(Method):
    """Nothing is stored."""

    source = FIRST_VISIT

    def prepare(self, case: Case) -> None:
        """See Method."""
        del case
        self.key_values.store.clear()


class FromMemory(Method):
    """All chunks of a prompt are in memory."""

    source = MEMORY

    def prepare(self, case: Case) -> None:
        """See Method."""
        self.ways().store(case)


class FromDisk(Method):
    """All chunks are on disk alone, outside the page cache."""

    source = DISK

    def __init__(
        self,
        engine: PrefillEngine,
        way: Callable[[Ways], Way],
        folder: Path,
        disk_bytes: int,
        prefill_speed: float,
        cases: Sequence[Case],
    ) -> None:
        """Save the chunks of all cases in a folder, once for all methods with this folder.

        prefill_speed: see open_store.
        """
        self._folder, self._disk_bytes, self._prefill_speed = folder, disk_bytes, prefill_speed
        is_new = not folder.exists()
        super().__init__(engine, way, self._opened(engine))
        if is_new:
            for case in cases:
                self.ways().store(case)
                settle(self.key_values)  # before the next prompt, so that the write buffer suffices

    def prepare(self, case: Case) -> None:
        """See Method."""
        del case
        self.close()
        drop_from_page_cache(self._folder)
        self.key_values = self._opened(self._engine)

    def close(self) -> None:
        """End the threads of the store."""
        self.key_values.store.close()

    def _opened(self, engine: PrefillEngine) -> KeyValueReuse:
        return open_store(engine, self._prefill_speed, folder=self._folder, disk_bytes=self._disk_bytes)


def random_cases(
    engine: PrefillEngine, count: int, chunks: int, chunk_tokens: int, query_tokens: int, seed: int = 0
) -> list[Case]:
    """Return prompts of random tokens: chunks of one small pool, in another order each, and a query."""
    random = np.random.default_rng(seed)
    frame = engine.tokenizer.frame(engine.tokenizer.default_prompt)
    opening = frame.before[: frame.opening]
    pool = random.integers(_FIRST_TOKEN, engine.vocabulary, (chunks + _OTHER_CHUNKS, chunk_tokens))
    ends = [len(opening) + chunk_tokens * number for number in range(chunks + 1)]
    cases = []
    for _ in range(count):
        query = random.integers(_FIRST_TOKEN, engine.vocabulary, query_tokens)
        chosen = pool[random.permutation(len(pool))[:chunks]].ravel()
        ids = [*opening, *chosen.tolist(), *query.tolist()]
        cases.append(Case(Segmented(ids, list(pairwise(ends)), opening)))
    return cases


def methods(
    engine: PrefillEngine,
    cases: Sequence[Case],
    ratios: Sequence[float],
    first_visit: float,
    memory_bytes: int | None,
    folder: Path,
    disk_bytes: int,
    prefill_speed: float = 0.0,
) -> dict[tuple[str, str | None], Method]:
    """Return the methods by name and source, RECOMPUTED first.

    ratios: of the methods from memory and from disk. first_visit: the ratio of the method that finds nothing
    stored. folder: does not exist; the disk tier is written there. prefill_speed: see open_store.
    """
    memory, empty = (open_store(engine, memory_bytes=memory_bytes) for _ in range(2))
    chosen: dict[str, Callable[[Ways], Way]] = {PREFIX_CACHING: lambda ways: ways.prefix_caching}
    chosen |= {method_name(ratio): _blended(ratio) for ratio in ratios}
    recomputed = Method(engine, lambda ways: ways.recomputed, memory)
    found: dict[tuple[str, str | None], Method] = {(RECOMPUTED, None): recomputed}
    found[method_name(first_visit), FIRST_VISIT] = FirstVisit(engine, _blended(first_visit), empty)
    found |= {(name, MEMORY): FromMemory(engine, way, memory) for name, way in chosen.items()}
    shutil.rmtree(folder, ignore_errors=True)
    for name, way in chosen.items():
        found[name, DISK] = FromDisk(engine, way, folder, disk_bytes, prefill_speed, cases)
    return found


def _blended(ratio: float) -> Callable[[Ways], Way]:
    return lambda ways: ways.blended(Recomputation(ratio))


def measure(
    chosen: dict[tuple[str, str | None], Method], cases: Sequence[Case], report: Progress
) -> list[Row]:
    """Measure the methods on the prompt of each round.

    cases: one more than rounds; the first one warms up. chosen: with RECOMPUTED. report: called with the
    stage and (done, total) rounds.
    """
    seconds: dict[tuple[str, str | None], list[float]] = {key: [] for key in chosen}
    answers: dict[tuple[str, str | None], list[Answer]] = {key: [] for key in chosen}
    for number, case in enumerate(cases):
        for key, method in alternating(list(chosen.items()), number):
            method.prepare(case)
            passed, answer = timed(partial(method.run, case))
            if number:
                seconds[key].append(passed)
                answers[key].append(answer)
        if number:
            report("rounds", number, len(cases) - 1)
    expected = seconds[RECOMPUTED, None], answers[RECOMPUTED, None]
    return [_row(key, seconds[key], answers[key], *expected) for key in chosen]


def _row(
    key: tuple[str, str | None],
    seconds: Sequence[float],
    answers: Sequence[Answer],
    full_seconds: Sequence[float],
    full_answers: Sequence[Answer],
) -> Row:
    ratios = [taken / full for taken, full in zip(seconds, full_seconds, strict=True)]
    outputs, expected = (np.stack([answer.outputs for answer in part]) for part in (answers, full_answers))
    return Row(
        *key,
        statistics.median(seconds),
        statistics.median(ratios),
        max(ratios),
        statistics.fmean(answer.tokens for answer in answers),
        float(cosines(outputs, expected).min()),
    )
