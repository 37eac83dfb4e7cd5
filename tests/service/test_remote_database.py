"""Databases in object stores: pushed as a whole or not at all, downloaded once, checked, and followed."""

import errno
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run, succeeded
from core_models import flip
from forked import is_killed
from killed_transfers import download_until_killed, push_until_killed
from store_server import object_store

from attncache_core import (
    AttentionDatabase,
    AttnCacheError,
    BuildFailed,
    CorruptDatabase,
    DatabaseRefused,
    InvalidInput,
    PrefillEngine,
)
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps import publishing
from attncache_core.reuse.maps.database import verify_generations
from attncache_core.reuse.maps.generations import (
    current_generation,
    kept_generations,
    read_renewals,
    structural_faults,
)
from attncache_core.reuse.maps.policy import Budget, Steps
from attncache_core.reuse.maps.policy_state import Tightened, kept_steps, merge_tightened
from service.loading import pushing
from service.loading import remote as remote_module
from service.loading.engines import load_engines
from service.loading.remote import POINTER, RemoteDatabase, with_remote_database
from service.loading.renewals import with_renewals
from service.objects import ObjectFolder
from service.settings.reading import read_settings
from service.state import FetchFailed, Pause

SECRET = "zanzibar"  # a secret of a URL, which nothing may show


@pytest.fixture
def store():
    with object_store() as running:
        yield running


@pytest.fixture
def other(tiny_prototypes_database, tmp_path):
    return Path(shutil.copytree(tiny_prototypes_database, tmp_path / "other.db"))


def pushed(root, url):
    return pushing.push(root, url, lambda *_: None)


def followed(url, tmp_path, checkpoint):
    """Return the folder of the cache after one look."""
    remote = RemoteDatabase(url, tmp_path / "cache", checkpoint)
    list(remote.fetch(waits=True))
    return remote


# Of the machine, or of all generations.
NOT_SENT = ("gain.json", "current", "renewals.jsonl")


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.name not in NOT_SENT
    }


def refused(url, tmp_path, checkpoint, *words):
    with pytest.raises((AttnCacheError, OSError)) as raised:
        followed(url, tmp_path, checkpoint)
    told = f"{raised.value} {getattr(raised.value, 'filename', '')}"
    assert SECRET not in told
    for word in words:
        assert word in told, told


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_pushed_database_is_downloaded_with_every_byte_and_only_changes_are_sent(
    scheme, store, root, other, tmp_path, tiny_checkpoint
):
    url = store.s3 % "a" if scheme == "s3" else (tmp_path / "store").as_uri()
    (root / "tightened.json").write_bytes(b'{"format_version": 1, "policies": {}}')
    for name, content in zip(NOT_SENT, (b"[]", b"0\n", b""), strict=True):
        (root / name).write_bytes(content)
    shown = succeeded(run("push", root, url))
    count = len(files_of(root))
    assert f"{count} of {count} files sent" in shown
    assert "endpoint" not in shown
    assert "holds this database already" in pushed(root, url)
    (root / "tightened.json").write_bytes(b'{"format_version": 1, "policies": { }}')
    assert "1 of" in pushed(root, url)

    reader = url if scheme == "file" else store.http % "a"
    remote = followed(reader, tmp_path, tiny_checkpoint)
    first = current_generation(remote.root)
    assert files_of(first.folder) == files_of(root)
    assert (first.folder / "key").stat().st_mode & 0o777 == 0o600
    assert not list(structural_faults(remote.root))
    assert not [fault for found in verify_generations(remote.root) for fault in found.faults]

    pushed(other, url)
    list(remote.fetch(waits=True))
    assert files_of(current_generation(remote.root).folder) == files_of(other)
    pushed(root, url)
    list(remote.fetch(waits=True))
    assert current_generation(remote.root).number == 1
    assert [generation.number for generation in kept_generations(remote.root)] == [1, 2]


