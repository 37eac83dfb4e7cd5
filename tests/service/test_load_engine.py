"""The engine that a server's settings describe, with a real database."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attncache_core import AttentionDatabase, Checkpoint, Outcome, PrefillEngine
from attncache_core.attention_maps.policy import Preset
from attncache_core.corpus import CorpusSentence
from service.commands.serve import load_engine
from service.settings import read_settings


@pytest.fixture(autouse=True)
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[PrefillEngine]:
    """Costs are not measured; answers the engines that would have been weighed."""
    seen: list[PrefillEngine] = []
    monkeypatch.setattr(PrefillEngine, "weigh_costs", lambda engine: seen.append(engine))
    return seen


def engine_of(checkpoint: Checkpoint, database: Path | None, **values: Any) -> PrefillEngine:
    given = values if database is None else {"database": str(database), **values}
    return load_engine(read_settings({"dtype": "float32", **given}), checkpoint)


def thresholds(engine: PrefillEngine) -> set[float]:
    assert engine.policy
    return {kind.threshold for group in engine.policy.groups for kind in group.kinds.values()}


@pytest.mark.parametrize(
    ("policy", "theta"), [("conservative", 0.995), ("moderate", 0.99), ("aggressive", 0.95)]
)
def test_policy_gives_the_papers_threshold_to_all_lengths_and_kinds(
    tiny_checkpoint: Checkpoint, tiny_database: Path, policy: str, theta: float
) -> None:
    engine = engine_of(tiny_checkpoint, tiny_database, policy=policy)
    assert thresholds(engine) == {theta} == {Preset(policy).threshold}


def test_policy_decides_what_hits(
    tiny_checkpoint: Checkpoint, tiny_database: Path, tiny_corpus: list[CorpusSentence]
) -> None:
    texts = ["my card my card", "the bank was closed today", tiny_corpus[0].text]
    own, preset = (
        engine_of(tiny_checkpoint, tiny_database, **given) for given in ({}, {"policy": "conservative"})
    )
    sequences = own.tokenize(texts)
    assert own.run(sequences, [True] * 3).outcomes == (Outcome.HIT,) * 3
    assert preset.run(sequences, [True] * 3).outcomes == (Outcome.MISS, Outcome.MISS, Outcome.HIT)


def test_policy_keeps_no_budget(tiny_checkpoint: Checkpoint, tiny_database: Path) -> None:
    engine = engine_of(tiny_checkpoint, tiny_database, policy="aggressive")
    assert engine.policy
    assert engine.policy.budget.least == 0


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
def test_costs_are_weighed_unless_every_text_is_to_be_searched(
    tiny_checkpoint: Checkpoint,
    tiny_database: Path,
    weighed: list[PrefillEngine],
    search_always: bool,
) -> None:
    engine = engine_of(tiny_checkpoint, tiny_database, search_always=search_always)
    assert weighed == ([] if search_always else [engine])


def test_every_text_is_compared_where_that_was_asked_for(
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
