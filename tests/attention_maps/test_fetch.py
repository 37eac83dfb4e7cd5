"""Every way from records to context gives the plain products, and copies no more than it says.

Copies are counted by torch's profiler: by the names of operators, and by the memory that operators take,
since matmul clones views whose strides it does not like without a word.
"""

from math import prod

import numpy as np
import pytest
import torch
from core_models import SEAL, attention_by, random_sequences
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from attncache_core import native
from attncache_core.attention_maps import fetch
from attncache_core.attention_maps.fetch import Fetch, HitRecords, RecordGroup
from attncache_core.attention_maps.mapped import map_side_by_side
from attncache_core.attention_maps.segment_writer import SegmentWriter
from attncache_core.attention_maps.store import MapForm, RecordKind, RecordLayout, Segment

STORED, RECORDS, WIDTH = (4, 2, 3), 5, 8
LAYERS = range(len(STORED))
# Below and from the length at which views are taken where nothing is compiled.
MIDDLE, LONG = 90, 130
LENGTHS = (1, 5, 7, 8, 33, MIDDLE, LONG)
# The ways that the kernel goes, and all of them with torch's operators, as where no kernel was built.
BY_KERNEL = (Fetch.AUTO, Fetch.IN_PLACE, Fetch.MAPPED)
WAYS = [*((way, "kernel") for way in BY_KERNEL), *((way, "operators") for way in Fetch)]
# What no context is.
CANARY = -768.0
# A number is rounded to bfloat16 by at most this part of itself.
BFLOAT16 = 2**-8
# Sums of products in float32, as part of the sum of the products' sizes.
FLOAT32 = 1e-5


def random_maps(length, dtype, form=MapForm.SQUARE):
    """layer -> [records, heads, L, L]."""
    generator = torch.Generator().manual_seed(length)
    maps = [
        (3 * torch.randn(RECORDS, heads, length, length, generator=generator)).softmax(-1).to(dtype)
        for heads in STORED
    ]
    return [layer.tril() for layer in maps] if form is MapForm.PACKED else maps


@pytest.fixture(scope="module")
def segment(tmp_path_factory):
    """A function from (length, dtype, form) to a segment of random maps, made once."""
    made = {}

    def segment(length, dtype=torch.bfloat16, form=MapForm.SQUARE):
        if (length, dtype, form) not in made:
            path = tmp_path_factory.mktemp("segments") / "random.maps"
            layout = RecordLayout(STORED, dtype, form)
            with SegmentWriter(path, length, RECORDS, layout, SEAL) as writer:
                for record, ids in enumerate(random_sequences([length] * RECORDS)):
                    maps = [layer[record] for layer in random_maps(length, dtype, form)]
                    writer.append(maps, ids, RecordKind.STORED)
            made[length, dtype, form] = Segment(path, length, layout, SEAL)
        return made[length, dtype, form]

    return segment


def group_of(segment, records):
    return RecordGroup(segment, np.array(records, dtype=np.int64))


def values(tokens, heads, dtype, width=WIDTH):
    """V of the first `heads` heads, as a layer has them: a part of the projection of all."""
    whole = torch.randn(tokens, STORED[0] + 2, width, generator=torch.Generator().manual_seed(tokens))
    return whole.to(dtype)[:, :heads]


def assert_plain_products(found, groups, layer, value):
    """`found` is maps @ V of each hit, and no further off than the rounding of 16-bit numbers allows."""
    first = 0
    for segment, records in groups:
        layout = segment.layout
        maps = random_maps(segment.length, layout.dtype, layout.form)[layer].double()
        for record in records:
            tokens = slice(first, first + segment.length)
            own, v = maps[record, : value.shape[1]], value[tokens].double()
            exact = torch.einsum("hpq,qhd->phd", own, v)
            sizes = torch.einsum("hpq,qhd->phd", own, v.abs())
            # Of V's dtype are the result and, if they are converted to it, the maps.
            allowed = FLOAT32 * sizes
            if value.dtype is torch.bfloat16:
                allowed += BFLOAT16 * (exact.abs() + 1.01 * sizes)
            assert bool(((found[tokens].double() - exact).abs() <= allowed).all())
            first = tokens.stop


def fetched(groups, way, layer, value):
    """The context of hits, which has tokens of misses behind theirs and other heads beside."""
    whole = torch.full((len(value), value.shape[1] + 2, value.shape[2]), CANARY, dtype=value.dtype)
    context = whole[:, 1:-1]
    with HitRecords(groups, way) as records:
        records.apply(layer, value, context)
    hits = sum(group.tokens for group in groups)
    assert (whole[:, [0, -1]] == CANARY).all()
    assert (whole[hits:] == CANARY).all()
    return context[:hits]


