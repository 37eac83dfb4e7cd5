"""A fixture with recorded sentences of the tiny model."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from core_models import SEAL, random_sequences

from attncache_core.build.recording import Recording
from attncache_core.build.sentences import FirstInputs, Sentences
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.index import FeatureIndex
from attncache_core.reuse.maps.policy import Budget, uniform_policy
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.storage.layout import RecordLayout
from attncache_core.reuse.storage.store import AttentionMapStore


class Recorded(NamedTuple):
    """Recorded sentences of 5, 7 and 9 tokens. Held-out ones, such as all of 9 tokens, are in no index."""

    sentences: Sentences
    recording: Recording
    first_inputs: FirstInputs
    store: AttentionMapStore
    search: SearchEngine
    rank: np.ndarray  # not in the order of the heads, so that a mix-up is noticed
    held_out: list[list[int]]


@pytest.fixture(scope="module")
def recorded(tiny_engine, tmp_path_factory) -> Recorded:
    sequences = random_sequences([5] * 60 + [7] * 40 + [9] * 12, seed=11)
    assert len(set(map(tuple, sequences))) == 112
    sides = np.random.default_rng(12).random(112) < 0.3
    sides[-12:] = True
    sentences = Sentences(sequences, sides)
    rank = np.array([[3, 0, 2, 1], [4, 7, 5, 6], [11, 10, 9, 8]])
    folder = tmp_path_factory.mktemp("recorded")
    inputs = FirstInputs(tiny_engine.model, folder)
    layout = RecordLayout((4, 4, 4), torch.float16)
    recording = Recording(tiny_engine.model, sentences, layout, 3, SEAL, inputs)
    store = recording.write(folder, rank, lambda *_: None)
    torch.manual_seed(1)
    projector = FeatureProjector(tiny_engine.model.hidden_size, 9).requires_grad_(False)
    projector.position.mul_(0.2)  # similarities mostly in [0, 1]
    index = FeatureIndex()
    for length, features in recording.features(projector).items():
        training = len(sentences.rows(recording.by_length[length], held_out=False))
        if training:
            index.add(length, features[:training])
    search = SearchEngine(
        projector,
        index,
        recording.prototype_index(projector),
        store,
        uniform_policy(Budget(Measure.COSINE, 0.9), 1.0),
    )
    held_out = [ids for ids, held in zip(sequences, sides.tolist(), strict=True) if held]
    assert len(held_out) > 30
    return Recorded(sentences, recording, inputs, store, search, rank, held_out)
