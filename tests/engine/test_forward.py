"""The layers over a packed batch give the reference model's hidden states, for any mix of lengths."""

import numpy as np
import pytest
import torch
from core_models import COMPUTING, attention_by, last_hidden, layers_output, random_sequences
from core_reference import FLOAT32
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attncache_core.engine.forward import hits_first
from attncache_core.reuse.plan import ReusePlan
from attncache_core.text.token_batch import by_sequence, pack

any_lengths = st.lists(
    st.one_of(st.integers(1, 24), st.integers(1, 512), st.sampled_from([1, 31, 32, 191, 192, 512])),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("computing", COMPUTING)
@settings(max_examples=20)
@given(lengths=any_lengths)
@example([512, 1, 192, 1, 191, 512])
def test_hidden_states_equal_hugging_face_for_single_sequences(
    tiny_engine, tiny_reference, computing, lengths
):
    sequences = random_sequences(lengths, seed=len(lengths))
    with attention_by(computing):
        hidden = last_hidden(tiny_engine.model, sequences)
    for found, ids in zip(hidden, sequences, strict=True):
        torch.testing.assert_close(found, tiny_reference.hidden(ids), atol=FLOAT32, rtol=0)


def plan_of(records):
    similarities = np.linspace(0.5, 0.9, len(records), dtype=np.float32)
    reasons = np.arange(len(records)) % 3  # arbitrary values, to be moved with the sequences
    kinds = np.arange(len(records)) % 2
    return ReusePlan(np.array(records), kinds, similarities, reasons, -similarities, corrupt_records=3)


def rows_of(plan, order):
    """Return the entries of a plan for each sequence, sorted by the caller's index."""
    columns = (plan.kinds, plan.similarities, plan.reasons, plan.strangeness)
    return sorted(zip(order, *columns, strict=True))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(-1, 4)), min_size=1, max_size=10))
def test_hits_first_sorts_batch_hidden_states_and_plan_alike(rows):
    lengths, records = map(list, zip(*rows, strict=True))
    batch = pack(random_sequences(lengths))
    plan = plan_of([records[index] for index in batch.order])
    hidden = batch.ids[:, None].float()  # hidden states that identify their token
    moved, moved_hidden, moved_plan = hits_first(batch, hidden, plan)
    hits = int(moved_plan.hits.sum())
    assert moved_plan.hits.tolist() == [True] * hits + [False] * (len(rows) - hits)
    assert moved.lengths[:hits].tolist() == sorted(moved.lengths[:hits])
    assert moved.lengths[hits:].tolist() == sorted(moved.lengths[hits:])
    served = list(zip(moved.lengths[:hits].tolist(), moved_plan.records[:hits].tolist(), strict=True))
    assert served == sorted(served)  # sequences of one record are neighbours
    assert moved_hidden[:, 0].long().tolist() == moved.ids.tolist()
    assert moved_plan.records.tolist() == [records[index] for index in moved.order]
    assert rows_of(moved_plan, moved.order) == rows_of(plan, batch.order)
    assert moved_plan.corrupt_records == 3


@pytest.mark.parametrize(
    "records", [[0, 1, 0], [0, 0, 2], [-1, -1, -1], [3, -1, -1]], ids=["hits", "shared", "misses", "both"]
)
def test_batch_in_the_right_order_is_not_copied(records):
    batch = pack(random_sequences([3, 3, 5]))
    hidden = torch.randn(11, 2)
    moved, moved_hidden, _ = hits_first(batch, hidden, plan_of(records))
    assert moved is batch
    assert moved_hidden is hidden


def test_rows_of_a_group_are_a_view_of_the_packed_tensor():
    batch = pack(random_sequences([2, 4, 4]))
    hidden = torch.arange(10 * 3).view(10, 3)
    rows = by_sequence(hidden, batch.groups()[1])
    assert rows.shape == (2, 4, 3)
    assert torch.equal(rows[1], hidden[6:])
    assert rows.data_ptr() == hidden[2:].data_ptr()


def test_layers_do_not_change_their_input(tiny_engine):
    batch = pack(random_sequences([4, 9]))
    with torch.inference_mode():
        hidden = tiny_engine.model.embed(batch)
        before = hidden.clone()
        layers_output(tiny_engine.model, batch, hidden)
    assert torch.equal(hidden, before)
