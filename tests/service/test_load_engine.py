"""Load the engine that a server's settings describe, with a real database."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_models import prefill, write_model

from attncache_core import AttentionDatabase, Checkpoint, CorruptDatabase, Outcome, PrefillEngine
from attncache_core.build.default import default_database_folder
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.corpus import CorpusSentence
from service.commands import serve
from service.commands.serve import load_engine, load_engines
from service.settings import read_settings


@pytest.fixture(autouse=True)
def required_gains(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the measurement of gains, and return the gains that were required."""
    required: list[float] = []
    monkeypatch.setattr(serve, "require_gain", lambda _, min_gain, **_kept: required.append(min_gain))
    return required


def engine_of(checkpoint: Checkpoint, database: Path | None, **values: Any) -> PrefillEngine:
    given = values if database is None else {"database": str(database), **values}
    return load_engine(read_settings({"dtype": "float32", **given}), checkpoint)


def thresholds(engine: PrefillEngine) -> set[float]:
    assert engine.policy
    return {kind.threshold for group in engine.policy.groups for kind in group.kinds.values()}


def test_more_tokens_than_the_model_takes_are_warned_of(
    tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    most = engine_of(tiny_checkpoint, None, maps=False).max_tokens
    engine_of(tiny_checkpoint, None, maps=False, max_tokens=most)
    assert not caplog.records
    assert engine_of(tiny_checkpoint, None, maps=False, max_tokens=100_000).max_tokens == most
    assert "--max-tokens is 100000" in caplog.text


def test_given_threshold_keeps_no_budget(tiny_checkpoint: Checkpoint, tiny_database: Path) -> None:
    engine = engine_of(tiny_checkpoint, tiny_database, threshold="0.95")
    assert thresholds(engine) == {0.95}
    assert engine.policy
    assert engine.policy.budget.least == 0


def test_given_threshold_decides_what_hits(
    tiny_checkpoint: Checkpoint, tiny_database: Path, tiny_corpus: list[CorpusSentence]
) -> None:
    texts = ["my card my card", "the bank was closed today", tiny_corpus[0].text]
    own, strict = (
        engine_of(tiny_checkpoint, tiny_database, **given) for given in ({}, {"threshold": "0.995"})
    )
    sequences = own.tokenize(texts)
    assert prefill(own, sequences).outcomes == (Outcome.HIT,) * 3
    assert prefill(strict, sequences).outcomes == (Outcome.MISS, Outcome.MISS, Outcome.HIT)


def test_threshold_and_heads_override_the_databases(tiny_checkpoint: Checkpoint, tiny_database: Path) -> None:
    engine = engine_of(tiny_checkpoint, tiny_database, threshold="0.7", heads="5")
    assert thresholds(engine) == {0.7}
    assert engine.database
    assert engine.database.mask.total == 5


def test_without_an_override_the_databases_own_thresholds_hold(
    tiny_checkpoint: Checkpoint, tiny_database: Path
) -> None:
    engine = engine_of(tiny_checkpoint, tiny_database)
    assert engine.policy == AttentionDatabase.open(tiny_database).manifest.policy


def test_longest_text_is_what_the_settings_say(tiny_checkpoint: Checkpoint, tiny_database: Path) -> None:
    engine = engine_of(tiny_checkpoint, tiny_database, max_tokens="7")
    assert engine.max_tokens == 7
    assert [len(ids) for ids in engine.tokenize(["card " * 30])] == [7]


@pytest.mark.parametrize("search_always", [False, True])
def test_gain_is_required_unless_every_text_is_to_be_searched(
    tiny_checkpoint: Checkpoint,
    tiny_database: Path,
    required_gains: list[float],
    search_always: bool,
) -> None:
    engine_of(tiny_checkpoint, tiny_database, search_always=search_always)
    assert required_gains == ([] if search_always else [0.05])
    engine_of(tiny_checkpoint, tiny_database, min_gain=0.2)
    assert required_gains[-1] == 0.2


def test_search_always_compares_every_text(
    tiny_checkpoint: Checkpoint, tiny_database: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_database, tmp_path / "a.db"))
    manifest = AttentionDatabase.open(folder).manifest
    groups = tuple(group.recorded_only() for group in manifest.policy.groups)
    replace(manifest, policy=replace(manifest.policy, groups=groups)).write(folder)
    for search_always in (False, True):
        policy = engine_of(tiny_checkpoint, folder, search_always=search_always).policy
        assert policy
        assert {group.searched for group in policy.groups} == {search_always}


def test_without_reuse_no_database_is_opened(tiny_checkpoint: Checkpoint) -> None:
    engine = engine_of(tiny_checkpoint, None, reuse=False)
    assert engine.database is None
    assert engine.policy is None


def test_sound_database_gives_one_engine(
    tiny_checkpoint: Checkpoint, tiny_database: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_database, default_database_folder(tiny_checkpoint, tmp_path))
    for given in ({"database": str(tiny_database)}, {"cache_dir": str(tmp_path)}, {"reuse": "off"}):
        settings = read_settings({"dtype": "float32", **given})
        (engine,) = load_engines(settings, tiny_checkpoint)
        assert (engine.database is not None) == settings.reuse
        assert engine.info().reuse_off == []


@pytest.mark.parametrize("given", [{}, {"threshold": "0.7"}, {"heads": "5"}], ids=str)
def test_engine_without_reuse_serves_first_where_the_default_database_is_damaged(
    tiny_checkpoint: Checkpoint, tiny_database: Path, tmp_path: Path, given: dict[str, str]
) -> None:
    folder = default_database_folder(tiny_checkpoint, tmp_path)
    shutil.copytree(tiny_database, folder)
    next(folder.glob("maps/*.maps")).unlink()
    settings = read_settings({"dtype": "float32", "cache_dir": str(tmp_path), **given})
    engine = next(load_engines(settings, tiny_checkpoint))
    assert engine.database is None
    assert engine.info().reuse_off == ["the default database is damaged, and a new one is being built"]
    # The database stays unchanged until the first engine serves.
    assert folder.is_dir()


def test_damaged_database_of_the_option_ends_the_start_and_stays_unchanged(
    tiny_checkpoint: Checkpoint, tiny_database: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_database, tmp_path / "a.db"))
    next(folder.glob("maps/*.maps")).unlink()
    settings = read_settings({"dtype": "float32", "database": str(folder)})
    with pytest.raises(CorruptDatabase, match=r"remove .* and build it again"):
        next(load_engines(settings, tiny_checkpoint))
    assert folder.is_dir()


def test_cross_encoder_gets_no_default_database_because_pairs_take_no_maps(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path / "reranker", ["relevance"]))
    engine = engine_of(checkpoint, None, cache_dir=str(tmp_path / "cache"))
    assert engine.database is None
    assert engine.pair_scores.supported
    assert not (tmp_path / "cache").exists()
