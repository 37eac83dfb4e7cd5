"""A policy that one server tightened is tight in all servers, after a restart, and if the disk fails."""

import json
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from core_models import prefill, random_sequences
from forked import forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tightening_acts import POLICY, SHARED, fill_the_disk, group, lack_permission, tighten_beside_another

from attncache_core.calibration.database import calibrate_database
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.maps.policy import Budget, ReusePolicy, Steps, StrangenessLimit
from attncache_core.reuse.maps.policy_state import ServedPolicy, Tightened, forget_tightened
from attncache_core.reuse.maps.verification import Band, Window, windows_of
from attncache_core.reuse.plan import Outcome
from attncache_core.runtime.files import left_unfinished, locked

FIRST = Window(0, Band.USUAL)
parts = st.lists(st.sampled_from([0, 1, 2, None]), max_size=12)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def after(policy: ReusePolicy, steps: list[int | None]) -> ReusePolicy:
    """Return the policy after steps of length groups (index) and of the limit (None)."""
    for index in steps:
        is_off = policy.limit.is_off if index is None else policy.groups[index].is_off
        if not is_off:
            policy = policy.tightened(index)
    return policy


@pytest.fixture
def folder(tiny_database, tmp_path) -> Path:
    """A database with three length groups that a test may change."""
    folder = Path(shutil.copytree(tiny_database, tmp_path / "a.db"))
    manifest = AttentionDatabase.open(folder).manifest
    replace(manifest, policy=replace(POLICY, limit=None)).write(folder)
    return folder


def engine_of(checkpoint, folder, **overrides) -> PrefillEngine:
    return PrefillEngine.load(
        checkpoint, database=AttentionDatabase.open(folder, **overrides), dtype="float32"
    )


def tighten(engine: PrefillEngine, *parts: int | None) -> None:
    for index in parts:
        engine.map_reuse.tighten(index)
        engine.map_reuse.keep_verified({})


# Merging findings.


def found(steps: Steps, fidelity: float, hits: int = 3) -> Tightened:
    """Return findings with this number of hits of one fidelity in every window."""
    return Tightened(steps, tuple((window, (fidelity,) * hits) for window in windows_of(steps)))


steps = st.builds(Steps, st.tuples(*[st.integers(0, 3)] * 3), st.integers(0, 3))


@given(first=steps, second=steps)
def test_merging_takes_the_larger_steps_and_drops_hits_of_looser_policies(first, second):
    merged = found(first, 0.1).merged(found(second, 0.2))
    assert merged.steps.groups == tuple(map(max, first.groups, second.groups))
    assert merged.steps.limit == max(first.limit, second.limit)
    windows = dict(merged.windows)
    for window in windows_of(merged.steps):
        now = merged.steps.groups[window.place], merged.steps.limit
        expected = []
        for side, fidelity in ((first, 0.1), (second, 0.2)):
            # The limit of strangeness does not affect usual texts.
            as_tight = side.groups[window.place] == now[0]
            if as_tight and (window.band is Band.USUAL or side.limit == now[1]):
                expected += [fidelity] * 3
        assert list(windows.pop(window, ())) == expected
    assert not windows


def test_window_holds_the_last_1000_hits_of_all_servers():
    none = Steps((0, 0, 0), 0)
    merged = found(none, 0.1, hits=950).merged(found(none, 0.2, hits=80))
    assert dict(merged.windows)[FIRST] == (0.1,) * 920 + (0.2,) * 80


# Keeping findings.


@settings(same_folder, max_examples=30)
@given(steps=parts)
def test_kept_steps_hold_at_the_next_start(tmp_path, steps):
    forget_tightened(tmp_path)
    policy = after(POLICY, steps)
    served = ServedPolicy(tmp_path, POLICY)
    for index, count in enumerate([*policy.steps.groups, policy.steps.limit]):
        for _ in range(count):
            served.tighten(index if index < 3 else None)
    served.keep({})
    assert ServedPolicy(tmp_path, POLICY).policy == served.policy == policy


def test_hits_are_kept_after_a_restart_and_new_hits_are_added(tmp_path):
    assert ServedPolicy(tmp_path, POLICY).keep({FIRST: [0.25, float("nan")]})
    again = ServedPolicy(tmp_path, POLICY).keep({FIRST: [0.5]})
    assert str(dict(again.windows)[FIRST]) == "(0.25, -1.0, 0.5)"


