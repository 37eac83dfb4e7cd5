"""Keys and values in slots: rows behind given tokens are the rows of the whole sequence, to the last bit."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_stacks import ALL_LAYERS, FORMS, PLACES, REUSED, Form, made_ids, made_stack

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


@pytest.fixture(scope="module")
def stack(kernel, form, kind):
    return made_stack(kernel.library, form, kind, reused=(0,) * LAYERS)


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
    lengths = [len(ids) - count for ids, count in zip(sequences, known, strict=True)]
    ids = np.concatenate([ids[count:] for ids, count in zip(sequences, known, strict=True)])
    positions = np.concatenate(
        [np.arange(count, len(ids)) for ids, count in zip(sequences, known, strict=True)]
    )
    trees = np.arange(len(sequences) + 1)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    rows = StackRows(offsets, positions, trees, np.array(known), ids, ids % PLACES)
    given_blocks = [block.addresses(count) for block, count in zip(blocks, known, strict=True)]
    kept = [
        slot
        for number, (block, count, ids) in enumerate(zip(blocks, known, sequences, strict=True))
        for slot in (block.slots(count, len(ids)) if number in keep else ())
    ]
    kept_rows = np.flatnonzero(np.repeat([number in keep for number in range(len(known))], lengths))
    size = blocks[0].size
    slots = KeyValueSlots(
        size,
        size * stack.slot_bytes,
        np.array([address for of_sequence in given_blocks for address in of_sequence], dtype=np.uint64),
        np.concatenate(([0], np.cumsum([len(of_sequence) for of_sequence in given_blocks]))),
        np.array(kept, dtype=np.uint64) if keep else None,
        kept_rows if keep else None,
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


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 40])
def test_neighbours_behind_the_same_given_tokens_are_rows_of_their_whole_sequences(stack, threads, count):
    """They are computed as one tree, in front of which the given tokens are laid out once."""
    front = made_ids(33, 1)
    sequences = [np.concatenate([front, made_ids(3 + number % 20, number)]) for number in range(count)]
    shared = Blocks(stack, 60, 16)
    run(stack, [front], [shared], [0], threads, keep=[0])
    other = Blocks(stack, 90, 16)  # in the middle, so that not all trees become one
    sequences.insert(1, made_ids(90, 3))
    run(stack, sequences[1:2], [other], [0], threads, keep=[0])
    blocks = [other if number == 1 else shared for number in range(len(sequences))]
    found, _ = run(stack, sequences, blocks, [len(front)] * len(sequences), threads)
    for ids, rows in zip(sequences, found, strict=True):
        whole, _ = run(stack, [ids], [Blocks(stack, len(ids), 16)], [0], threads)
        assert torch.equal(rows, whole[0][len(front) :])


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


def filled(stack, sequences, size):
    """The blocks of whole sequences, and their rows."""
    blocks = [Blocks(stack, len(ids), size) for ids in sequences]
    rows, _ = run(stack, sequences, blocks, [0] * len(sequences), 1, keep=range(len(sequences)))
    return blocks, rows


def run_scattered(
    stack, sequences, blocks, chosen, threads, *, kept=None, layers=ALL_LAYERS, hidden=None, only=False
):
    """Run the tokens at positions `chosen` of each sequence. kept: addresses; None: in the blocks."""
    positions = np.concatenate(chosen)
    offsets = np.concatenate(([0], np.cumsum([len(positions) for positions in chosen])))
    ids = np.concatenate([ids[positions] for ids, positions in zip(sequences, chosen, strict=True)])
    lengths = np.array([len(ids) for ids in sequences])
    rows = StackRows(offsets, positions, np.arange(len(sequences) + 1), lengths)
    if hidden is None:
        rows = replace(rows, ids=ids, types=ids % PLACES)
    addresses = [block.addresses(len(ids)) for block, ids in zip(blocks, sequences, strict=True)]
    if kept is None:
        slots = zip(blocks, sequences, chosen, strict=True)
        kept = [cache.slots(0, len(ids))[at] for cache, ids, positions in slots for at in positions]
    size = blocks[0].size
    slots = KeyValueSlots(
        size,
        size * stack.slot_bytes,
        np.array([address for of_sequence in addresses for address in of_sequence], dtype=np.uint64),
        np.concatenate(([0], np.cumsum([len(of_sequence) for of_sequence in addresses]))),
        np.array(kept, dtype=np.uint64),
        np.arange(len(kept)),
        scattered=True,
        only=only,
    )
    found, counts = stack.run(hidden, rows, layers, threads=threads, slots=slots)
    return list(found.split([len(positions) for positions in chosen])), counts


def chosen_of(sequences, share, seed=0):
    """Rising positions of about a share of each sequence's tokens, at least one of each."""
    random = np.random.default_rng(seed)
    counts = [max(1, round(share * len(ids))) for ids in sequences]
    pairs = zip(sequences, counts, strict=True)
    return [np.sort(random.choice(len(ids), count, replace=False)) for ids, count in pairs]


