"""What stands around chunks: openings, headings, separators, and an exact beginning behind the chunks."""

import numpy as np
import pytest
import torch
from blends import (
    OPENING,
    apart,
    full_log_probabilities,
    joined,
    key_values,
    noted_layers,
    prompt,
    random_chunks,
    run_prompt,
    run_share,
)
from family_reference import FamilyReference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_models import assert_nothing_is_in_use, store_of

from attncache_core.engine.blended import run_blended
from attncache_core.engine.continued import run_continued
from attncache_core.engine.request import PrefillRequest
from attncache_core.reuse.blend.chunks import Blend, Recomputation
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.text.prompts import SequencePlan, Target

LAYERS = 3
NEAR = {"rtol": 0, "atol": 1e-4}  # float32 sums in another order
LONG_OPENING = [0, *range(5, 5 + BLOCK_TOKENS)]  # longer than a block


openings = st.sampled_from([[], [0], [0, 1], LONG_OPENING])
prompts = st.builds(
    prompt,
    st.lists(st.integers(1, 35), min_size=2, max_size=4),
    st.integers(1, 10),
    openings,
    st.lists(st.integers(5, 9), max_size=3),
    st.lists(st.integers(5, 9), max_size=2),
)


@settings(max_examples=8)
@given(found=prompts)
@example(found=prompt([16, 15, 17], 1, [], [7, 8], [9]))
@example(found=prompt([16, 15, 17], 1, LONG_OPENING, [7, 8], [9]))
def test_without_recomputation_what_stands_between_chunks_sees_all_and_chunks_do_not_see_it(
    model, tiny_llama, found
):
    store = store_of(model)
    expected = apart(tiny_llama, *found)
    between = [place for place in range(found.spans[0][1], len(found.ids)) if not in_spans(found, place)]
    for _ in range(2):
        with noted_layers() as noted:
            result = run_prompt(model, store, found, 0.0)
        np.testing.assert_allclose(result.outputs[0], expected, **NEAR)
        assert [run.rows for run in noted] == [between] * LAYERS
    assert_nothing_is_in_use(store)


def in_spans(found, place):
    return any(first <= place < end for first, end in found.spans)


@settings(max_examples=8)
@given(found=prompts)
@example(found=prompt([16, 15, 17], 1, [], [7, 8], [9]))
@example(found=prompt([16, 15, 17], 1, LONG_OPENING, [7, 8], [9]))
def test_recomputing_everything_is_the_full_pass_whatever_stands_between_chunks(model, tiny_llama, found):
    result = run_prompt(model, store_of(model), found, 1.0)
    np.testing.assert_allclose(result.outputs[0], FamilyReference(tiny_llama).hidden(found.ids)[-1], **NEAR)


@given(found=prompts, ratio=st.floats(0, 1))
def test_chunks_are_stored_behind_the_opening_as_the_tokens_they_have_in_the_sequence(found, ratio):
    blend = Blend.of(key_values(None), *found, b"", Recomputation(ratio))
    stored = [np.frombuffer(chunk.prefix_key.tokens, "<i4").tolist() for chunk in blend.chunks]
    first, *others = [found.ids[start:end] for start, end in found.spans]
    assert stored[0] == found.ids[: found.spans[0][1]]
    assert stored[0][-len(first) :] == first
    assert stored[1:] == [[*found.opening, *other] for other in others]
    starts = [0, *(start for start, _ in found.spans[1:])]
    assert [(chunk.first, chunk.first + chunk.length) for chunk in blend.chunks] == [
        (start, end) for start, (_, end) in zip(starts, found.spans, strict=True)
    ]
    again = ratio * sum(map(len, others))
    assert blend.tokens == pytest.approx(
        len(found.ids) - len(stored[0]) - sum(map(len, others)) + again, abs=0.5
    )


def test_separators_and_headings_do_not_matter_for_what_is_stored_of_a_chunk(model, store):
    run_prompt(model, store, prompt((20, 37, 9), 7), 0.0)
    found = prompt((20, 37, 9), 7, separator=[5, 6, 7], heading=[8])
    report = run_prompt(model, store, found, 0.0).blends[0]
    # The first chunk belongs to the beginning, with its heading.
    assert [chunk.cached for chunk in report.chunks] == [0, 37, 9]
    assert report.computed_tokens == len(OPENING) + 1 + 20


def test_without_an_opening_a_chunk_has_one_entry_wherever_it_stands(model, store):
    found = prompt((20, 37, 9), 7, opening=[])
    run_prompt(model, store, found, 0.0)
    first, second, third = (found.ids[start:end] for start, end in found.spans)
    stored = len(store.memory)
    ids = [*third, *first, *second, *found.ids[found.spans[-1][1] :]]
    other = found._replace(ids=ids, spans=[(0, 9), (9, 29), (29, 66)])
    assert run_prompt(model, store, other, 0.0).blends[0].computed_tokens == 0
    assert len(store.memory) == stored


@pytest.mark.parametrize("more", [1, 2, BLOCK_TOKENS])
def test_a_chunk_that_extends_a_stored_chunk_computes_and_stores_its_new_tokens(model, store, more):
    (first, second), query = random_chunks((20, 30 + more), 7)
    run_share(model, store, [first, second[:30]], query, 0.0)
    for computed in (more, 0):
        report = run_share(model, store, [first, second], query, 0.0).blends[0]
        assert report.computed_tokens == computed
        assert report.chunks[1].cached == 30 + more - computed
        assert report.rows == (len(query),) * LAYERS


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("stored", [1, 15, 26], ids="{} tokens behind the chunks".format)
def test_targets_are_read_behind_an_exact_beginning_that_ends_behind_the_chunks(
    model, tiny_llama, store, stored, ratio
):
    chunks, query = random_chunks((20, 37, 9), 30)
    ids, spans = joined(chunks, query)
    plan = SequencePlan(0, targets=(Target(0, 5), Target(2, 17), Target(3, 300)))
    reuse = key_values(store)
    beginning = reuse.whole(ids[: spans[-1][1] + stored], b"")
    with torch.inference_mode():
        request = PrefillRequest(ids[: spans[-1][1] + stored], False, prefix_key=beginning)
        run_continued(model, store, [request], [0])
        blend = Blend.of(reuse, ids, spans, OPENING, b"", Recomputation(ratio))
        prefix_key = reuse.prefix_key(ids, plan, b"")
        found = run_blended(model, store, PrefillRequest(ids, False, plan, prefix_key, blend=blend))
    assert found.blends[0].exact_tokens == spans[-1][1] + stored
    assert found.blends[0].rows == (30 - stored,) * LAYERS
    expected = full_log_probabilities(tiny_llama, ids, plan.targets)
    np.testing.assert_allclose(found.log_probabilities[0], expected, rtol=0, atol=1e-3)
    np.testing.assert_allclose(found.outputs, run_share(model, store, chunks, query, 1.0).outputs, **NEAR)
