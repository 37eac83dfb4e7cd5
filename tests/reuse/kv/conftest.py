"""The model of the tests of keys and values."""

import pytest
import torch

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.models import load_model


@pytest.fixture(scope="module")
def model(tiny_llama):
    """The tiny Llama in float32."""
    return load_model(read_checkpoint(tiny_llama), torch.float32)