# Examples: columns, rows and blocks of the stack.
@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    share=st.floats(0, 1),
    size=st.sampled_from([1, 3, 16]),
    threads=st.integers(1, 4),
)
@example(lengths=[20], share=0.5, size=16, threads=4)
@example(lengths=[90, 40], share=0.1, size=16, threads=3)
@example(lengths=[300], share=0.9, size=16, threads=2)
@example(lengths=[60] * 20, share=0.5, size=16, threads=2)
@example(lengths=[50], share=1.0, size=3, threads=1)
def test_scattered_rows_are_those_of_the_whole_sequence(stack, lengths, share, size, threads):
    sequences = [made_ids(length, seed) for seed, length in enumerate(lengths)]
    whole, all_rows = filled(stack, sequences, size)
    blocks, _ = filled(stack, sequences, size)
    chosen = chosen_of(sequences, share)
    for block, positions in zip(blocks, chosen, strict=True):
        for position in positions.tolist():  # what was there is replaced before anything reads it
            block.bytes[position // size][:, position % size] = 255
    found, counts = run_scattered(stack, sequences, blocks, chosen, threads)
    for rows, expected, positions in zip(found, all_rows, chosen, strict=True):
        assert torch.equal(rows, expected[torch.from_numpy(positions)])
    for block, expected in zip(blocks, whole, strict=True):
        assert all((one == other).all() for one, other in zip(block.bytes, expected.bytes, strict=True))
    # Of a row's maps, as of a row's products, nothing is computed but its own.
    _, of_all = run(stack, sequences, whole, [0] * len(lengths), 1)
    computed, tokens = sum(map(len, chosen)), sum(lengths)
    assert counts.map_rows * tokens == of_all.map_rows * computed
    assert counts.multiplications * tokens == of_all.multiplications * computed


def test_scattered_rows_see_what_they_are_given_up_to_their_own_position(stack, form):
    (ids,) = sequences = [made_ids(60, 1)]
    chosen = [np.array([3, 20, 21, 47])]
    reach = LAYERS * form.before if form.before else None  # of a row through all layers
    blocks, _ = filled(stack, sequences, 16)
    expected = run_scattered(stack, sequences, blocks, chosen, 2)[0][0]
    for changed in (2, 12, 30, 59):
        blocks, _ = filled(stack, sequences, 16)
        other, _ = filled(stack, [np.flip(ids).copy()], 16)
        blocks[0].bytes[changed // 16][:, changed % 16] = other[0].bytes[changed // 16][:, changed % 16]
        found = run_scattered(stack, sequences, blocks, chosen, 2)[0][0]
        for position, row, before in zip(chosen[0].tolist(), found, expected, strict=True):
            if position < changed or (reach is not None and position - changed > reach):
                assert torch.equal(row, before)
            elif position == min(row for row in chosen[0] if row > changed) and reach is None:
                assert not torch.equal(row, before)


def test_rotations_reach_all_given_tokens_also_those_behind_the_last_scattered_row(kernel, monkeypatch):
    stack, asked = made_stack(kernel.library, FORMS["decoder"], reused=(0,) * LAYERS), []
    sequences, chosen = [made_ids(40, 1), made_ids(60, 2)], [np.array([3]), np.array([2, 7])]
    blocks, all_rows = filled(stack, sequences, 16)

    def noting(tables):
        return lambda positions: asked.append(positions) or tables(positions)

    layout = stack._layout
    monkeypatch.setattr(layout, "angles", [noting(tables) for tables in layout.angles])
    found, _ = run_scattered(stack, sequences, blocks, chosen, 2)
    assert asked == [60]
    for rows, expected, positions in zip(found, all_rows, chosen, strict=True):
        assert torch.equal(rows, expected[torch.from_numpy(positions)])


@pytest.mark.parametrize(
    ("lengths", "threads", "layer"),
    [([20], 4, 0), ([30, 9], 1, 1), ([300], 2, LAYERS - 1), ([60] * 20, 2, 1)],
    ids=["few rows", "one thread", "long", "many trees"],
)
def test_only_the_slots_of_a_layer_are_kept_and_everything_else_stays(stack, lengths, threads, layer):
    sequences = [made_ids(length, seed) for seed, length in enumerate(lengths)]
    blocks, _ = filled(stack, sequences, 16)
    before = [[block.copy() for block in cache.bytes] for cache in blocks]
    chosen = chosen_of(sequences, 0.5)
    hidden = None
    if layer:
        parts, _ = run_scattered(stack, sequences, blocks, chosen, 1, layers=range(layer))
        hidden = torch.cat(parts)
    given_hidden = None if hidden is None else hidden.clone()
    slots = np.full((sum(map(len, chosen)) + 1, LAYERS * 16 * stack.slot_bytes), 7, np.uint8)
    addresses = slots.ctypes.data + np.arange(len(slots) - 1) * slots.shape[1]
    found, counts = run_scattered(
        stack,
        sequences,
        blocks,
        chosen,
        threads,
        kept=addresses.tolist(),
        layers=range(layer, layer + 1),
        hidden=hidden,
        only=True,
    )
    at = layer * 16 * stack.slot_bytes
    own_slots = slots[:-1, at : at + stack.slot_bytes]
    expected = [
        bytes_before[position // 16][layer, position % 16]
        for bytes_before, positions in zip(before, chosen, strict=True)
        for position in positions.tolist()
    ]
    assert (own_slots == np.array(expected)).all()
    slots[:-1, at : at + stack.slot_bytes] = 7
    assert (slots == 7).all()
    for cache, others in zip(blocks, before, strict=True):
        assert all((one == other).all() for one, other in zip(cache.bytes, others, strict=True))
    assert counts.map_rows == 0
    if given_hidden is not None:
        assert torch.equal(torch.cat(found), given_hidden)


def test_layers_that_differ_or_have_reused_heads_have_no_slots(kernel):
    assert made_stack(kernel.library, FORMS["decoder"]).slot_bytes is None


def test_a_root_behind_tokens_that_are_not_given_is_refused(kernel):
    stack = made_stack(kernel.library, FORMS["decoder"], reused=(0,) * LAYERS)
    ids, trees = made_ids(4, 0), np.arange(2)
    rows = StackRows(np.array([0, 4]), np.arange(3, 7), trees, np.array([3]), ids, ids % PLACES)
    with pytest.raises(AssertionError):
        stack.run(None, rows, range(LAYERS))