def test_tightening_empties_the_windows_of_the_group_for_every_server(tmp_path):
    first, second = (ServedPolicy(tmp_path, POLICY) for _ in range(2))
    unusual, other = replace(FIRST, band=Band.UNUSUAL), Window(1, Band.USUAL)
    first.keep({FIRST: [0.1], unusual: [0.2], other: [0.3]})
    first.tighten(0)
    first.keep({})
    # The second server verified these hits before it knew of the step.
    known = second.keep({FIRST: [0.4], unusual: [0.5], other: [0.6]})
    assert dict(known.windows) == {other: (0.3, 0.6)}
    assert second.policy == first.policy
    third = second.keep({replace(FIRST, steps=1): [0.7]})
    assert dict(third.windows) == {other: (0.3, 0.6), replace(FIRST, steps=1): (0.7,)}


def test_kept_file_holds_numbers_only(tmp_path):
    served = ServedPolicy(tmp_path, POLICY)
    for index in (0, 2, None, 0):
        served.tighten(index)
    served.keep({replace(FIRST, steps=2): [0.5, 1.0]})
    content = json.loads((tmp_path / "tightened.json").read_bytes())
    assert content == {
        "format_version": 1,
        "policies": {
            POLICY.digest: {
                "steps": {"groups": [2, 0, 1], "limit": 1},
                "windows": [[{"place": 0, "band": "usual", "steps": 2, "limit_steps": 0}, [0.5, 1.0]]],
            }
        },
    }


def test_findings_of_another_policy_are_kept_separately(tmp_path):
    """A server may still run with the policy from before the database was calibrated again."""
    served = ServedPolicy(tmp_path, POLICY)
    served.tighten(0)
    (tmp_path / ".tightened.json.0123.unfinished").touch()  # of a process that was killed
    served.keep({Window(1, Band.USUAL): [0.5]})
    assert not left_unfinished(tmp_path)
    for other in (
        replace(POLICY, groups=POLICY.groups[1:]),
        replace(POLICY, budget=Budget(Measure.COSINE, 0.91)),
        replace(POLICY, groups=(group(6, 0.51), *POLICY.groups[1:])),
        replace(POLICY, limit=StrangenessLimit(0.03, 0.02)),
    ):
        newer = ServedPolicy(tmp_path, other)
        assert newer.policy == other
        newer.tighten(1)
        assert newer.keep({}).windows == ()
        assert ServedPolicy(tmp_path, other).policy == other.tightened(1)
    assert ServedPolicy(tmp_path, POLICY).policy == POLICY.tightened(0)
    content = json.loads((tmp_path / "tightened.json").read_bytes())
    assert content["policies"][POLICY.digest]["windows"]


def test_policy_without_a_budget_keeps_no_findings_and_needs_no_file(tmp_path):
    (tmp_path / "tightened.json").mkdir()
    served = ServedPolicy(tmp_path, POLICY.with_threshold(0.3))
    served.tighten(0)
    assert served.keep({FIRST: [0.0]}) is None
    assert served.policy == POLICY.with_threshold(0.3).tightened(0)
    assert served.reuse_off == []


# Several servers.


def test_two_processes_that_tighten_concurrently_lose_no_step_and_no_hit(tmp_path):
    both = [forked(tighten_beside_another, tmp_path, number) for number in range(2)]
    assert [finished() for finished in both] == [None, None]
    served = ServedPolicy(tmp_path, POLICY)
    assert served.policy.steps == Steps((5, 0, 0), 5)
    assert sorted(dict(served.keep({}).windows)[SHARED]) == [0.0] * 100 + [0.1] * 100


def test_steps_of_one_engine_reach_the_other(tiny_checkpoint, folder):
    first, second = (engine_of(tiny_checkpoint, folder) for _ in range(2))
    first.map_reuse.tighten(0)
    second.map_reuse.tighten(1)
    for engine in (first, second, first):
        engine.map_reuse.keep_verified({})
    assert first.map_reuse.policy == second.map_reuse.policy == after(replace(POLICY, limit=None), [0, 1])


