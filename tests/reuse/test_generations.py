"""A renewed database: which generation serves, what is kept, and what a kill at any moment leaves."""

import os
import random
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from core_models import flip, random_text, tighten
from forked import is_killed
from generations import renew
from killed_renewals import SYNCED_AT_ONCE, TEXTS, build_and_renew, killed_after, sample

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.calibration.database import calibrate_database
from attncache_core.corpus.reservoir import TIME_STEP_SECONDS
from attncache_core.corpus.sample import read_sample, sample_folder
from attncache_core.errors import BuildFailed, CorruptDatabase, DatabaseRefused, InvalidInput
from attncache_core.heads.classifier import LinearClassifier
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps import database as database_module
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.familiarity import familiarity_name
from attncache_core.reuse.maps.generations import (
    Generation,
    Result,
    current_generation,
    kept_generations,
    read_renewals,
)
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.maps.policy_state import Tightened, merge_tightened
from attncache_core.reuse.maps.publishing import (
    begin_building,
    building_folder,
    clear_workspace,
    renewing,
    roll_back,
)
from attncache_core.runtime import files
from attncache_core.runtime.files import left_unfinished

# `make kills` sets 1000.
KILLS = int(os.environ.get("ATTNCACHE_KILLS", "20"))


@pytest.fixture
def root(tiny_database, tmp_path):
    """A plain database."""
    return Path(shutil.copytree(tiny_database, tmp_path / "a.db"))


def number_of(root):
    return AttentionDatabase.open(root).info().generation


