"""A policy that a server tightened stays tight at the next start, until it is calibrated anew."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from core_models import random_sequences
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncache_core.attention_maps import tightened
from attncache_core.attention_maps.calibration import calibrate_database
from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.policy import Budget, KindPolicy, LengthGroup, ReusePolicy
from attncache_core.attention_maps.store import RecordKind
from attncache_core.attention_maps.tightened import as_tightened, forget_tightened, keep_tightened
from attncache_core.engine import PrefillEngine
from attncache_core.outputs import Measure


def group(longest: int, theta: float, searched: bool = True) -> LengthGroup:
    return LengthGroup(
        longest, {kind: KindPolicy(theta, (0.5, 0.9), (0.2, 0.1)) for kind in RecordKind}, searched
    )


POLICY = ReusePolicy(
    Budget(Measure.COSINE, 0.9), (group(6, 0.5), group(8, 0.7, searched=False), group(9, 0.9).recorded_only())
)
places = st.lists(st.integers(0, len(POLICY.groups) - 1), max_size=12)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def after(policy: ReusePolicy, steps: list[int]) -> ReusePolicy:
    for place in steps:
        if not policy.groups[place].is_off:
            policy = policy.tightened(place)
    return policy


@pytest.fixture
def folder(tiny_database, tmp_path) -> Path:
    """A database with three length groups that may be changed."""
    folder = Path(shutil.copytree(tiny_database, tmp_path / "a.db"))
    manifest = AttentionDatabase.open(folder).manifest
    replace(manifest, policy=POLICY).write(folder)
    return folder


def engine_of(checkpoint, folder, **overrides) -> PrefillEngine:
    return PrefillEngine.load(
        checkpoint, database=AttentionDatabase.open(folder, **overrides), dtype="float32"
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=places)
def test_what_was_kept_comes_back(tmp_path, steps):
    policy = after(POLICY, steps)
    keep_tightened(tmp_path, POLICY, policy)
    assert as_tightened(tmp_path, POLICY) == policy


def test_nothing_kept_is_the_calibrated_policy(tmp_path):
    assert as_tightened(tmp_path, POLICY) == POLICY


def test_engine_that_was_tightened_is_tight_at_the_next_start(tiny_checkpoint, folder):
    engine = engine_of(tiny_checkpoint, folder)
    for place in (0, 2, 0):
        engine.tighten(place)
    policy = engine_of(tiny_checkpoint, folder).policy
    assert policy == engine.policy == after(POLICY, [0, 2, 0])
    assert [each.tightened for each in policy.groups] == [2, 0, 1]


def test_tightening_goes_on_from_where_it_was(tiny_checkpoint, folder):
    for _ in range(3):
        engine_of(tiny_checkpoint, folder).tighten(0)
    assert engine_of(tiny_checkpoint, folder).policy == after(POLICY, [0, 0, 0])


def test_manifest_keeps_what_calibration_found(tiny_checkpoint, folder):
    before = (folder / "manifest.json").read_bytes()
    engine_of(tiny_checkpoint, folder).tighten(0)
    assert (folder / "manifest.json").read_bytes() == before
    assert AttentionDatabase.open(folder).manifest.policy == POLICY


def test_group_that_was_switched_off_stays_off(tiny_checkpoint, folder):
    engine = engine_of(tiny_checkpoint, folder)
    for _ in range(6):
        engine.tighten(0)
    assert engine_of(tiny_checkpoint, folder).policy.groups[0].is_off


@pytest.mark.parametrize("overrides", [{"threshold": 0.3}, {"threshold": 0.3, "heads": "all"}])
def test_operators_own_threshold_knows_nothing_of_it(tiny_checkpoint, folder, overrides):
    engine_of(tiny_checkpoint, folder).tighten(0)
    policy = AttentionDatabase.open(folder, **overrides).search.policy
    assert policy == POLICY.with_threshold(0.3)
    assert {each.tightened for each in policy.groups} == {0}


def test_operators_own_heads_keep_no_budget_and_are_not_tightened(tiny_checkpoint, folder):
    engine_of(tiny_checkpoint, folder).tighten(1)
    assert AttentionDatabase.open(folder, heads="3").search.policy == POLICY.without_budget()


def test_another_policy_is_not_tightened_by_what_was_kept_for_this_one(tmp_path):
    keep_tightened(tmp_path, POLICY, after(POLICY, [0, 1]))
    for other in (
        replace(POLICY, groups=POLICY.groups[1:]),
        replace(POLICY, budget=Budget(Measure.COSINE, 0.91)),
        replace(POLICY, groups=(group(6, 0.51), *POLICY.groups[1:])),
    ):
        assert as_tightened(tmp_path, other) == other


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), anything.map(lambda value: json.dumps(value).encode())))
def test_file_that_is_none_changes_nothing(tmp_path, content):
    (tmp_path / "tightened.json").write_bytes(content)
    assert as_tightened(tmp_path, POLICY) == POLICY


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(anything, st.lists(st.integers(), max_size=5)))
def test_damaged_steps_never_loosen_and_never_fail(tmp_path, steps):
    content = {"policy": tightened._digest(POLICY), "steps": steps}
    (tmp_path / "tightened.json").write_text(json.dumps(content), encoding="utf-8")
    found = as_tightened(tmp_path, POLICY)
    assert len(found.groups) == len(POLICY.groups)
    for own, calibrated in zip(found.groups, POLICY.groups, strict=True):
        assert own.tightened <= 6
        for kind, of_kind in own.kinds.items():
            assert of_kind.threshold >= calibrated.kinds[kind].threshold


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000])
def test_file_of_endless_brackets_changes_nothing(tmp_path, content):
    (tmp_path / "tightened.json").write_bytes(content)
    assert as_tightened(tmp_path, POLICY) == POLICY


def test_folder_in_the_place_of_the_file_changes_nothing(tmp_path):
    (tmp_path / "tightened.json").mkdir()
    assert as_tightened(tmp_path, POLICY) == POLICY


def test_forgetting_what_was_never_kept_is_no_error(tmp_path):
    forget_tightened(tmp_path)
    keep_tightened(tmp_path, POLICY, after(POLICY, [0]))
    forget_tightened(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert as_tightened(tmp_path, POLICY) == POLICY


@pytest.mark.usefixtures("fixed_costs")
def test_calibration_begins_anew(tiny_checkpoint, tiny_engine, folder):
    engine_of(tiny_checkpoint, folder).tighten(0)
    assert (folder / "tightened.json").exists()
    sequences = random_sequences([5, 6, 7, 8, 9, 10] * 6, seed=71)
    calibrate_database(tiny_engine, AttentionDatabase.open(folder), sequences, Budget(Measure.COSINE, 0.5))
    assert not (folder / "tightened.json").exists()
    database = AttentionDatabase.open(folder)
    assert database.search.policy == database.manifest.policy
    assert {each.tightened for each in database.search.policy.groups} == {0}


def test_folder_that_cannot_be_written_to_is_no_error(tiny_checkpoint, folder, monkeypatch):
    """Permissions would not stop an administrator, so that the refusal is the system's own."""

    def refuse(path, _):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(tightened, "write_whole", refuse)
    engine = engine_of(tiny_checkpoint, folder)
    engine.tighten(0)
    assert engine.policy == after(POLICY, [0])
    assert engine_of(tiny_checkpoint, folder).policy == POLICY


def test_folder_that_is_gone_is_no_error(tiny_checkpoint, folder):
    engine = engine_of(tiny_checkpoint, folder)
    shutil.rmtree(folder)
    engine.tighten(0)
    assert engine.policy == after(POLICY, [0])


def test_what_is_kept_is_the_policys_digest_and_a_number_for_each_group(tmp_path):
    keep_tightened(tmp_path, POLICY, after(POLICY, [0, 2, 0]))
    content = json.loads((tmp_path / "tightened.json").read_bytes())
    assert content["steps"] == [2, 0, 1]
    assert set(content) == {"policy", "steps"}
