"""Every family on packed tokens is Hugging Face's, with and without reused maps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from core_models import COMPUTING, SEAL, attention_by, needs_bfloat16, random_sequences
from core_reference import rounded
from families import CASES, HEADS, SIZES, Case, write_family
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attncache_core import models
from attncache_core.attention_maps.recording import smallest_form
from attncache_core.attention_maps.search import no_reuse
from attncache_core.attention_maps.segment_writer import SegmentWriter
from attncache_core.attention_maps.store import RecordKind, RecordLayout, Segment, segment_path
from attncache_core.attention_maps.substitution import collect_maps
from attncache_core.checkpoint import DroppedLayers, read_checkpoint
from attncache_core.forward import forward, hits_first
from attncache_core.models import load_model
from attncache_core.models.rotary import Rotary
from attncache_core.tokens import pack, rounded_up

# float32 sums in another order, over layers whose strong weights make numbers of size 10 on the way.
FLOAT32 = 1e-4
# Maps kept in 16 bits are off by up to 2^-11 of themselves; three layers of strong weights make 1e-2 of it.
SIXTEEN_BITS = 2e-2

LAYERS = SIZES["num_hidden_layers"]
ORDERS = [(2, 0, 3, 1), (3, 2, 1, 0), (1, 3, 0, 2)]
# Of each layer; with two heads to a key, (2, 0) is a group in part, (3, 2) one as a whole.
MASKS = [(4, 4, 4), (1, 2, 3), (3, 0, 2)]

NOTHING = DroppedLayers()
DROPPED = [
    DroppedLayers(attention=frozenset({1})),
    DroppedLayers(attention=frozenset({0}), blocks=frozenset({2})),
    DroppedLayers(attention=frozenset({2}), blocks=frozenset({0})),
]

any_lengths = st.lists(st.one_of(st.integers(1, 24), st.sampled_from([31, 32, 80])), min_size=1, max_size=4)


@dataclass
class Family:
    """One case's checkpoint, and models of it."""

    case: Case
    folder: Path
    loaded: dict = field(default_factory=dict)

    @cached_property
    def checkpoint(self):
        return read_checkpoint(write_family(self.folder, self.case.made(), saved_as=self.case.saved_as))

    @cached_property
    def reference(self):
        return self.case.reference(self.checkpoint.folder)

    def model(self, reused=None, orders=None, dtype=torch.float32, dropped=NOTHING):
        """The packed model, whose outputs are all tokens' last hidden states."""
        key = (reused, tuple(map(tuple, orders or ())), dtype, dropped)
        if key not in self.loaded:
            checkpoint = replace(self.checkpoint, dropped=dropped)
            with mock.patch.object(models, "pool", lambda hidden, batch, **_: hidden):  # noqa: ARG005
                self.loaded[key] = load_model(checkpoint, dtype, head_order=orders, reused_heads=reused)
        return self.loaded[key]


@pytest.fixture(scope="module", params=CASES)
def family(request, tmp_path_factory):
    return Family(CASES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=COMPUTING)
def computing(request):
    with attention_by(request.param):
        yield


@torch.inference_mode()
def last_hidden(model, sequences, plan=None, segments=None):
    """The last hidden states of each sequence, in the order given; `plan` in packed order."""
    batch = pack(sequences).filled()
    plan = plan or no_reuse(len(sequences))
    batch, hidden, plan = hits_first(batch, model.embed(batch), plan)
    hidden, _ = forward(model, batch, hidden, plan, segments or {})
    rows = model.outputs(hidden, batch).rows[: batch.offsets[-1]]
    parts = torch.split(rows, batch.lengths.tolist())
    return [parts[place] for place in batch.order.argsort()]