def kept(root):
    return [generation.number for generation in kept_generations(root)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def id_of(folder):
    return AttentionDatabase.open(folder).manifest.id


def test_published_generation_is_opened_and_the_plain_one_stays(
    root, tiny_database, tiny_prototypes_database
):
    database = AttentionDatabase.open(root)
    assert (database.folder, database.info().generation, kept(root)) == (root, 0, [0])
    assert renew(root, tiny_prototypes_database) == 1
    assert id_of(root) == id_of(tiny_prototypes_database)
    assert AttentionDatabase.open(root).folder == root / "generations" / "000001"
    assert (kept(root), not (root / ".renewal").exists()) == ([0, 1], True)
    # Figures and maps of texts are the owner's.
    modes = [(root / name).stat().st_mode & 0o777 for name in ("renewals.jsonl", "generations")]
    assert modes == [0o600, 0o700]
    assert AttentionDatabase.open(root).verify() == []
    roll_back(root)
    assert id_of(root) == id_of(tiny_database)


def test_last_two_generations_are_kept_and_the_plain_one_is_removed_whole(root, tiny_prototypes_database):
    renew(root, tiny_prototypes_database)
    served = AttentionDatabase.open(root)
    # What servers and a calibration have written beside the files of the build.
    for name in ("gain.json", "calibrated_on.json", "tightened.json"):
        (root / name).touch()
        (root / f".{name}.lock").touch()
    (root / ".calibrated_on.json.lock").unlink()
    (root / "generations" / ".000001.lock").touch()
    for _ in range(2):
        renew(root, tiny_prototypes_database)
    assert kept(root) == [2, 3]
    assert names(root) == [".renewal.lock", "current", "generations", "renewals.jsonl"]
    assert names(root / "generations") == ["000002", "000003"]
    # Records that a server has mapped stay readable.
    assert not served.folder.exists()
    for segment in served.search.store.segments.values():
        assert segment.are_sound(np.arange(len(segment))).all()


def test_refused_generation_is_removed_and_its_number_is_not_used_again(root, tiny_prototypes_database):
    assert renew(root, tiny_prototypes_database, Result.REFUSED) == 1
    assert (number_of(root), kept(root)) == (0, [0])
    assert not (root / ".renewal").exists()
    assert renew(root, tiny_prototypes_database) == 2
    info = AttentionDatabase.open(root).info()
    assert info.renewals == {"published": 1, "refused": 1, "no_gain": 0, "rolled_back": 0}
    assert info.last_renewal["generation"] == 2


def test_rollback_goes_back_once_and_the_next_generation_has_a_new_number(root, tiny_prototypes_database):
    renew(root, tiny_prototypes_database)
    renew(root, tiny_prototypes_database)
    assert roll_back(root).generation == 1
    assert (number_of(root), kept(root)) == (1, [1, 2])
    with pytest.raises(InvalidInput, match=r"before generation 1.*only 1, 2; .* write its number into"):
        roll_back(root)
    for number in (2, 1):  # a rollback that was a mistake, and the way back
        (root / "current").write_text(f"{number}\n")
        assert number_of(root) == number
    assert renew(root, tiny_prototypes_database) == 3
    assert (number_of(root), kept(root)) == (3, [1, 3])
    assert [(line.result, line.generation) for line in read_renewals(root)] == [
        ("published", 1),
        ("published", 2),
        ("rolled_back", 1),
        ("published", 3),
    ]


@pytest.mark.parametrize(("published", "remain"), [(1, [0, 1]), (2, [1, 2])])
def test_rollback_from_a_generation_that_is_not_there_keeps_the_one_before(
    root, tiny_prototypes_database, published, remain
):
    for _ in range(published):
        renew(root, tiny_prototypes_database)
    (root / "current").write_text("9\n")
    assert roll_back(root).generation == published
    assert (number_of(root), kept(root)) == (published, remain)
    assert roll_back(root).generation == published - 1


def test_error_for_a_renewed_database_without_current_says_what_to_write(root, tiny_prototypes_database):
    for _ in range(2):
        renew(root, tiny_prototypes_database)
    (root / "current").unlink()
    with pytest.raises(DatabaseRefused, match=r"current is missing; write the number .* such as 2"):
        AttentionDatabase.open(root)
    (root / "current").mkdir()
    with pytest.raises(CorruptDatabase, match="current cannot be read: Is a directory"):
        AttentionDatabase.open(root)


def test_rollback_that_was_killed_is_finished_and_not_repeated(root, tiny_prototypes_database, monkeypatch):
    for _ in range(2):
        renew(root, tiny_prototypes_database)
    with monkeypatch.context() as patch:
        patch.setattr("attncache_core.reuse.maps.publishing.settle", lambda *_: None)
        roll_back(root)
    assert number_of(root) == 2
    assert roll_back(root).generation == 1
    assert (number_of(root), [line.generation for line in read_renewals(root)]) == (1, [1, 2, 1])


def test_rollback_takes_back_a_publication_that_was_killed(root, tiny_prototypes_database, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("attncache_core.reuse.maps.publishing.settle", lambda *_: None)
        renew(root, tiny_prototypes_database)
    assert roll_back(root).generation == 0
    assert (number_of(root), [line.generation for line in read_renewals(root)]) == (0, [1, 0])


def test_rollback_to_a_generation_that_was_removed_by_hand_meanwhile_changes_nothing(
    root, tiny_prototypes_database, monkeypatch
):
    for _ in range(2):
        renew(root, tiny_prototypes_database)
    with monkeypatch.context() as patch:
        patch.setattr("attncache_core.reuse.maps.publishing.settle", lambda *_: None)
        roll_back(root)
    shutil.rmtree(root / "generations" / "000001")
    with renewing(root):
        assert (number_of(root), kept(root)) == (2, [2])


def test_findings_of_verification_stay_with_their_generation(root, tiny_prototypes_database):
    renew(root, tiny_prototypes_database)
    database = AttentionDatabase.open(root)
    merge_tightened(database.folder, database.search.policy, Tightened(database.search.policy.steps))
    renew(root, tiny_prototypes_database)
    assert not (AttentionDatabase.open(root).folder / "tightened.json").exists()
    roll_back(root)
    assert (AttentionDatabase.open(root).folder / "tightened.json").exists()


@pytest.mark.parametrize("name", ["manifest.json", "key", "projector.safetensors", "index", "maps"])
def test_file_of_another_generation_is_refused(root, tiny_prototypes_database, name):
    renew(root, tiny_prototypes_database)
    ours, other = root / "generations" / "000001" / name, root / name
    if ours.is_dir():
        ours, other = (sorted(folder.iterdir())[0] for folder in (ours, other))
    shutil.copyfile(other, ours)
    with pytest.raises(CorruptDatabase, match="--rollback"):
        AttentionDatabase.open(root)


def test_remedy_for_a_damaged_generation_removes_nothing_that_serves(root, tiny_prototypes_database):
    renew(root, tiny_prototypes_database)
    flip(root / "projector.safetensors", 100)
    (fault,) = AttentionDatabase.open(root).verify()
    assert "generation 0 does not serve" in fault
    with pytest.raises(CorruptDatabase, match="generation 0 does not serve"):
        roll_back(root)
    assert number_of(root) == 1
    (root / "current").write_text("0\n", encoding="ascii")
    with pytest.raises(CorruptDatabase, match="to let generation 1 serve, write this number"):
        AttentionDatabase.open(root)
    shutil.rmtree(root / "generations")
    with pytest.raises(CorruptDatabase, match=r"remove .* and build it again"):
        AttentionDatabase.open(root)


@pytest.mark.parametrize("other", ["renews", "has renewed", "has calibrated"])
def test_calibration_and_renewal_exclude_each_other(root, tiny_engine, tiny_prototypes_database, other):
    database = AttentionDatabase.open(root)
    with ExitStack() as stack:
        if other == "renews":
            stack.enter_context(renewing(root))
        elif other == "has renewed":
            renew(root, tiny_prototypes_database)
        else:
            files = database.keep_decisions(LinearClassifier(("a",), np.eye(1), np.zeros(1), "f", "m", {}))
            replace(database.manifest, files=files).write(root)
        before = (root / "manifest.json").read_bytes()
        words = "renews or calibrates" if other == "renews" else "calibrate again"
        stack.enter_context(pytest.raises(BuildFailed, match=words))
        calibrate_database(tiny_engine, database, [], (), Budget(Measure.COSINE, 0.5))
    assert (root / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        *((content, CorruptDatabase, "current is damaged") for content in (b"", b"7", b"\x37\x8a", b"-1\n")),
        (b"../a\n", CorruptDatabase, "current is damaged"),
        (b"9\n", DatabaseRefused, "names generation 9"),
    ],
)
def test_current_that_is_damaged_or_names_no_generation_is_refused(root, content, error, words):
    (root / "current").write_bytes(content)
    with pytest.raises(error, match=words):
        AttentionDatabase.open(root)


def test_database_opens_although_its_generation_is_removed_meanwhile(
    root, tiny_prototypes_database, monkeypatch
):
    renew(root, tiny_prototypes_database)
    open_generation = AttentionDatabase.open_generation.__func__
    opened = []

    def late(cls, generation, **options):
        opened.append(generation.number)
        if len(opened) == 1:
            for _ in range(2):
                with monkeypatch.context() as undone:
                    undone.undo()
                    renew(root, tiny_prototypes_database)
        return open_generation(cls, generation, **options)

    monkeypatch.setattr(AttentionDatabase, "open_generation", classmethod(late))
    assert AttentionDatabase.open(root).info().generation == 3
    assert opened == [1, 3]


def test_database_opens_although_a_calibration_ends_meanwhile(root, monkeypatch):
    manifest = AttentionDatabase.open(root).manifest
    old = familiarity_name(manifest.files)
    renamed = old.replace("-", "-0", 1)

    def late(folder, files, indexed, real=database_module.require_unchanged):
        if (folder / old).exists():
            (folder / old).rename(folder / renamed)
            changed = {renamed if name == old else name: digest for name, digest in manifest.files.items()}
            replace(manifest, files=changed).write(folder)
        real(folder, files, indexed)

    monkeypatch.setattr(database_module, "require_unchanged", late)
    assert renamed in AttentionDatabase.open(root).manifest.files
    (root / renamed).unlink()
    with pytest.raises(CorruptDatabase, match="is missing or cannot be read; remove"):
        AttentionDatabase.open(root)


def test_folder_without_a_database_is_refused_and_gets_no_lock(tmp_path):
    with pytest.raises(DatabaseRefused, match=r"no manifest\.json"), renewing(tmp_path):
        pass
    assert names(tmp_path) == []


def test_second_renewal_says_which_process_renews(root):
    lock = root / ".renewal.lock"
    for left in ("", f"{2**31}"):  # by a process that has ended
        lock.write_text(left)
        with renewing(root):
            with pytest.raises(BuildFailed, match=f"process {os.getpid()} renews"), renewing(root):
                pass
            lock.write_text("")  # as before the holder has written its id
            with pytest.raises(BuildFailed, match="another process renews"), renewing(root):
                pass


def test_lines_that_are_damaged_are_reported_and_kept(root, tiny_prototypes_database):
    renew(root, tiny_prototypes_database)
    lines = root / "renewals.jsonl"
    lines.write_bytes(b"garbage\n" + lines.read_bytes())
    assert AttentionDatabase.open(root).verify() == [f"1 of 2 lines of {lines} cannot be read"]
    renew(root, tiny_prototypes_database)
    assert lines.read_bytes().startswith(b"garbage\n")
    assert len(read_renewals(root)) == 2
    lines.write_bytes(lines.read_bytes() + b"cut sho")
    renew(root, tiny_prototypes_database)
    assert len(read_renewals(root)) == 3
    lines.unlink()
    lines.mkdir()
    assert AttentionDatabase.open(root).info().last_renewal is None


def test_verify_names_what_no_renewal_leaves(root, tiny_prototypes_database):
    renew(root, tiny_prototypes_database)
    generations = root / "generations"
    shutil.copytree(generations / "000001", generations / "000005")
    for name in ("notes", ".000001.lock"):
        (generations / name).touch()
    assert AttentionDatabase.open(root).verify() == [
        f"{root} has more than 2 generations: 0, 1, 5",
        f"{generations / 'notes'} is no generation",
    ]


def test_verify_reads_the_generation_that_does_not_serve_too(root, tiny_prototypes_database):
    renew(root, tiny_prototypes_database)
    segment = root / "generations" / "000001" / "maps" / "00007.maps"
    flip(segment, 2 * 4096)  # the records begin behind a page of header and a page of table
    roll_back(root)
    (fault,) = AttentionDatabase.open(root).verify()
    assert fault.startswith("generation 1, length ")


def test_full_disk_changes_nothing_and_the_next_renewal_finishes_the_decision(
    root, tiny_prototypes_database, monkeypatch
):
    renew(root, tiny_prototypes_database)
    write_whole, written = files.write_whole, []

    def full(path, content, mode=0o666):
        written.append(path.name)
        if path.name == "renewals.jsonl":
            raise OSError(28, "No space left on device", str(path))
        write_whole(path, content, mode)

    with monkeypatch.context() as patch:
        patch.setattr("attncache_core.reuse.maps.publishing.write_whole", full)
        with pytest.raises(OSError, match="No space left"):
            renew(root, tiny_prototypes_database)
    assert written == ["decision.json", "renewals.jsonl"]
    assert (number_of(root), kept(root)) == (1, [0, 1])
    assert AttentionDatabase.open(root).verify() == []
    with renewing(root):
        assert (number_of(root), kept(root)) == (2, [1, 2])


def test_folder_that_cannot_be_written_is_left_as_it_is(root, tiny_prototypes_database):
    # A folder at the path of the lock; file permissions would not stop root.
    (root / ".renewal.lock").mkdir()
    with pytest.raises(OSError, match="directory"):
        renew(root, tiny_prototypes_database)
    assert number_of(root) == 0


def test_decision_that_was_damaged_on_the_disk_is_not_done(root, tiny_prototypes_database):
    renew(root, tiny_prototypes_database)
    (root / ".renewal").mkdir()
    (root / ".renewal" / "decision.json").write_bytes(b"\x00")
    with renewing(root):
        assert number_of(root) == 1
    assert not (root / ".renewal").exists()


def test_kills_at_any_moment_leave_a_whole_generation(root, tiny_database, tiny_prototypes_database):
    chance, builds = random.Random(0), (tiny_database, tiny_prototypes_database)
    held, killed, ids = AttentionDatabase.open(root), 0, {0: id_of(tiny_database)}
    while killed < KILLS:
        result = chance.choice([Result.PUBLISHED, Result.PUBLISHED, Result.REFUSED])
        work = (renew, root, chance.choice(builds), result)
        if kept(root)[0] < number_of(root) and chance.random() < 0.3:
            work = (roll_back, root)
        # A renewal makes up to 80 of these calls, and more if it finishes another one.
        killed += is_killed(killed_after, chance.randint(1, 80), *work)
        database = AttentionDatabase.open(root)
        assert database.verify() == []
        number = database.generation.number
        decided = [line.generation for line in read_renewals(root) if line.result is Result.PUBLISHED]
        assert number in (0, *decided)
        assert decided == sorted(set(decided))
        assert ids.setdefault(number, database.manifest.id) == database.manifest.id
        assert number in kept(root)
        if killed % 10 == 0:  # what a server has opened before stays readable
            for segment in held.search.store.segments.values():
                assert segment.are_sound(np.arange(len(segment))).all()
            held = database
    last = renew(root, tiny_database)
    assert current_generation(root) == Generation(root, last)
    assert {*names(root)} - {".gain.json.lock"} <= {
        *(".renewal.lock", "current", "generations", "renewals.jsonl"),
        *(names(tiny_database) if kept(root)[0] == 0 else ()),
    }
    decided = [line.generation for line in read_renewals(root) if line.result != Result.ROLLED_BACK]
    assert decided == sorted(set(decided))
    assert len(kept(root)) == 2


@pytest.mark.usefixtures("fixed_costs")
def test_kills_while_a_generation_is_built_and_judged_lose_nothing(
    tiny_engine, tiny_checkpoint, tiny_corpus, tmp_path
):
    root, corpus = tmp_path / "a.db", tmp_path / "asked.txt"
    options = BuildOptions(heads="3", min_cosine=0.5, min_text_cosine=0.0, prototypes=4, training_steps=10)
    build_database(tiny_engine, tiny_corpus[::3], root, options)
    tighten(root)  # so there is something to gain
    random_words = np.random.default_rng(99)
    texts = [random_text(random_words, words) for words in np.repeat(np.arange(4, 8), 60)]
    corpus.write_text("\n".join(texts), encoding="utf-8")
    work, calls = (build_and_renew, root, tiny_checkpoint.folder, corpus), 8
    while is_killed(killed_after, calls, *work):
        database = AttentionDatabase.open(root)
        assert database.verify() == []
        assert database.generation.number in (0, 1)
        calls *= 3  # a resumed build repeats nothing that was finished
    assert AttentionDatabase.open(root).generation.number == 1
    assert AttentionDatabase.open(root).verify() == []
    assert not (root / ".renewal").exists()
    # If a kill comes behind the publication, the next process renews again, and there is nothing to gain.
    published, *again = [renewal.result for renewal in read_renewals(root)]
    assert (published, {*again} - {Result.REFUSED}) == (Result.PUBLISHED, set())


def test_kills_at_any_moment_lose_no_synced_text_of_a_sample(tmp_path):
    chance, synced = random.Random(0), tmp_path / "synced"
    synced.write_text("0", encoding="utf-8")
    for _ in range(KILLS):
        assert is_killed(killed_after, chance.randint(1, 80), sample, tmp_path, synced)
        number = int(synced.read_text(encoding="utf-8"))
        assert len(left_unfinished(sample_folder(tmp_path))) <= 1  # of the last kill
        read = {text.token_ids[0]: text.asked_at // TIME_STEP_SECONDS for text in read_sample(tmp_path)}
        assert len(read) >= min(number, TEXTS)
        assert all(read[text % TEXTS] >= text // TEXTS for text in range(max(number - TEXTS, 0), number))
        assert max(read.values(), default=0) <= (number + SYNCED_AT_ONCE) // TEXTS
    assert number > TEXTS
    # An entry has 28 bytes. The log is written anew when it has twice the size of what the sample holds.
    assert (sample_folder(tmp_path) / "0.log").stat().st_size <= (2 * TEXTS + SYNCED_AT_ONCE + 2) * 28


def test_files_that_a_server_writes_at_this_moment_stay(root):
    ours, server = root / ".current.0123.unfinished", root / ".tightened.json.0123.unfinished"
    for path in (ours, server):
        path.touch()
    with renewing(root):
        assert (ours.exists(), server.exists()) == (False, True)


def test_process_that_is_killed_while_it_clears_up_leaves_no_half_build_to_go_on_with(
    root, tiny_database, monkeypatch
):
    workspace = building_folder(root).parent
    workspace.mkdir()
    shutil.copytree(tiny_database, building_folder(root))
    for name in ("inputs", "decision.json"):
        (workspace / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            clear_workspace(root)
    assert names(workspace) == ["000001", "decision.json"]
    clear_workspace(root)
    assert not workspace.exists()


def test_workspace_is_prepared_again_if_that_was_stopped(root):
    with pytest.raises(ZeroDivisionError):
        begin_building(root, b"texts", lambda: 1 / 0)
    prepared = []
    for _ in range(2):
        begin_building(root, b"texts", lambda: prepared.append(True))
    assert prepared == [True]
