"""Factors between activations and weights: what they compute, who shares them, and what they improve."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import layers_output, needs_int8, random_sequences, write_model
from families import CASES, FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModel

from attncache_core.checkpoints import hugging_face
from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.corpus import default_corpus
from attncache_core.heads.vectors import cosines
from attncache_core.models import load, load_model
from attncache_core.models.compiled import attention_half, forward_half
from attncache_core.models.linear import quantizing
from attncache_core.models.projections import LinearWeights, joined_linear
from attncache_core.models.quantized import Int8Linear
from attncache_core.models.smoothing import calibration_sequences, smooth, smoothing_of
from attncache_core.text.token_batch import pack


def numbers(rows, inputs, outputs, seed):
    """Return x, weight, bias and factors."""
    torch.manual_seed(seed)
    return (
        torch.randn(rows, inputs),
        torch.randn(outputs, inputs),
        torch.randn(outputs),
        torch.randn(inputs).exp(),
    )


@needs_int8
@settings(max_examples=30)
@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 150), st.integers(1, 60)), seed=st.integers(0, 50))
def test_factors_multiply_x_and_divide_the_weight_before_rounding(shape, seed):
    x, weight, bias, factors = numbers(*shape, seed)
    expected = Int8Linear(weight / factors, bias)(x * factors)
    assert torch.equal(Int8Linear(weight, bias, None, factors)(x), expected)


@needs_int8
def test_product_is_exact_where_factors_make_levels_whole():
    """Without the factors, every second input of x would round to a few levels."""
    torch.manual_seed(0)
    factors = torch.tensor([1.0, 64.0]).repeat(64)
    levels = torch.randint(-127, 128, (9, 128)).float()
    weight_levels = torch.randint(-127, 128, (20, 128)).float()
    # Rows of x have steps of 1: (127 + 128) / 255 from minimum to maximum.
    levels[:, 0], levels[:, 1], weight_levels[:, 0] = 127, -128, 127
    x, weight = levels / factors, weight_levels * factors
    expected = functional.linear(x.double(), weight.double()).float()
    assert torch.equal(Int8Linear(weight, None, None, factors)(x), expected)
    assert not torch.equal(Int8Linear(weight)(x), expected)


@needs_int8
def test_weight_is_the_given_weight_within_half_a_step():
    _, weight, bias, factors = numbers(1, 70, 30, 0)
    layer = Int8Linear(weight, bias, None, factors)
    again = Int8Linear(layer.weight, bias, None, factors)
    steps = (weight / factors).abs().amax(dim=1, keepdim=True) / 127 * factors
    assert ((layer.weight - weight).abs() <= 0.501 * steps).all()
    torch.testing.assert_close(again.weight, layer.weight, rtol=1e-6, atol=0)


@needs_int8
def test_joined_layers_need_equal_factors():
    _, weight, _, factors = numbers(1, 32, 16, 0)
    part = LinearWeights(weight, None, factors)
    with quantizing(Quantization.INT8):
        joined = joined_linear([part, LinearWeights(-weight, None, factors.clone())])
        assert torch.equal(joined.smoothing, factors)
        for other in (None, factors + 1):
            with pytest.raises(AssertionError):
                joined_linear([part, LinearWeights(weight, None, other)])


class Reader(nn.Module):
    """Two layers that read x, one that reads another tensor, and one that only even rows reach."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.one, self.two, self.after, self.routed, self.unused = (nn.Linear(24, 24) for _ in range(5))

    def forward(self, ids):
        x = self.embedding(ids)
        self.routed(x[:, ::2])
        return self.after(self.one(x) * self.two(x))


SEQUENCES = [list(range(first, first + length)) for first, length in ((0, 5), (20, 9), (3, 5), (40, 1))]


def smoothed_reader():
    torch.manual_seed(1)
    model = Reader()
    smooth(model, SEQUENCES)
    return model