@pytest.mark.parametrize(("way", "computing"), WAYS)
@settings(max_examples=25)
@given(
    hits=st.dictionaries(
        st.sampled_from(LENGTHS), st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=4), max_size=3
    ),
    misses=st.integers(0, 9),
    layer_heads=st.sampled_from([(0, 4), (0, 1), (1, 2), (1, 1), (2, 3), (2, 2)]),
    map_dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    form=st.sampled_from(MapForm),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    width=st.sampled_from([WIDTH, 32]),
)
@example(
    {7: [0, 0, 3], MIDDLE: [4, 4], LONG: [2, 0, 2]},
    5,
    (2, 3),
    torch.bfloat16,
    MapForm.SQUARE,
    torch.bfloat16,
    32,
)
@example(
    {7: [0, 0, 3], MIDDLE: [4, 4], LONG: [2, 0]},
    5,
    (2, 3),
    torch.bfloat16,
    MapForm.PACKED,
    torch.bfloat16,
    32,
)
@example({8: [1, 1, 1, 1], LONG: [3, 3]}, 0, (0, 4), torch.float16, MapForm.SQUARE, torch.float32, 8)
def test_context_of_hits_of_any_lengths_is_the_plain_products_of_their_records(
    segment, way, computing, hits, misses, layer_heads, map_dtype, form, dtype, width
):
    groups = [group_of(segment(length, map_dtype, form), records) for length, records in hits.items()]
    layer, heads = layer_heads
    value = values(sum(group.tokens for group in groups) + misses, heads, dtype, width)
    with attention_by(computing):
        found = fetched(groups, way, layer, value)
    assert_plain_products(found, groups, layer, value)


@pytest.mark.parametrize(("way", "computing"), WAYS)
def test_one_batchs_records_serve_layer_after_layer(segment, way, computing):
    groups = [group_of(segment(length), [2, 2, 0]) for length in (9, LONG)]
    tokens = sum(group.tokens for group in groups)
    with attention_by(computing), HitRecords(groups, way) as records:
        for layer in (*LAYERS, 0):
            value = values(tokens, 2, torch.float32)
            context = torch.full(value.shape, CANARY)
            records.apply(layer, value, context)
            assert_plain_products(context, groups, layer, value)


@pytest.mark.parametrize(("way", "computing"), WAYS)
def test_batch_without_hits_has_none_and_writes_nothing(way, computing):
    context = torch.full((4, 2, 8), CANARY)
    with attention_by(computing), HitRecords([], way) as records:
        records.apply(0, torch.randn(4, 2, 8), context)
        assert records.count == 0
    assert (context == CANARY).all()


def test_hits_are_counted_over_all_groups(segment):
    assert HitRecords([group_of(segment(5), [0, 0]), group_of(segment(7), [1])]).count == 3


class SpiedKernel:
    """The kernel, noting the runs that it is given."""

    def __init__(self):
        self.kernel, self.runs = native.kernel(), []

    def takes(self, tensor):
        return self.kernel.takes(tensor)

    def apply_maps(self, maps, map_dtype, runs, *arguments, **options):
        self.runs.append(np.diff(runs).tolist())
        self.kernel.apply_maps(maps, map_dtype, runs, *arguments, **options)


@pytest.fixture
def spied_kernel(monkeypatch):
    if native.kernel() is None:
        pytest.skip("no kernel was built for this processor")
    spied = SpiedKernel()
    monkeypatch.setattr(native, "kernel", lambda: spied)
    return spied


@pytest.mark.parametrize("way", Fetch)
def test_the_kernel_is_given_what_is_not_gathered_or_viewed(segment, spied_kernel, way):
    groups = [group_of(segment(5), [3]), group_of(segment(LONG), [1])]
    fetched(groups, way, 0, values(5 + LONG, 4, torch.float32))
    assert spied_kernel.runs == ([[1, 1]] if way in BY_KERNEL else [])


def test_neighbours_that_share_a_record_are_one_product_and_others_are_not(segment, spied_kernel):
    groups = [group_of(segment(5), [0, 0, 4, 0]), group_of(segment(7), [0, 2, 2, 2])]
    fetched(groups, Fetch.IN_PLACE, 0, values(48, 4, torch.float32))
    assert spied_kernel.runs == [[2, 1, 1, 1, 3]]


COPIES = (
    *("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy"),
    *("aten::index_select", "aten::index", "aten::gather"),
)