def donated(full, reused, sequences, donors, folder):
    """What last_hidden needs for sequences served by the maps of a donor each (its ids; None: a miss)."""
    segments, records = {}, np.full(len(sequences), -1)
    layout = RecordLayout(reused, torch.float16, smallest_form(full))
    for length in {len(donor) for donor in donors if donor}:
        own = [place for place, donor in enumerate(donors) if donor and len(donor) == length]
        path = segment_path(folder, length)
        with SegmentWriter(path, length, len(own), layout, SEAL) as writer:
            for record, place in enumerate(own):
                maps = collect_maps(full, pack([donors[place]]))
                stored = [group[0, :held].half() for (group,), held in zip(maps, reused, strict=True)]
                writer.append(stored, donors[place], RecordKind.STORED)
                records[place] = record
        segments[length] = Segment(path, length, layout, SEAL)
    nothing = no_reuse(len(sequences))
    records = records[pack(sequences).order]
    return replace(nothing, records=records), segments


def assert_near(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("computing", COMPUTING)
@settings(max_examples=4)
@given(lengths=any_lengths)
@example([80, 1, 17, 3, 17])
def test_hidden_states_are_those_of_hugging_face_one_sequence_at_a_time(family, computing, lengths):
    sequences = random_sequences(lengths, seed=len(lengths))
    with attention_by(computing):
        found = last_hidden(family.model(), sequences)
    assert_near(found, map(family.reference.hidden, sequences), FLOAT32)


@needs_bfloat16
def test_sixteen_bit_activations_keep_the_direction_of_most_hidden_states(family):
    sequences = random_sequences([5, 17, 90, 40])
    expected = torch.cat([family.reference.hidden(ids) for ids in sequences])
    found = torch.cat(last_hidden(family.model(dtype=torch.bfloat16), sequences))
    assert found.dtype is torch.bfloat16
    # Now and then a token meets another expert than in float32.
    assert torch.cosine_similarity(found.float(), expected, dim=1).median() >= 0.999


@settings(max_examples=6)
@given(any_lengths)
def test_a_row_of_a_batch_is_the_row_alone(family, lengths):
    sequences = random_sequences(lengths, seed=sum(lengths))
    alone = [last_hidden(family.model(), [ids])[0] for ids in sequences]
    assert_near(last_hidden(family.model(), sequences), alone, FLOAT32)


@pytest.mark.parametrize("reused", MASKS)
def test_model_is_the_same_with_its_heads_in_any_order_and_any_of_them_reusable(family, reused):
    sequences = random_sequences([5, 30, 5, 17])
    found = last_hidden(family.model(reused, ORDERS), sequences)
    assert_near(found, last_hidden(family.model(), sequences), FLOAT32)


@pytest.mark.parametrize("dropped", DROPPED, ids=str)
def test_a_model_without_some_layers_is_hugging_faces_with_them_bypassed(family, dropped):
    sequences = random_sequences([9, 1, 30, 9])
    found = last_hidden(family.model(dropped=dropped), sequences)
    expected = [family.reference.hidden_without(ids, dropped) for ids in sequences]
    assert_near(found, expected, FLOAT32)
    assert all(
        abs(one - family.reference.hidden(ids)).max() > 100 * FLOAT32
        for one, ids in zip(expected, sequences, strict=True)
    )


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("reused", MASKS)
def test_a_recorded_sequence_that_hits_itself_gives_the_full_models_output(family, tmp_path, reused):
    sequences = random_sequences([7, 12, 7, 30])
    full = family.model(orders=ORDERS)
    served = donated(full, reused, sequences, sequences, tmp_path)
    found = last_hidden(family.model(reused, ORDERS), sequences, *served)
    away = (torch.cat(found) - torch.cat(last_hidden(full, sequences))).abs().amax(dim=1)
    # Rounding may send a token to another expert, and with it those that attend to it.
    assert away.quantile(0.8 if family.case.experts else 1.0) <= SIXTEEN_BITS


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("reused", MASKS)
def test_a_hit_has_its_donors_maps_in_the_masks_heads_and_its_own_in_the_others(family, tmp_path, reused):
    sequences = random_sequences([9, 6, 9, 14], seed=1)
    donors = random_sequences([9, 6, 9, 14], seed=2)
    donors[2] = None
    served = donated(family.model(orders=ORDERS), reused, sequences, donors, tmp_path)
    found = last_hidden(family.model(reused, ORDERS), sequences, *served)
    for hidden, ids, donor in zip(found, sequences, donors, strict=True):
        chosen = chosen_maps(family.reference, donor, reused) if donor else {}
        expected = family.reference.hidden_with_maps(ids, chosen)
        torch.testing.assert_close(hidden, expected, atol=SIXTEEN_BITS, rtol=0)
        # The donor is another sequence, and far enough to be seen.
        assert not donor or abs(expected - family.reference.hidden(ids)).max() > 10 * SIXTEEN_BITS


def chosen_maps(reference, donor, reused):
    """The donor's maps, as a record keeps them, of the heads that are reused."""
    maps = rounded(reference.maps(donor))
    return {
        (layer, head): maps[layer, head]
        for layer, count in enumerate(reused)
        for head in ORDERS[layer][:count]
    }


@dataclass
class Spy:
    """A layer that notes what it is asked for: the shapes of Q and K [tokens, heads] of each call."""

    layer: object
    projected: list = field(default_factory=list)
    projected_reused: list = field(default_factory=list)
    attended: list = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.layer, name)

    def project(self, x, positions):
        projection = self.layer.project(x, positions)
        self.projected.append((tuple(projection.value.shape[:2]), tuple(projection.query.shape[:2])))
        assert projection.query.shape == projection.key.shape
        return projection

    def project_reused(self, x, positions):
        query, key = self.layer.project_reused(x, positions)
        self.projected_reused.append(tuple(query.shape[:2]))
        return query, key

    def attend(self, query, key, value, offsets, heads, context):
        self.attended.append(tuple(query.shape[:2]))
        self.layer.attend(query, key, value, offsets, heads, context)


