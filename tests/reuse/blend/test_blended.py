"""Blended passes: their answers, which tokens they compute, and by what they choose them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from blends import (
    OPENING,
    full_log_probabilities,
    joined,
    key_values,
    keys_and_values,
    loaded,
    noted_layers,
    own_full_pass,
    prompt,
    random_chunks,
    run_chunks,
    run_prompt,
    run_share,
)
from core_decoders import write_llama
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_models import pooled_by, store_of

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine import blended
from attncache_core.engine.continued import run_continued
from attncache_core.engine.request import PrefillRequest
from attncache_core.models import load_model
from attncache_core.reuse.blend.chunks import Recomputation
from attncache_core.text.prompts import SequencePlan, Target
from benchmarks.papers.blending import RandomTokens

LAYERS = 6  # behind the check layer's step of two layers, there is a step of three layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module", params=["stack", "plain"])
def model(folder, request):
    return loaded(read_checkpoint(folder).adapted(label_logits=True, labels=("a", "b")), request.param)


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("ratio", "separator", "heading", "first_tokens"),
    [
        (0.1, [], [], 0),
        (0.4, [], [], 0),
        (0.7, [], [], 0),
        (0.3, [5, 6, 7], [8], 0),
        (0.3, [5, 6, 7], [8], 2),
    ],
)
def test_tokens_that_deviate_most_from_a_full_pass_are_picked(
    model, folder, ratio, separator, heading, first_tokens
):
    found = prompt((20, 37, 9, 30), 7, separator=separator, heading=heading)
    full = keys_and_values(folder, found.ids, 1)
    deviations = np.full(len(found.ids), np.nan)
    for first, end in found.spans[1:]:
        alone = keys_and_values(folder, [*OPENING, *found.ids[first:end]], 1)[len(OPENING) :]
        distances = ((full[first:end] - alone) ** 2).sum(axis=1)
        deviations[first + first_tokens : end] = distances[first_tokens:]
    with noted_layers() as noted:
        result = run_prompt(model, store_of(model), found, ratio, first_tokens=first_tokens)
    np.testing.assert_allclose(result.blends[0].deviations, deviations, rtol=1e-3, atol=1e-4)
    free = np.flatnonzero(~np.isnan(deviations))
    count = Recomputation(ratio).counts(len(free), LAYERS)[1]
    best = free[np.argsort(-deviations[free])[:count]]
    forced = {*range(found.spans[0][1], len(found.ids))} - {*free.tolist()}
    checked = next(run for run in noted if run.layer == 1 and not run.only_slots)
    assert checked.rows == sorted(forced | {*best.tolist()})


def test_later_steps_pick_those_whose_keys_and_values_moved_most(model, monkeypatch):
    """Gradual filtering: what goes on deviated at least as much as what is left behind."""
    chunks, query = random_chunks((20, 37, 9, 30), 7)
    noted_deviations, deviations = [], blended.deviations

    def noting(*arguments):
        noted_deviations.append(deviations(*arguments))
        return noted_deviations[-1]

    monkeypatch.setattr(blended, "deviations", noting)

    # Fewer tokens go on in the check layer, behind it, behind the next one, and behind a step of two.
    class LayerByLayer(Recomputation):
        def counts(self, tokens, layers):
            shares = (1.0, 0.5, 0.4, 0.3, 0.3, 0.2)
            assert layers == len(shares)
            return [round(share * tokens) for share in shares]

    with noted_layers() as noted:
        run_chunks(model, store_of(model), chunks, query, LayerByLayer(0.4))
    rows = [np.array(run.rows[: len(run.rows) - len(query)]) for run in noted if not run.only_slots]
    compared = [rows[0], rows[1], rows[2], rows[4]]
    assert len(noted_deviations) == len(compared)
    # Behind the check layer, the same keys and values are compared with those that were given.
    of_check = noted_deviations[0][np.isin(compared[0], compared[1])]
    np.testing.assert_allclose(noted_deviations[1], of_check, rtol=1e-3, atol=1e-4)
    for before, after, found in zip(compared, [*rows[1:4], rows[5]], noted_deviations, strict=True):
        goes_on = np.isin(before, after)
        assert found[goes_on].min() >= found[~goes_on].max()


@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_layers_that_compute_the_same_tokens_run_together_and_give_the_same_numbers(
    model, monkeypatch, ratio
):
    chunks, query = random_chunks((20, 37, 9, 30), 7)
    plain, runs, run_layers = [], [], blended.run_layers

    def noting(*arguments, slots):
        if not slots.only:
            runs.append([*arguments[4]])
        return run_layers(*arguments, slots=slots)

    monkeypatch.setattr(blended, "run_layers", noting)
    for most in (4, 1):
        monkeypatch.setattr(blended, "LAYERS_A_STEP", most)
        plain.append(run_share(model, store_of(model), chunks, query, ratio).outputs)
    together = [[0], [1, 2], [3, 4, 5]] if ratio == 0.4 else [[0, 1, 2, 3], [4, 5]]
    assert runs == [*together, *([layer] for layer in range(LAYERS))]
    assert np.array_equal(*plain)


def test_nothing_deviates_in_the_first_chunk(model):
    chunks, query = random_chunks((20, 37, 9), 7)
    with noted_layers() as noted:
        report = run_share(model, store_of(model), chunks, query, 1.0).blends[0]
    assert report.exact_tokens == len(OPENING) + 20
    assert report.chunks[0].recomputed == 0
    assert min(row for run in noted for row in run.rows) == report.exact_tokens
    report = run_share(model, store_of(model), chunks, query, 0.5).blends[0]
    is_compared = ~np.isnan(report.deviations)
    end = report.exact_tokens + 37 + 9
    assert not is_compared[: report.exact_tokens].any()
    assert is_compared[report.exact_tokens : end].all()
    assert not is_compared[end:].any()


def test_nothing_deviates_in_layer_0_and_everything_behind_the_first_chunk_deviates_later(model):
    """So the first layer can check nothing."""
    chunks, query = random_chunks((20, 37, 9), 7)
    compared = []
    for check_layer in range(1, LAYERS):
        found = run_share(model, store_of(model), chunks, query, 0.5, check_layer=check_layer)
        compared.append(np.nanmin(found.blends[0].deviations))
    assert min(compared) > 1e-3
    in_layer_0 = slots_of_layer_0(model, chunks, query)
    assert all(np.allclose(alone, within, rtol=0, atol=1e-5) for alone, within in in_layer_0)


@torch.inference_mode()
def slots_of_layer_0(model, chunks, query):
    """The slots of each chunk by itself, and in the whole sequence, float32 [tokens, n]."""
    store = store_of(model)
    reuse = key_values(store)
    ids, spans = joined(chunks, query)
    run_share(model, store, chunks, query, 0.0)
    whole = reuse.whole(ids, b"other")
    run_continued(model, store, [PrefillRequest(ids, False, prefix_key=whole)], [0])

    def slots(prefix_key):
        places = [block.place for block in store.memory.known(prefix_key).blocks]
        of_layer = store.memory.pool.layer(0)[places]
        return of_layer.reshape(-1, store.layout.slot_bytes).view(np.float32)

    for (first, end), chunk in zip(spans[1:], chunks[1:], strict=True):
        alone = slots(reuse.whole([*OPENING, *chunk], b""))
        yield alone[len(OPENING) : len(OPENING) + len(chunk)], slots(whole)[first:end]


def test_on_average_choosing_by_deviation_errs_less_than_choosing_at_random(folder):
    """And the error falls with the share that is computed again."""
    model = pooled_by(load_model(read_checkpoint(folder), torch.float32), "lasttoken")

    def error(seed, recomputation):
        chunks, query = random_chunks((20 + seed, 25, 30 - seed), 5, seed)
        found = run_chunks(model, store_of(model), chunks, query, recomputation).outputs[0]
        expected = own_full_pass(model, store_of(model), joined(chunks, query)[0])
        return np.linalg.norm(found - expected) / np.linalg.norm(expected)

    def mean_error(recomputation):
        return np.mean([error(seed, recomputation) for seed in range(24)])

    means = {ratio: mean_error(Recomputation(ratio)) for ratio in (0, 0.15, 0.3, 0.4, 0.75, 1)}
    assert all(other < one for one, other in pairwise(means.values()))
    assert means[1] < 1e-4 < means[0]
    for ratio in (0.3, 0.4):  # at smaller ones, all answers of random weights are far off
        assert means[ratio] < mean_error(RandomTokens(ratio))


@settings(max_examples=12)
@given(
    lengths=lengths,
    query=st.integers(1, 20),
    ratio=st.floats(0, 1),
    check_layer=st.integers(1, LAYERS + 1),
    first_tokens=st.integers(0, 5),
)
@example(lengths=[9, 30, 1, 20], query=3, ratio=0.15, check_layer=1, first_tokens=2)
def test_each_layer_computes_as_many_tokens_as_planned_among_those_of_the_layer_before(
    model, lengths, query, ratio, check_layer, first_tokens
):
    chunks, last = random_chunks(lengths, query)
    ids, spans = joined(chunks, last)
    recomputation = Recomputation(ratio, check_layer, first_tokens=first_tokens)
    with noted_layers() as noted:
        report = run_chunks(model, store_of(model), chunks, last, recomputation).blends[0]
    runs = [run for run in noted if not run.only_slots]
    assert [run.layer for run in runs] == list(range(LAYERS))
    forced = {*range(spans[-1][1], len(ids))}
    for first, end in spans[1:]:
        forced |= {*range(first, min(end, first + first_tokens))}
    free = spans[-1][1] - spans[0][1] - (len(forced) - query)
    expected = [count + len(forced) for count in recomputation.counts(free, LAYERS)]
    assert [len(run.rows) for run in runs] == expected
    assert report.rows == tuple(expected)
    for run in runs:
        assert run.rows == sorted({*run.rows})
        assert forced <= {*run.rows} <= {*range(spans[0][1], len(ids))}
    assert all({*one.rows} >= {*other.rows} for one, other in pairwise(runs))
    # Besides, one layer computes keys and values only, to compare them, of the rows of the layer before.
    for run in noted:
        assert not run.only_slots or (run.layer == check_layer and run.rows == runs[run.layer - 1].rows)


def test_the_report_adds_up(model):
    chunks, query = random_chunks((20, 37, 9), 7)
    store = store_of(model)
    first = run_share(model, store, chunks, query, 0.5)
    found = run_share(model, store, chunks, query, 0.5)
    report = found.blends[0]
    rows = [chunk.recomputed for chunk in report.chunks]
    assert sum(rows) + len(query) == report.rows[1]
    assert [chunk.tokens for chunk in report.chunks] == [21, 37, 9]
    assert [chunk.cached for chunk in report.chunks] == [21, 37, 9]
    assert [chunk.cached for chunk in first.blends[0].chunks] == [0, 0, 0]
    assert report.computed_tokens == 0
    assert first.blends[0].tokens_by_state() == (0, 0, 67)
    assert report.tokens_by_state() == (67 - sum(rows), sum(rows), 0)
    assert found.cached_tokens.tolist() == [67 - sum(rows)]
    assert found.all_asked_tokens == 67 + len(query)
    assert found.report.tokens == sum(report.rows) // LAYERS
    assert first.report.tokens == found.report.tokens + first.blends[0].computed_tokens


def test_targets_have_the_log_probabilities_of_the_full_model(model, folder):
    chunks, query = random_chunks((20, 37, 9), 7)
    ids, _ = joined(chunks, query)
    targets = (Target(0, 5), Target(0, 17), Target(len(query) - 1, 300), Target(3, 5))
    plan = SequencePlan(0, targets=targets)
    found = run_chunks(model, store_of(model), chunks, query, Recomputation(1.0), plan=plan)
    expected = full_log_probabilities(folder, ids, targets)
    np.testing.assert_allclose(found.log_probabilities[0], expected, rtol=0, atol=1e-3)
    assert found.finite.all()
