"""Hits on records of other texts take refitted weights, and no other sequence does.

The oracle is an engine whose own weights are the refitted ones.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import COMPUTING, DTYPES, QUANTIZATIONS, attention_by, prefill, random_sequences
from core_reference import SIXTEEN_BITS
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import DatabaseRefused
from attncache_core.models.projections import LinearWeights
from attncache_core.models.refitted import LastProducts, last_products, refitted_layers
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.plan import Outcome

# Heads of every number are reused, and the mask leaves some heads of each layer to be computed.
HEADS = "7"


@pytest.fixture(scope="module")
def products(tiny_engine):
    """Other weights for every layer of the tiny model."""
    generator = torch.Generator().manual_seed(3)

    def moved(weights):
        noise = (torch.randn(part.shape, generator=generator) * 0.05 for part in weights[:2])
        return LinearWeights(
            *((part + added).bfloat16() for part, added in zip(weights[:2], noise, strict=True))
        )

    layers = tiny_engine.model.layers
    return [LastProducts(*map(moved, last_products(layer))) for layer in layers]


@pytest.fixture(scope="module")
def database(tiny_database, products):
    return replace(AttentionDatabase.open(tiny_database, heads=HEADS, threshold=0.0), refitted=products)


@pytest.fixture(scope="module", params=DTYPES)
def engines(request, tiny_checkpoint, database):
    """(with refitted weights for hits, with its own weights, with the refitted weights as its own)."""
    refitted = PrefillEngine.load(tiny_checkpoint, database=database, dtype=request.param)
    original = PrefillEngine.load(
        tiny_checkpoint, database=replace(database, refitted=None), dtype=request.param
    )
    model = replace(original.model, layers=refitted_layers(original.model, database.refitted, None))
    return refitted, original, replace(original, model=model)


@pytest.fixture(scope="module")
def recorded(tiny_engine, tiny_corpus):
    """Recorded sequences of 5 to 10 tokens, in any order."""
    sequences = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])
    return [sequences[index] for index in np.random.default_rng(0).permutation(len(sequences))]


@pytest.mark.parametrize("computing", COMPUTING)
@settings(max_examples=8)
@given(
    others=st.lists(st.integers(4, 11), max_size=6),
    stored=st.lists(st.integers(0, 239), max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_each_sequence_of_a_batch_takes_the_weights_of_its_outcome(
    engines, recorded, computing, others, stored, order
):
    refitted, original, instead = engines
    # Declined sequences are misses, and lengths without records are not searched.
    asked = [(ids, True) for ids in random_sequences(others, seed=len(others))]
    asked += [(recorded[index], declined) for index in stored for declined in (True, False)]
    if not asked:
        return
    order.shuffle(asked)
    sequences, reuse = map(list, zip(*asked, strict=True))
    with attention_by(computing):
        found, plain, replaced = (
            prefill(engine, sequences, reuse=reuse) for engine in (refitted, original, instead)
        )
    assert found.outcomes == plain.outcomes
    for row, outcome in enumerate(found.outcomes):
        is_hit = outcome is Outcome.HIT and found.similarities[row] < 1
        expected = replaced if is_hit else plain
        # Rows that one product computes together may be rounded in another way by torch's operators.
        exact = computing == "stack"
        np.testing.assert_allclose(found.outputs[row], expected.outputs[row], atol=0 if exact else 0.02)
        if is_hit:
            assert abs(found.outputs[row] - plain.outputs[row]).max() > 0.05


def test_recorded_sequence_gives_the_full_models_output(engines, recorded):
    refitted, *_ = engines
    result = prefill(refitted, recorded[:40])
    assert result.similarities.tolist() == [1.0] * 40
    full = prefill(refitted, recorded[:40], reuse=False)
    atol = SIXTEEN_BITS if refitted.dtype is torch.float32 else 0.05
    np.testing.assert_allclose(result.outputs, full.outputs, atol=atol)


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(4, 11), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_sequence_of_a_batch_is_the_sequence_alone_to_the_last_bit(engines, recorded, lengths, seed):
    refitted, *_ = engines
    if refitted.model.stack is None:
        pytest.skip("torch's operators round rows by the number of rows")
    sequences = [*random_sequences(lengths, seed), *recorded[seed : seed + 3]]
    together = prefill(refitted, sequences).outputs
    alone = np.concatenate([prefill(refitted, [ids]).outputs for ids in sequences])
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_refitted_weights_are_quantised_like_the_models(tiny_checkpoint, database, quantization):
    checkpoint = replace(tiny_checkpoint, quantization=quantization)
    strategy = MapReuse(database)  # the database of another variant is refused, and a strategy is not
    engine = PrefillEngine.load(checkpoint, strategy=strategy, dtype="float32")
    sequences = random_sequences([5, 7, 7, 10], seed=4)
    compiled = prefill(engine, sequences)
    with attention_by("operators"):
        plain = prefill(engine, sequences)
    assert compiled.outcomes == (Outcome.HIT,) * 4
    np.testing.assert_allclose(compiled.outputs, plain.outputs, atol=0.02)
    for one, other in zip(engine.model.layers, engine.model.refitted, strict=True):
        assert type(one.output) is type(other.output)
        for half, refitted in zip(one.halves, other.halves, strict=True):
            assert type(half.network.down) is type(refitted.network.down)


def test_weights_of_another_shape_are_refused(tiny_checkpoint, database, products):
    wrong = replace(database, refitted=products[:-1])
    with pytest.raises(DatabaseRefused, match=r"refitted\.safetensors .* build it again"):
        PrefillEngine.load(tiny_checkpoint, database=wrong)
