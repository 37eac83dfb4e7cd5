"""Importance equals 1 - cosine of Hugging Face's hidden states before and after a module."""

from unittest import mock

import numpy as np
import pytest
import torch
from core_models import random_sequences
from core_reference import FLOAT32
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.evaluation.importance import measure_importance


def changes(reference, ids):
    """Return 1 - cosine of each token before and after attention, and the whole layer: two of [layers, L]."""
    seen = {}
    hooks = []
    for number, layer in enumerate(reference.model.encoder.layer):
        for kind, module in (("attention", layer.attention), ("block", layer)):

            def keep(_module, inputs, made, key=(kind, number)):
                after = made[0] if isinstance(made, tuple) else made
                seen[key] = (inputs[0], after)

            hooks.append(module.register_forward_hook(keep))
    reference.hidden(ids)
    for hook in hooks:
        hook.remove()
    return [
        [
            1 - torch.cosine_similarity(*seen[kind, number], dim=-1).flatten().numpy()
            for number in range(len(reference.model.encoder.layer))
        ]
        for kind in ("attention", "block")
    ]


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_importance_is_the_mean_change_of_the_references_tokens(tiny_engine, tiny_reference, lengths):
    sequences = random_sequences(lengths)
    attention, blocks = zip(*(changes(tiny_reference, ids) for ids in sequences), strict=True)
    found = measure_importance(tiny_engine.model, sequences)
    for of_kind, seen in ((found.attention, attention), (found.blocks, blocks)):
        expected = np.concatenate([np.array(layers) for layers in seen], axis=1).mean(axis=1)
        np.testing.assert_allclose(of_kind, expected, atol=FLOAT32, rtol=0)
        assert expected.min() > 100 * FLOAT32


def test_importance_of_a_sample_of_several_passes_is_a_mean_over_all_tokens(tiny_engine):
    """Eight sequences of 500 tokens need two passes."""
    sequences = random_sequences([500] * 9 + [3])
    told = []
    whole = measure_importance(tiny_engine.model, sequences, lambda *done: told.append(done))
    assert len(told) == 2
    assert told[-1] == (10, 10)
    tokens = np.array(list(map(len, sequences)))
    alone = np.array([measure_importance(tiny_engine.model, [ids]).attention for ids in sequences])
    np.testing.assert_allclose(whole.attention, tokens @ alone / tokens.sum(), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("part", ["attention", "block"])
def test_module_that_changes_nothing_has_no_importance(tiny_engine, monkeypatch, part):
    layer = mock.Mock(wraps=tiny_engine.model.layers[1], heads=4, reused_heads=0)
    layer.add_attention = lambda hidden, _: hidden
    if part == "block":
        layer.feed_forward = lambda hidden: hidden
    layers = tiny_engine.model.layers
    monkeypatch.setattr(tiny_engine.model, "layers", [layers[0], layer, *layers[2:]])
    found = measure_importance(tiny_engine.model, random_sequences([6, 12]))
    assert found.attention[1] == pytest.approx(0, abs=1e-12)
    assert (found.blocks[1] == pytest.approx(0, abs=1e-12)) == (part == "block")