def test_layers_share_factors_if_they_read_the_same_tensor():
    model = smoothed_reader()
    assert torch.equal(smoothing_of(model.one), smoothing_of(model.two))
    assert not torch.equal(smoothing_of(model.one), smoothing_of(model.after))


def test_layer_that_not_every_token_reaches_is_not_smoothed():
    model = smoothed_reader()
    assert smoothing_of(model.routed) is None
    assert smoothing_of(model.unused) is None


def test_factors_give_x_and_the_weights_equal_largest_values():
    """With alpha = 0.5, the maxima of each input and of its weights become equal."""
    model = smoothed_reader()
    x = model.embedding(torch.tensor([token for ids in SEQUENCES for token in ids]))
    factors = smoothing_of(model.one)
    weights = torch.cat([model.one.weight, model.two.weight]) / factors
    torch.testing.assert_close((x * factors).abs().amax(dim=0), weights.abs().amax(dim=0))


def test_nothing_is_smoothed_without_tokens():
    model = Reader()
    smooth(model, [])
    assert all(smoothing_of(module) is None for module in model.modules())


def test_damaged_numbers_do_not_reach_the_factors():
    model = Reader()
    with torch.no_grad():
        model.embedding.weight[21] = torch.nan
        model.one.weight[3, 4] = torch.inf
    smooth(model, SEQUENCES)
    assert smoothing_of(model.one).isfinite().all()


def test_input_that_was_always_zero_has_a_moderate_factor():
    model = Reader()
    with torch.no_grad():
        model.embedding.weight[:, 7] = 0
        model.one.weight[:, 9] = model.two.weight[:, 9] = 0
    smooth(model, SEQUENCES)
    factors = smoothing_of(model.one)
    assert factors.max() / factors.median() < 20
    assert factors.min() > 0


