"""The model of most tests of blending, by each executor, and a store."""

import pytest
from blends import loaded
from kv_models import assert_nothing_is_in_use, store_of

from attncache_core.checkpoints.description import read_checkpoint


@pytest.fixture(scope="module", params=["stack", "plain"])
def model(tiny_llama, request):
    """The tiny Llama of three layers, which scores labels."""
    checkpoint = read_checkpoint(tiny_llama).adapted(label_logits=True, labels=("a", "b"))
    return loaded(checkpoint, request.param)


@pytest.fixture
def store(model):
    found = store_of(model)
    yield found
    assert_nothing_is_in_use(found)