def test_push_of_the_same_database_sends_missing_and_damaged_objects_again(store, root, monkeypatch):
    pushed(root, store.s3 % "a")
    whole = dict(store.objects)
    missing, damaged = sorted(whole, key=lambda name: len(whole[name]))[-2:]
    monkeypatch.setattr(pushing, "RANGE_BYTES", len(whole[damaged]) // 3)
    for findings, sent in ((None, "2 of"), (b"{}", "3 of")):
        store.objects[damaged] = b"x" * len(whole[damaged])
        del store.objects[missing]
        if findings is not None:
            (root / "tightened.json").write_bytes(findings)
        assert sent in pushed(root, store.s3 % "a")
        assert [store.objects[name] for name in (damaged, missing)] == [whole[damaged], whole[missing]]


def test_push_that_is_killed_leaves_the_present_database_and_goes_on(root, other, tmp_path, tiny_checkpoint):
    url = (tmp_path / "store").as_uri()
    pushed(other, url)
    assert is_killed(push_until_killed, root, url, 9)
    served = followed(url, tmp_path, tiny_checkpoint)
    assert files_of(current_generation(served.root).folder) == files_of(other)
    count, id_of_root = len(files_of(root)), AttentionDatabase.open(root).manifest.id
    left = [tmp_path / "store" / below / ".x.1.unfinished" for below in ("", id_of_root)]
    for path in left:
        path.write_bytes(b"x")
    assert f"{count - 9} of {count} files sent" in pushed(root, url)
    assert not [path for path in left if path.exists()]


def test_database_that_is_calibrated_while_it_is_read_is_not_pushed(root, tmp_path, monkeypatch):
    url = (tmp_path / "store").as_uri()

    def digest(path, real=pushing.file_digest):
        found = real(path)
        if path.name == "manifest.json":
            (root / changed).write_bytes((root / changed).read_bytes() + more)
        return found

    (root / "tightened.json").write_bytes(b"{}")
    with monkeypatch.context() as patched:
        patched.setattr(pushing, "file_digest", digest)
        changed, more = "projector.safetensors", b""
        with pytest.raises(OSError, match="changed while it was read; push"):
            pushed(root, url)
        assert not (tmp_path / "store" / POINTER).exists()
        # A server that verifies hits writes what it finds out at any time.
        changed, more = "tightened.json", b" "
        assert "files sent" in pushed(root, url)
    assert "1 of" in pushed(root, url)


def test_database_with_a_damaged_record_is_not_pushed(root, tmp_path):
    flip(root / "maps" / "00007.maps", 2 * 4096)
    with pytest.raises(CorruptDatabase, match="length 7: 1 damaged records, the first is 0"):
        pushed(root, (tmp_path / "store").as_uri())
    assert not list((tmp_path / "store").iterdir())


def test_file_that_is_changed_while_it_is_sent_is_not_pushed(root, tmp_path, monkeypatch):
    path = root / "projector.safetensors"
    other = bytes(path.stat().st_size)
    # What is called after the digests are read, and before the files are sent.
    monkeypatch.setattr(ObjectFolder, "remove_unfinished", lambda *_: path.write_bytes(other))
    monkeypatch.setattr(pushing, "RANGE_BYTES", 1000)
    with pytest.raises(OSError, match="changed while it was sent; push again"):
        pushed(root, (tmp_path / "store").as_uri())
    assert not (tmp_path / "store" / POINTER).exists()


@pytest.mark.parametrize("withdrawn", [False, True])
@pytest.mark.parametrize("ends_in", ["_finish", "_switch_to", "clear_workspace"])
def test_killed_download_is_published_from_what_is_there_unless_it_was_withdrawn_before_it_served(
    root, other, tmp_path, tiny_checkpoint, monkeypatch, ends_in, withdrawn
):
    url = (tmp_path / "store").as_uri()
    pushed(root, url)
    remote = followed(url, tmp_path, tiny_checkpoint)
    pushed(other, url)
    step = getattr(publishing, ends_in)
    with monkeypatch.context() as patched:
        patched.setattr(
            publishing, ends_in, lambda *given: 1 / 0 if publishing.is_decided(remote.root) else step(*given)
        )
        with pytest.raises(ZeroDivisionError):
            list(remote.fetch(waits=True))
    served = ends_in == "clear_workspace"
    if withdrawn:
        pushed(root, url)
    for folder in (tmp_path / "store").glob("*/"):
        shutil.rmtree(folder)  # nothing is downloaded again
    list(remote.fetch(waits=True))
    assert not (remote.root / ".renewal").exists()
    assert not list(structural_faults(remote.root))
    assert files_of(current_generation(remote.root).folder) == files_of(root if withdrawn else other)
    lines = [1] if withdrawn and not served else [1, 2, 1] if withdrawn else [1, 2]
    assert [line.generation for line in read_renewals(remote.root)] == lines
    assert [generation.number for generation in kept_generations(remote.root)] == lines[:2]


@pytest.mark.parametrize("damaged", [False, True])
def test_database_that_is_named_again_serves_with_what_was_found_out_about_it(
    root, other, tmp_path, tiny_checkpoint, damaged
):
    url = (tmp_path / "store").as_uri()
    manifest = AttentionDatabase.open(root).manifest
    policy = replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))
    replace(manifest, policy=policy).write(root)
    pushed(root, url)
    remote = followed(url, tmp_path, tiny_checkpoint)
    first = current_generation(remote.root)
    groups = len(policy.groups)
    merge_tightened(first.folder, policy, Tightened(Steps((2,) * groups, 0)))
    pushed(other, url)
    list(remote.fetch(waits=True))
    merge_tightened(root, policy, Tightened(Steps((1,) * groups, 1)))
    pushed(root, url)
    if damaged:
        (first.folder / "projector.safetensors").write_bytes(b"")
    list(remote.fetch(waits=True))
    serving = current_generation(remote.root)
    assert serving.number == (3 if damaged else 1)
    assert kept_steps(serving.folder, policy) == Steps(((1 if damaged else 2),) * groups, 1)
    assert not (remote.root / ".renewal").exists()


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_of_two_pushes_at_once_one_wins_as_a_whole(
    scheme, store, root, other, tmp_path, tiny_checkpoint, monkeypatch
):
    url = store.s3 % "a" if scheme == "s3" else (tmp_path / "store").as_uri()
    meet, send = threading.Barrier(2), pushing._send

    def send_together(*arguments, **options):
        sent = send(*arguments, **options)
        meet.wait(240)  # both have seen the same pointer, and written nothing of it yet
        return sent

    monkeypatch.setattr(pushing, "_send", send_together)
    outcomes = {}

    def attempt(folder):
        try:
            outcomes[folder] = pushed(folder, url)
        except InvalidInput as error:
            outcomes[folder] = str(error)

    threads = [threading.Thread(target=attempt, args=(folder,)) for folder in (root, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    lost = [folder for folder, told in outcomes.items() if "push again" in told]
    assert len(lost) == 1
    (won,) = {root, other} - set(lost)
    served = followed(url, tmp_path, tiny_checkpoint)
    assert files_of(current_generation(served.root).folder) == files_of(won)


def test_download_that_is_killed_goes_on_with_what_it_has(store, root, tmp_path, tiny_checkpoint):
    pushed(root, store.s3 % "a")
    assert is_killed(download_until_killed, store.http % "a", tmp_path / "cache", tiny_checkpoint, 8)
    remote = RemoteDatabase(store.http % "a", tmp_path / "cache", tiny_checkpoint)
    assert not remote.is_there
    (target,) = (path for path in (remote.root / ".renewal").iterdir() if path.is_dir())
    kept = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert kept > 0
    before = len(store.requests)
    list(remote.fetch(waits=True))
    assert files_of(current_generation(remote.root).folder) == files_of(root)
    read = [path for method, path in store.requests[before:] if method == "GET"]
    assert len(read) <= len(files_of(root)) + 1


def test_workers_and_servers_of_a_machine_download_once(store, root, tmp_path, tiny_checkpoint):
    pushed(root, store.s3 % "a")
    before = len(store.requests)
    arguments = store.http % "a", tmp_path, tiny_checkpoint
    threads = [threading.Thread(target=followed, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    objects = [path for method, path in store.requests[before:] if method == "GET" and POINTER not in path]
    assert len(objects) == len(set(objects)) > 0


def test_download_of_another_process_is_waited_for_at_the_start_alone_and_is_said_once(
    store, root, tmp_path, tiny_checkpoint, monkeypatch
):
    monkeypatch.setattr(remote_module, "_WAIT_SECONDS", 0.001)
    pushed(root, store.s3 % "a")
    remote = RemoteDatabase(store.http % "a", tmp_path, tiny_checkpoint)
    remote.root.mkdir(parents=True)
    with publishing.renewing(remote.root, begins=True):
        assert list(remote.fetch(waits=False)) == []
        waiting = remote.fetch(waits=True)
        assert next(waiting) == f"another process downloads the database from {remote.url}"
        with monkeypatch.context() as patch:
            patch.setattr(remote_module, "_LONGEST_WAIT_SECONDS", 0.1)
            lines = []
            with pytest.raises(BuildFailed):
                lines.extend(remote.fetch(waits=True))
        assert len(lines) == 1
    assert "downloading" in next(waiting)
    assert list(waiting)
    assert remote.is_there


def test_what_is_missing_short_changed_or_of_another_model_is_refused_with_url_and_reason(
    store, root, tmp_path, tiny_checkpoint, tiny_classifier_checkpoint
):
    secret = f"http://user:{SECRET}@127.0.0.1:{store.port}/bucket/a?sig={SECRET}"
    url = store.http % "a"
    refused(secret, tmp_path, tiny_checkpoint, url, "not there")
    pushed(root, store.s3 % "a")
    pointer = json.loads(store.objects[f"/bucket/a/{POINTER}"])
    largest = max(pointer["files"].values(), key=lambda file: file["bytes"])
    name = f"/bucket/a/{pointer['id']}/{largest['sha256']}"
    whole = store.objects[name]
    for content, word in ((None, "not there"), (whole[:-1], "instead of"), (b"x" + whole[1:], "other bytes")):
        store.objects.pop(name)
        if content is not None:
            store.objects[name] = content
        refused(secret, tmp_path, tiny_checkpoint, url, word)
        store.objects[name] = whole
    store.fail = lambda _method, path: 403 if path == name else None
    refused(secret, tmp_path, tiny_checkpoint, "access is refused")
    store.fail = lambda _method, _path: None
    before = len(store.requests)
    for _ in range(2):
        refused(secret, tmp_path / "other", tiny_classifier_checkpoint, url, "fingerprint")
    (read,) = (path for method, path in store.requests[before:] if method == "GET" and POINTER not in path)
    assert pointer["files"]["manifest.json"]["sha256"] in read
    good = store.objects[f"/bucket/a/{POINTER}"]
    files = pointer["files"]
    outside = ("../../outside", "/etc/x", "maps/../x", ".renewal")
    for bad in (
        *(pointer | {"files": files | {path: {"bytes": 1, "sha256": "0" * 64}}} for path in outside),
        pointer | {"files": files | {"key": {"bytes": 1, "sha256": "../" * 21 + "x"}}},
        pointer | {"id": f"../{'0' * 29}"},
        *(pointer | {"files": {name: files[name]}} for name in ("key", "manifest.json")),
    ):
        store.objects[f"/bucket/a/{POINTER}"] = json.dumps(bad).encode()
        refused(secret, tmp_path, tiny_checkpoint, "no pointer")
    store.objects[f"/bucket/a/{POINTER}"] = good
    followed(secret, tmp_path, tiny_checkpoint)


def test_full_disk_is_refused_and_left_with_space(store, root, tmp_path, tiny_checkpoint, monkeypatch):
    pushed(root, store.s3 % "a")
    free = shutil.disk_usage(tmp_path)._replace(free=100)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: free)
        refused(store.http % "a", tmp_path, tiny_checkpoint, "100 are free")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectFolder, "read_range", full)
        refused(store.http % "a", tmp_path, tiny_checkpoint, "No space left")
    remote = RemoteDatabase(store.http % "a", tmp_path / "cache", tiny_checkpoint)
    assert [path.name for path in remote.root.iterdir()] == [".renewal.lock"]


def test_server_follows_the_pointer_serves_on_after_failures_and_logs_each_once(
    store, root, other, tmp_path, tiny_checkpoint, monkeypatch, caplog
):
    monkeypatch.setattr(remote_module, "SECONDS_BETWEEN_LOOKS", 0.0)
    url = f"http://user:{SECRET}@127.0.0.1:{store.port}/bucket/a"
    settings = read_settings(
        {
            "model": str(tiny_checkpoint.folder),
            "dtype": "float32",
            "database": url,
            "cache_dir": tmp_path / "cache",
            "min_gain": 0,
            "verify_rate": 0,
        }
    )
    assert SECRET not in repr(settings)

    def load(local):
        return with_renewals(load_engines(local, tiny_checkpoint), local)

    def serving():
        return with_remote_database(settings, tiny_checkpoint, load, leads=True)

    def until(loading, kind):
        return next(loaded for _, loaded in zip(range(40), loading, strict=False) if isinstance(loaded, kind))

    with pytest.raises(DatabaseRefused, match="not there"):
        list(serving())
    pushed(root, store.s3 % "a")
    loading = serving()
    engine = until(loading, PrefillEngine)
    assert engine.map_reuse.database.generation.number == 1
    store.fail = lambda _method, path: 404 if path.endswith(POINTER) else None
    for _ in range(3):
        until(loading, FetchFailed)
    assert caplog.text.count("not there") == 1
    # A server that starts meanwhile serves what was downloaded.
    starting = serving()
    assert isinstance(next(starting), FetchFailed)
    assert until(starting, PrefillEngine).map_reuse.database.generation.number == 1
    store.fail = lambda _method, _path: None
    pushed(other, store.s3 % "a")
    engine = until(loading, PrefillEngine)
    assert engine.map_reuse.database.generation.number == 2
    assert engine.map_reuse.database.manifest.id == AttentionDatabase.open(other).manifest.id
    assert isinstance(until(loading, Pause), Pause)
    caplog.clear()
    store.fail = lambda _method, path: 404 if path.endswith(POINTER) else None
    until(loading, FetchFailed)  # the same failure, behind a success
    assert caplog.text.count("not there") == 1
    assert SECRET not in caplog.text
