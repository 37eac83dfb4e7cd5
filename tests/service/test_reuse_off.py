"""A server that cannot keep the findings of verification reuses nothing, and its summary says so."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run, succeeded
from core_models import prefill

from attncache_core import AttentionDatabase, Outcome, PrefillEngine
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget
from service.loading.engines import load_engine
from service.loading.summary import expected_savings
from service.settings import read_settings


@pytest.fixture
def folder(tiny_database, tmp_path):
    """A database with a budget in which every text hits, and in which no file can be written."""
    folder = Path(shutil.copytree(tiny_database, tmp_path / "a.db"))
    manifest = AttentionDatabase.open(folder).manifest
    replace(manifest, policy=replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))).write(folder)
    # A folder at the path of the lock file, because permissions would not stop an administrator.
    (folder / ".tightened.json.lock").mkdir()
    return folder


def engine_of(checkpoint, folder, **values):
    settings = {"dtype": "float32", "database": str(folder), "min_gain": 0, **values}
    return load_engine(read_settings(settings), checkpoint)


def outcome(engine):
    return prefill(engine, engine.tokenize(["my card my card"])).outcomes[0]


def test_nothing_is_reused_if_findings_cannot_be_kept(tiny_checkpoint, folder, caplog):
    caplog.set_level(logging.INFO)
    engine = engine_of(tiny_checkpoint, folder)
    assert outcome(engine) is Outcome.NOT_SEARCHED
    (reason,) = engine.reuse_off
    assert reason.startswith("tightened.json cannot be written (Is a directory)")
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == f"attention maps are not reused: {reason}"
    assert expected_savings(engine) == f"serving exactly: {reason}"


@pytest.mark.parametrize("values", [{"verify_rate": 0}, {"threshold": 0.1}], ids=["unverified", "own θ"])
def test_folder_may_be_read_only_if_nothing_needs_to_be_kept(tiny_checkpoint, folder, values):
    before = sorted(folder.rglob("*"))
    engine = engine_of(tiny_checkpoint, folder, **values)
    assert outcome(engine) is Outcome.HIT
    assert engine.reuse_off == []
    # The library reuses maps from a folder that it cannot write.
    library = PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(folder), dtype="float32")
    assert outcome(library) is Outcome.HIT
    assert sorted(folder.rglob("*")) == before


def test_findings_are_kept_from_the_first_start_on_and_inspect_shows_them(tiny_checkpoint, folder):
    (folder / ".tightened.json.lock").rmdir()
    engine = engine_of(tiny_checkpoint, folder)
    assert (folder / "tightened.json").is_file()
    assert outcome(engine) is Outcome.HIT
    assert "reuse off" not in succeeded(run("inspect", folder))
    engine.map_reuse.tighten(0)
    engine.map_reuse.keep_verified({})
    theta = next(iter(engine.map_reuse.policy.groups[0].kinds.values())).threshold
    assert f"{theta:.4f}" in succeeded(run("inspect", folder))
    (folder / "tightened.json").write_bytes(b"garbage")
    shown = " ".join(succeeded(run("inspect", folder)).split())
    assert "reuse off tightened.json cannot be read" in shown
