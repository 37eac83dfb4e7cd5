"""Substituted maps, each head's damage, and mask and θ for a budget, against computations of their own."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel

from attncache_core.attention_maps.calibration import (
    choose_policy,
    collect_maps,
    head_damage,
    probed,
    substituted_outputs,
    token_passes,
    traced_forward,
)
from attncache_core.tokens import pack

LAYERS, HEADS = 3, 4  # of the tiny model
# float32 through three layers, another kernel for the same product.
TOLERANCE = 1e-5


def sequences(lengths: list[int], seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[2, *random.integers(5, 40, length - 2).tolist(), 3] for length in lengths]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 80))
def test_passes_take_every_index_once_sorted_by_length_within_the_limit(lengths, tokens):
    passes = list(token_passes(lengths, tokens))
    flat = [index for run in passes for index in run]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[index] for index in flat] == sorted(lengths)
    assert all(passes)
    for run in passes:
        assert len(run) == 1 or sum(lengths[index] for index in run) <= tokens


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 80))
def test_pass_is_cut_only_where_the_next_one_does_not_fit(lengths, tokens):
    passes = list(token_passes(lengths, tokens))
    for run, following in pairwise(passes):
        assert sum(lengths[index] for index in run) + lengths[following[0]] > tokens


def test_trace_gives_the_engines_outputs_and_every_layers_maps(tiny_engine):
    asked = sequences([4, 7, 4, 9], seed=1)
    batch = pack(asked)
    seen = []
    hidden, outputs = traced_forward(
        tiny_engine.model, batch, lambda layer, group, maps: seen.append((layer, group, maps))
    )
    np.testing.assert_allclose(
        batch.in_callers_order(outputs), tiny_engine.run(asked, [False] * 4).outputs, atol=TOLERANCE
    )
    assert len(hidden) == LAYERS
    assert [(layer, group.length) for layer, group, _ in seen] == [
        (layer, length) for layer in range(LAYERS) for length in (4, 7, 9)
    ]
    for _, group, maps in seen:
        assert maps.shape == (group.count, HEADS, group.length, group.length)
        np.testing.assert_allclose(maps.sum(dim=-1), 1, atol=TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_substituting_a_probes_own_maps_changes_nothing(tiny_engine, data):
    lengths = data.draw(st.lists(st.integers(3, 12), min_size=1, max_size=6))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(LAYERS, HEADS)
    batch = pack(sequences(lengths, seed=2))
    probes = probed(tiny_engine.model, batch, collect_maps(tiny_engine.model, batch))
    changed = substituted_outputs(tiny_engine.model, probes, mask)
    np.testing.assert_allclose(changed, probes.outputs, atol=TOLERANCE)


def test_substituting_another_sentences_maps_changes_the_output_only_if_the_mask_holds_a_head(tiny_engine):
    probes, donors = pack(sequences([6, 6, 8], seed=3)), pack(sequences([6, 6, 8], seed=4))
    measured = probed(tiny_engine.model, probes, collect_maps(tiny_engine.model, donors))
    nothing = np.zeros((LAYERS, HEADS), dtype=bool)
    np.testing.assert_allclose(
        substituted_outputs(tiny_engine.model, measured, nothing), measured.outputs, atol=TOLERANCE
    )
    for layer in range(LAYERS):
        for head in range(HEADS):
            alone = nothing.copy()
            alone[layer, head] = True
            changed = substituted_outputs(tiny_engine.model, measured, alone)
            assert (np.abs(changed - measured.outputs).max(axis=1) > 10 * TOLERANCE).all()
            shortened = substituted_outputs(tiny_engine.model, measured, alone, first_layer=layer)
            np.testing.assert_allclose(shortened, changed, atol=TOLERANCE)


def plain_outputs(checkpoint, ids: list[int], replaced: tuple[int, int, torch.Tensor] | None = None):
    """Mean-pooled output of Hugging Face's eager model, one head's map replaced; and its maps."""
    model = AutoModel.from_pretrained(checkpoint.folder, attn_implementation="eager").eval()
    if replaced:
        layer, head, map_ = replaced
        attend = model.encoder.layer[layer].attention.self
        size = attend.attention_head_size

        def swap(_module, arguments, keywords, output):
            hidden = arguments[0] if arguments else keywords["hidden_states"]
            columns = slice(head * size, (head + 1) * size)
            context = output[0].clone()
            context[0, :, columns] = map_ @ attend.value(hidden)[0, :, columns]
            return (context, *output[1:])

        attend.register_forward_hook(swap, with_kwargs=True)
    with torch.inference_mode():
        output = model(torch.tensor([ids]), output_attentions=True)
    return output.last_hidden_state[0].mean(dim=0).double(), output.attentions


@pytest.mark.parametrize(("layer", "head"), [(0, 2), (2, 1)])
def test_damage_of_a_head_is_that_of_hugging_faces_model_with_its_map_replaced(
    tiny_engine, tiny_checkpoint, layer, head
):
    probes, donors = sequences([5, 9, 5], seed=5), sequences([5, 9, 5], seed=6)
    losses = []
    for probe, donor in zip(probes, donors, strict=True):
        _, maps = plain_outputs(tiny_checkpoint, donor)
        full, _ = plain_outputs(tiny_checkpoint, probe)
        changed, _ = plain_outputs(tiny_checkpoint, probe, (layer, head, maps[layer][0, head]))
        losses.append(1 - torch.cosine_similarity(full, changed, dim=0).item())
    damage = head_damage(tiny_engine.model, probes, donors)
    assert damage.shape == (LAYERS, HEADS)
    assert damage[layer, head] == pytest.approx(np.mean(losses), abs=1e-6, rel=1e-3)
    assert damage[layer, head] > 1e-5


def test_donors_that_are_the_probes_themselves_do_no_damage(tiny_engine):
    probes = sequences([5, 9, 7], seed=5)
    np.testing.assert_allclose(head_damage(tiny_engine.model, probes, probes), 0, atol=1e-6)


def test_damage_does_not_depend_on_the_order_of_the_probes_and_progress_reaches_its_end(tiny_engine):
    probes, donors = sequences([5, 9, 7, 5], seed=5), sequences([5, 9, 7, 5], seed=6)
    seen = []
    damage = head_damage(tiny_engine.model, probes, donors, lambda done, total: seen.append((done, total)))
    backwards = head_damage(tiny_engine.model, probes[::-1], donors[::-1])
    np.testing.assert_allclose(damage, backwards, atol=1e-6)
    assert seen == [(done, LAYERS) for done in range(1, LAYERS + 1)]


@st.composite
def probe_tables(draw):
    """Cosines by mask size, similarities (some equal, some -inf) and a budget."""
    probes = draw(st.integers(1, 12))
    similarity = st.sampled_from([-np.inf, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.999])
    similarities = np.array(draw(st.lists(similarity, min_size=probes, max_size=probes)))
    sizes = draw(st.lists(st.integers(1, 72), min_size=1, max_size=4, unique=True))
    # Eighths: sums and means compare without rounding.
    cosine = st.integers(-8, 8).map(lambda eighths: eighths / 8)
    cosines = {
        size: np.array(draw(st.lists(cosine, min_size=probes, max_size=probes))) for size in sorted(sizes)
    }
    return cosines, similarities, draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]))


def loosest_hits(cosine: np.ndarray, similarities: np.ndarray, min_cosine: float) -> np.ndarray:
    """bool [probes], by trying every θ at which anything changes: the most hits inside the budget."""
    for threshold in np.unique(similarities[np.isfinite(similarities)]):  # rising: the loosest first
        hits = similarities >= threshold
        if cosine[hits].mean() >= min_cosine:
            return hits
    return np.zeros(len(cosine), dtype=bool)


@settings(max_examples=300, deadline=None)
@given(probe_tables())
def test_chosen_policy_is_the_best_of_every_mask_size_and_every_threshold(table):
    cosines, similarities, min_cosine = table
    best = {size: loosest_hits(cosine, similarities, min_cosine) for size, cosine in cosines.items()}
    size = max(best, key=lambda size: (best[size].mean() * size, size))
    chosen = choose_policy(cosines, similarities, min_cosine)
    assert chosen.heads == size
    assert chosen.hit_rate == best[size].mean()
    # Probes of one similarity come in together, and the budget holds on those that are in.
    assert (similarities >= chosen.threshold).tolist() == best[size].tolist()
    if best[size].any():
        assert chosen.mean_cosine == cosines[size][best[size]].mean() >= min_cosine
    else:
        assert chosen.threshold == 1.0
        assert np.isnan(chosen.mean_cosine)


@settings(max_examples=200, deadline=None)
@given(probe_tables(), st.sampled_from([0.0, 0.85, 0.95, 0.96, 0.999, 1.0]))
def test_given_threshold_stays_and_takes_the_largest_mask_inside_the_budget(table, threshold):
    cosines, similarities, min_cosine = table
    hits = similarities >= threshold
    inside = [size for size, cosine in cosines.items() if not hits.any() or cosine[hits].mean() >= min_cosine]
    chosen = choose_policy(cosines, similarities, min_cosine, threshold)
    assert chosen.threshold == threshold
    assert chosen.hit_rate == hits.mean()
    assert chosen.heads == (max(inside) if inside else min(cosines))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 0.9990234375, width=32), st.floats(-1, 1)), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_budget_is_never_broken_on_the_probes(pairs, min_cosine):
    similarities, cosine = (np.array(column) for column in zip(*pairs, strict=True))
    chosen = choose_policy({7: cosine}, similarities, min_cosine)
    hits = similarities >= chosen.threshold
    # Two ways to add up one mean.
    assert not hits.any() or cosine[hits].mean() >= min_cosine - 1e-12


def test_threshold_lies_half_way_to_the_first_probe_left_out():
    similarities, cosine = np.array([0.9, 0.99, 0.97]), np.array([0.0, 1.0, 0.98])
    assert choose_policy({5: cosine}, similarities, 0.985).threshold == pytest.approx((0.97 + 0.9) / 2)
    assert choose_policy({5: cosine}, similarities, 0.5).threshold == 0.9


def test_refused_probe_of_similarity_one_does_not_hit():
    similarities, cosine = np.array([1.0, 0.5]), np.array([0.2, 0.3])
    assert choose_policy({5: cosine}, similarities, 0.985).hit_rate == 0
