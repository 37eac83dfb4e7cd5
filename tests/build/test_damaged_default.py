"""A damaged default database is detected, and renamed once even if several servers find it."""

import errno
import io
import json
import os
import shutil
import threading
import time
from dataclasses import replace

import pytest
from forked import forked

from attncache_core import CorruptDatabase, InvalidInput, open_default_database, set_damaged_aside
from attncache_core.heads.classifier import nearest_label
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.default import default_database_folder
from attncache_core.runtime.files import locked


@pytest.fixture
def cache(tiny_checkpoint, tiny_database, tmp_path):
    """A cache folder with the tiny database as the tiny model's default database."""
    shutil.copytree(tiny_database, default_database_folder(tiny_checkpoint, tmp_path))
    return tmp_path


@pytest.fixture
def folder(tiny_checkpoint, cache):
    return default_database_folder(tiny_checkpoint, cache)


def change_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_decisions(folder, engine):
    """Change the classifier file after the calibration for its decisions."""
    database = AttentionDatabase.open(folder)
    labels = nearest_label(("a", "b"), engine.embed(["my card", "the bank"]), fingerprint="f", model="m")
    replace(database.manifest, files=database.keep_decisions(labels)).write(folder)
    change_byte(next(folder.glob("decisions-*/classifier.json")))


def change_manifest(folder, **entries):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | entries), encoding="utf-8")


DAMAGES = {
    "a byte of an index": lambda folder, _: change_byte(next(folder.glob("index/*.faiss"))),
    "a byte of the projector": lambda folder, _: change_byte(folder / "projector.safetensors"),
    "a segment cut short": lambda folder, _: os.truncate(next(folder.glob("maps/*.maps")), 5000),
    "a segment gone": lambda folder, _: next(folder.glob("maps/*.maps")).unlink(),
    "a manifest of garbage": lambda folder, _: (folder / "manifest.json").write_bytes(b"\xff\x00garbage"),
    "a manifest of other JSON": lambda folder, _: (folder / "manifest.json").write_text("[]"),
    "no manifest": lambda folder, _: (folder / "manifest.json").unlink(),
    "another format": lambda folder, _: change_manifest(folder, format_version=1),
    "another model": lambda folder, _: change_manifest(folder, fingerprint="f" * 64),
    "changed decisions": change_decisions,
    "an empty folder": lambda folder, _: (shutil.rmtree(folder), folder.mkdir()),
    "a file instead of the folder": lambda folder, _: (shutil.rmtree(folder), folder.write_bytes(b"")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_default_database_is_refused_and_set_aside_unchanged(
    tiny_checkpoint, tiny_engine, cache, folder, damage
):
    damage(folder, tiny_engine)
    files = contents(folder)
    with pytest.raises(CorruptDatabase, match="the default database is damaged"):
        open_default_database(tiny_checkpoint, cache)
    aside = set_damaged_aside(tiny_checkpoint, cache)
    assert aside.name.startswith(f"{folder.name}.damaged-")
    assert aside.parent == folder.parent
    assert contents(aside) == files
    assert not folder.exists()


def contents(folder):
    """Return the bytes of every file by its relative path. `folder` may also be a file."""
    paths = [path for path in (folder, *folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_sound_or_missing_database_is_not_set_aside_also_if_an_override_cannot_be_served(
    tiny_checkpoint, cache, folder
):
    assert open_default_database(tiny_checkpoint, cache).verify() == []
    with pytest.raises(InvalidInput):
        open_default_database(tiny_checkpoint, cache, heads="all the best")
    assert open_default_database(tiny_checkpoint, cache, threshold=0.7).search.policy.groups
    assert set_damaged_aside(tiny_checkpoint, cache) is None
    assert folder.is_dir()
    assert set_damaged_aside(tiny_checkpoint, cache / "absent") is None


def test_only_the_last_damaged_database_is_kept(tiny_checkpoint, tiny_database, cache, folder):
    asides = []
    for _ in range(3):
        (folder / "manifest.json").unlink()
        asides.append(set_damaged_aside(tiny_checkpoint, cache))
        shutil.copytree(tiny_database, folder)
    assert len(set(asides)) == 3
    assert [path for path in folder.parent.iterdir() if "damaged" in path.name] == [asides[-1]]


def test_only_one_of_several_processes_sets_the_database_aside(tiny_checkpoint, cache, folder):
    (folder / "manifest.json").unlink()
    others = [forked(set_damaged_aside, tiny_checkpoint, cache) for _ in range(2)]
    told = sorted(str(told_by_other()) for told_by_other in others)
    assert told[0].startswith(f"{folder}.damaged-")
    assert told[1] == "None"
    assert len(list(folder.parent.glob("*damaged*"))) == 1


def test_database_that_another_process_rebuilt_is_not_set_aside(
    tiny_checkpoint, tiny_database, cache, folder
):
    """One process sets the damaged database aside and builds under the lock while this process waits."""
    (folder / "manifest.json").unlink()
    aside = folder.with_name(f"{folder.name}.damaged-earlier")
    found = []
    with locked(folder, on_wait=lambda: None):
        late = threading.Thread(target=lambda: found.append(set_damaged_aside(tiny_checkpoint, cache)))
        late.start()
        time.sleep(0.3)  # without the lock, the other thread would rename the folder now
        folder.rename(aside)
        shutil.copytree(tiny_database, folder)
    late.join(timeout=240)
    assert found == [None]
    assert open_default_database(tiny_checkpoint, cache).verify() == []
    assert aside.is_dir()


def test_folder_that_cannot_be_renamed_raises_oserror(tiny_checkpoint, cache, folder):
    (folder / "manifest.json").unlink()
    # Root may write to a folder without write permission, so a folder blocks the path of the lock file.
    (folder.parent / f".{folder.name}.lock").mkdir()
    with pytest.raises(OSError, match="lock"):
        set_damaged_aside(tiny_checkpoint, cache)
    assert folder.is_dir()


@pytest.mark.parametrize("refusal", [errno.EACCES, errno.EMFILE, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("file", ["manifest.json", "key", "projector.safetensors", "current"])
def test_database_that_the_system_does_not_let_us_read_is_no_damaged_one(
    tiny_checkpoint, cache, folder, monkeypatch, file, refusal
):
    opened = io.open

    def refusing(path, *args, **options):
        if str(path).endswith(file) and folder.name in str(path):
            raise OSError(refusal, os.strerror(refusal), str(path))
        return opened(path, *args, **options)

    files = contents(folder)
    with monkeypatch.context() as patched:
        patched.setattr(io, "open", refusing)
        with pytest.raises(CorruptDatabase, match="the default database cannot be read") as caught:
            open_default_database(tiny_checkpoint, cache)
        with pytest.raises(OSError, match=os.strerror(refusal)):
            set_damaged_aside(tiny_checkpoint, cache)
    assert "build it again" not in str(caught.value)
    assert contents(folder) == files