def test_server_that_verifies_nothing_adopts_the_steps_of_another_and_writes_nothing(folder, caplog):
    quiet, other = (MapReuse(AttentionDatabase.open(folder)) for _ in range(2))
    other.tighten(0)
    other.keep_verified({})
    written = (folder / "tightened.json").stat()
    other.keep_verified({FIRST: [1.0]})  # of a looser policy, so there is nothing to write
    quiet.tighten(1)
    for _ in range(2):
        quiet.adopt_findings()
    assert quiet.policy == after(replace(POLICY, limit=None), [0, 1])
    assert caplog.text.count("another server has found the policy of the database too loose") == 1
    assert (folder / "tightened.json").stat() == written
    searched = quiet.search
    other.keep_verified({replace(FIRST, steps=1): [1.0]})
    assert (folder / "tightened.json").stat() != written
    quiet.adopt_findings()  # other content, and no other step
    (folder / "tightened.json").unlink()
    quiet.adopt_findings()
    assert quiet.search is searched
    assert quiet.reuse_off == []


def test_engine_does_not_wait_for_a_held_lock_and_keeps_its_findings_later(tiny_checkpoint, folder):
    engine = engine_of(tiny_checkpoint, folder)
    with locked(folder / "tightened.json", on_wait=pytest.fail):
        engine.map_reuse.tighten(0)
        assert engine.map_reuse.keep_verified({FIRST: [0.5]}) is None
        assert engine.map_reuse.policy.steps.groups == (1, 0, 0)
    assert engine.reuse_off == []
    assert not (folder / "tightened.json").exists()
    assert engine.map_reuse.keep_verified({}).steps.groups == (1, 0, 0)


# After a restart.


def test_step_that_is_found_while_the_groups_that_pay_are_set_is_not_lost(folder):
    reuse = MapReuse(AttentionDatabase.open(folder))
    tightening = threading.Thread(target=reuse.tighten, args=(0,))

    class Paying(tuple):
        def __iter__(self):
            # While `reuse_in` changes what is searched. Long enough for a step that does not wait.
            tightening.start()
            tightening.join(0.2)
            return super().__iter__()

    reuse.reuse_in(Paying((0, 1)))
    tightening.join()
    assert reuse.policy.steps.groups[0] == 1
    assert reuse.search.paying == {1}


def test_steps_of_an_engine_hold_after_a_restart_and_are_not_in_the_manifest(tiny_checkpoint, folder):
    before = (folder / "manifest.json").read_bytes()
    engine = engine_of(tiny_checkpoint, folder)
    tighten(engine, 0, 2, 0)
    policy = engine_of(tiny_checkpoint, folder).map_reuse.policy
    assert policy == engine.map_reuse.policy == after(replace(POLICY, limit=None), [0, 2, 0])
    assert [each.tightened for each in policy.groups] == [2, 0, 1]
    assert (folder / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    "overrides", [{"threshold": 0.3}, {"threshold": 0.3, "heads": "all"}, {"heads": "3"}], ids=str
)
def test_operators_own_threshold_or_heads_have_no_budget_and_ignore_kept_steps(
    tiny_checkpoint, folder, overrides
):
    tighten(engine_of(tiny_checkpoint, folder), 0, 1)
    policy = engine_of(tiny_checkpoint, folder, **overrides).map_reuse.policy
    calibrated = replace(POLICY, limit=None)
    own = calibrated.with_threshold(0.3) if "threshold" in overrides else calibrated.without_budget()
    assert policy == own
    assert policy.steps.groups == (0, 0, 0)


@pytest.mark.usefixtures("fixed_costs")
def test_calibration_deletes_the_findings(tiny_checkpoint, tiny_engine, folder):
    tighten(engine_of(tiny_checkpoint, folder), 0)
    sequences = random_sequences([5, 6, 7, 8, 9, 10] * 6, seed=71)
    calibrate_database(
        tiny_engine, AttentionDatabase.open(folder), sequences, (), Budget(Measure.COSINE, 0.5)
    )
    assert not (folder / "tightened.json").exists()
    assert [*folder.parent.iterdir()] == [folder]  # the folder may be all that can be written to
    engine = engine_of(tiny_checkpoint, folder)
    assert engine.map_reuse.policy == engine.map_reuse.database.manifest.policy
    assert set(engine.map_reuse.policy.steps.groups) == {0}