def profiled(groups, way, heads, dtype=torch.bfloat16):
    """The operators that ran while records' maps were multiplied by V, those that map them included."""
    value = values(sum(group.tokens for group in groups), heads, dtype)
    context = torch.empty_like(value)
    # What is made of V is told apart by its size from the maps of a single head.
    assert value.numel() < min(group.segment.length for group in groups) ** 2
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler,
        HitRecords(groups, way) as records,
    ):
        records.apply(0, value, context)
    return profiler.events()


def copies_of(events, numbers):
    """Names of the copying operators that were given this many numbers or more."""
    return [
        event.name
        for event in events
        if event.name in COPIES and max(map(prod, event.input_shapes)) >= numbers
    ]


def tensors_of(events, numbers):
    """How many times this many 16-bit numbers the new tensors could hold, those that hold them at all."""
    sizes = [event.self_cpu_memory_usage / (2 * numbers) for event in events]
    return [size for size in sizes if size >= 1]


@pytest.mark.parametrize(
    ("way", "computing"),
    [(Fetch.IN_PLACE, "kernel"), (Fetch.MAPPED, "kernel"), (Fetch.VIEWS, "operators")],
)
@pytest.mark.parametrize("heads", [1, 3, STORED[0]])
def test_three_ways_copy_not_one_map_and_make_no_tensor_of_its_size(segment, way, computing, heads):
    with attention_by(computing):
        events = profiled([group_of(segment(LONG), [4, 0, 2])], way, heads)
    assert copies_of(events, LONG**2) == []
    assert tensors_of(events, LONG**2) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("map_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", [Fetch.IN_PLACE, Fetch.MAPPED])
@pytest.mark.parametrize("form", MapForm)
def test_the_kernel_copies_no_maps_of_another_dtype_or_form_either(segment, way, map_dtype, dtype, form):
    with attention_by("kernel"):
        events = profiled([group_of(segment(LONG, map_dtype, form), [4, 0, 2])], way, 2, dtype)
    assert copies_of(events, LONG**2) == []
    assert tensors_of(events, LONG**2) == []


@pytest.mark.parametrize("heads", [1, 3, STORED[0]])
@pytest.mark.parametrize("length", [MIDDLE, LONG])
def test_the_gather_way_copies_maps_once_by_one_selection(segment, length, heads):
    events = profiled([group_of(segment(length), [4, 0])], Fetch.GATHER, heads)
    assert copies_of(events, length**2) == ["aten::index_select"]
    assert tensors_of(events, length**2) == [2 * heads]


@pytest.mark.parametrize(
    ("way", "conversions"), [(Fetch.GATHER, 1), (Fetch.VIEWS, 2), (Fetch.MAPPED, STORED[0])]
)
def test_a_conversion_that_is_made_is_seen_by_both_counts(segment, way, conversions):
    # Maps of another dtype than V: converted at once, for each record, or for each head.
    with attention_by("operators"):
        events = profiled([group_of(segment(LONG), [3, 1])], way, STORED[0], torch.float32)
    converted = 2 * STORED[0] // conversions * LONG**2
    assert copies_of(events, converted).count("aten::_to_copy") == conversions
    assert tensors_of(events, 2 * converted).count(1) == conversions


def test_a_clone_that_matmul_makes_by_itself_is_seen_by_the_count_of_tensors(segment):
    held = segment(LONG)
    value = values(3 * LONG, 4, torch.bfloat16).unflatten(0, (3, LONG))
    with map_side_by_side(held, np.array([4, 0, 2])) as mapped:
        maps = held.squares(mapped, 0, 4)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
            _ = maps @ value.transpose(1, 2)
    assert tensors_of(profiler.events(), LONG**2) == [3 * 4]


@pytest.mark.parametrize("way", [Fetch.AUTO, Fetch.IN_PLACE])
def test_without_a_kernel_short_maps_are_gathered_and_long_ones_are_views(segment, way):
    assert MIDDLE < fetch._VIEWS_FROM <= LONG
    with attention_by("operators"):
        short = profiled([group_of(segment(MIDDLE), [4, 0])], way, 4)
        long = profiled([group_of(segment(LONG), [4, 0])], way, 4)
    assert copies_of(short, MIDDLE**2) == ["aten::index_select"]
    assert copies_of(long, LONG**2) == []


def test_layer_maps_are_a_view_on_the_mapped_file(segment):
    held = segment(LONG)
    first, second = (held.layer_maps(2, layer, 2) for layer in (0, 1))
    assert second.data_ptr() - first.data_ptr() == STORED[0] * LONG * LONG * first.element_size()
    assert held.layer_maps(2, 1, 1).data_ptr() == second.data_ptr()
    assert held.addresses(np.array([4, 2])).tolist() == [
        held.layer_maps(record, 0, 1).data_ptr() for record in (4, 2)
    ]
