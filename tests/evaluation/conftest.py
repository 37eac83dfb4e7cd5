"""What several tests evaluate with."""

import pytest

from attncache_core.attention_maps.builder import BuildOptions, build_database


@pytest.fixture(scope="session")
def tiny_prototypes_database(tiny_engine, tiny_corpus, tmp_path_factory):
    """The folder of a database of the tiny corpus: all heads, θ = 0, prototypes. Not to be changed."""
    folder = tmp_path_factory.mktemp("databases") / "prototypes.db"
    options = BuildOptions(heads="all", threshold=0.0, prototypes=4, training_steps=20)
    build_database(tiny_engine, tiny_corpus, folder, options)
    return folder
