"""Reuse skips the work that it should skip.

The tests count the tokens and heads that each layer computes, the cells of the context that the kernel
computes or reads from records, the operators that run, and what the compiled stack reports.
"""

from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch
from core_models import READERS, CountedLayer, attention_by, prefill, random_sequences
from torch.profiler import ProfilerActivity, profile

from attncache_core import native
from attncache_core.engine import forward as forward_module
from attncache_core.engine.layers import run_layers
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.models.prepacked import PackedLinear
from attncache_core.native.stack import CompiledStack
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.plan import Outcome
from attncache_core.text.token_batch import pack

MASKS = ["all", "layers:1", "5"]
LAYERS, HEADS, WIDTH, HIDDEN, INNER = 3, 4, 8, 32, 64


@pytest.fixture(params=READERS)
def computing(request):
    """The ways to compute that call the layers; the compiled stack has counts of its own."""
    with attention_by(request.param):
        yield request.param


@pytest.fixture(params=MASKS)
def plain_engine(request, tiny_checkpoint, tiny_database):
    """An engine with θ = 1, so that recorded sequences hit and others miss."""
    database = AttentionDatabase.open(tiny_database, heads=request.param, threshold=1.0)
    return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")


@pytest.fixture
def engine(plain_engine):
    """The engine with counting layers, which have no compiled stack."""
    engine = plain_engine
    engine.model.layers = [CountedLayer(layer) for layer in engine.model.layers]
    return engine


@pytest.fixture(scope="module")
def hits(tiny_engine, tiny_corpus):
    """Recorded sequences of several lengths, two of each."""
    return tiny_engine.tokenize([tiny_corpus[index].text for index in (0, 1, 80, 81, 200, 201)])


@pytest.fixture(scope="module")
def misses():
    """Sequences without a record, of lengths with and without records."""
    return random_sequences([5, 7, 7, 20], seed=9)


def run(engine, sequences):
    result = prefill(engine, sequences)
    return result, [outcome == Outcome.HIT for outcome in result.outcomes]


def test_inputs_projected_for_the_reused_heads_are_those_of_the_misses(tiny_engine, engine, hits, misses):
    with attention_by("kernel"):
        run(engine, [*hits, *misses])
    first = engine.model.layers[0]
    if not first.reused_heads:
        assert first.reused_inputs == []
        return
    # The first layer's input of each miss, in the order of lengths, as packing sorts them.
    expected = torch.cat([embedded(tiny_engine, ids) for ids in sorted(misses, key=len)])
    torch.testing.assert_close(first.reused_inputs[0], expected, atol=1e-6, rtol=0)


@torch.inference_mode()
def embedded(engine, ids):
    """Return the first layer's input of one sequence."""
    return engine.model.embed(pack([ids]))


