"""Fixtures that several tests of the evaluation share."""

import pytest

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions


@pytest.fixture(scope="session")
def tiny_prototypes_database(tiny_engine, tiny_corpus, tmp_path_factory):
    """The folder of a database of the tiny corpus: all heads, θ = 0, with prototypes. Do not change it."""
    folder = tmp_path_factory.mktemp("databases") / "prototypes.db"
    options = BuildOptions(heads="all", threshold=0.0, prototypes=4, training_steps=20)
    build_database(tiny_engine, tiny_corpus, folder, options)
    return folder
