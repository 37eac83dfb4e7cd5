"""Reuse masks: the heads that an operator's option or a rank selects."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.errors import InvalidInput
from attncache_core.reuse.mask import (
    ReuseMask,
    head_order,
    mildest_mask,
    natural_rank,
    parse_heads,
    require_stored_heads,
)

# Head 0 of layer 1 has the lowest rank, head 2 of layer 0 the highest.
RANK = np.array([[0.3, 0.2, 0.9], [0.1, 0.5, 0.4]])


@st.composite
def ranks(draw):
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 6)))
    values = draw(st.lists(st.floats(0, 2), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.array(values).reshape(shape)


@given(ranks(), st.data())
def test_mask_of_n_heads_has_the_n_heads_of_lowest_rank(rank, data):
    count = data.draw(st.integers(1, rank.size))
    array = mildest_mask(rank, count).as_array()
    assert array.shape == rank.shape
    assert array.sum() == mildest_mask(rank, count).total == count
    assert mildest_mask(rank, count).heads == rank.size
    if count < rank.size:
        assert rank[array].max() <= rank[~array].min()


@given(ranks())
def test_masks_are_nested_and_share_one_order(rank):
    masks = [mildest_mask(rank, count) for count in range(1, rank.size + 1)]
    for smaller, larger in pairwise(masks):
        assert (smaller.as_array() <= larger.as_array()).all()
        assert smaller.order == larger.order == head_order(rank)
        assert all(few <= many for few, many in zip(smaller.reused, larger.reused, strict=True))


@given(ranks(), st.data())
def test_order_of_a_layer_sorts_its_heads_by_rank_and_the_first_ones_are_marked(rank, data):
    reused = tuple(data.draw(st.integers(0, rank.shape[1])) for _ in rank)
    array = ReuseMask(head_order(rank), reused).as_array()
    for row, order, count, marked in zip(rank, head_order(rank), reused, array, strict=True):
        assert sorted(order) == list(range(len(row)))
        assert (np.diff(row[list(order)]) >= 0).all()
        assert set(np.flatnonzero(marked).tolist()) == set(order[:count])


@pytest.mark.parametrize(
    ("text", "reused"),
    [
        ("all", (3, 3, 3, 3)),
        ("layers:0", (3, 0, 0, 0)),
        ("layers:0-3", (3, 3, 3, 3)),
        ("layers:1-2", (0, 3, 3, 0)),
        ("layers:0,2", (3, 0, 3, 0)),
        ("layers:3,0-1", (3, 3, 0, 3)),
        ("layers:2-2", (0, 0, 3, 0)),
        ("1", (1, 0, 0, 0)),
        ("5", (3, 2, 0, 0)),
        ("12", (3, 3, 3, 3)),
    ],
)
def test_every_form_of_the_heads_option(text, reused):
    mask = parse_heads(text, natural_rank(4, 3))
    assert mask.reused == reused
    assert mask.order == ((0, 1, 2),) * 4


@given(ranks(), st.data())
def test_number_selects_the_heads_of_lowest_rank(rank, data):
    count = data.draw(st.integers(1, rank.size))
    assert parse_heads(str(count), rank) == mildest_mask(rank, count)


@pytest.mark.parametrize(
    "text",
    [
        *("", "none", "ALL", "0", "13", "-1", "1.5", "heads:1"),
        "٣",  # a digit outside ASCII
        *("layers:", "layers:²", "layers:0-①", "layers:1-", "layers:4", "layers:0-4", "layers:2-1"),
        *("layers:-1", "layers:0,,1", "layers:a", "layers: 1", "layers:0-1-2"),
    ],
)
def test_other_text_is_refused_with_the_field(text):
    with pytest.raises(InvalidInput) as refused:
        parse_heads(text, natural_rank(4, 3))
    assert refused.value.field == "heads"


@given(st.text("0123456789-, layers:", max_size=12))
def test_any_text_gives_a_mask_or_a_refusal(text):
    try:
        mask = parse_heads(text, natural_rank(4, 3))
    except InvalidInput:
        return
    assert 1 <= mask.total <= 12


def test_mask_with_heads_that_are_not_stored_is_refused():
    mask = mildest_mask(RANK, 3)  # 2 heads in layer 0, 1 head in layer 1
    assert require_stored_heads(mask, (2, 1)) is mask
    assert require_stored_heads(mask, (3, 3)) is mask
    with pytest.raises(InvalidInput, match="build the database again") as refused:
        require_stored_heads(mask, (3, 0))
    assert refused.value.field == "heads"
