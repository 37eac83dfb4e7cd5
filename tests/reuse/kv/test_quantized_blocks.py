"""Blocks in 8 bits: the error of each number is bounded, and approximate blocks have names of their own."""

from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from core_decoders import write_llama
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.heads.vectors import cosines
from attncache_core.reuse.kv.quantized import Int8Slots


def through_8_bits(layers, tokens=16):
    """Return what a block with these slots [16, numbers] holds after it was saved and loaded."""
    dtype, numbers = layers[0].dtype, layers[0].shape[1]
    state = torch.randn(5, 7)
    parts = [memoryview(bytearray(x.view(torch.uint8).numpy().tobytes())) for x in (*layers, state)]
    quantized = Int8Slots([len(part) for part in parts], numbers * dtype.itemsize, dtype)
    saved = quantized.encode(parts, tokens)
    assert tuple(map(len, saved)) == quantized.part_bytes
    found = [memoryview(bytearray(len(part))) for part in parts]
    for index, part in enumerate(saved):
        quantized.decode(index, part, found[index])
    assert found[-1] == parts[-1]
    return [torch.frombuffer(part, dtype=dtype).view(16, numbers) for part in found[:-1]]


@given(
    seed=st.integers(0, 1000),
    slot=st.sampled_from([8, 40, 64, 192]),
    size=st.sampled_from([0.0, 1e-3, 50.0, 1e30, 1e-42]),
    outlier=st.sampled_from([1.0, 1e3, 1e6]),
    constant=st.sampled_from([0.0, 3.0, 1e3]),
    tokens=st.integers(1, 16),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_within_half_a_step(dtype, seed, slot, size, outlier, constant, tokens):
    """The step is 1/127 of twice the largest number of the column, whatever the other columns are.

    In a column with a large constant part, the step is 1/127 of twice what the numbers differ by.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = [(size * torch.randn(16, slot, generator=generator)).to(dtype) for _ in range(2)]
    for layer in layers:
        layer[:, 3] *= outlier
        layer[:, 1] += constant * size
        layer[tokens:] = torch.nan  # whatever was there before
    for y, x in zip(through_8_bits(layers, tokens), layers, strict=True):
        x, y = x.double(), y.double()
        step = 2 * x[:tokens].abs().amax(dim=0) / 127
        if constant > 10:
            step[1] = 2 * (x[:tokens, 1].amax() - x[:tokens, 1].amin()) / 127
        rounding = x[:tokens].abs() * (2**-7 if dtype == torch.bfloat16 else 1e-6)
        least = 2**-126 / 127 + (2**-133 if dtype == torch.bfloat16 else 2**-149)
        assert (abs(x - y)[:tokens] <= step * 0.5001 + rounding + least).all()
        assert y[tokens:].isfinite().all()


def test_a_row_of_small_numbers_has_small_steps():
    """As in values, whose size differs from token to token."""
    layer = torch.randn(16, 64) * torch.logspace(-4, 4, 16)[:, None]
    (found,) = through_8_bits([layer])
    assert cosines(found.numpy(), layer.numpy()).min() > 0.99


def test_blocks_in_8_bits_take_fewer_bytes_approximate_and_are_found_by_nobody_else(tiny_llama, tmp_path):
    checkpoint = read_checkpoint(tiny_llama)

    def engine(disk_dtype):
        options = KeyValueOptions(2**24, folder=tmp_path / "kv", disk_dtype=disk_dtype)
        return PrefillEngine.load(checkpoint, dtype="float32", key_values=options)

    ids = np.random.default_rng(0).integers(3, 400, 80).tolist()
    used, outputs = {}, {}
    for disk_dtype in ("model", "int8"):
        first = engine(disk_dtype)
        store = first.key_values.store
        before = store.transfers.disk.bytes_used
        assert first.run(first.requests([ids[:64]])).cached_tokens.tolist() == [0]
        first.close()
        used[disk_dtype] = store.transfers.disk.bytes_used - before
        again = engine(disk_dtype)
        again.key_values.store.transfers.load_speed = 0.0  # unknown, so blocks are loaded
        result = again.run(again.requests([ids]))
        assert result.cached_tokens.tolist() == [64]
        assert again.key_values.approximation == (None if disk_dtype == "model" else "int8")
        outputs[disk_dtype] = result.outputs
        again.close()
    assert used["int8"] < used["model"]
    plain = PrefillEngine.load(checkpoint, dtype="float32")
    expected = plain.run(plain.requests([ids])).outputs
    np.testing.assert_allclose(outputs["model"], expected, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(outputs["int8"], outputs["model"])
    assert cosines(outputs["int8"], expected)[0] > 0.99


def with_outliers(folder: Path, to: Path, factor: float) -> Path:
    """Copy a Llama whose first two columns of each key are `factor` times as large: the same function.

    Q is divided by what K is multiplied with. The rotation turns column 0 with the first of the second half.
    """
    copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            halves = weight.unflatten(0, (-1, 2, 4))  # heads, halves and columns: heads are 8 wide
            halves[:, :, 0] *= factor if "k_proj" in name else 1 / factor
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def through_disk(folder: Path, kept: Path):
    """Return the outputs of texts behind prefixes that were saved in 8 bits, and those of whole texts."""
    checkpoint = replace(read_checkpoint(folder), pooling=Pooling(("lasttoken",)))
    options = KeyValueOptions(2**24, folder=kept, disk_dtype="int8")
    random = np.random.default_rng(0)
    prefixes = [random.integers(3, 400, 64).tolist() for _ in range(8)]
    longer = [prefix + random.integers(3, 400, 9).tolist() for prefix in prefixes]
    first = PrefillEngine.load(checkpoint, dtype="float32", key_values=options)
    first.run(first.requests(prefixes))
    first.close()
    again = PrefillEngine.load(checkpoint, dtype="float32", key_values=options)
    again.key_values.store.transfers.load_speed = 0.0  # unknown, so blocks are loaded
    found = again.run(again.requests(longer))
    assert found.cached_tokens.tolist() == [64] * 8
    expected = again.run(again.requests(longer, reuse=False)).outputs
    again.close()
    return found.outputs, expected


def test_large_columns_of_keys_do_not_cost_the_others_their_precision(tiny_llama, tmp_path):
    """As in Qwen2, whose keys have a few columns that are hundreds of times as large as the others."""
    found, expected = through_disk(with_outliers(tiny_llama, tmp_path / "model", 2.0**10), tmp_path / "kv")
    _, unchanged = through_disk(tiny_llama, tmp_path / "unchanged")
    np.testing.assert_allclose(unchanged, expected, rtol=1e-4, atol=1e-4)
    assert cosines(found, expected).min() > 0.999


def test_a_large_bias_does_not_cost_keys_what_differs_from_token_to_token(tmp_path):
    """Also as in Qwen2. Keys are stored before their rotation, so the bias is the same for all tokens."""
    folder = write_llama(tmp_path / "model", attention_bias=True)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("k_proj.bias"):
            weight[::3] = 50 * torch.randn(len(weight[::3]), generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found, expected = through_disk(folder, tmp_path / "kv")
    assert cosines(found, expected).min() > 0.99
