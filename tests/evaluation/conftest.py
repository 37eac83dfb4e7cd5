"""What several tests evaluate with."""

import pytest

from attncache_core import engine
from attncache_core.attention_maps.builder import BuildOptions, build_database
from attncache_core.attention_maps.cost import CostModel


@pytest.fixture(scope="module")
def reuse_pays():
    """Whether reuse pays depends on the machine; here a hit saves 10 µs a token and a search is free."""
    costs = CostModel(lengths=(1, 99), search=(0.0, 0.0), fetch=(0.0, 0.0), compute=(10.0, 990.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "cost_model", lambda *_: costs)
        yield


@pytest.fixture(scope="session")
def tiny_prototypes_database(tiny_engine, tiny_corpus, tmp_path_factory):
    """The folder of a database of the tiny corpus: all heads, θ = 0, prototypes. Not to be changed."""
    folder = tmp_path_factory.mktemp("databases") / "prototypes.db"
    options = BuildOptions(heads="all", threshold=0.0, prototypes=4, training_steps=20)
    build_database(tiny_engine, tiny_corpus, folder, options)
    return folder
