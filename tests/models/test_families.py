"""Every family on packed tokens equals Hugging Face's model, with and without reused maps."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np
import pytest
import torch
from core_models import (
    COMPUTING,
    SEAL,
    CountedLayer,
    attention_by,
    layers_output,
    needs_bfloat16,
    random_sequences,
)
from core_reference import rounded
from families import CASES, FULL, HEADS, SIZES, Family
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_models import pooled_by

from attncache_core.build.recording import smallest_form
from attncache_core.calibration.substitution import collect_maps
from attncache_core.checkpoints.checkpoint import DroppedLayers
from attncache_core.engine.continued import run_continued
from attncache_core.engine.forward import hits_first
from attncache_core.engine.layers import run_layers
from attncache_core.engine.request import PrefillRequest
from attncache_core.heads.pooling import Pooler
from attncache_core.models import LayerHeads, load, load_model, with_heads
from attncache_core.models.rotary import Rotary
from attncache_core.native.stack import KeyValueSlots
from attncache_core.reuse.execution.reused_maps import HitRecords
from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.opening import block_layout
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.reuse.kv.transfer import Transfers
from attncache_core.reuse.plan import no_reuse
from attncache_core.reuse.storage.layout import RecordKind, RecordLayout, segment_path
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.segment_file import SegmentWriter
from attncache_core.text import prefix_tree
from attncache_core.text.prefix_tree import PrefixTree
from attncache_core.text.token_batch import TokenBatch, pack, pack_shared

# float32 sums in another order, in layers with large weights and intermediate values of magnitude 10.
FLOAT32 = 1e-4
# Maps in 16 bits have relative errors up to 2^-11, which three layers of large weights amplify to 1e-2.
SIXTEEN_BITS = 2e-2

LAYERS = SIZES["num_hidden_layers"]
ORDERS = [(2, 0, 3, 1), (3, 2, 1, 0), (1, 3, 0, 2)]
# Numbers of reused heads per layer. With two query heads per key head, the first two heads of ORDERS[0]
# belong to different groups, and the first two heads of ORDERS[1] are a whole group.
# The masks hold layers of which all, some and no heads are reused.
MASKS = [(1, 2, 3), (4, 0, 3)]

NOTHING = DroppedLayers()
DROPPED = [
    DroppedLayers(attention=frozenset({1})),
    DroppedLayers(attention=frozenset({0}), blocks=frozenset({2})),
    DroppedLayers(attention=frozenset({2}), blocks=frozenset({0})),
]

any_lengths = st.lists(st.one_of(st.integers(1, 24), st.sampled_from([31, 32, 80])), min_size=1, max_size=4)


class Unpooled(Pooler):
    """Gives the states of all tokens."""

    def __call__(self, hidden, batch):  # noqa: ARG002
        return hidden


@dataclass
class LoadedFamily(Family):
    """A family with the models loaded from its checkpoint."""

    loaded: dict = field(default_factory=dict)
    known: dict = field(default_factory=dict)  # hidden states of the reference, which every executor needs

    def hidden(self, ids):
        """Return the reference's last hidden states of a sequence, [L, hidden]."""
        if tuple(ids) not in self.known:
            self.known[tuple(ids)] = self.reference.hidden(ids)
        return self.known[tuple(ids)]

    def hidden_with(self, donor, reused, ids):
        """Return the reference's hidden states with the donor's maps of the reused heads, as in a record."""
        key = (tuple(donor), reused, tuple(ids))
        if key not in self.known:
            maps = rounded(self.reference.maps(donor))
            heads = [(layer, head) for layer, count in enumerate(reused) for head in ORDERS[layer][:count]]
            self.known[key] = self.reference.hidden_with_maps(ids, {at: maps[at] for at in heads})
        return self.known[key]

    def model(self, reused=None, orders=None, dtype=torch.float32, dropped=NOTHING):
        """Load the packed model without pooling: its outputs are the last hidden states of all tokens."""
        key = (reused, tuple(map(tuple, orders or ())), dtype, dropped)
        if key not in self.loaded:
            checkpoint = replace(self.checkpoint, dropped=dropped)
            with mock.patch.object(load, "Pooler", Unpooled):
                self.loaded[key] = load_model(checkpoint, dtype, head_order=orders, reused_heads=reused)
        return self.loaded[key]


def family_of(request, tmp_path_factory):
    return LoadedFamily(CASES[request.param], tmp_path_factory.mktemp(request.param))


family = pytest.fixture(scope="module", params=FULL)(family_of)
any_family = pytest.fixture(scope="module", params=CASES)(family_of)


