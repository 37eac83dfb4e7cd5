"""Models and databases that many tests share. Nothing is downloaded: tiny models are made by the tests."""

import process_setup  # noqa: F401, I001 - before anything that loads torch

import gc

import numpy as np
import pytest
from core_decoders import write_llama
from core_models import random_text, write_model, write_sentence_transformer
from family_reference import FamilyReference
from forked_peer import forked_peers, hide_libraries  # noqa: F401 - fixtures
from hypothesis import HealthCheck, settings
from recorded import recorded  # noqa: F401 - a fixture

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.calibration import calibrate as calibration
from attncache_core.calibration.savings import Savings
from attncache_core.checkpoints.description import DEFAULT_MODEL, find_checkpoint, read_checkpoint
from attncache_core.corpus import CorpusSentence
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.runtime.threads import available_processors

# No deadline, because a busy machine is not an error. The same examples in every run, so failures repeat.
settings.register_profile(
    "attncache", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
# Other examples in every run, and many of them: `make fuzz`.
settings.register_profile("fuzz", settings.get_profile("attncache"), derandomize=False, max_examples=2000)
settings.register_profile("quick", settings.get_profile("attncache"), max_examples=5)
settings.load_profile("attncache")


def pytest_collection_finish():
    """Let the garbage collector run again, and look only at what the tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A tiny BERT in a sentence-transformers folder: 3 layers of 4 heads, mean pooling, unit length."""
    return read_checkpoint(write_sentence_transformer(tmp_path_factory.mktemp("models") / "tiny-bert"))


@pytest.fixture(scope="session")
def tiny_classifier_checkpoint(tmp_path_factory):
    """A tiny BERT with a sequence-classification head of three classes."""
    folder = tmp_path_factory.mktemp("models") / "tiny-classifier"
    return read_checkpoint(write_model(folder, labels=["transfer", "card", "help"]))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """The folder of a tiny Llama without settings for prompts or pooling. Do not change it."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint):
    """The tiny model in float32, without a database."""
    return PrefillEngine.load(tiny_checkpoint, dtype="float32")


@pytest.fixture(scope="session")
def classifier(tiny_classifier_checkpoint):
    """The tiny classifier in float32."""
    return PrefillEngine.load(tiny_classifier_checkpoint, dtype="float32")


@pytest.fixture(scope="session")
def tiny_corpus():
    """240 distinct texts of 3 to 8 words (5 to 10 tokens), each with its own source."""
    random = np.random.default_rng(7)
    texts = [random_text(random, words) for words in np.repeat(np.arange(3, 9), 40)]
    return [CorpusSentence(text, text) for text in texts]


@pytest.fixture(scope="session")
def tiny_database(tiny_engine, tiny_corpus, tmp_path_factory):
    """The folder of a database of the tiny corpus: all heads stored and reused, θ = 0. Do not change it."""
    folder = tmp_path_factory.mktemp("databases") / "tiny.db"
    build_database(
        tiny_engine,
        tiny_corpus,
        folder,
        BuildOptions(heads="all", threshold=0.0, prototypes=0, training_steps=40),
    )
    return folder


@pytest.fixture(scope="module")
def fixed_costs():
    """Calibration with fixed savings instead of measured savings, so that its choice is always the same.

    A hit saves 0.1 µs per head and token, and a search costs 1 µs.
    """
    with pytest.MonkeyPatch.context() as patch:
        savings = Savings(per_hit=lambda lengths, heads: lengths * heads / 10, search=lambda _: 1.0)
        patch.setattr(calibration, "measure_savings", lambda *_: savings)
        yield


@pytest.fixture(scope="session")
def default_checkpoint():
    """The default model, from the installed package that carries it."""
    return find_checkpoint(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_reference(tiny_checkpoint):
    """The tiny model, run by Hugging Face."""
    return FamilyReference(tiny_checkpoint.folder)


@pytest.fixture(scope="session")
def default_reference(default_checkpoint):
    """The default model, run by Hugging Face."""
    return FamilyReference(default_checkpoint.folder)


def pytest_collection_modifyitems(items):
    """Run the folder with the slowest files first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: item.path.parent.name != "service")


def pytest_xdist_auto_num_workers():
    """One worker per available processor, four at most: each takes about a gigabyte."""
    return min(4, available_processors())


@pytest.fixture(scope="session")
def tiny_prototypes_database(tiny_engine, tiny_corpus, tmp_path_factory):
    """The folder of a database of the tiny corpus: all heads, θ = 0, with prototypes. Do not change it."""
    folder = tmp_path_factory.mktemp("databases") / "prototypes.db"
    options = BuildOptions(heads="all", threshold=0.0, prototypes=4, training_steps=20)
    build_database(tiny_engine, tiny_corpus, folder, options)
    return folder
