"""Measure conversations on a real model: time to answer, prefill throughput and hit rate by tier.

Time is partly simulated: turns arrive at the times of the trace, and a turn takes the seconds that were
measured for it. One turn runs at a time, in the order of their arrival, so all stores run the same turns in
the same order, and alternate turn by turn. They differ in what waits meanwhile: the queue of a faster store
is shorter. The waiting turns are told to the store (`expect`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from attncache_core import PrefillEngine, Progress
from attncache_core.engine.request import PrefillRequest
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.reuse.kv.memory import PrefixKey
from benchmarks.measuring.conversations import Turn, arrived_until, max_at_once
from benchmarks.measuring.prefix import RECOMPUTED
from benchmarks.measuring.stores import Exactness, alternating, layout_of, open_store, settle, timed

# A first token that most vocabularies do not use as a special token.
_FIRST_TOKEN = 3


@dataclass(frozen=True)
class Row:
    """The figures of one store. Rates are of the tokens of histories."""

    store: str
    memory_hit_rate: float
    disk_hit_rate: float
    whole_rate: float  # the share of turns with a history whose history was stored in full
    p50_seconds: float  # from the arrival of a turn to its answer
    p95_seconds: float
    tokens_per_second: float  # tokens of prompts per second of work
    speed_up: float  # of tokens_per_second, to RECOMPUTED
    computed_tokens: int
    evicted_blocks: int
    most_waiting: int  # turns in the queue
    difference: float  # see Exactness
    cosine: float


@dataclass
class Runner:
    """One store with its queue."""

    name: str
    engine: PrefillEngine
    key_values: KeyValueReuse | None  # None: everything is computed
    free_at: float = 0.0  # seconds since the start of the trace
    busy: float = 0.0  # seconds of work
    answers: list[float] = field(default_factory=list)  # seconds from arrival to answer
    computed: int = 0  # tokens
    memory_tokens: int = 0
    disk_tokens: int = 0
    whole: int = 0  # histories that were stored in full
    most_waiting: int = 0
    exactness: Exactness = field(default_factory=Exactness)
    _arrived: int = 0

    def __post_init__(self) -> None:
        self.engine = replace(self.engine, share_prefixes=bool(self.key_values), key_values=self.key_values)

    def run(self, turns: Sequence[Turn], sessions: Sequence[list[int]], index: int) -> np.ndarray:
        """Run one turn, and return its output."""
        turn = turns[index]
        ids = sessions[turn.session][: turn.tokens]
        start = max(turn.arrival, self.free_at)
        self._arrived = arrived_until(turns, start, max(self._arrived, index + 1))
        self.most_waiting = max(self.most_waiting, self._arrived - index - 1)
        stored = self._announce(turns[index : self._arrived], sessions)
        seconds, result = timed(lambda: self.engine.run(self.engine.requests([ids])))
        # The next turn begins when everything of this turn is saved.
        saving, _ = timed(lambda: settle(self.key_values))
        self.answers.append(start + seconds - turn.arrival)
        self.busy += seconds + saving
        self.free_at = start + seconds + saving
        cached = int(result.cached_tokens[0])
        self.computed += result.report.tokens
        self.memory_tokens += min(stored, cached)
        self.disk_tokens += cached - min(stored, cached)
        self.whole += turn.history > 0 and cached >= turn.history
        return result.outputs

    def _announce(self, turns: Sequence[Turn], sessions: Sequence[list[int]]) -> int:
        """Tell the store which turns wait behind the first one. Returns the first one's tokens in memory."""
        if not self.key_values:
            return 0
        first, *others = (self._requested(sessions[turn.session][: turn.tokens]) for turn in turns)
        stored = self.key_values.store.lookup(first).memory
        self.key_values.store.expect(others)
        return stored

    def _requested(self, ids: list[int]) -> PrefixKey:
        prefix_key = self.engine.prefix_key(ids, None, b"")
        assert prefix_key
        return prefix_key


def runners(
    engine: PrefillEngine,
    policies: Sequence[str],
    memory_bytes: int,
    disk_bytes: int,
    folder: Path,
    prefill_speed: float = 0.0,
) -> list[Runner]:
    """Return what is compared: recomputing, and each policy with memory only and with a disk tier.

    folder: of the disk tiers. prefill_speed: see open_store.
    """
    found = [Runner(RECOMPUTED, engine, None)]
    for policy in policies:
        memory = open_store(engine, memory_bytes=memory_bytes, eviction=policy)
        both = open_store(
            engine,
            prefill_speed,
            memory_bytes=memory_bytes,
            eviction=policy,
            folder=folder / policy,
            disk_bytes=disk_bytes,
        )
        found += [
            Runner(f"{policy}, memory", engine, memory),
            Runner(f"{policy}, memory + disk", engine, both),
        ]
    return found


def store_bytes(engine: PrefillEngine, turns: Sequence[Turn]) -> int:
    """Return the most bytes that the sessions need at one time.

    Raises InvalidInput if keys and values of the model cannot be reused.
    """
    layout = layout_of(engine)
    return max_at_once(turns, lambda tokens: -(-tokens // BLOCK_TOKENS) * layout.block_bytes)


def measure(chosen: Sequence[Runner], turns: Sequence[Turn], vocabulary: int, report: Progress) -> list[Row]:
    """Run a trace on all stores, RECOMPUTED among them. report: called with the stage and (done, total)."""
    sessions = _tokens(turns, vocabulary)
    by_name = {runner.name: runner for runner in chosen}
    for runner in chosen:
        runner.engine.run([PrefillRequest(sessions[0][:32])])  # warms up, and stores nothing
    for index in range(len(turns)):
        outputs = {
            name: by_name[name].run(turns, sessions, index) for name in alternating(list(by_name), index)
        }
        for name, found in outputs.items():
            by_name[name].exactness.add(found, outputs[RECOMPUTED])
        report("turns", index + 1, len(turns))
    for runner in chosen:
        if runner.key_values:
            runner.key_values.store.close()
    return [_row(runner, by_name[RECOMPUTED], turns) for runner in chosen]


def _row(runner: Runner, recomputed: Runner, turns: Sequence[Turn]) -> Row:
    history = max(1, sum(turn.history for turn in turns))
    store = runner.key_values and runner.key_values.store
    return Row(
        store=runner.name,
        memory_hit_rate=runner.memory_tokens / history,
        disk_hit_rate=runner.disk_tokens / history,
        whole_rate=runner.whole / max(1, sum(turn.history > 0 for turn in turns)),
        p50_seconds=float(np.percentile(runner.answers, 50)),
        p95_seconds=float(np.percentile(runner.answers, 95)),
        tokens_per_second=sum(turn.tokens for turn in turns) / runner.busy,
        speed_up=recomputed.busy / runner.busy,
        computed_tokens=runner.computed,
        evicted_blocks=sum(store.memory.evicted.values()) if store else 0,
        most_waiting=runner.most_waiting,
        difference=runner.exactness.difference,
        cosine=runner.exactness.cosine,
    )


def _tokens(turns: Sequence[Turn], vocabulary: int) -> list[list[int]]:
    """Return random tokens for each session, as many as its longest prompt needs."""
    longest = [0] * (1 + max(turn.session for turn in turns))
    for turn in turns:
        longest[turn.session] = max(longest[turn.session], turn.tokens)
    return [
        np.random.default_rng(session).integers(_FIRST_TOKEN, vocabulary, length).tolist()
        for session, length in enumerate(longest)
    ]