@pytest.fixture(params=COMPUTING)
def computing(request):
    with attention_by(request.param):
        yield


@torch.inference_mode()
def last_hidden(model, sequences, plan=None):
    """Return the last hidden states of each sequence, in the given order; `plan` is in packed order."""
    batch = pack(sequences)
    plan = plan or no_reuse(len(sequences))
    batch, hidden, plan = hits_first(batch, model.embed(batch), plan)
    hidden = layers_output(model, batch, hidden, plan)
    rows = model.outputs(hidden, batch)[: batch.offsets[-1]]
    parts = torch.split(rows, batch.lengths.tolist())
    return [parts[index] for index in batch.order.argsort()]


def donated(full, reused, sequences, donors, folder):
    """Record the maps of the donors, and return a plan that serves each sequence with its donor's maps.

    donors: for each sequence the token ids of its donor, or None for a miss.
    """
    segments, records = {}, np.full(len(sequences), -1)
    layout = RecordLayout(reused, torch.float16, smallest_form(full))
    for length in {len(donor) for donor in donors if donor}:
        recorded = [index for index, donor in enumerate(donors) if donor and len(donor) == length]
        path = segment_path(folder, length)
        with SegmentWriter(path, length, len(recorded), layout, SEAL) as writer:
            for record, index in enumerate(recorded):
                maps = collect_maps(full, pack([donors[index]]))
                stored = [group[0, :held].half() for (group,), held in zip(maps, reused, strict=True)]
                writer.append(stored, donors[index], RecordKind.STORED)
                records[index] = record
        segments[length] = Segment(path, length, layout, SEAL)
    nothing = no_reuse(len(sequences))
    records = records[pack(sequences).order]
    return replace(nothing, records=records, segments=segments)


def skip_what_kernel_computes(model, computing):
    """Skip "stack" for a model that has none, because its layers run as in "kernel"."""
    if computing == "stack" and model.stack is None:
        pytest.skip("this model has no compiled stack")


