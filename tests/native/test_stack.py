"""The compiled stack: a row's numbers depend only on its sequence, and it computes only what it must."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_formulas import library, run_script
from made_stacks import (
    BATCHES,
    FORMS,
    HEADS,
    HIDDEN,
    INNER,
    PLACES,
    REUSED,
    WIDTH,
    Form,
    all_batches,
    given_to,
    made_ids,
    made_stack,
    reused_records,
    run,
)

from attncache_core import native
from attncache_core.native.pooling import pool_states
from attncache_core.native.stack import StackRows

LAYERS = len(REUSED)

lengths_of_sequences = st.lists(
    st.one_of(st.integers(1, 12), st.integers(13, 60), st.integers(61, 300)), min_size=1, max_size=6
)
thread_counts = st.integers(1, 4)


@pytest.fixture(scope="module", params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.fixture(scope="module")
def stack(kernel, form, kind):
    return made_stack(kernel.library, form, kind)


@pytest.fixture(scope="module")
def refitted_stacks(kernel, form, kind):
    """Stacks that differ in their refitted weights: without, beside their own, instead of their own."""
    return [made_stack(kernel.library, form, kind, refitted=where) for where in (None, "beside", "instead")]


def sequences_of(lengths):
    return [made_ids(length, seed) for seed, length in enumerate(lengths)]


def assert_alone(stack, found, sequences, records=()):
    """Assert that each sequence of a batch has the numbers that it has alone on one thread."""
    for number, (rows, ids) in enumerate(zip(found, sequences, strict=True)):
        alone, _ = run(stack, [ids], 1, records[number : number + 1])
        assert torch.equal(rows, alone[0]), f"sequence {number} of {len(ids)} tokens"


@settings(max_examples=5)
@given(lengths=lengths_of_sequences, threads=thread_counts, hits=st.integers(0, 6))
@example(BATCHES["columns"], 4, 0)
@example(BATCHES["columns"], 2, 1)
@example(BATCHES["rows"], 2, 0)
@example(BATCHES["rows"], 4, 1)
@example(BATCHES["blocks"], 2, 33)
@example(BATCHES["even blocks"], 2, 3)
def test_sequence_of_a_batch_is_the_sequence_alone_to_the_last_bit(stack, lengths, threads, hits):
    sequences = sequences_of(lengths)
    records = given_to(lengths[:hits])
    found, _ = run(stack, sequences, threads, records)
    assert all(rows.isfinite().all() for rows in found)
    assert_alone(stack, found, sequences, records)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_layers_in_two_runs_are_the_layers_in_one(stack, lengths):
    sequences = sequences_of(lengths)
    for threads in (1, 4):
        whole, counts = run(stack, sequences, threads)
        first, counts_of_first = run(stack, sequences, threads, layers=range(1))
        rest = range(1, LAYERS)
        second, counts_of_rest = run(stack, sequences, threads, layers=rest, hidden=torch.cat(first))
        assert all(torch.equal(one, other) for one, other in zip(whole, second, strict=True)), threads
        assert counts.multiplications == counts_of_first.multiplications + counts_of_rest.multiplications
        assert counts.map_rows == counts_of_first.map_rows + counts_of_rest.map_rows


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_vectors_are_those_of_the_last_layers_rows(stack, lengths):
    ids = np.concatenate(sequences_of(lengths))
    offsets, skipped = np.concatenate(([0], np.cumsum(lengths))), np.minimum(3, np.array(lengths) - 1)
    rows = StackRows(offsets, ids=ids, types=ids % PLACES, skipped=skipped)
    for threads, hits in ((1, 1), (2, 0), (4, 1)):
        records = given_to(lengths[:hits])
        states = torch.cat(run(stack, sequences_of(lengths), threads, records)[0])
        vectors, finite, _ = stack.vectors(rows, threads, reused_records(records))
        assert finite.all()
        np.testing.assert_array_equal(vectors, pool_states(states, offsets, ("mean", "max"), skipped))


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_maps_of_a_record_change_their_sequence_alone(kernel, form, lengths):
    stack, sequences = made_stack(kernel.library, form), sequences_of(lengths)
    hits = len(lengths) - 1
    records = given_to(lengths[:hits])
    before, _ = run(stack, sequences, 4, records)
    changed = [record.clone() for record in records]
    changed[0].zero_()
    after, _ = run(stack, sequences, 4, changed)
    same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [False] + [True] * hits
    none, _ = run(stack, sequences, 4)
    same = [torch.equal(one, other) for one, other in zip(before, none, strict=True)]
    # The map of a single token is 1, in a record too.
    assert same == [length == 1 for length in lengths[:hits]] + [True]


def test_reused_maps_are_those_of_their_head_and_layer(kernel):
    """Maps that move every token to the next position move the contexts of the reused heads alike."""
    reused = (4, 4)
    stack = made_stack(kernel.library, FORMS["norms-last"], reused=reused)
    ids = [made_ids(9, 0)]
    expected = {}
    for shift in range(3):
        record = torch.eye(9).roll(shift, 1).expand(8, 9, 9).half().contiguous()
        expected[shift], _ = run(stack, ids, 1, [record], reused, range(2))
    assert not torch.equal(expected[0][0], expected[1][0])
    # Each head of each layer is read: changing one map changes the output.
    record = torch.eye(9).expand(8, 9, 9).half().contiguous()
    for number in range(8):
        changed = record.clone()
        changed[number] = changed[number].roll(1, 1)
        found, _ = run(stack, ids, 1, [changed], reused, range(2))
        assert not torch.equal(found[0], expected[0][0]), number


@settings(max_examples=5)
@given(lengths=lengths_of_sequences, threads=thread_counts, hits=st.integers(0, 6), data=st.data())
@example(BATCHES["columns"], 4, 2, None)
@example(BATCHES["columns"], 2, 3, None)
@example(BATCHES["rows"], 2, 2, None)
@example(BATCHES["blocks"], 2, 33, None)
@example(BATCHES["even blocks"], 4, 3, None)
def test_refitted_weights_are_those_of_the_first_hits_alone(
    form, refitted_stacks, lengths, threads, hits, data
):
    plain, beside, instead = refitted_stacks
    sequences = sequences_of(lengths)
    records = given_to(lengths[:hits])
    refitted = data.draw(st.integers(0, len(records))) if data else len(records) - 1
    found, counts = run(beside, sequences, threads, records, refitted=refitted)
    assert_alone(instead, found[:refitted], sequences[:refitted], records[:refitted])
    assert_alone(plain, found[refitted:], sequences[refitted:], records[refitted:])
    assert counts.multiplications == expected_counts(form, lengths, len(records), REUSED)[0]


# Counts.


def products_of_a_row(form):
    """Return the multiplications of one row: V and what follows attention; Q and K of one head."""
    values = HEADS // 2 if form.shared_keys else HEADS
    forward = (3 if form.gated else 2) * HIDDEN * INNER
    return HIDDEN * values * WIDTH + HEADS * WIDTH * HIDDEN + forward


def key_heads(form, count):
    return (count + 1) // 2 if form.shared_keys else count


def expected_counts(form, lengths, hits, reused):
    """Return the multiplications with weights and the rows of maps, from the shapes alone."""
    tokens, missed = sum(lengths), sum(lengths[hits:])
    multiplications = tokens * products_of_a_row(form) * len(reused)
    map_rows = 0
    for count in reused:
        for rows, heads in ((tokens, HEADS - count), (missed, count)):
            multiplications += rows * (heads + key_heads(form, heads)) * WIDTH * HIDDEN
            map_rows += rows * heads
    return multiplications, map_rows


@settings(max_examples=4)
@given(lengths=lengths_of_sequences, threads=thread_counts, hits=st.integers(0, 6))
@example(BATCHES["columns"], 4, 0)
@example(BATCHES["columns"], 4, 2)
@example(BATCHES["rows"], 4, 1)
@example(BATCHES["blocks"], 4, 40)
def test_counts_are_those_of_the_shapes(kernel, form, lengths, threads, hits):
    for reused in (REUSED, (HEADS,) * 3, (0, 0, 0)):
        stack = made_stack(kernel.library, form, reused=reused)
        records = given_to(lengths[:hits], total=sum(reused)) if sum(reused) else []
        _, counts = run(stack, sequences_of(lengths), threads, records, reused)
        found = counts.multiplications, counts.map_rows
        assert found == expected_counts(form, lengths, len(records), reused)
        if len(records) == len(lengths) and reused == (HEADS,) * 3:
            # Hits with all heads reused have no maps, and no products for Q and K.
            assert found == (sum(lengths) * 3 * products_of_a_row(form), 0)
        assert counts.attention_seconds > 0


# Threads and processes.


def test_many_threads_may_run_the_stack_at_once(kernel):
    stacks = [made_stack(kernel.library, form) for form in (FORMS["norms-last"], FORMS["decoder"])]
    expected = [all_batches(stack, 1) for stack in stacks]
    start = Barrier(8)

    def repeatedly(number):
        start.wait()
        stack, rows = stacks[number % 2], expected[number % 2]
        return all(torch.equal(all_batches(stack, 1 + number % 4), rows) for _ in range(6))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(repeatedly, range(8)))


def test_a_stack_that_is_dropped_while_helpers_leave_is_freed_safely(kernel):
    for number in range(40):
        stack = made_stack(kernel.library, Form(), seed=number)
        sequences = sequences_of(BATCHES["columns"])
        found, _ = run(stack, sequences, 4)
        del stack
        assert all(rows.isfinite().all() for rows in found)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are stopped and placed as on Linux")
def test_process_survives_forks_and_helpers_that_lose_their_processor():
    # Threads do not depend on the processor's level, so one level is enough.
    kernel = native.kernel()
    if kernel is None:
        pytest.skip("no kernel was built for this processor")
    script = Path(__file__).with_name("made_stacks.py")
    what = ("forks", "sleeping helpers", "one processor")
    assert run_script(script, kernel.level, str(library(kernel.level)), *what) == (0, "")
