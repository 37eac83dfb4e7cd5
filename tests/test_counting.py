"""What reuse saves, proved by counting: tokens and heads that each layer is asked for, operators that ran."""

from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest
import torch
from core_models import random_sequences
from torch.profiler import ProfilerActivity, profile

from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.search import Outcome
from attncache_core.engine import PrefillEngine

MASKS = ["all", "layers:1", "5", "11"]
LAYERS, HEADS, WIDTH, HIDDEN = 3, 4, 8, 32


@dataclass
class Counted:
    """A layer that notes what it is asked for."""

    layer: object
    values: list = field(default_factory=list)  # rows and heads of each projection of V
    computed: list = field(default_factory=list)  # rows and heads of each projection of computed Q and K
    reused: list = field(default_factory=list)  # rows and heads of each projection of reused Q and K
    reused_inputs: list = field(default_factory=list)
    attended: list = field(default_factory=list)  # tokens, filling left out, and heads

    def __getattr__(self, name):
        return getattr(self.layer, name)

    def project(self, x):
        value, query, key = projection = self.layer.project(x)
        self.values.append(tuple(value.shape[:2]))
        self.computed.append(tuple(query.shape[:2]))
        assert query.shape == key.shape
        return projection

    def project_reused(self, x):
        query, key = self.layer.project_reused(x)
        self.reused.append(tuple(query.shape[:2]))
        self.reused_inputs.append(x.clone())
        return query, key

    def attend(self, query, key, value, mask):
        sequences, length, heads, _ = query.shape
        tokens = sequences * length if mask is None else int((mask == 0).sum())
        self.attended.append((tokens, heads))
        return self.layer.attend(query, key, value, mask)

    @property
    def attended_tokens_times_heads(self):
        return sum(prod(shape) for shape in self.attended)


@pytest.fixture(params=MASKS)
def engine(request, tiny_checkpoint, tiny_database):
    """An engine at θ = 1 (recorded sequences hit, others miss) whose layers count."""
    database = AttentionDatabase.open(tiny_database, heads=request.param, threshold=1.0)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    engine.model.layers = [Counted(layer) for layer in engine.model.layers]
    return engine


@pytest.fixture(scope="module")
def hits(tiny_engine, tiny_corpus):
    """Recorded sequences of several lengths, two of each."""
    return tiny_engine.tokenize([tiny_corpus[place].text for place in (0, 1, 80, 81, 200, 201)])


@pytest.fixture(scope="module")
def misses():
    """Sequences without a record, of lengths with and without records."""
    return random_sequences([5, 7, 7, 20], seed=9)


def run(engine, sequences):
    result = engine.run(sequences, [True] * len(sequences))
    return result, [outcome == Outcome.HIT for outcome in result.outcomes]


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


def test_misses_have_all_heads_computed(engine, misses):
    _, hit = run(engine, misses)
    assert not any(hit)
    tokens = sum(map(len, misses))
    for layer in engine.model.layers:
        assert layer.values == [(tokens, HEADS)]
        assert layer.attended_tokens_times_heads == tokens * HEADS


def test_in_a_mixed_batch_only_the_misses_tokens_are_projected_for_the_reused_heads(engine, hits, misses):
    sequences = [misses[3], hits[0], misses[0], *hits[1:], misses[1], misses[2]]
    _, hit = run(engine, sequences)
    assert hit == [ids in hits for ids in sequences]
    tokens, missed = sum(map(len, sequences)), sum(map(len, misses))
    for layer, reused in zip(engine.model.layers, engine.database.mask.reused, strict=True):
        assert layer.values == [(tokens, HEADS)]
        assert layer.computed == [(tokens, HEADS - reused)]
        assert layer.reused == ([(missed, reused)] if reused else [])
        assert layer.attended_tokens_times_heads == tokens * (HEADS - reused) + missed * reused


def test_the_tokens_projected_for_the_reused_heads_are_those_of_the_misses(tiny_engine, engine, hits, misses):
    run(engine, [*hits, *misses])
    first = engine.model.layers[0]
    if not first.reused_heads:
        assert first.reused_inputs == []
        return
    # The first layer's input of each miss alone; packing sorts them by length.
    expected = torch.cat([embedded(tiny_engine, ids) for ids in sorted(misses, key=len)])
    torch.testing.assert_close(first.reused_inputs[0], expected, atol=1e-6, rtol=0)


@torch.inference_mode()
def embedded(engine, ids):
    """The first layer's input of one sequence."""
    return engine.model._embeddings(torch.tensor([ids]))[0]


def profiled(engine, sequences):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        _, hit = run(engine, sequences)
    return profiler.events(), np.array(hit)


def softmaxed(events):
    """Numbers that went through a softmax."""
    return sum(prod(event.input_shapes[0]) for event in events if event.name == "aten::_softmax")


def numbers_of_maps(lengths):
    """Numbers in one head's maps, sequences filled up to the longest of their eight lengths."""
    eights = -(-lengths // 8)
    return sum((eights == eight).sum() * lengths[eights == eight].max() ** 2 for eight in np.unique(eights))


@pytest.mark.parametrize("kind", ["hits", "misses", "both"])
def test_the_softmax_operator_sees_no_reused_head_of_a_hit(engine, hits, misses, kind):
    sequences = {"hits": hits, "misses": misses, "both": [*misses, *hits]}[kind]
    events, hit = profiled(engine, sequences)
    lengths = np.array([len(ids) for ids in sequences])
    missed = numbers_of_maps(lengths[~hit])
    reused = engine.database.mask.total
    computed = (numbers_of_maps(lengths[hit]) + missed) * (LAYERS * HEADS - reused)
    assert softmaxed(events) == computed + missed * reused


def weight_shape(event):
    """[outputs, inputs] of a linear layer; a residual comes before the weight, the bias after it."""
    _, second, third, *_ = event.input_shapes
    return third if len(third) == 2 else second


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="linear layers are counted by oneDNN's name"
)
@pytest.mark.parametrize("kind", ["hits", "both"])
def test_the_matrix_products_of_a_hit_have_no_rows_of_reused_q_and_k(engine, hits, misses, kind):
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
