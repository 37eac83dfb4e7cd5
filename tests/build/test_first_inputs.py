"""First-layer inputs: computed once for each sequence, and equal to the model's own."""

from itertools import pairwise

import pytest
import torch
from core_models import random_sequences

from attncache_core.build.builder import build_database
from attncache_core.build.first_inputs import FirstInputs
from attncache_core.build.options import BuildOptions
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import BuildFailed
from attncache_core.text.token_batch import pack


@pytest.fixture
def embedded(tiny_engine, monkeypatch):
    """A list of the token sequences that the tiny model has embedded so far."""
    seen, embed = [], tiny_engine.model.embed

    def noting(batch):
        seen.extend(tuple(batch.ids[a:b].tolist()) for a, b in pairwise(batch.offsets.tolist()))
        return embed(batch)

    monkeypatch.setattr(tiny_engine.model, "embed", noting)
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_equal_those_of_the_models_first_layer(tiny_checkpoint, tmp_path, dtype):
    model = PrefillEngine.load(tiny_checkpoint, dtype=dtype).model
    inputs, sequences = FirstInputs(model, tmp_path), random_sequences([4] * 300 + [7])
    assert list(tmp_path.iterdir()) == []  # an unnamed file, so a killed process leaves nothing
    found = inputs.of(sequences[:300][::-1])
    assert found.shape == (300, 4, model.hidden_size)
    assert found.dtype == torch.float32
    with torch.inference_mode():
        expected = model.search_input(model.embed(pack(sequences[:300]))).float()
    torch.testing.assert_close(found.flip(0).flatten(0, 1), expected, atol=0, rtol=0)
    assert inputs.of(sequences[300:]).shape == (1, 7, model.hidden_size)
    assert inputs.of([]).shape[0] == 0


def test_each_sequence_is_computed_once(tiny_engine, tmp_path, embedded):
    inputs, sequences = FirstInputs(tiny_engine.model, tmp_path), random_sequences([5] * 6)
    first = inputs.of([*sequences[:4], sequences[0]])
    again = inputs.of(sequences[2:])
    assert embedded == [tuple(ids) for ids in sequences]
    assert torch.equal(first[2:4], again[:2])
    assert torch.equal(first[0], first[4])


def test_number_that_is_not_finite_is_refused(tiny_checkpoint, tmp_path):
    model = PrefillEngine.load(tiny_checkpoint, dtype="float32").model
    embed = model.embed
    model.embed = lambda batch: embed(batch) / 0
    with pytest.raises(BuildFailed, match="NaN or infinity for a text of 4 tokens"):
        FirstInputs(model, tmp_path).of(random_sequences([4]))


def test_build_computes_the_inputs_of_its_corpus_once(tiny_engine, tiny_corpus, tmp_path, monkeypatch):
    computed = []
    compute = FirstInputs._compute
    monkeypatch.setattr(FirstInputs, "_compute", lambda self, ids: computed.extend(ids) or compute(self, ids))
    options = BuildOptions(heads="6", training_steps=5, prototypes=2)
    build_database(tiny_engine, tiny_corpus, tmp_path / "db", options)
    corpus = {tuple(ids) for ids in tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])}
    assert corpus <= set(computed)
    assert len(set(computed)) == len(computed)
