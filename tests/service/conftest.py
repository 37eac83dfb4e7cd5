import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from core_decoders import write_llama
from server_process import starting_servers

from attncache_core import AttentionDatabase, BuildOptions, PrefillEngine
from service.commands import build, serving


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def start():
    """Return a function that starts a server as a process; one process imports everything for all of them."""
    with starting_servers() as started:
        yield started


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a tiny decoder. Do not change it."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def root(tiny_database, tmp_path):
    """A copy of the tiny database. A test may change it."""
    return Path(shutil.copytree(tiny_database, tmp_path / "a.db"))


@pytest.fixture(scope="session")
def exact_engine(tiny_checkpoint, tiny_database):
    """The tiny model with its database; only recorded texts hit. Do not change it."""
    database = AttentionDatabase.open(tiny_database, threshold=1.0)
    return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")


@pytest.fixture
def loaded(monkeypatch):
    """The engine that `attncache serve` loads first, in a list; the command ends then."""
    engines = []

    def load_only(settings, load, _listeners):
        engines.append(next(load(settings, 0)))
        sys.exit(0)

    monkeypatch.setattr(serving, "serve_with_workers", load_only)
    return engines


@pytest.fixture(scope="module")
def few_steps():
    """Let `attncache build` train the projector for a few steps only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BuildOptions", partial(BuildOptions, training_steps=20))
        yield


@pytest.fixture(scope="module")
def files(tiny_corpus, tmp_path_factory):
    """corpus.tsv with every second text and unseen.tsv with the other texts, all with labels."""
    folder = tmp_path_factory.mktemp("files")
    texts = [sentence.text for sentence in tiny_corpus]
    for name, part in (("corpus", texts[::2]), ("unseen", texts[1::2])):
        lines = ["text\tlabel", *(f"{text}\t{'card' if 'card' in text else 'other'}" for text in part)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
