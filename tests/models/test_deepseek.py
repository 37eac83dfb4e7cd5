"""The products of latent attention that hits skip and misses compute."""

import pytest
import torch
from families import DECODERS, LATENT, QUERY_LATENT

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.models import load_model
from attncache_core.models.linear import PackedLinear

HEADS, RANK, QUERY_RANK = 4, LATENT["kv_lora_rank"], QUERY_LATENT["q_lora_rank"]
ROTARY, PLAIN, VALUE = (LATENT[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
WIDTH = ROTARY + PLAIN


@pytest.fixture(params=["deepseek-v2", "deepseek-v3-query-latent-interleaved-yarn"])
def checkpoint(request, tmp_path):
    return read_checkpoint(DECODERS[request.param].written(tmp_path))


@pytest.fixture
def products(monkeypatch):
    """A list of (tokens, rows of the weight), one entry for each product."""
    noted = []

    def multiplied(self, x, residual=None):
        noted.append((len(x), self.outputs))
        return multiply(self, x, residual)

    multiply = PackedLinear.__call__
    monkeypatch.setattr(PackedLinear, "__call__", multiplied)
    return noted


def query_rows(checkpoint, heads):
    """Return the weight rows of each product for the shared key and the queries of `heads` heads."""
    if checkpoint.config["q_lora_rank"] is None:
        return [ROTARY + heads * WIDTH]
    return [ROTARY + QUERY_RANK, heads * WIDTH]


@pytest.mark.parametrize("reused", range(HEADS + 1))
def test_a_hit_skips_the_weight_rows_of_reused_heads(checkpoint, products, reused):
    layers = load_model(checkpoint, torch.float32, reused_heads=[reused] * 3).layers
    products.clear()
    projection = layers[1].project(torch.randn(5, 32), torch.arange(5))
    computed = HEADS - reused
    assert projection.value.shape == (5, HEADS, VALUE)
    assert projection.query.shape == projection.key.shape == (5, computed, WIDTH)
    queries = query_rows(checkpoint, computed) if computed else []
    values = HEADS * VALUE + computed * PLAIN
    assert sorted(products) == sorted((5, rows) for rows in [RANK, values, *queries])


@pytest.mark.parametrize("reused", range(1, HEADS + 1))
def test_misses_compute_latents_and_reused_heads_but_no_values(checkpoint, products, reused):
    layers = load_model(checkpoint, torch.float32, reused_heads=[reused] * 3).layers
    products.clear()
    query, key = layers[1].project_reused(torch.randn(2, 32), torch.arange(2))
    assert query.shape == key.shape == (2, reused, WIDTH)
    rows = [RANK, reused * PLAIN, *query_rows(checkpoint, reused)]
    assert sorted(products) == sorted((2, count) for count in rows)
