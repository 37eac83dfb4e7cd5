"""Blocks in 8 bits: the error of each number is bounded, and approximate blocks have names of their own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.heads.vectors import cosines
from attncache_core.reuse.kv.quantized import Int8Slots


@given(
    seed=st.integers(0, 1000), slot=st.sampled_from([8, 40, 64, 192]), size=st.sampled_from([0.0, 1e-3, 50.0])
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_within_half_a_step(dtype, seed, slot, size):
    generator = torch.Generator().manual_seed(seed)
    layers = [(size * torch.randn(16, slot, generator=generator)).to(dtype) for _ in range(2)]
    state = torch.randn(5, 7, generator=generator)
    parts = [memoryview(bytearray(x.view(torch.uint8).numpy().tobytes())) for x in (*layers, state)]
    quantized = Int8Slots([len(part) for part in parts], slot * dtype.itemsize, dtype)
    saved = quantized.encode(parts)
    assert tuple(map(len, saved)) == quantized.part_bytes
    found = [memoryview(bytearray(len(part))) for part in parts]
    for index, part in enumerate(saved):
        quantized.decode(index, part, found[index])
    assert found[2] == parts[2]
    row = np.gcd(slot, 64)
    for part, layer in zip(found, layers, strict=False):
        x, y = layer.float().view(-1, row), torch.frombuffer(part, dtype=dtype).float().view(-1, row)
        step = x.abs().amax(dim=1, keepdim=True) / 127
        rounding = x.abs() * (2**-7 if dtype == torch.bfloat16 else 1e-6)
        assert (abs(x - y) <= step * 0.5001 + rounding).all()


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