# Files that cannot be read.


def directory(path: Path) -> None:
    path.mkdir()


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00garbage")


UNREADABLE = [directory, garbage]


def is_never_looser(served: ServedPolicy) -> bool:
    if served.reuse_off:
        return all(each.is_off for each in served.policy.groups)
    return all(
        of_kind.threshold >= calibrated.kinds[kind].threshold
        for group, calibrated in zip(served.policy.groups, POLICY.groups, strict=True)
        for kind, of_kind in group.kinds.items()
    )


def is_refused(folder: Path, content: bytes) -> bool:
    """Return whether this content of tightened.json switches reuse off; the content must stay unchanged."""
    (folder / "tightened.json").write_bytes(content)
    served = ServedPolicy(folder, POLICY)
    assert is_never_looser(served)
    if served.reuse_off:
        assert served.keep({FIRST: [1.0]}) is None
        assert (folder / "tightened.json").read_bytes() == content
    return bool(served.reuse_off)


@same_folder
@given(st.one_of(st.binary(max_size=60), anything.map(lambda value: json.dumps(value).encode())))
def test_invalid_file_switches_reuse_off(tmp_path, content):
    assert is_refused(tmp_path, content)


@same_folder
@given(steps=st.one_of(anything, st.lists(st.integers(), max_size=5)), windows=anything)
def test_damaged_steps_never_loosen_the_policy_and_never_raise(tmp_path, steps, windows):
    for counted in ({"groups": steps, "limit": 0}, {"groups": [1, 1, 1], "limit": steps}, steps):
        policies = {POLICY.digest: {"steps": counted, "windows": windows}}
        is_refused(tmp_path, json.dumps({"format_version": 1, "policies": policies}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"steps": {"groups": [1, 1], "limit": 0}},
        {"steps": {"groups": [1, 1, -1], "limit": 0}},
        {"steps": {"groups": [1, 1, 1]}},
        {"windows": [[{"place": 0, "band": "usual"}, [1.5]]]},
        {"windows": [[{"place": 0, "band": "usual"}, [float("inf")]]]},
        {"windows": [[{"place": 0, "band": "other"}, [1.0]]]},
        {"more": 1},
    ],
)
def test_damaged_content_is_refused(tmp_path, change):
    sound = {"steps": {"groups": [1, 1, 1], "limit": 0}, "windows": []}
    for content, refused in ((sound, False), (sound | change, True)):
        policies = {POLICY.digest: content}
        assert refused == is_refused(
            tmp_path, json.dumps({"format_version": 1, "policies": policies}).encode()
        )


@pytest.mark.parametrize(
    "content",
    [*(b'{"format_version": 2, "policies": {}}', b'{"policies": {}}'), *(b"[" * 100_000, b'{"a":' * 100_000)],
    ids=lambda content: content[:20],
)
def test_another_format_version_and_deep_nesting_are_refused(tmp_path, content):
    assert not is_refused(tmp_path, b'{"format_version": 1, "policies": {}}')
    assert is_refused(tmp_path, content)


@pytest.mark.parametrize("spoil", UNREADABLE)
def test_engine_with_an_unreadable_file_reuses_nothing(tiny_checkpoint, tiny_corpus, folder, caplog, spoil):
    engine = engine_of(tiny_checkpoint, folder)
    recorded = engine.tokenize([sentence.text for sentence in tiny_corpus[::80]])
    assert prefill(engine, recorded).outcomes == (Outcome.HIT,) * 3
    assert engine.info().reuse_off == []
    spoil(folder / "tightened.json")
    engine = engine_of(tiny_checkpoint, folder)
    (reason,) = engine.info().reuse_off
    assert reason.startswith("tightened.json cannot be read (")
    assert f"attention maps are not reused: {reason}" in caplog.text
    assert prefill(engine, recorded).outcomes == (Outcome.NOT_SEARCHED,) * 3
    assert all(each.is_off for each in engine.map_reuse.policy.groups)


