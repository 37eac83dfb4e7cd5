"""Reuse skips the work that it should skip.

The tests count the tokens and heads that each layer computes, the cells of the context that the kernel
computes or reads from records, and the operators that run.
"""

from dataclasses import dataclass, field
from math import prod
from unittest import mock

import numpy as np
import pytest
import torch
from core_models import COMPUTING, attention_by, prefill, random_sequences
from torch.profiler import ProfilerActivity, profile

from attncache_core import native
from attncache_core.engine import forward as forward_module
from attncache_core.engine import layers as layers_module
from attncache_core.engine.layers import run_layers
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.plan import Outcome
from attncache_core.text.token_batch import TokenBatch, pack, rounded_up

MASKS = ["all", "layers:1", "5", "11"]
LAYERS, HEADS, WIDTH, HIDDEN = 3, 4, 8, 32


@dataclass
class Counted:
    """A layer that stores the sizes of its computations."""

    layer: object
    values: list = field(default_factory=list)  # rows and heads of each projection of V
    computed: list = field(default_factory=list)  # rows and heads of each projection of computed Q and K
    reused: list = field(default_factory=list)  # rows and heads of each projection of reused Q and K
    reused_inputs: list = field(default_factory=list)
    attended: list = field(default_factory=list)  # tokens and heads

    def __getattr__(self, name):
        return getattr(self.layer, name)

    def project(self, x, positions):
        value, query, key = projection = self.layer.project(x, positions)
        self.values.append(tuple(value.shape[:2]))
        self.computed.append(tuple(query.shape[:2]))
        assert query.shape == key.shape
        return projection

    def project_reused(self, x, positions):
        query, key = self.layer.project_reused(x, positions)
        self.reused.append(tuple(query.shape[:2]))
        self.reused_inputs.append(x.clone())
        return query, key

    def attend(self, query, key, value, offsets, heads, context, tree=None):
        tokens = int(offsets[-1] - offsets[0])
        assert query.shape[:2] == key.shape[:2] == value.shape[:2] == context.shape[:2]
        assert len(query) >= tokens
        self.attended.append((tokens, query.shape[1]))
        self.layer.attend(query, key, value, offsets, heads, context, tree)

    @property
    def attended_tokens_times_heads(self):
        return sum(prod(shape) for shape in self.attended)


@pytest.fixture(params=COMPUTING)
def computing(request):
    with attention_by(request.param):
        yield request.param


@pytest.fixture(params=MASKS)
def engine(request, tiny_checkpoint, tiny_database):
    """An engine with counting layers and θ = 1, so that recorded sequences hit and others miss."""
    database = AttentionDatabase.open(tiny_database, heads=request.param, threshold=1.0)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    engine.model.layers = [Counted(layer) for layer in engine.model.layers]
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
    # Without filler tokens, so that counts are exact; test_token_batch.py bounds the number of fillers.
    with (
        mock.patch.object(TokenBatch, "filled", lambda batch: batch),
        mock.patch.object(layers_module, "rounded_up", lambda tokens: tokens),
    ):
        result = prefill(engine, sequences)
    return result, [outcome == Outcome.HIT for outcome in result.outcomes]


@pytest.mark.usefixtures("computing")
def test_hits_never_have_q_and_k_or_softmax_of_the_reused_heads(engine, hits):
    _, hit = run(engine, hits)
    assert all(hit)
    tokens = sum(map(len, hits))
    for layer, reused in zip(engine.model.layers, engine.database.mask.reused, strict=True):
        assert layer.values == [(tokens, HEADS)]
        assert layer.computed == [(tokens, HEADS - reused)]
        assert layer.reused == []
        assert layer.attended_tokens_times_heads == tokens * (HEADS - reused)
        assert {heads for *_, heads in layer.attended} <= {HEADS - reused}


@pytest.mark.usefixtures("computing")
def test_filled_batch_has_round_numbers_of_tokens(engine, hits, misses):
    prefill(engine, [*hits, *misses])
    tokens, missed = (rounded_up(sum(map(len, sequences))) for sequences in ([*hits, *misses], misses))
    fillers = tokens - sum(map(len, [*hits, *misses]))
    for layer, reused in zip(engine.model.layers, engine.database.mask.reused, strict=True):
        assert layer.values == [(tokens, HEADS)]
        assert layer.computed == [(tokens, HEADS - reused)]
        assert [heads for _, heads in layer.reused] == ([reused] if reused else [])
        assert all(missed <= rows <= rounded_up(missed + fillers) for rows, _ in layer.reused)


