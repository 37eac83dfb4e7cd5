"""Records are read in place: their products maps @ V are the plain products, and no map is copied to another.

Copies are counted with torch's profiler, by the names of operators and by the memory that operators allocate,
because matmul silently clones views with strides that it does not support.
"""

from math import prod

import numpy as np
import pytest
import torch
from core_models import READERS, SEAL, attention_by, random_sequences
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from attncache_core import native
from attncache_core.reuse.execution.reused_maps import HitRecords, RecordGroup
from attncache_core.reuse.storage.layout import MapForm, RecordKind, RecordLayout
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.segment_file import SegmentWriter

STORED, RECORDS, WIDTH = (4, 2, 3), 5, 8
MIDDLE, LONG = 90, 130
LENGTHS = (1, 5, 7, 8, 33, MIDDLE, LONG)
# A value that no context has.
CANARY = -768.0
# The relative rounding error of bfloat16.
BFLOAT16 = 2**-8
# The error of a float32 sum of products, relative to the sum of the absolute products.
FLOAT32 = 1e-5


def random_maps(length, dtype, form=MapForm.SQUARE):
    """Return random maps for each layer, [records, heads, L, L]."""
    generator = torch.Generator().manual_seed(length)
    maps = [
        (3 * torch.randn(RECORDS, heads, length, length, generator=generator)).softmax(-1).to(dtype)
        for heads in STORED
    ]
    return [layer.tril() for layer in maps] if form is MapForm.PACKED else maps


@pytest.fixture(scope="module")
def segment(tmp_path_factory):
    """A function that returns a segment of random maps for (length, dtype, form), made once."""
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


def tokens_of(groups):
    return sum(len(records) * segment.length for segment, records in groups)


def values(tokens, heads, dtype, width=WIDTH):
    """Return V of the first `heads` heads as a view on the V of all heads, as in a layer."""
    whole = torch.randn(tokens, STORED[0] + 2, width, generator=torch.Generator().manual_seed(tokens))
    return whole.to(dtype)[:, :heads]


def assert_plain_products(found, groups, layer, value):
    """Assert that `found` is maps @ V of each hit, except for rounding."""
    first = 0
    for segment, records in groups:
        layout = segment.layout
        maps = random_maps(segment.length, layout.dtype, layout.form)[layer].double()
        for record in records:
            tokens = slice(first, first + segment.length)
            weights, v = maps[record, : value.shape[1]], value[tokens].double()
            exact = torch.einsum("hpq,qhd->phd", weights, v)
            sizes = torch.einsum("hpq,qhd->phd", weights, v.abs())
            # The result is rounded to the dtype of V, and maps may be converted to it.
            allowed = FLOAT32 * sizes
            if value.dtype is torch.bfloat16:
                allowed += BFLOAT16 * (exact.abs() + 1.01 * sizes)
            assert bool(((found[tokens].double() - exact).abs() <= allowed).all())
            first = tokens.stop


def applied(groups, layer, value):
    """Return the context of hits. Assert that the rows of misses and other heads are not written."""
    whole = torch.full((len(value), value.shape[1] + 2, value.shape[2]), CANARY, dtype=value.dtype)
    context = whole[:, 1:-1]
    records = HitRecords(groups)
    records.apply(layer, value, context)
    assert records.count == sum(len(group.records) for group in groups)
    hits = tokens_of(groups)
    assert (whole[:, [0, -1]] == CANARY).all()
    assert (whole[hits:] == CANARY).all()
    return context[:hits]


@pytest.mark.parametrize("computing", READERS)
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
def test_context_of_hits_is_the_plain_product_of_their_records(
    segment, computing, hits, misses, layer_heads, map_dtype, form, dtype, width
):
    groups = [group_of(segment(length, map_dtype, form), records) for length, records in hits.items()]
    layer, heads = layer_heads
    value = values(tokens_of(groups) + misses, heads, dtype, width)
    with attention_by(computing):
        found = applied(groups, layer, value)
    assert_plain_products(found, groups, layer, value)


class SpiedKernel:
    """The kernel with a list of the runs that it was called with."""

    def __init__(self):
        self.kernel, self.runs = native.kernel(), []

    def supports(self, tensor):
        return self.kernel.supports(tensor)

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


def test_only_neighbouring_hits_of_one_record_are_one_product(segment, spied_kernel):
    groups = [group_of(segment(5), [0, 0, 4, 0]), group_of(segment(7), [0, 2, 2, 2])]
    applied(groups, 0, values(48, 4, torch.float32))
    assert spied_kernel.runs == [[2, 1, 1, 1, 3]]


COPIES = (
    *("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy"),
    *("aten::index_select", "aten::index", "aten::gather"),
)


def profiled(groups, heads, dtype=torch.bfloat16):
    """Return the operators that ran while maps of records were multiplied by V."""
    value = values(tokens_of(groups), heads, dtype)
    context = torch.empty_like(value)
    # Tensors made from V must be smaller than the maps of a single head, to tell them apart by size.
    assert value.numel() < min(group.segment.length for group in groups) ** 2
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
        HitRecords(groups).apply(0, value, context)
    return profiler.events()


def copies_of(events, numbers):
    """Return the names of the copying operators with inputs of at least this many numbers."""
    return [
        event.name
        for event in events
        if event.name in COPIES and max(map(prod, event.input_shapes)) >= numbers
    ]


def tensors_of(events, numbers):
    """Return the sizes of new tensors, in units of this many 16-bit numbers, without tensors below 1."""
    sizes = [event.self_cpu_memory_usage / (2 * numbers) for event in events]
    return [size for size in sizes if size >= 1]


@pytest.mark.parametrize("computing", READERS)
@pytest.mark.parametrize("heads", [1, 3, STORED[0]])
def test_reading_in_place_makes_no_tensor_of_the_size_of_a_map(segment, computing, heads):
    with attention_by(computing):
        events = profiled([group_of(segment(LONG), [4, 0, 2])], heads)
    assert copies_of(events, LONG**2) == []
    assert tensors_of(events, LONG**2) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("map_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", MapForm)
def test_kernel_copies_no_maps_of_another_dtype_or_form(segment, map_dtype, dtype, form):
    with attention_by("kernel"):
        events = profiled([group_of(segment(LONG, map_dtype, form), [4, 0, 2])], 2, dtype)
    assert copies_of(events, LONG**2) == []
    assert tensors_of(events, LONG**2) == []


def test_the_profile_sees_a_conversion_of_maps(segment):
    # Operators convert the maps of a record to the dtype of V.
    with attention_by("operators"):
        events = profiled([group_of(segment(LONG), [3, 1])], STORED[0], torch.float32)
    converted = STORED[0] * LONG**2
    assert copies_of(events, converted).count("aten::_to_copy") == 2
    assert tensors_of(events, 2 * converted).count(1) == 2
