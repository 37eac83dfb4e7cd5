"""An engine that runs batches in several threads at once gives each batch the result of a single thread."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from core_decoders import write_llama
from core_models import prefill

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine import forward
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.strategy import ReuseStrategy

THREADS, BATCHES, ROUNDS = 4, 12, 3


def batches_of(engine, texts, seed):
    """Batches of one to twelve sequences: recorded sequences, and sequences of random tokens."""
    random = np.random.default_rng(seed)
    recorded = engine.tokenize(texts)
    batches = []
    for _ in range(BATCHES):
        chosen = random.integers(0, len(recorded), random.integers(0, 6))
        lengths = random.integers(2, 60, random.integers(1, 7))
        batches.append(
            [recorded[index] for index in chosen]
            + [random.integers(5, 40, length).tolist() for length in lengths]
        )
    return batches


def run_at_once(engine, batches, seed):
    """Run all batches in each of several threads, each in an order of its own; the results per thread."""
    begin = threading.Barrier(THREADS)

    def run(number):
        order = np.random.default_rng([seed, number]).permutation(len(batches)).tolist()
        begin.wait(timeout=240)
        found = {index: prefill(engine, batches[index]) for index in order}
        return [found[index] for index in range(len(batches))]

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(run, range(THREADS)))


def assert_same(found, expected):
    for parallel, result in zip(found, expected, strict=True):
        assert parallel.outcomes == result.outcomes
        np.testing.assert_allclose(parallel.similarities, result.similarities, atol=1e-5)
        np.testing.assert_allclose(parallel.outputs, result.outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("database", [False, True])
def test_results_of_many_threads_are_those_of_one(tiny_checkpoint, tiny_database, tiny_corpus, database):
    def loaded():
        opened = AttentionDatabase.open(tiny_database, threshold=0.9, heads="all") if database else None
        return PrefillEngine.load(tiny_checkpoint, database=opened, dtype="float32", threads=2)

    engine = loaded()
    texts = [sentence.text for sentence in tiny_corpus][:60]
    for seed in range(ROUNDS):
        batches = batches_of(engine, texts, seed)
        expected = [prefill(engine, batch) for batch in batches]
        assert any(outcome.is_hit for result in expected for outcome in result.outcomes) is database
        # An engine that has run nothing yet, so that records, tables and caches are made at once too.
        for found in run_at_once(loaded(), batches, seed):
            assert_same(found, expected)


def test_tables_of_rotary_positions_may_grow_in_many_threads(tmp_path):
    checkpoint = read_checkpoint(write_llama(tmp_path, max_position_embeddings=2048))
    random = np.random.default_rng(0)
    batches = [[random.integers(5, 40, length).tolist()] for length in (3, 700, 20, 1100, 600, 5, 1500, 90)]
    expected = [prefill(PrefillEngine.load(checkpoint, dtype="float32"), batch) for batch in batches]
    for seed in range(ROUNDS):
        engine = PrefillEngine.load(checkpoint, dtype="float32", threads=2)
        for found in run_at_once(engine, batches, seed):
            assert_same(found, expected)


class OneAtATime(ReuseStrategy):
    """Asserts that one thread at a time calls the strategy, and that batches run side by side."""

    def __init__(self, strategy):
        self.strategy, self.inside = strategy, threading.Lock()

    @property
    def mask(self):
        return self.strategy.mask

    def _called(self, method, *arguments):
        assert self.inside.acquire(blocking=False)
        try:
            return method(*arguments)
        finally:
            self.inside.release()

    def prepare(self, lengths):
        return self._called(self.strategy.prepare, lengths)

    def rule_out(self, lengths, allowed):
        return self._called(self.strategy.rule_out, lengths, allowed)

    def plan(self, batch, allowed):
        return self._called(self.strategy.plan, batch, allowed)

    def refine(self, plan, batch, hidden):
        return self._called(self.strategy.refine, plan, batch, hidden)

    def commit(self, plan, batch):
        return self._called(self.strategy.commit, plan, batch)


def test_strategy_is_called_by_one_thread_at_a_time_and_layers_run_side_by_side(
    tiny_checkpoint, tiny_database, tiny_corpus, monkeypatch
):
    opened = AttentionDatabase.open(tiny_database, threshold=0.9, heads="all")
    strategy = OneAtATime(PrefillEngine.load(tiny_checkpoint, database=opened, dtype="float32").strategy)
    engine = PrefillEngine.load(tiny_checkpoint, strategy=strategy, dtype="float32", threads=2)
    batches = batches_of(engine, [sentence.text for sentence in tiny_corpus][:60], 0)
    expected = [prefill(engine, batch) for batch in batches]
    meeting = threading.Barrier(THREADS)
    reused_by = forward.reused_by

    def together(*arguments):
        meeting.wait(timeout=240)  # every thread has a batch between its plan and its commit
        return reused_by(*arguments)

    monkeypatch.setattr(forward, "reused_by", together)
    for found in run_at_once(engine, batches, 0):
        assert_same(found, expected)


def test_engine_gains_by_as_many_threads_as_it_has_only_with_the_compiled_stack(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    engine = PrefillEngine.load(tiny_checkpoint, dtype="float32", threads=3)
    assert engine.parallel_runs == (3 if engine.model.stack else 1)
    engine.model.stack = None
    assert engine.parallel_runs == 1
