"""Blending in every kind of decoder: windows, rotations, experts and latent attention."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pytest
import torch
from blends import block_diagonal, joined, own_full_pass, run_share
from core_models import needs_bfloat16, random_sequences
from families import DECODERS, Family
from family_reference import FamilyReference
from kv_models import assert_nothing_is_in_use, pooled_by, store_of

from attncache_core.heads.vectors import cosines
from attncache_core.models import load_model

FAMILIES = [
    *("llama-linear", "llama-llama3", "llama-yarn", "mistral-window-narrow-heads", "qwen2-windows-by-layer"),
    *("qwen3", "qwen3-biased-windows-yarn", "gemma", "gemma2", "gemma3", "mixtral", "mixtral-window"),
    *("qwen3-moe-sparse-steps", "deepseek-v2", "deepseek-v3-query-latent-interleaved-yarn", "deepseek"),
]
NEAR = {"rtol": 0, "atol": 1e-4}  # as in test_families.py
# The last token depends on several chunks through three layers with narrow windows.
*CHUNKS, QUERY = random_sequences([17, 30, 25, 3, 2])


class BlendedFamily(Family):
    """A family with its models by each executor."""

    @cached_property
    def model(self):
        return pooled_by(load_model(self.checkpoint, torch.float32), "lasttoken")

    @cached_property
    def plain_model(self):
        model = pooled_by(load_model(self.checkpoint, torch.float32), "lasttoken")
        model.__dict__["stack"] = None
        return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return BlendedFamily(DECODERS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["model", "plain_model"])
def model(family, request):
    return getattr(family, request.param)


def test_recomputing_everything_is_the_familys_full_pass(family, model):
    store = store_of(model)
    ids, _ = joined(CHUNKS, QUERY)
    for _ in range(2):
        found = run_share(model, store, CHUNKS, QUERY, 1.0)
        np.testing.assert_allclose(found.outputs[0], family.reference.hidden(ids)[-1].numpy(), **NEAR)
        np.testing.assert_allclose(found.outputs[0], own_full_pass(model, store, ids), **NEAR)
        assert found.finite.all()
    assert_nothing_is_in_use(store)


def test_without_recomputation_chunks_do_not_see_each_other(family, model):
    if family.case.reference is not FamilyReference:
        pytest.skip("transformers does not include this family")
    found = run_share(model, store_of(model), CHUNKS, QUERY, 0.0).outputs[0]
    expected = block_diagonal(family.checkpoint.folder, CHUNKS, QUERY)
    np.testing.assert_allclose(found, expected, **NEAR)
    full = family.reference.hidden(joined(CHUNKS, QUERY)[0])[-1].numpy()
    assert np.abs(found - full).max() > 100 * NEAR["atol"]  # so the two tests tell the passes apart


@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_the_compiled_stack_and_the_plain_executor_agree(family, ratio):
    if family.model.stack is None:
        pytest.skip("this family has no compiled stack")
    one, other = (
        run_share(model, store_of(model), CHUNKS, QUERY, ratio)
        for model in (family.model, family.plain_model)
    )
    assert one.blends[0].rows == other.blends[0].rows
    np.testing.assert_allclose(one.outputs, other.outputs, **NEAR)
    np.testing.assert_allclose(one.blends[0].deviations, other.blends[0].deviations, rtol=1e-2, atol=1e-4)


def test_first_and_later_requests_agree(model):
    store = store_of(model)
    first, *later = (run_share(model, store, CHUNKS, QUERY, 0.3).outputs for _ in range(3))
    assert all(np.array_equal(first, other) for other in later)


@needs_bfloat16
@pytest.mark.parametrize("name", ["llama-llama3", "qwen3", "gemma3"])
def test_in_16_bits_recomputing_everything_is_the_full_pass_within_rounding(name, tmp_path):
    family = BlendedFamily(DECODERS[name], tmp_path)
    model = pooled_by(load_model(family.checkpoint, torch.bfloat16), "lasttoken")
    store, (ids, _) = store_of(model), joined(CHUNKS, QUERY)
    for ratio, least in ((1.0, 0.999), (0.5, 0.0)):
        found = run_share(model, store, CHUNKS, QUERY, ratio)
        assert found.finite.all()
        assert cosines(found.outputs, own_full_pass(model, store, ids)[None])[0] > least
