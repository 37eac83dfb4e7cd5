"""Models on another device than the CPU: all tensors of a layer are on the device, and maps are copied to it.

torch's meta device stands in for a GPU: it computes shapes only, and refuses to mix devices as a GPU does.
If a GPU is present, its results are compared to the CPU's.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from core_models import SEAL, layers_output, prefill, random_sequences
from families import CASES, FULL

from attncache_core import native
from attncache_core.calibration.substitution import collect_maps
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.models import attention, load_model, model_shape
from attncache_core.models.attention import AttentionMask, attend, attend_by_maps, attention_maps
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.plan import no_reuse
from attncache_core.reuse.storage.layout import MapForm, RecordKind, RecordLayout
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.segment_file import SegmentWriter
from attncache_core.runtime.devices import resolve_device
from attncache_core.text.token_batch import pack

LENGTHS, RECORDED = [4, 4, 9], 4
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")


@pytest.fixture(scope="module", params=FULL)
def checkpoint(request, tmp_path_factory):
    return read_checkpoint(CASES[request.param].written(tmp_path_factory.mktemp(request.param)))


def recorded(checkpoint, folder):
    """Record the maps of the first sequence in a segment."""
    model, ids = load_model(checkpoint, torch.float32), random_sequences(LENGTHS)[0]
    layout = RecordLayout((model.layers[0].heads,) * len(model.layers), torch.float16, MapForm.SQUARE)
    with SegmentWriter(folder / "a.maps", RECORDED, 1, layout, SEAL) as writer:
        maps = collect_maps(model, pack([ids]))
        writer.append([layer[0].half() for (layer,) in maps], ids, RecordKind.STORED)
    return Segment(folder / "a.maps", RECORDED, layout, SEAL)


def run(checkpoint, segment, device):
    """Return the representations of three sequences. The first is a hit; half of the heads are reused."""
    layers, heads = model_shape(checkpoint)
    half = [heads // 2] * layers
    model = load_model(checkpoint, torch.float32, reused_heads=half, device=device)
    batch = pack(random_sequences(LENGTHS))
    plan = replace(no_reuse(3), records=np.array([0, -1, -1]))
    with torch.inference_mode():
        hidden = layers_output(model, batch, model.embed(batch), replace(plan, segments={RECORDED: segment}))
        return model.outputs(hidden, batch)


def test_no_tensor_of_a_model_stays_on_the_cpu(checkpoint, tmp_path):
    device = torch.device("meta")
    segment = recorded(checkpoint, tmp_path)
    try:
        assert run(checkpoint, segment, device).device == device
    except (RuntimeError, NotImplementedError) as error:
        if "Expected inputs of BF16" in str(error) or "aten::bincount" in str(error):
            pytest.skip("the meta device lacks some products of experts, and cannot route tokens")
        raise


@pytest.mark.cuda
@needs_gpu
def test_a_gpu_computes_what_the_cpu_does(checkpoint, tmp_path):
    segment = recorded(checkpoint, tmp_path)
    on_gpu, on_cpu = (run(checkpoint, segment, torch.device(name)).cpu() for name in ("cuda", "cpu"))
    torch.testing.assert_close(on_gpu, on_cpu, atol=1e-4, rtol=0)


BOUNDS = [(None, None), (None, 0), (3, 0), (2, 5)]


def packed_attention(bounds, width, device):
    """Attend to some of the packed rows, by 16-bit numbers. Returns the context and what it should be.

    The first and last rows, which belong to other sequences, are not written.
    """
    offsets, random = np.array([10, 11, 24, 37, 90]), torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(100, 4, width, generator=random).bfloat16() for _ in range(3))
    context, expected = torch.full((2, 100, 4, width), 7.0)
    context, mask = context.to(device, torch.bfloat16), AttentionMask(width**-0.5 * 1.5, *bounds)
    attend(query.to(device), key.to(device), value.to(device), offsets, mask, context)
    maps = partial(attention_maps, attention_mask=mask)
    attend_by_maps(maps, query.float(), key.float(), value.float(), offsets, expected)
    return context.cpu().float(), expected


def one_by_one(query, key, value, ends, _ends, longest, _longest, *, scale, window_size):
    """Do what torch's operator for packed sequences does."""
    assert (longest, int(ends[-1])) == (ends.diff().max(), len(query))
    before, after = (None if bound < 0 else bound for bound in window_size)
    found, mask = torch.full_like(query, torch.nan), AttentionMask(scale, before, after)
    maps = partial(attention_maps, attention_mask=mask)
    attend_by_maps(maps, query.float(), key.float(), value.float(), ends.numpy(), found)
    return found


@pytest.mark.parametrize("bounds", BOUNDS)
def test_attention_of_packed_rows_is_told_their_ends_and_window(bounds, monkeypatch):
    monkeypatch.setattr(native, "kernel", lambda: None)
    monkeypatch.setattr(attention, "_runs_packed", lambda *_: True)
    monkeypatch.setattr(attention, "_packed_attention", lambda: one_by_one)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # which needs a GPU
    torch.testing.assert_close(*packed_attention(bounds, 32, "cpu"), atol=2e-2, rtol=0)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("width", [32, 20])  # torch packs only widths that are multiples of 8
def test_16_bit_attention_of_a_gpu_reads_the_tokens_that_the_mask_allows(bounds, width):
    torch.testing.assert_close(*packed_attention(bounds, width, "cuda"), atol=2e-2, rtol=0)


@pytest.mark.cuda
@needs_gpu
def test_an_engine_on_a_gpu_serves_a_database(tiny_checkpoint, tiny_database, tiny_corpus):
    texts = [sentence.text for sentence in tiny_corpus[:20]]
    database = AttentionDatabase.open(tiny_database)
    outputs = []
    for device in ("cuda", "cpu"):
        engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32", device=device)
        result = prefill(engine, engine.tokenize(texts))
        assert all(outcome.is_hit for outcome in result.outcomes)
        outputs.append(result.outputs)
    np.testing.assert_allclose(*outputs, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_refused_with_the_remedy(tiny_checkpoint):
    with pytest.raises(InvalidInput, match="choose cpu") as refused:
        PrefillEngine.load(tiny_checkpoint, device="cuda")
    assert refused.value.field == "device"
    assert resolve_device("cpu") == torch.device("cpu")
