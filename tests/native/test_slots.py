"""Keys and values in slots: rows behind given tokens are the rows of the whole sequence, to the last bit."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_stacks import FORMS, PLACES, REUSED, Form, made_ids, made_stack

from attncache_core.native.products import MatrixKind, has_pairs
from attncache_core.native.stack import KeyValueSlots, StackRows

LAYERS = len(REUSED)
FORMS_OF_DECODERS = {
    "decoder": FORMS["decoder"],
    "plain": Form(after=0),
    "window": Form(norms_first=True, rotated=True, before=6, after=0),
}


@pytest.fixture(scope="module", params=FORMS_OF_DECODERS)
def form(request):
    return FORMS_OF_DECODERS[request.param]


@pytest.fixture(scope="module", params=MatrixKind)
def stack(kernel, form, request):
    if request.param is MatrixKind.PAIRS and not has_pairs(kernel.library):
        pytest.skip("this level does not multiply pairs of bfloat16")
    return made_stack(kernel.library, form, request.param, reused=(0,) * LAYERS)


class Blocks:
    """Blocks of slots for the tokens of one sequence."""

    def __init__(self, stack, tokens, size):
        self.size, self.slot = size, stack.slot_bytes
        self.bytes = [np.zeros((LAYERS, size, stack.slot_bytes), np.uint8) for _ in range(-(-tokens // size))]

    def addresses(self, tokens):
        """The address of each block that holds some of the first `tokens` tokens."""
        return [block.ctypes.data for block in self.bytes[: -(-tokens // self.size)]]

    def slots(self, first, end):
        return [
            self.bytes[at // self.size].ctypes.data + at % self.size * self.slot for at in range(first, end)
        ]


def run(stack, sequences, blocks, known, threads, *, keep=(), ready=None, written=None):
    """Run sequences behind their first `known` tokens. Return their rows."""
    lengths = [len(ids) - own for ids, own in zip(sequences, known, strict=True)]
    ids = np.concatenate([ids[own:] for ids, own in zip(sequences, known, strict=True)])
    positions = np.concatenate([np.arange(own, len(ids)) for ids, own in zip(sequences, known, strict=True)])
    trees = np.arange(len(sequences) + 1)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    rows = StackRows(offsets, positions, trees, np.array(known), ids, ids % PLACES)
    given_blocks = [own.addresses(count) for own, count in zip(blocks, known, strict=True)]
    kept = [
        slot if number in keep else 0
        for number, (own, count, ids) in enumerate(zip(blocks, known, sequences, strict=True))
        for slot in own.slots(count, len(ids))
    ]
    size = blocks[0].size
    slots = KeyValueSlots(
        size,
        size * stack.slot_bytes,
        np.array([address for own in given_blocks for address in own], dtype=np.uint64),
        np.concatenate(([0], np.cumsum([len(own) for own in given_blocks]))),
        np.array(kept, dtype=np.uint64) if keep else None,
        ready,
        written,
    )
    found, counts = stack.run(None, rows, range(LAYERS), threads=threads, slots=slots)
    return list(found.split(lengths)), counts


# The sequences and the tokens of each one that are given: columns, rows and blocks of the stack.
cases = st.lists(st.tuples(st.integers(1, 90), st.floats(0, 1)), min_size=1, max_size=5)


@settings(max_examples=8, deadline=None)
@given(cases=cases, size=st.sampled_from([1, 3, 16]), threads=st.integers(1, 4))
@example([(20, 0.5)], 16, 4)
@example([(300, 0.1)], 16, 2)
@example([(60, 0.5)] * 20, 16, 2)
def test_rows_behind_given_tokens_are_those_of_the_whole_sequence(stack, cases, size, threads):
    sequences = [made_ids(length, seed) for seed, (length, _) in enumerate(cases)]
    known = [min(int(share * length), length - 1) for length, share in cases]
    blocks = [Blocks(stack, length, size) for length, _ in cases]
    none = [0] * len(cases)
    plain, counts = run(stack, sequences, blocks, none, threads)
    written = np.zeros(LAYERS, np.int32)
    whole, _ = run(stack, sequences, blocks, none, threads, keep=range(len(cases)), written=written)
    assert all(torch.equal(one, other) for one, other in zip(plain, whole, strict=True))
    assert (written == sum(map(len, sequences))).all()
    found, fewer = run(stack, sequences, blocks, known, threads)
    for number, (rows, all_rows) in enumerate(zip(found, whole, strict=True)):
        assert torch.equal(rows, all_rows[known[number] :]), number
    tokens, computed = sum(map(len, sequences)), sum(map(len, sequences)) - sum(known)
    assert fewer.multiplications * tokens == counts.multiplications * computed
    assert fewer.map_rows * tokens == counts.map_rows * computed


def test_only_chosen_sequences_are_kept_and_what_is_kept_can_be_extended(stack):
    sequences = [made_ids(40, 1), made_ids(50, 2)]
    blocks = [Blocks(stack, len(ids), 16) for ids in sequences]
    run(stack, [ids[:30] for ids in sequences], blocks, [0, 0], 2, keep=[1])
    assert not any(block.any() for block in blocks[0].bytes)
    run(stack, sequences[1:], blocks[1:], [30], 2, keep=[0])
    again = Blocks(stack, 50, 16)
    run(stack, sequences[1:], [again], [0], 2, keep=[0])
    assert all((one == other).all() for one, other in zip(blocks[1].bytes, again.bytes, strict=True))


def test_stack_waits_for_a_layer_whose_slots_are_not_filled_yet(stack):
    sequences, ready = [made_ids(40, 1)], np.zeros(1, np.int32)
    filled = Blocks(stack, 40, 16)
    whole, _ = run(stack, sequences, [filled], [0], 1, keep=[0])
    empty, order = Blocks(stack, 40, 16), []

    def fill():
        for layer in range(LAYERS):
            time.sleep(0.03)
            for block, source in zip(empty.bytes, filled.bytes, strict=True):
                block[layer] = source[layer]
            order.append("filled")
            ready[0] = layer + 1

    loader = threading.Thread(target=fill)
    loader.start()
    found, _ = run(stack, sequences, [empty], [35], 2, ready=ready)
    order.append("run")
    loader.join()
    assert order == ["filled"] * LAYERS + ["run"]
    assert torch.equal(found[0], whole[0][35:])


def test_layers_that_differ_or_have_reused_heads_have_no_slots(kernel):
    assert made_stack(kernel.library, FORMS["decoder"]).slot_bytes is None


def test_a_root_behind_tokens_that_are_not_given_is_refused(kernel):
    stack = made_stack(kernel.library, FORMS["decoder"], reused=(0,) * LAYERS)
    ids, trees = made_ids(4, 0), np.arange(2)
    rows = StackRows(np.array([0, 4]), np.arange(3, 7), trees, np.array([3]), ids, ids % PLACES)
    with pytest.raises(AssertionError):
        stack.run(None, rows, range(LAYERS))