@dataclass
class CountedKernel:
    """The kernel with counts of writes to each cell of a layer's context [tokens, heads]."""

    kernel: native.AttentionKernel
    contexts: dict = field(default_factory=dict)  # address of a context -> its memory, kept alive
    computed: dict = field(default_factory=dict)  # address -> number of writes of computed maps to each cell
    reused: dict = field(default_factory=dict)  # address -> number of writes of maps from records

    @property
    def library(self):
        return self.kernel.library

    def supports(self, tensor):
        return self.kernel.supports(tensor)

    def attend(self, query, key, value, offsets, scale, context, **band):
        self._note(self.computed, offsets, context)
        self.kernel.attend(query, key, value, offsets, scale, context, **band)

    def apply_maps(self, maps, map_dtype, runs, value, offsets, context, **form):
        assert runs[-1] == len(maps) == len(offsets) - 1
        self._note(self.reused, offsets, context)
        self.kernel.apply_maps(maps, map_dtype, runs, value, offsets, context, **form)

    def _note(self, cells, offsets, context):
        memory = context.untyped_storage()
        if memory.data_ptr() not in self.contexts:
            self.contexts[memory.data_ptr()] = memory
            tokens = memory.nbytes() // (HIDDEN * context.element_size())
            for counts in (self.computed, self.reused):
                counts[memory.data_ptr()] = np.zeros((tokens, HEADS), dtype=int)
        token, head = divmod(context.storage_offset() // WIDTH, HEADS)
        tokens = slice(token + int(offsets[0]), token + int(offsets[-1]))
        heads = slice(head, head + context.shape[1])
        cells[memory.data_ptr()][tokens, heads] += 1


@pytest.mark.parametrize("kind", ["hits", "both"])
def test_kernel_computes_no_reused_head_of_a_hit(engine, hits, misses, kind, monkeypatch):
    sequences = {"hits": hits, "both": [*misses, *hits]}[kind]
    with attention_by("kernel"):
        counted = CountedKernel(native.kernel())
        monkeypatch.setattr(native, "kernel", lambda: counted)
        _, hit = run(engine, sequences)
    assert hit == [ids in hits for ids in sequences]
    tokens = sum(map(len, sequences))
    of_hits = sum(len(ids) for ids in sequences if ids in hits)
    assert len(counted.contexts) == LAYERS
    by_layer = zip(counted.computed.values(), counted.reused.values(), strict=True)
    for (computed, read), reused in zip(by_layer, engine.map_reuse.database.mask.reused, strict=True):
        expected = np.zeros((tokens, HEADS), dtype=int)
        expected[:of_hits, :reused] = 1  # hits and reused heads come first
        np.testing.assert_array_equal(read, expected)
        np.testing.assert_array_equal(computed, 1 - expected)


def profiled(engine, sequences):
    """Return the operators that ran in the layers, without the search, and whether each sequence hit."""
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def profiled_forward(*arguments):
        with profiler:
            return run_layers(*arguments)

    with mock.patch.object(forward_module, "run_layers", profiled_forward):
        _, hit = run(engine, sequences)
    return profiler.events(), np.array(hit)


# The operators that compute maps. Variants run inside an operator with one of these names.
ATTENTION = ("aten::scaled_dot_product_attention", "aten::softmax", "aten::_softmax")


def numbers_of_maps(events):
    """Return the number of elements of all maps that operators of attention computed."""
    found = [event for event in events if event.name in ATTENTION]
    assert {event.name for event in found} <= {"aten::scaled_dot_product_attention"}
    shapes = [event.input_shapes[0] for event in found]  # [n, heads, L, head_dim]
    return sum(n * heads * length**2 for n, heads, length, _ in shapes)


@pytest.mark.parametrize("kind", ["hits", "both"])
def test_operators_of_attention_compute_no_reused_head_of_a_hit(engine, hits, misses, kind):
    sequences = {"hits": hits, "both": [*misses, *hits]}[kind]
    with attention_by("operators"):
        events, hit = profiled(engine, sequences)
    squares = np.array([len(ids) for ids in sequences]) ** 2
    reused = engine.map_reuse.database.mask.total
    expected = squares.sum() * (LAYERS * HEADS - reused) + squares[~hit].sum() * reused
    assert numbers_of_maps(events) == expected


def test_with_the_kernel_no_operator_computes_a_map(engine, hits, misses):
    with attention_by("kernel"):
        events, _ = profiled(engine, [*misses, *hits])
    assert numbers_of_maps(events) == 0
    assert not [event.name for event in events if event.name in ("aten::bmm", "aten::baddbmm")]


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("kind", ["hits", "both"])
def test_matrix_products_of_a_hit_have_no_rows_of_reused_q_and_k(engine, hits, misses, kind, monkeypatch):
    sequences = {"hits": hits, "both": [*misses, *hits]}[kind]
    found, multiply = [], PackedLinear.__call__

    def noted(self, x, residual=None):
        found.append((len(x), self.outputs))
        return multiply(self, x, residual)

    monkeypatch.setattr(PackedLinear, "__call__", noted)
    _, hit = run(engine, sequences)
    lengths = np.array([len(ids) for ids in sequences])
    tokens, missed = int(lengths.sum()), int(lengths[~np.array(hit)].sum())
    expected = []
    for reused in engine.map_reuse.database.mask.reused:
        expected.append((tokens, HIDDEN + 2 * (HEADS - reused) * WIDTH))
        if reused and missed:
            expected.append((missed, 2 * reused * WIDTH))
        expected += [(tokens, HIDDEN), (tokens, INNER), (tokens, HIDDEN)]
    assert found == expected


@pytest.mark.parametrize("kind", ["hits", "both"])
def test_the_stack_computes_no_reused_head_of_a_hit(plain_engine, hits, misses, kind, monkeypatch):
    if native.kernel() is None:
        pytest.skip("no kernel was built for this processor")
    sequences = {"hits": hits, "both": [*misses, *hits]}[kind]
    noted, run_job = [], CompiledStack._run_job

    def noting(*arguments):
        noted.append(run_job(*arguments))
        return noted[-1]

    monkeypatch.setattr(CompiledStack, "_run_job", noting)
    _, hit = run(plain_engine, sequences)
    assert hit == [ids in hits for ids in sequences]
    lengths = np.array([len(ids) for ids in sequences])
    tokens, missed = int(lengths.sum()), int(lengths[~np.array(hit)].sum())
    # V, the output projection and the feed-forward half of every token in every layer.
    multiplications, map_rows = tokens * LAYERS * 2 * (HIDDEN * HIDDEN + HIDDEN * INNER), 0
    for reused in plain_engine.map_reuse.database.mask.reused:
        rows_of_heads = tokens * (HEADS - reused) + missed * reused
        multiplications += rows_of_heads * 2 * WIDTH * HIDDEN
        map_rows += rows_of_heads
    assert sum(counts.multiplications for counts in noted) == multiplications
    assert sum(counts.map_rows for counts in noted) == map_rows