@pytest.fixture
def calls(monkeypatch):
    """What runs beside the layers' own methods: (name, shape of the input) of modules and rotations."""
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


def heads_placed(calls):
    """(tokens, heads, d) of what was rotated, or normalised head by head, call by call."""
    return [shape for name, shape in calls if name == "Rotary" or ("Norm" in name and len(shape) == 3)]


def experts_called(calls):
    return [(name, shape) for name, shape in calls if re.search("(Experts|Router|Block|Moe|MoE)$", name)]


@pytest.mark.parametrize("reused", MASKS)
def test_hits_compute_no_q_k_rotation_norm_or_softmax_of_reused_heads_but_run_all_experts(
    family, calls, tmp_path, reused
):
    sequences = random_sequences([7, 12, 7])
    tokens = rounded_up(sum(map(len, sequences)))
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
        assert spy.projected == [((tokens, HEADS), (tokens, HEADS - count))]
        assert spy.projected_reused == []
        assert spy.attended == ([(tokens, HEADS - count)] if count < HEADS else [])
    # K has fewer heads than Q where they are shared.
    assert max((heads for _, heads, _ in heads_placed(calls)), default=0) <= HEADS - min(reused)


@pytest.mark.parametrize("reused", MASKS)
def test_in_a_mixed_batch_only_misses_have_q_and_k_of_the_reused_heads(family, calls, tmp_path, reused):
    sequences = random_sequences([7, 12, 7])
    served = donated(family.model(orders=ORDERS), reused, sequences, [*sequences[:2], None], tmp_path)
    tokens = rounded_up(26)
    missed = rounded_up(tokens - 19)
    calls.clear()
    spies = spied_run(family.model(reused, ORDERS), sequences, served)
    for spy, count in zip(spies, reused, strict=True):
        assert spy.projected == [((tokens, HEADS), (tokens, HEADS - count))]
        assert spy.projected_reused == ([(missed, count)] if count else [])
        assert sum(rows * heads for rows, heads in spy.attended) == tokens * (HEADS - count) + missed * count
    if reused == (HEADS,) * LAYERS:
        assert {rows for rows, *_ in heads_placed(calls)} <= {missed}


def spied_run(model, sequences, served):
    spies = [Spy(layer) for layer in model.layers]
    with mock.patch.object(model, "layers", spies):
        last_hidden(model, sequences, *served)
    return spies
