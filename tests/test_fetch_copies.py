"""The copies between the mapped file and the matrix product, counted by torch's profiler."""

from math import prod

import pytest
import torch
from core_models import random_sequences
from torch.profiler import ProfilerActivity, profile

from attncache_core.attention_maps.fetch import VIEWS_FROM_LENGTH, RecordGroup, reused_context
from attncache_core.attention_maps.store import RecordKind, RecordLayout, Segment, SegmentWriter

LAYERS, STORED, WIDTH, RECORDS = 3, 4, 8, 5
SHORT, LONG = 40, VIEWS_FROM_LENGTH
# Gathered, and multiplied in the model's own 16 bits.
BETWEEN = 90
COPIES = (
    *("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy"),
    *("aten::index_select", "aten::index", "aten::gather"),
)


def random_maps(length, dtype=torch.bfloat16):
    """[records, layers, heads, L, L]."""
    generator = torch.Generator().manual_seed(length)
    scores = torch.randn(RECORDS, LAYERS, STORED, length, length, generator=generator)
    return (3 * scores).softmax(-1).to(dtype)


@pytest.fixture(scope="module")
def segment(tmp_path_factory):
    """A function from (length, dtype) to a segment of random maps."""

    def written(length, dtype=torch.bfloat16):
        path = tmp_path_factory.mktemp("segments") / "random.maps"
        layout = RecordLayout((STORED,) * LAYERS, dtype)
        with SegmentWriter(path, length, RECORDS, layout) as writer:
            sequences = random_sequences([length] * RECORDS)
            for ids, maps in zip(sequences, random_maps(length, dtype), strict=True):
                writer.append(list(maps), ids, RecordKind.STORED)
        return Segment(path, length, layout)

    return written


def values(length, heads, count, dtype=torch.bfloat16):
    return torch.randn(count, length, heads, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def profiled(segment, records, heads, dtype=torch.bfloat16):
    """The operators that ran while records' maps were multiplied by V."""
    value = values(segment.length, heads, len(records), dtype)
    # What is made of V is told apart from maps by its size.
    assert value.numel() < heads * segment.length**2
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
        reused_context([RecordGroup(segment, torch.tensor(records))], 1, heads, value)
    return profiler.events()


def map_sized_copies(segment, records, heads, dtype=torch.bfloat16):
    """Names of the copying operators that were given as many numbers as one sequence's maps have, or more."""
    return [
        event.name
        for event in profiled(segment, records, heads, dtype)
        if event.name in COPIES and max(map(prod, event.input_shapes)) >= heads * segment.length**2
    ]


def map_sized_tensors(segment, records, heads):
    """How many records' maps the new tensors could hold that are large enough for one's or more."""
    map_bytes = heads * segment.length**2 * 2
    sizes = [event.self_cpu_memory_usage for event in profiled(segment, records, heads)]
    return [size / map_bytes for size in sizes if size >= map_bytes]


@pytest.mark.parametrize("heads", [1, 3, STORED])
def test_the_view_way_copies_no_maps(segment, heads):
    assert map_sized_copies(segment(LONG), [4, 0, 2], heads) == []


@pytest.mark.parametrize("heads", [1, 3, STORED])
def test_the_view_way_makes_no_tensor_of_the_size_of_maps(segment, heads):
    assert map_sized_tensors(segment(LONG), [4, 0, 2], heads) == []
    assert map_sized_tensors(segment(BETWEEN), [4, 0, 2], heads) == [3]  # the gathered ones


@pytest.mark.parametrize("heads", [1, 3, STORED])
def test_the_gather_way_copies_maps_once_by_one_selection(segment, heads):
    assert map_sized_copies(segment(BETWEEN), [3, 1], heads) == ["aten::index_select"]


@pytest.mark.parametrize("heads", [1, 3, STORED])
def test_short_maps_are_selected_once_and_converted_once_for_the_product_in_float32(segment, heads):
    copies = map_sized_copies(segment(SHORT), [3, 1, 0], heads)
    assert copies == ["aten::index_select", "aten::_to_copy", "aten::copy_"]


@pytest.mark.parametrize("length", [BETWEEN, LONG])
def test_a_copy_that_is_made_is_seen_by_the_count(segment, length):
    # Maps of another dtype than V must be converted: once for the group, or once for each record.
    copies = map_sized_copies(segment(length), [3, 1], STORED, torch.float32)
    assert copies.count("aten::_to_copy") == (1 if length == BETWEEN else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [SHORT, BETWEEN, LONG])
def test_both_ways_give_the_plain_products_of_the_recorded_maps(segment, length, dtype):
    held, records, heads = segment(length, dtype), [4, 0, 4], 3
    value = values(length, heads, len(records), torch.float32)
    for layer in range(LAYERS):
        found = reused_context([RecordGroup(held, torch.tensor(records))], layer, heads, value)
        maps = random_maps(length, dtype)[records, layer, :heads].float()
        torch.testing.assert_close(found, torch.einsum("nhpq,nqhd->nhpd", maps, value), atol=1e-5, rtol=0)


def test_layer_maps_are_a_view_on_the_mapped_file(segment):
    held = segment(LONG)
    first, second = (held.layer_maps(2, layer, STORED) for layer in (0, 1))
    step = STORED * LONG * LONG * first.element_size()
    assert second.data_ptr() - first.data_ptr() == step
    assert held.layer_maps(2, 1, 2).data_ptr() == second.data_ptr()


def test_hits_of_several_lengths_side_by_side_are_each_length_by_itself(segment):
    lengths, counts, heads = (5, 7, 8), (2, 1, 3), 2
    groups = [
        RecordGroup(segment(length), torch.arange(count))
        for length, count in zip(lengths, counts, strict=True)
    ]
    value = torch.randn(sum(counts), max(lengths), heads, 8)
    together = reused_context(groups, 1, heads, value)
    first = 0
    for group, length, count in zip(groups, lengths, counts, strict=True):
        own = slice(first, first + count)
        alone = reused_context([group], 1, heads, value[own, :length])
        torch.testing.assert_close(together[own, :, :length], alone, atol=1e-6, rtol=0)
        assert not together[own, :, length:].any()
        first += count
