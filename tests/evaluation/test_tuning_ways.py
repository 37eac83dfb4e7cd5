"""Ways are named, combined and applied to a checkpoint part by part."""

import pytest

from attncache_core import InvalidInput, Quantization
from attncache_core.evaluation.tuning.ways import WAYS, Way, parse_ways

INT8 = Way(quantization=Quantization.INT8)


def test_name_lists_the_parts_and_a_way_without_parts_is_exact():
    assert Way().name == "exact"
    way = Way("float32", Quantization.INT4, (0, 2), (1,), True)
    assert way.name == "float32 + int4 + no attention in 0,2 + no layer 1 + maps"


def test_combination_has_the_parts_of_both_in_either_order():
    other = Way(drop_attention=(3,), maps=True)
    expected = Way(quantization=Quantization.INT8, drop_attention=(3,), maps=True)
    assert INT8.with_part(other) == other.with_part(INT8) == expected


@pytest.mark.parametrize(
    ("left", "right", "combined"),
    [
        (INT8, Way(quantization=Quantization.INT4), None),
        (Way(drop_attention=(1,)), Way(drop_attention=(2,)), None),
        (Way(drop_attention=(1,)), Way(drop_blocks=(0, 1)), None),
        # A layer that is left out loses its attention once.
        (Way(drop_attention=(1, 2)), Way(drop_blocks=(1,)), Way(drop_attention=(2,), drop_blocks=(1,))),
    ],
)
def test_parts_that_exclude_each_other_are_not_combined(left, right, combined):
    assert left.with_part(right) == combined


def test_variant_of_a_checkpoint_replaces_the_variant_that_it_has(tiny_checkpoint):
    variant = Way(drop_attention=(1,), drop_blocks=(2,)).variant_of(INT8.variant_of(tiny_checkpoint))
    assert variant.variant == {"dropped_attention": [1], "dropped_blocks": [2]}
    assert Way(dtype="float32", maps=True).variant_of(variant).variant == {}


def test_names_of_ways_are_read_once_each_and_unknown_names_are_refused():
    assert parse_ways("int8, maps,int8") == ("int8", "maps")
    with pytest.raises(InvalidInput, match=r"'int3' is not a known way; the ways are .*") as refused:
        parse_ways("int8,int3")
    assert refused.value.field == "ways"
    assert set(Quantization) < set(WAYS)
