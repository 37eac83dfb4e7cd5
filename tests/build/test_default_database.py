"""The default database: built once by the first start of a server, and found by model and format."""

import stat
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from attncache_core.build import default
from attncache_core.build.builder import build_database
from attncache_core.build.default import _STAGE_BEGINS, build_default_database, share_done
from attncache_core.build.options import BuildOptions
from attncache_core.checkpoints.template import Template
from attncache_core.corpus import default_corpus
from attncache_core.errors import InvalidInput
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.default import default_database_folder


@pytest.fixture(scope="module")
def built(tiny_checkpoint, tmp_path_factory):
    """The folder of two servers that start at once with an empty cache, and the threads that built it."""
    cache, builders, folders = tmp_path_factory.mktemp("cache") / "not there yet", set(), []
    shares: list[float] = []

    def start():
        name = threading.get_ident()

        def progress(stage, done, total):
            shares.append(share_done(stage, done, total))
            if stage != "waiting for another build":
                assert stage in _STAGE_BEGINS
                builders.add(name)

        folder = build_default_database(tiny_checkpoint, cache_dir=cache, dtype="float32", progress=progress)
        folders.append(folder)

    servers = [threading.Thread(target=start) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        few_steps = BuildOptions(training_steps=20)
        patch.setattr(default, "build_database", partial(build_database, options=few_steps))
        for server in servers:
            server.start()
        for server in servers:
            server.join()
    assert len(folders) == 2
    assert folders[0] == folders[1]
    # No mask of this small model keeps the budget, so the last two stages are left out.
    assert max(shares) > 0.6
    assert all(0 <= share <= 1 for share in shares)
    return folders[0], builders


def test_one_of_two_simultaneous_first_starts_builds_and_both_get_the_folder(built):
    folder, builders = built
    assert len(builders) == 1
    assert folder.is_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_default_database_is_whole_and_holds_the_shipped_corpus(built, tiny_checkpoint, tiny_engine):
    database = AttentionDatabase.open(built[0])
    database.require_fingerprint(tiny_checkpoint)
    assert database.verify() == []
    texts = [sentence.text for sentence in default_corpus()]
    distinct = {tuple(ids) for ids in tiny_engine.tokenize(texts) if len(ids) <= 64}
    assert sum(database.manifest.records.values()) == len(distinct)
    # Every length from the shortest to the longest sentence has a record.
    held = sorted(database.search.store.segments)
    assert held == list(range(min(map(len, distinct)), max(map(len, distinct)) + 1))
    assert database.manifest.build["texts"] == len(texts)


def test_next_start_builds_nothing(built, tiny_checkpoint):
    folder, _ = built
    before = (folder / "manifest.json").stat()
    seen = []
    options = {"dtype": "float32", "progress": lambda *step: seen.append(step)}
    again = build_default_database(tiny_checkpoint, cache_dir=folder.parent.parent, **options)
    assert again == folder
    assert seen == []
    assert (folder / "manifest.json").stat() == before


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tiny-bert", "tiny-bert"),
        ("sentence-transformers/all-MiniLM-L6-v3.1", "all-MiniLM-L6-v3.1"),
        ("./models/my model (new)", "my-model-new-"),
        ("/a/b/model/", "model"),
    ],
)
def test_folder_has_a_plain_name_of_model_fingerprint_and_format(tiny_checkpoint, tmp_path, name, shown):
    folder = default_database_folder(replace(tiny_checkpoint, name=name), tmp_path)
    assert folder.parent == tmp_path / "databases"
    assert folder.name == f"{shown}-{tiny_checkpoint.use_fingerprint()[:12]}-v4.1.5"


def test_other_weights_templates_or_pooling_have_another_folder(
    tiny_checkpoint, tiny_classifier_checkpoint, tmp_path
):
    """Other templates give other token sequences, and other pooling gives other budgets."""
    ways = (
        tiny_checkpoint,
        replace(tiny_classifier_checkpoint, name=tiny_checkpoint.name),
        tiny_checkpoint.adapted(template=Template("query: ")),
        tiny_checkpoint.adapted(pooling="cls"),
        tiny_checkpoint.adapted(labels=["card", "bank"]),
        tiny_checkpoint.adapted(labels=["bank", "card"], label_logits=True),
    )
    assert len({default_database_folder(way, tmp_path) for way in ways}) == 6


def test_default_folder_is_in_the_users_cache(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = default_database_folder(tiny_checkpoint)
    assert folder.is_relative_to(Path(tmp_path))
    assert not folder.exists()


def test_user_without_a_home_is_told_which_option_to_set(tiny_checkpoint, monkeypatch):
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])
    with pytest.raises(InvalidInput, match="set --cache-dir") as refused:
        default_database_folder(tiny_checkpoint)
    assert refused.value.field == "cache_dir"
