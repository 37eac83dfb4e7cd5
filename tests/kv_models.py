"""A tiny causal model in memory, requests to it, and what a store should hold: shared by the tests of kv."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from attncache_core.engine import continued
from attncache_core.engine.continued import run_continued
from attncache_core.engine.request import PrefillRequest
from attncache_core.heads.pooling import Pooler
from attncache_core.models import PackedModel
from attncache_core.reuse.blend.gate import PromptShapes
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, root_key
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.opening import block_layout
from attncache_core.reuse.kv.store import KeyValueStore

MEMORY = 2**24
ANY_SHAPE = PromptShapes((0, 10**9), (0, 10**9), (0.0, 1e9), (0, 10**9), (0, 10**9))


def store_of(model: PackedModel, memory=MEMORY, **more) -> KeyValueStore:
    return KeyValueStore(block_layout(model), memory, **more)


# The sequence that was named last, whose names the next one takes, as in KeyValueReuse.
_named: list[PrefixKey | None] = [None]


def prefix_key(ids, salt=b"", *, skipped=0, max_given=None):
    most = len(ids) if max_given is None else max_given
    _named[0] = PrefixKey.of(root_key(b"model", salt, skipped), ids, most, _named[0])
    return _named[0]


def pooled_by(model, *modes):
    """Return the same model, whose outputs pool in these modes."""
    outputs = copy(model.outputs)
    outputs.pool = Pooler(modes)
    found = replace(model, outputs=outputs)
    if "stack" in model.__dict__ and model.stack is None:
        found.__dict__["stack"] = None  # as the model was told
    return found


def computed_by(model):
    """The name in engine/continued.py of what computes the batches of a model."""
    return "run_layers" if model.compiled_outputs is None else "stack_outputs"


@torch.inference_mode()
def run(model, store, sequences, *, salts=None, skipped=0):
    """Run sequences of given salts; salt None: nothing is given and nothing is stored."""
    salts = [b""] * len(sequences) if salts is None else salts
    requests = [
        PrefillRequest(ids, False, None, None if salt is None else prefix_key(ids, salt, skipped=skipped))
        for ids, salt in zip(sequences, salts, strict=True)
    ]
    return run_continued(model, store, requests, [skipped] * len(sequences))


def random_ids(length, seed=0):
    return np.random.default_rng(seed).integers(3, 400, length).tolist()


def plain(model, sequences, **more):
    """What the model computes for sequences from which nothing is given and nothing is stored."""
    return run(model, store_of(model), sequences, salts=[None] * len(sequences), **more)


def assert_same(model, found, expected):
    """Rows are the same: to the last bit in the compiled stack, else within 1e-5 of the largest number."""
    if model.stack:
        assert np.array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


class Remembered:
    """What a store that never evicts has: every prefix that ends with a block, or with a sequence."""

    def __init__(self):
        self.prefixes = set()

    def given(self, ids, salt=b""):
        """The tokens of a sequence that are given."""
        blocks = 0
        while len(ids) >= (end := (blocks + 1) * BLOCK_TOKENS) and (salt, *ids[:end]) in self.prefixes:
            blocks += 1
        first = blocks * BLOCK_TOKENS
        ends = range(min(len(ids), first + BLOCK_TOKENS - 1), first, -1)
        return next((end for end in ends if (salt, *ids[:end]) in self.prefixes), first)

    def add(self, ids, salt=b""):
        for end in (*range(BLOCK_TOKENS, len(ids), BLOCK_TOKENS), len(ids)):
            self.prefixes.add((salt, *ids[:end]))

    def computed(self, sequences, salts):
        """The tokens that a batch computes: each distinct prefix of what is not given once."""
        rows = set()
        for ids, salt in zip(sequences, salts, strict=True):
            cached = 0 if salt is None else self.given(ids, salt)
            rows |= {(salt, *ids[:end]) for end in range(cached + 1, len(ids) + 1)}
        return len(rows)


def assert_nothing_is_in_use(store):
    """All places are free or hold a block that is found, nothing is claimed, and no block has a user."""
    pool = store.memory.pool
    assert pool.free + pool.used == pool.places
    assert pool.used == len(store.memory)
    assert not store._claimed
    assert all(block.users == 0 for block in store.memory._blocks.values())


def settled(store):
    """Wait for the threads of a store, and check its accounts."""
    store.transfers.flush()
    assert_nothing_is_in_use(store)


def run_behind_another(model, first, second):
    """Call `second` while `first` computes; assert that it waits, and return what both return."""
    entered, may_go_on = threading.Event(), threading.Event()
    compute = getattr(continued, computed_by(model))

    def slow(*arguments, **more):
        entered.set()
        assert may_go_on.wait(240)
        return compute(*arguments, **more)

    with mock.patch.object(continued, computed_by(model), slow), ThreadPoolExecutor(2) as threads:
        one = threads.submit(first)
        assert entered.wait(240)
        entered.clear()
        two = threads.submit(second)
        assert not entered.wait(0.1)
        may_go_on.set()
        return one.result(), two.result()
