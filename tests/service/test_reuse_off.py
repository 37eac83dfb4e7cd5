"""A server that cannot keep what it verifies reuses nothing, and says so from its first line on."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import run, succeeded

from attncache_core import AttentionDatabase, Checkpoint, Outcome, PrefillEngine
from attncache_core.attention_maps.policy import Budget
from attncache_core.outputs import Measure
from service.commands.serve import load_engine
from service.settings import read_settings


@pytest.fixture
def folder(tiny_database: Path, tmp_path: Path) -> Path:
    """A database in which everything hits, with a budget to keep, that nothing can be added to."""
    folder = Path(shutil.copytree(tiny_database, tmp_path / "a.db"))
    manifest = AttentionDatabase.open(folder).manifest
    replace(manifest, policy=replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))).write(folder)
    # Permissions would not stop an administrator.
    (folder / ".tightened.json.lock").mkdir()
    return folder


def engine_of(checkpoint: Checkpoint, folder: Path, **values: Any) -> PrefillEngine:
    given = {"dtype": "float32", "database": str(folder), "min_gain": 0, **values}
    return load_engine(read_settings(given), checkpoint)


def outcome(engine: PrefillEngine) -> Outcome:
    return engine.run(engine.tokenize(["my card my card"]), [True]).outcomes[0]


@pytest.mark.parametrize("search_always", [False, True])
def test_without_a_place_to_keep_it_nothing_is_reused(
    tiny_checkpoint: Checkpoint, folder: Path, caplog: pytest.LogCaptureFixture, search_always: bool
) -> None:
    caplog.set_level(logging.INFO)
    engine = engine_of(tiny_checkpoint, folder, search_always=search_always)
    assert outcome(engine) is Outcome.NOT_SEARCHED
    (reason,) = engine.reuse_off
    assert reason.startswith("tightened.json cannot be written (Is a directory)")
    warning, start = caplog.records
    assert (warning.levelno, start.levelno) == (logging.WARNING, logging.INFO)
    assert warning.getMessage() == f"attention maps are not reused: {reason}"
    assert start.getMessage() == f"serving exactly: {reason}"


@pytest.mark.parametrize(
    "values",
    [{"verify_rate": 0}, {"threshold": 0.1}, {"heads": "5"}],
    ids=["unverified", "own θ", "own heads"],
)
def test_where_nothing_needs_to_be_kept_the_folder_may_be_read_only(
    tiny_checkpoint: Checkpoint, folder: Path, values: dict[str, Any]
) -> None:
    before = sorted(folder.rglob("*"))
    engine = engine_of(tiny_checkpoint, folder, **values)
    assert outcome(engine) is Outcome.HIT
    assert engine.reuse_off == []
    assert sorted(folder.rglob("*")) == before


def test_library_reuses_from_a_folder_that_it_only_reads(tiny_checkpoint: Checkpoint, folder: Path) -> None:
    engine = PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(folder), dtype="float32")
    assert outcome(engine) is Outcome.HIT


def test_file_can_be_written_from_the_first_start_on(tiny_checkpoint: Checkpoint, folder: Path) -> None:
    (folder / ".tightened.json.lock").rmdir()
    engine = engine_of(tiny_checkpoint, folder)
    assert (folder / "tightened.json").is_file()
    assert outcome(engine) is Outcome.HIT


def test_inspect_says_that_nothing_will_be_reused_and_shows_what_was_tightened(
    tiny_checkpoint: Checkpoint, folder: Path
) -> None:
    (folder / ".tightened.json.lock").rmdir()
    engine = engine_of(tiny_checkpoint, folder)
    assert "reuse off" not in succeeded(run("inspect", folder))
    engine.tighten(0)
    engine.keep_verified({})
    assert engine.policy is not None
    theta = next(iter(engine.policy.groups[0].kinds.values())).threshold
    assert f"{theta:.4f}" in succeeded(run("inspect", folder))
    (folder / "tightened.json").write_bytes(b"garbage")
    told = " ".join(succeeded(run("inspect", folder)).split())
    assert "reuse off tightened.json cannot be read" in told