# Ends of the names of layers that read the same tensor.
READERS = [
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    ("self.query_proj", "self.key_proj", "self.value_proj"),
    ("attn.q", "attn.k", "attn.v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("self_attn.q_proj", "kv_a_proj_with_mqa"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("shared_experts.gate_proj", "shared_experts.up_proj"),
    ("shared_expert.gate_proj", "shared_expert.up_proj"),
]


@torch.no_grad()
def factors_by_name(model):
    smooth(model.eval(), random_sequences((5, 9, 9, 30)))
    modules = model.base_model.named_modules()
    return {name: factors for name, module in modules if (factors := smoothing_of(module)) is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_with_shared_factors(family, tmp_path):
    checkpoint = read_checkpoint(CASES[family].written(tmp_path))
    factors = factors_by_name(AutoModel.from_pretrained(tmp_path))
    _, config = load._layers_and_config(checkpoint)
    loaded = factors_by_name(load._read_weights(checkpoint, config, torch.float32))
    torch.testing.assert_close(loaded, {name: factors[name] for name in loaded}, rtol=1e-5, atol=1e-6)
    groups = 0
    for name, factor in factors.items():
        for first, *others in READERS:
            names = [name.removesuffix(first) + other for other in others]
            if name.endswith(first) and all(other in factors for other in names):
                groups += 1
                assert all(torch.equal(factors[other], factor) for other in names)
    assert groups >= 2 or "modernbert" in family  # ModernBERT's layers are fused
    assert min(len(factors), len(loaded)) >= 3 * 3


@needs_int8
@pytest.mark.parametrize("family", ["bert", "llama-grouped-biased"])
def test_products_of_hits_and_misses_share_their_factors(family, tmp_path):
    checkpoint = read_checkpoint(CASES[family].written(tmp_path))
    model = load_model(
        replace(checkpoint, quantization=Quantization.INT8), torch.float32, reused_heads=(1, 2, 3)
    )
    for layer in model.layers:
        half = attention_half(layer)
        always, misses = (factors_of(part.packed) for part in (half.always, half.misses))
        np.testing.assert_array_equal(always, misses)
        for forward in map(forward_half, layer.halves):
            if forward.gate:
                np.testing.assert_array_equal(factors_of(forward.gate), factors_of(forward.up))


@needs_int8
def test_experts_of_odd_sizes_run_over_the_calibration_texts(tmp_path):
    checkpoint = read_checkpoint(CASES["mixtral"].written(tmp_path, intermediate_size=37))
    model = load_model(replace(checkpoint, quantization=Quantization.INT8), torch.float32)
    assert all(factors_of(attention_half(layer).always.packed).any() for layer in model.layers)


def factors_of(packed):
    """Return the factors of a packed matrix, float32 [inputs]."""
    return np.array((ctypes.c_float * packed.inputs).from_address(packed.matrix.smoothing))


def with_outliers(folder):
    """Write a tiny BERT in which three hidden numbers are 40 times as large as the others."""
    write_model(folder, hidden_size=64, intermediate_size=128)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "LayerNorm.weight" in name:
            weight[[3, 17, 40]] *= 40
        elif name.endswith(("query.weight", "key.weight", "value.weight", "intermediate.dense.weight")):
            weight[:, [3, 17, 40]] /= 40
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return read_checkpoint(folder)


def token_states(checkpoint):
    """Return the last hidden state of each token without the outliers, normalised."""
    batch = pack(random_sequences((5, 9, 9, 30, 64)))
    model = load_model(checkpoint, torch.float32)
    hidden = layers_output(model, batch, model.embed(batch)).numpy().copy()
    hidden[:, [3, 17, 40]] = 0
    return hidden


@needs_int8
@torch.inference_mode()
def test_smoothing_reduces_the_error_of_outliers(tmp_path, monkeypatch):
    checkpoint = with_outliers(tmp_path)
    int8 = replace(checkpoint, quantization=Quantization.INT8)
    full = token_states(checkpoint)
    smoothed = 1 - cosines(full, token_states(int8)).mean()
    monkeypatch.setattr(load, "smooth", lambda *_: None)
    plain = 1 - cosines(full, token_states(int8)).mean()
    assert plain > 5 * smoothed
    assert smoothed < 0.01


def test_calibration_takes_equally_spaced_texts_of_the_corpus(tiny_checkpoint):
    checkpoint = replace(tiny_checkpoint, quantization=Quantization.INT8)
    texts = [sentence.text for sentence in default_corpus()]
    assert len(checkpoint.calibration_texts) == 100
    assert (checkpoint.calibration_texts[0], checkpoint.calibration_texts[-1]) == (texts[0], texts[-1])
    assert len(calibration_sequences(checkpoint)) == 100


def test_long_calibration_texts_are_thinned_out(tiny_checkpoint):
    texts = tuple(f"{'my card ' * 100}{number}" for number in range(100))
    sequences = calibration_sequences(replace(tiny_checkpoint, quantization_texts=texts))
    # The fingerprint does not cover the limit that a folder sets.
    limited = replace(tiny_checkpoint, quantization_texts=texts, max_tokens=5)
    assert calibration_sequences(limited) == sequences
    assert 3500 < sum(map(len, sequences)) <= 4000
    assert {len(ids) for ids in sequences} == {len(sequences[0])}  # whole texts


def test_texts_with_tokens_that_the_model_does_not_have_do_not_calibrate(tiny_checkpoint):
    every = calibration_sequences(tiny_checkpoint)
    largest = sorted(map(max, every))[len(every) // 2]
    smaller = replace(tiny_checkpoint, config={**tiny_checkpoint.config, "vocab_size": largest})
    assert calibration_sequences(smaller) == [ids for ids in every if max(ids) < largest]


@needs_int8
def test_no_other_model_is_loaded_while_int8_is_calibrated(tmp_path, monkeypatch):
    """transformers changes the default dtype of the whole process while it loads a model."""
    locked = []
    monkeypatch.setattr(load, "smooth", lambda *_: locked.append(hugging_face._LOADING.locked()))
    checkpoint = replace(read_checkpoint(write_model(tmp_path)), quantization=Quantization.INT8)
    load_model(checkpoint, torch.float32)
    assert locked == [True]
