"""The split of a corpus: distinct sequences, no source on both sides; inputs like the model's own."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from core_models import random_sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.build.sentences import FirstInputs, split
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.text.token_batch import pack

MAX_LENGTH = 6


def has_two_of_one_length(corpus) -> bool:
    lengths = [len(ids) for ids in {tuple(ids) for ids, _ in corpus}]
    return any(lengths.count(length) > 1 for length in range(1, MAX_LENGTH + 1))


corpora = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.sampled_from("abcdefghijklmnop")),
    min_size=2,
    max_size=120,
).filter(has_two_of_one_length)


def split_of(corpus, seed: int = 0):
    return split(
        [ids for ids, _ in corpus], [source for _, source in corpus], MAX_LENGTH, np.random.default_rng(seed)
    )


@settings(deadline=None)
@given(corpora, st.integers(0, 99))
def test_distinct_sequences_of_allowed_length_are_divided_by_source_and_seed(corpus, seed):
    sentences, again = split_of(corpus, seed), split_of(corpus, seed)
    # In the order of the corpus.
    expected = dict.fromkeys(tuple(ids) for ids, _ in corpus if len(ids) <= MAX_LENGTH)
    assert sentences.sequences == again.sequences == [list(ids) for ids in expected]
    assert sentences.held_out.tolist() == again.held_out.tolist()
    source_of = {}
    for ids, source in corpus:
        source_of.setdefault(tuple(ids), source)
    sides = {True: set(), False: set()}
    for ids, held_out in zip(sentences.sequences, sentences.held_out.tolist(), strict=True):
        sides[held_out].add(source_of[tuple(ids)])
    assert not sides[True] & sides[False]
    assert sentences.held_out.sum() <= len(sentences.sequences) / 10


def test_a_tenth_of_single_text_sources_is_held_out_by_the_seed():
    corpus = [([1, number], str(number)) for number in range(200)]
    splits = [split_of(corpus, seed).held_out for seed in (0, 1)]
    assert [held_out.sum() for held_out in splits] == [20, 20]
    assert (splits[0] != splits[1]).any()


def test_no_more_than_a_thousand_are_held_out():
    corpus = [([1, number], str(number)) for number in range(11_000)]
    assert split_of(corpus).held_out.sum() == 1000


def test_by_length_partitions_the_sentences_with_held_out_ones_last():
    sentences = split_of([([number] * (1 + number % 5), str(number)) for number in range(100)])
    by_length = sentences.by_length()
    assert list(by_length) == [1, 2, 3, 4, 5]
    assert sorted(index for indices in by_length.values() for index in indices) == list(range(100))
    for length, indices in by_length.items():
        # Training sentences come first, and both sides keep the order of the corpus.
        assert indices == sorted(indices, key=lambda index: (sentences.held_out[index], index))
        assert {len(sentences.sequences[index]) for index in indices} == {length}
        held_out, others = (sentences.rows(indices, held_out=side) for side in (True, False))
        assert sorted(held_out + others) == list(range(len(indices)))
        assert all(sentences.held_out[indices[row]] for row in held_out)
        assert not any(sentences.held_out[indices[row]] for row in others)


@settings(deadline=None)
@given(corpora, st.integers(1, MAX_LENGTH), st.integers(0, 9))
def test_cut_sentences_are_the_next_longer_training_sentences(corpus, length, most):
    sentences = split_of(corpus)
    longer = [
        ids
        for ids, held_out in zip(sentences.sequences, sentences.held_out, strict=True)
        if len(ids) > length and not held_out
    ]
    by_length = [ids for tokens in range(MAX_LENGTH + 1) for ids in longer if len(ids) == tokens]
    expected = []
    for ids in by_length[:most]:
        cut = [*ids[: length - 1], ids[-1]]
        if cut not in expected:
            expected.append(cut)
    assert sentences.cut_to(length, most) == expected


def test_one_long_source_name_does_not_multiply_the_memory():
    corpus = [([1, number], str(number)) for number in range(500)]
    corpus.append(([1], "x" * 20_000))
    tracemalloc.start()
    try:
        split_of(corpus)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The corpus itself is a few hundred kilobytes; 500 x 20,000 characters would be 40 MB.
    assert peak < 5_000_000


def test_source_that_ends_in_a_zero_character_stays_distinct():
    corpus = [([1, number], f"{number}\0") for number in range(100)]
    assert split_of(corpus).held_out.sum() == 10


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


def test_build_computes_the_inputs_of_its_corpus_once(tiny_engine, tiny_corpus, tmp_path, monkeypatch):
    computed = []
    compute = FirstInputs._compute
    monkeypatch.setattr(FirstInputs, "_compute", lambda self, ids: computed.extend(ids) or compute(self, ids))
    options = BuildOptions(heads="6", training_steps=5, prototypes=2)
    build_database(tiny_engine, tiny_corpus, tmp_path / "db", options)
    corpus = {tuple(ids) for ids in tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])}
    assert corpus <= set(computed)
    assert len(set(computed)) == len(computed)