@pytest.mark.usefixtures("computing")
def test_misses_have_all_heads_computed(engine, misses):
    _, hit = run(engine, misses)
    assert not any(hit)
    tokens = sum(map(len, misses))
    for layer in engine.model.layers:
        assert layer.values == [(tokens, HEADS)]
        assert layer.attended_tokens_times_heads == tokens * HEADS


@pytest.mark.usefixtures("computing")
def test_in_a_mixed_batch_only_misses_are_projected_for_the_reused_heads(engine, hits, misses):
    sequences = [misses[3], hits[0], misses[0], *hits[1:], misses[1], misses[2]]
    _, hit = run(engine, sequences)
    assert hit == [ids in hits for ids in sequences]
    tokens, missed = sum(map(len, sequences)), sum(map(len, misses))
    for layer, reused in zip(engine.model.layers, engine.database.mask.reused, strict=True):
        assert layer.values == [(tokens, HEADS)]
        assert layer.computed == [(tokens, HEADS - reused)]
        assert layer.reused == ([(missed, reused)] if reused else [])
        assert layer.attended_tokens_times_heads == tokens * (HEADS - reused) + missed * reused


def test_inputs_projected_for_the_reused_heads_are_those_of_the_misses(tiny_engine, engine, hits, misses):
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


@pytest.mark.parametrize("kind", ["hits", "misses", "both"])
def test_kernel_computes_no_reused_head_of_a_hit(engine, hits, misses, kind, monkeypatch):
    if native.kernel() is None:
        pytest.skip("no kernel was built for this processor")
    counted = CountedKernel(native.kernel())
    monkeypatch.setattr(native, "kernel", lambda: counted)
    sequences = {"hits": hits, "misses": misses, "both": [*misses, *hits]}[kind]
    _, hit = run(engine, sequences)
    assert hit == [ids in hits for ids in sequences]
    tokens = sum(map(len, sequences))
    of_hits = sum(len(ids) for ids in sequences if ids in hits)
    assert len(counted.contexts) == LAYERS
    by_layer = zip(counted.computed.values(), counted.reused.values(), strict=True)
    for (computed, read), reused in zip(by_layer, engine.database.mask.reused, strict=True):
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


@pytest.mark.parametrize("kind", ["hits", "misses", "both"])
def test_operators_of_attention_compute_no_reused_head_of_a_hit(engine, hits, misses, kind):
    sequences = {"hits": hits, "misses": misses, "both": [*misses, *hits]}[kind]
    with attention_by("operators"):
        events, hit = profiled(engine, sequences)
    squares = np.array([len(ids) for ids in sequences]) ** 2
    reused = engine.database.mask.total
    expected = squares.sum() * (LAYERS * HEADS - reused) + squares[~hit].sum() * reused
    assert numbers_of_maps(events) == expected


def test_with_the_kernel_no_operator_computes_a_map(engine, hits, misses):
    with attention_by("kernel"):
        events, _ = profiled(engine, [*misses, *hits])
    assert numbers_of_maps(events) == 0
    assert not [event.name for event in events if event.name in ("aten::bmm", "aten::baddbmm")]


def weight_shape(event):
    """Return the shape [outputs, inputs] of a linear layer's weight, which may follow a residual."""
    _, second, third, *_ = event.input_shapes
    return third if len(third) == 2 else second


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="linear layers are counted by oneDNN's name"
)
@pytest.mark.parametrize("kind", ["hits", "both"])
def test_matrix_products_of_a_hit_have_no_rows_of_reused_q_and_k(engine, hits, misses, kind):
    sequences = {"hits": hits, "both": [*misses, *hits]}[kind]
    events, hit = profiled(engine, sequences)
    found = [
        (event.input_shapes[0][0], weight_shape(event)[0])
        for event in events
        if event.name == "mkldnn::_linear_pointwise"
    ]
    lengths = np.array([len(ids) for ids in sequences])
    tokens, missed = int(lengths.sum()), int(lengths[~hit].sum())
    expected = []
    for reused in engine.database.mask.reused:
        expected.append((tokens, HIDDEN + 2 * (HEADS - reused) * WIDTH))
        if reused and missed:
            expected.append((missed, 2 * reused * WIDTH))
        expected += [(tokens, HIDDEN), (tokens, 64), (tokens, HIDDEN)]
    assert found == expected