@pytest.mark.parametrize("look", [MapReuse.adopt_findings, lambda reuse: reuse.keep_verified({FIRST: [1.0]})])
@pytest.mark.parametrize("spoil", UNREADABLE)
def test_file_that_becomes_unreadable_while_serving_ends_reuse(tiny_checkpoint, folder, spoil, look):
    engine = engine_of(tiny_checkpoint, folder)
    engine.map_reuse.keep_verified({})
    (folder / "tightened.json").unlink()
    spoil(folder / "tightened.json")
    for _ in range(2):
        assert look(engine.map_reuse) is None
        assert len(engine.reuse_off) == 1
    assert all(each.is_off for each in engine.map_reuse.policy.groups)


def test_database_can_be_opened_with_unreadable_findings_and_verifying_names_them(folder):
    assert AttentionDatabase.open(folder).verify() == []
    for name in ("tightened.json", "calibrated_on.json"):
        garbage(folder / name)
    database = AttentionDatabase.open(folder)
    assert database.calibrated_on([[1, 2]]) == 0
    assert [fault.split()[0] for fault in database.verify()] == ["tightened.json", "calibrated_on.json"]
    (reason,) = ServedPolicy(folder, database.manifest.policy).reuse_off
    assert "calibrate the database again" in reason


# Files that cannot be written.


def test_missing_folder_ends_reuse_and_is_not_created(tiny_checkpoint, folder):
    engine = engine_of(tiny_checkpoint, folder)
    shutil.rmtree(folder)
    tighten(engine, 0)
    assert not folder.exists()
    assert engine.reuse_off == [
        "tightened.json cannot be written (No such file or directory), so nothing would remember that the "
        "policy was found too loose; make the database's folder writable and start again"
    ]
    assert all(each.is_off for each in engine.map_reuse.policy.groups)


def test_reuse_stays_off_until_a_restart(tiny_checkpoint, folder):
    engine = engine_of(tiny_checkpoint, folder)
    (folder / ".tightened.json.lock").mkdir()
    assert engine.map_reuse.keep_verified({}) is None
    (folder / ".tightened.json.lock").rmdir()
    assert engine.map_reuse.keep_verified({}) is None
    assert len(engine.reuse_off) == 1
    again = engine_of(tiny_checkpoint, folder)
    assert again.map_reuse.keep_verified({}) is not None
    assert again.reuse_off == []


def test_steps_hold_at_the_next_start_although_other_machines_cannot_be_asked(tmp_path):
    served = ServedPolicy(tmp_path, POLICY)
    served.shared = Mock(change=Mock(side_effect=OSError("nobody answers")))
    served.tighten(0)
    now = Window(0, Band.USUAL, steps=1)
    assert served.keep({now: [0.1]}) is None
    again = ServedPolicy(tmp_path, POLICY)
    assert again.policy == after(POLICY, [0])
    # The fidelities wait for the other machines.
    assert again.keep({}).windows == ()
    served.shared = Mock(change=lambda _, change: change(None))
    assert served.keep({now: [0.1]}).windows == ((now, (0.1,)),)
    of_another_policy = b'{"steps":{"groups":[0],"limit":0},"windows":[]}'
    served.shared = Mock(change=lambda _, change: change(of_another_policy))
    assert served.keep({}) is None


def test_groups_that_pay_reuse_again_once_other_machines_can_be_asked(folder):
    reuse = MapReuse(AttentionDatabase.open(folder))
    reuse.reuse_in((0, 1))
    reuse.share_findings(Mock(change=Mock(side_effect=OSError("nobody answers"))))
    assert reuse.keep_verified({}) is None
    assert not any(map(reuse.reuses, range(3)))
    reuse.tighten(1)
    reuse.share_findings(Mock(change=lambda _, change: change(None)))
    assert reuse.keep_verified({}) is not None
    assert reuse.reuse_off == []
    # The group that was tightened meanwhile must be measured again.
    assert [*map(reuse.reuses, range(3))] == [True, False, False]


@pytest.mark.parametrize(
    ("act", "mode", "reason"),
    [(fill_the_disk, 0o755, "File too large"), (lack_permission, 0o555, "Permission denied")],
)
def test_step_that_cannot_be_written_ends_reuse(act, mode, reason):
    # tmp_path is accessible to its owner only, and the process may run as another user.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(mode)
        (told,) = forked(act, folder)()
        assert f"tightened.json cannot be written ({reason})" in told
        # The findings that were kept before are unchanged.
        assert ServedPolicy(folder, POLICY).policy == POLICY
        folder.chmod(0o755)