def assert_near(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("computing", COMPUTING)
@settings(max_examples=2)
@given(lengths=any_lengths)
@example([80, 1, 17, 3, 17, 32])
def test_hidden_states_are_those_of_hugging_face_one_sequence_at_a_time(any_family, computing, lengths):
    model = any_family.model()
    assert (model.stack is not None) == any_family.case.compiled
    skip_what_kernel_computes(model, computing)
    sequences = random_sequences(lengths, seed=len(lengths))
    with attention_by(computing):
        found = last_hidden(model, sequences)
    assert_near(found, map(any_family.hidden, sequences), FLOAT32)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_nothing_depends_on_torchs_default_dtype(any_family, default, computing):
    """transformers changes the default dtype of the whole process while another thread loads a model."""
    loaded = any_family.model()
    skip_what_kernel_computes(loaded, computing)
    sequences = random_sequences([5, 80, 17])
    with attention_by(computing):
        expected = last_hidden(loaded, sequences)
        any_family.loaded.clear()
        torch.set_default_dtype(default)
        try:
            found = last_hidden(any_family.model(), sequences)
        finally:
            torch.set_default_dtype(torch.float32)
    assert_near(found, expected, 0)


@needs_bfloat16
def test_sixteen_bit_activations_keep_the_direction_of_most_hidden_states(family):
    sequences = random_sequences([5, 17, 90, 40])
    expected = torch.cat([family.hidden(ids) for ids in sequences])
    found = torch.cat(last_hidden(family.model(dtype=torch.bfloat16), sequences))
    # Rounding occasionally routes a token to another expert than in float32.
    assert torch.cosine_similarity(found.float(), expected, dim=1).median() >= 0.999


@pytest.mark.parametrize("computing", COMPUTING)
@settings(max_examples=3)
@given(
    sequences=st.lists(st.lists(st.integers(5, 6), min_size=1, max_size=20), min_size=2, max_size=8),
    max_rows=st.sampled_from([1, 6, 256]),
)
@example(sequences=[[5] * 30, [5] * 29 + [6] * 9, [5] * 29 + [6, 5], [6] * 3], max_rows=6)
def test_sequences_of_a_causal_model_that_share_prefixes_are_hugging_faces(
    family, computing, sequences, max_rows
):
    model = family.model()
    if not all(layer.attention_mask.is_causal for layer in model.layers):
        pytest.skip("tokens depend on later tokens")
    # Every common prefix is shared, and attention is computed in blocks of any size.
    limits = {"_MIN_SAVING": 10**9, "_BLOCK_ROWS": max_rows}
    with torch.inference_mode(), attention_by(computing), mock.patch.multiple(prefix_tree, **limits):
        batch = pack_shared(sequences)
        hidden = layers_output(model, batch, model.embed(batch))
        batch, rows = batch.apart(model.outputs(hidden, batch))
    parts = torch.split(rows[: batch.offsets[-1]], batch.lengths.tolist())
    found = [parts[index] for index in batch.order.argsort()]
    assert_near(found, map(family.hidden, sequences), FLOAT32)


@pytest.mark.parametrize("reused", MASKS)
def test_model_is_the_same_with_its_heads_in_any_order_and_any_of_them_reusable(family, reused):
    sequences = random_sequences([5, 30, 5, 17])
    found = last_hidden(family.model(reused, ORDERS), sequences)
    assert_near(found, last_hidden(family.model(), sequences), FLOAT32)


@pytest.mark.parametrize("reused", MASKS)
def test_heads_of_a_loaded_model_are_reused_as_if_it_was_loaded_with_them(family, tmp_path, reused):
    sequences = random_sequences([5, 30, 5, 17])
    natural = [range(4)] * 3
    plain = family.model()
    try:
        again = with_heads(plain, family.checkpoint, list(map(LayerHeads, ORDERS, reused)))
    except NotImplementedError:
        assert "deepseek_v" in family.checkpoint.config["model_type"]
        return
    # Scores that a layer computes itself depend on the order of the heads, which then stays.
    orders = ORDERS if plain.layers[0].score_terms is None else natural
    donors = [sequences[2], None, sequences[0], None]
    served = donated(family.model(orders=orders), reused, sequences, donors, tmp_path)
    for plan in (None, served):
        found = last_hidden(again, sequences, plan)
        assert_near(found, last_hidden(family.model(reused, orders), sequences, plan), FLOAT32)


@pytest.mark.parametrize("dropped", DROPPED, ids=str)
def test_a_model_without_some_layers_is_hugging_faces_with_them_bypassed(family, dropped):
    sequences = random_sequences([9, 1, 30])
    found = last_hidden(family.model(dropped=dropped), sequences)
    expected = [family.reference.hidden_without(ids, dropped) for ids in sequences]
    assert_near(found, expected, FLOAT32)
    assert all(
        abs(one - family.hidden(ids)).max() > 100 * FLOAT32
        for one, ids in zip(expected, sequences, strict=True)
    )


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("reused", MASKS)
def test_a_hit_has_its_donors_maps_in_the_masks_heads_and_its_own_in_the_others(family, tmp_path, reused):
    sequences = random_sequences([9, 6, 9, 14, 12], seed=1)
    donors = random_sequences([9, 6, 9, 14, 12], seed=2)
    donors[2] = None
    donors[4] = sequences[4]  # a sequence that hits itself has the outputs of the full model
    served = donated(family.model(orders=ORDERS), reused, sequences, donors, tmp_path)
    found = last_hidden(family.model(reused, ORDERS), sequences, served)
    for hidden, ids, donor in zip(found, sequences, donors, strict=True):
        expected = family.hidden_with(donor, reused, ids) if donor else family.hidden(ids)
        torch.testing.assert_close(hidden, expected, atol=SIXTEEN_BITS, rtol=0)
        away = abs(expected - family.hidden(ids)).max()
        # The maps of another sequence change the output visibly.
        assert away > 10 * SIXTEEN_BITS if donor not in (None, ids) else away <= SIXTEEN_BITS


@pytest.fixture
def calls(monkeypatch):
    """A list of (name, shape of the input) of the modules and rotations that run."""
    noted = []

    def note(module, arguments, _):
        if arguments and isinstance(arguments[0], torch.Tensor):
            noted.append((type(module).__name__, tuple(arguments[0].shape)))

    def turned(self, x, positions):
        noted.append(("Rotary", tuple(x.shape)))
        return turn(self, x, positions)

    turn = Rotary.__call__
    monkeypatch.setattr(Rotary, "__call__", turned)
    hook = torch.nn.modules.module.register_module_forward_hook(note)
    yield noted
    hook.remove()


def transformed_heads(calls):
    """Return the shapes (tokens, heads, d) of all inputs that were rotated, or normalised per head."""
    return [shape for name, shape in calls if name == "Rotary" or ("Norm" in name and len(shape) == 3)]


def experts_called(calls):
    return [(name, shape) for name, shape in calls if re.search("(Experts|Router|Block|Moe|MoE)$", name)]


@pytest.mark.parametrize("reused", MASKS)
def test_hits_compute_no_q_k_rotation_norm_or_softmax_of_reused_heads_but_run_all_experts(
    family, calls, tmp_path, reused
):
    sequences = random_sequences([7, 12, 7])
    tokens = sum(map(len, sequences))
    full = family.model(orders=ORDERS)
    served = donated(full, reused, sequences, sequences, tmp_path)
    calls.clear()
    last_hidden(full, sequences)
    experts = experts_called(calls)
    assert bool(experts) == family.case.experts
    calls.clear()
    spies = spied_run(family.model(reused, ORDERS), sequences, served)
    assert experts_called(calls) == experts
    for spy, count in zip(spies, reused, strict=True):
        assert (spy.values, spy.computed) == ([(tokens, HEADS)], [(tokens, HEADS - count)])
        assert spy.reused == []
        assert spy.attended == ([(tokens, HEADS - count)] if count < HEADS else [])
    # K has fewer heads than Q if query heads share keys.
    assert max((heads for _, heads, _ in transformed_heads(calls)), default=0) <= HEADS - min(reused)


@pytest.mark.parametrize("reused", [*MASKS, (HEADS,) * LAYERS])
def test_in_a_mixed_batch_only_misses_have_q_and_k_of_the_reused_heads(family, calls, tmp_path, reused):
    sequences = random_sequences([7, 12, 7])
    served = donated(family.model(orders=ORDERS), reused, sequences, [*sequences[:2], None], tmp_path)
    tokens, missed = 26, 7
    calls.clear()
    spies = spied_run(family.model(reused, ORDERS), sequences, served)
    for spy, count in zip(spies, reused, strict=True):
        assert (spy.values, spy.computed) == ([(tokens, HEADS)], [(tokens, HEADS - count)])
        assert spy.reused == ([(missed, count)] if count else [])
        assert sum(rows * heads for rows, heads in spy.attended) == tokens * (HEADS - count) + missed * count
    if reused == (HEADS,) * LAYERS:
        assert {rows for rows, *_ in transformed_heads(calls)} <= {missed}


def spied_run(model, sequences, served):
    spies = [CountedLayer(layer) for layer in model.layers]
    with mock.patch.object(model, "layers", spies), attention_by("kernel"):
        last_hidden(model, sequences, served)
    return spies


class Slots:
    """Blocks of four slots for one tree of each sequence of a batch."""

    TOKENS = 4

    def __init__(self, model, lengths):
        layer, x = model.layers[0], torch.zeros(1, model.hidden_size, dtype=model.dtype)
        _, slots = layer.projections.query_and_slots(x, torch.zeros(1, dtype=torch.int64))
        self.bytes = slots.shape[1] * slots.element_size()
        size = (len(model.layers), self.TOKENS, self.bytes)
        self.blocks = [[np.zeros(size, np.uint8) for _ in range(length)] for length in lengths]
        self.written = np.zeros(len(model.layers), np.int32)

    def plan(self, known, lengths, *, keep, ready=None):
        cached = [block[: -(-count // self.TOKENS)] for block, count in zip(self.blocks, known, strict=True)]
        kept = [
            block[at // self.TOKENS].ctypes.data + at % self.TOKENS * self.bytes
            for block, first, end in zip(self.blocks, known, lengths, strict=True)
            for at in range(first, end)
        ]
        return KeyValueSlots(
            self.TOKENS,
            self.TOKENS * self.bytes,
            np.array([block.ctypes.data for blocks in cached for block in blocks], dtype=np.uint64),
            np.concatenate(([0], np.cumsum([len(blocks) for blocks in cached]))),
            np.array(kept, dtype=np.uint64) if keep else None,
            np.arange(len(kept)) if keep else None,
            ready=ready,
            written=self.written if keep else None,
        )


def rows_behind(known, sequences):
    """Return a batch of the tokens behind the first `known` tokens of each sequence, a tree for each one."""
    rest = [ids[count:] for ids, count in zip(sequences, known, strict=True)]
    offsets, count = np.concatenate(([0], np.cumsum([len(ids) for ids in rest]))), len(rest)
    tree = PrefixTree(np.full(count, -1), np.array(known), offsets, np.arange(count))
    ids = torch.tensor([token for part in rest for token in part])
    return TokenBatch(ids, np.diff(offsets), np.arange(count), tree=tree)


@pytest.mark.parametrize("computing", COMPUTING)
@settings(max_examples=2)
@given(cases=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=4))
@example([(30, 0.7), (17, 0.0), (80, 0.95), (5, 0.8)])
@torch.inference_mode()
def test_hidden_states_behind_kept_keys_and_values_are_those_of_whole_sequences(family, computing, cases):
    model = family.model()
    if not all(layer.attention_mask.is_causal for layer in model.layers):
        pytest.skip("only a causal model can continue a prefix")
    sequences = random_sequences([length for length, _ in cases], seed=len(cases))
    lengths, none = [length for length, _ in cases], [0] * len(cases)
    known = [min(int(share * length), length - 1) for length, share in cases]
    slots = Slots(model, lengths)
    with attention_by(computing):
        expected = last_hidden(model, sequences)
        for before, keep in ((none, True), (known, False)):
            batch = rows_behind(before, sequences)
            plan = slots.plan(before, lengths, keep=keep)
            hidden, _ = run_layers(model, batch, None, HitRecords([]), slots=plan)
            # The outputs of a family without its pooling are the last hidden states, with the last norm.
            found = model.outputs(hidden, batch).split(batch.lengths.tolist())
            behind = [rows[count:] for rows, count in zip(expected, before, strict=True)]
            assert_near(found, behind, FLOAT32)
    assert (slots.written == sum(lengths)).all()


@pytest.mark.parametrize("computing", COMPUTING)
@torch.inference_mode()
def test_stored_keys_and_values_give_hugging_faces_pooled_vectors(any_family, computing, tmp_path):
    model = any_family.model()
    if not all(layer.attention_mask.is_causal for layer in model.layers):
        pytest.skip("only a causal model can continue a prefix")
    if any_family.case in map(CASES.get, FULL):
        skip_what_kernel_computes(model, computing)
    elif computing != "stack":
        pytest.skip("with one model of each kind of layer, it is tested in every way to compute")
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    # With these seeds, the scores of the last chosen expert and the next one differ by 8e-5 or more. In a
    # tie, rounding decides which expert a token gets.
    prefix = random_sequences([37], seed=36)[0]
    first = [prefix, *random_sequences([16, 5, 80], seed=36)]
    longer = [ids + added for ids, added in zip(first, random_sequences([3, 20, 1, 9], seed=37), strict=True)]
    branches = [prefix[:32] + added for added in random_sequences([1, 30], seed=38)]
    requests = [
        PrefillRequest(ids, False, None, PrefixKey.of(bytes(32), ids, len(ids)))
        for ids in (*longer, *branches, *first)
    ]
    hidden = [any_family.hidden(request.ids) for request in requests]
    pooler = Pooler(modes, prompt_tokens=4)
    expected = [pooler(rows, pack([request.ids])) for rows, request in zip(hidden, requests, strict=True)]
    with attention_by(computing):
        model = pooled_by(model, *modes)
        layout = block_layout(model)
        for opened in range(2):  # the second time, blocks come from disk
            disk = DiskTier(tmp_path / computing, layout.part_bytes, 2**24)
            store = KeyValueStore(layout, 2**24, transfers=Transfers(disk, 1000))
            for batch in (slice(None),) * 2 if opened else (slice(6, None), slice(6), *(slice(None),) * 2):
                part = requests[batch]
                result = run_continued(model, store, part, [4] * len(part))
                assert_near(list(map(torch.from_numpy, result.outputs[:, None])), expected[batch], FLOAT32)
            assert result.report.tokens == 0
            assert bool(store.transfers.counts.loaded_blocks) == bool(opened)
            store.close()


@torch.inference_mode()
def test_plain_executor_waits_for_slots_that_are_not_filled_yet(family):
    model, (ids,) = family.model(), random_sequences([12])
    if not all(layer.attention_mask.is_causal for layer in model.layers):
        pytest.skip("only a causal model can continue a prefix")
    slots, ready = Slots(model, [12]), np.zeros(1, np.int32)
    loader = threading.Timer(0.05, ready.fill, [len(model.layers)])
    with attention_by("kernel"):
        run_layers(
            model, rows_behind([0], [ids]), None, HitRecords([]), slots=slots.plan([0], [12], keep=True)
        )
        plan = slots.plan([9], [12], keep=False, ready=ready)
        loader.start()
        found, _ = run_layers(model, rows_behind([9], [ids]), None, HitRecords([]), slots=plan)
        assert ready[0] == len(model.layers)
        batch = rows_behind([9], [ids])
        assert_near([model.outputs(found, batch)], [last_hidden(model, [ids])[0][9:]], FLOAT32)
