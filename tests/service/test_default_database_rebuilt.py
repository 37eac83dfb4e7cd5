"""Real servers with a damaged default database serve every text in full and build a new database."""

import errno
import os
import re
import shutil
import signal
from pathlib import Path

import httpx
import pytest
from core_models import flip
from raw_http import wait_until

from attncache_core import AttentionDatabase, BuildFailed, UnsupportedModel, default_corpus
from attncache_core.reuse.maps.default import default_database_folder
from attncache_core.runtime.files import locked
from service.loading import engines
from service.loading.engines import DAMAGED, FIRST_WORKER_DECIDES, NO_DATABASE_YET, NOT_BUILT, load_engines
from service.loading.rebuild import build_while_serving
from service.settings import Settings

CORPUS = default_corpus()
RECORDED = CORPUS[0].text


def cut_a_segment(folder):
    segment = next(folder.glob("maps/*.maps"))
    os.truncate(segment, segment.stat().st_size // 2)


def scramble_the_manifest(folder):
    (folder / "manifest.json").write_bytes(b"\x00garbage\xff")


@pytest.fixture
def folder(tiny_checkpoint, tiny_database, tmp_path):
    """The default database of the tiny model, in a cache folder."""
    folder = default_database_folder(tiny_checkpoint, tmp_path / "cache")
    return Path(shutil.copytree(tiny_database, folder))


class Server:
    """A process of `attncache serve`."""

    def __init__(self, start, checkpoint, folder, builds=50):
        """builds: so many texts, by a fork, which imports nothing; None: as every server builds."""
        current = folder.parent.parent.parent
        # The builder must import the modules of the server, and not modules from the current folder.
        (current / "service").mkdir(exist_ok=True)
        (current / "service" / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
        model = ("--model", str(checkpoint.folder), "--dtype", "float32", "--min-gain", "0")
        arguments = ["serve", *model, "--port", "0", "--cache-dir", str(folder.parent.parent)]
        self.running = start("command", arguments=arguments, folder=str(current), builds=builds)

    def until(self, happened):
        wait_until(lambda: happened() or self.running.has_ended)
        assert not self.running.has_ended, self.running.log

    def until_ready(self):
        self.running.wait_until_ready()
        return httpx.Client(base_url=self.running.url(), timeout=240)

    def builders(self):
        """Return the ids of the processes that the server has started."""
        tasks = Path(f"/proc/{self.running.number('pid')}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    def end(self, number):
        self.running.send(number)
        return self.running.number("code")


def reuse_off(client):
    return list(client.get("/info").json()["reuse_off"])


def hits(client):
    answer = client.post("/embed", json={"inputs": RECORDED})
    assert answer.status_code == 200
    return answer.headers["X-AttnCache-Hits"]


def test_two_servers_serve_in_full_until_one_of_them_has_built_a_new_database(start, tiny_checkpoint, folder):
    flip(next(folder.glob("index/*.faiss")), -1)
    servers = [Server(start, tiny_checkpoint, folder) for _ in "ab"]
    with locked(folder, on_wait=lambda: None):
        # While the lock is held, neither server can rename or build the database, and both serve.
        clients = [server.until_ready() for server in servers]
        for client in clients:
            assert (hits(client), reuse_off(client)) == ("0/1", [DAMAGED])
        assert folder.exists()
    for server, client in zip(servers, clients, strict=True):
        server.until(lambda client=client: hits(client) == "1/1")
        assert reuse_off(client) == []
        metrics = client.get("/metrics").text
        assert 'attncache_requests_total{route="/embed",status="200"}' in metrics
        assert 'status="500"} 0.0' in metrics
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.running.log
        shares = re.findall(r"building a database .*: (\d+)%", server.running.log)
        assert shares[0] == "0"
        assert [int(share) for share in shares] == sorted({int(share) for share in shares})
    logs = [server.running.log for server in servers]
    assert [log.count("the default database is damaged: ") for log in logs] == [1, 1]
    assert [log.count(f"serving exactly: {DAMAGED}") for log in logs] == [1, 1]
    assert sum(log.count("the damaged database was set aside as") for log in logs) == 1
    (aside,) = folder.parent.glob("*.damaged-*")
    assert any(str(aside) in log for log in logs)
    assert AttentionDatabase.open(folder).verify() == []


@pytest.mark.parametrize(
    ("damage", "end", "code", "builds"),
    [(cut_a_segment, signal.SIGKILL, -9, None), (scramble_the_manifest, signal.SIGTERM, 0, len(CORPUS))],
    ids=["killed", "sigterm"],
)
def test_building_ends_with_the_server(start, tiny_checkpoint, folder, damage, end, code, builds):
    damage(folder)
    partial = folder.parent / f".{folder.name}.partial"
    server = Server(start, tiny_checkpoint, folder, builds)
    server.until_ready()
    server.until(partial.exists)
    (builder,) = server.builders()
    if builds is None:
        pid = server.running.number("pid")
        assert os.getpriority(os.PRIO_PROCESS, builder) == 19
        assert os.getsid(builder) == os.getsid(pid)  # in another session, Linux would not heed the priority
        assert os.getpgid(builder) == builder  # so Ctrl-C does not reach the process
    assert server.end(end) == code
    wait_until(lambda: not Path(f"/proc/{builder}").exists())
    # The builder released its lock when it ended, so another build can continue.
    with locked(folder, on_wait=lambda: pytest.fail("the builder still holds the lock")):
        assert not folder.exists()


@pytest.mark.parametrize("obstacle", [".partial", ".lock"])
def test_build_that_cannot_begin_is_logged_and_tried_again_and_the_server_serves_in_full(
    start, tiny_checkpoint, folder, obstacle
):
    cut_a_segment(folder)
    # File permissions would not stop root: a file is where a folder is built, or a folder where a file is.
    path = folder.parent / f".{folder.name}{obstacle}"
    if obstacle == ".partial":
        path.write_bytes(b"")
    else:
        path.mkdir()
    server = Server(start, tiny_checkpoint, folder)
    client = server.until_ready()
    server.until(lambda: reuse_off(client) == [NOT_BUILT])
    assert hits(client) == "0/1"
    assert server.running.log.count("there is no new default database: ") == 1
    assert str(path) in server.running.log
    wait_until(lambda: "builds again in 1 min" in server.running.log)
    assert "Traceback" not in server.running.log
    assert folder.exists() == (obstacle == ".lock")  # without its lock, nothing is renamed


def test_worker_that_finds_no_database_serves_until_another_process_has_built_it(
    tiny_checkpoint, tiny_database, tmp_path
):
    settings = Settings(model=str(tiny_checkpoint.folder), dtype="float32", cache_dir=tmp_path, min_gain=0)
    engines = load_engines(settings, tiny_checkpoint, builds=False)
    first = next(engines)
    assert (first.map_reuse, first.reuse_off) == (None, [NO_DATABASE_YET])
    shutil.copytree(tiny_database, default_database_folder(tiny_checkpoint, tmp_path))
    (second,) = engines
    assert first.reuse_off == [FIRST_WORKER_DECIDES]
    assert second.map_reuse is not None


def test_build_that_failed_goes_on_later(tiny_checkpoint, tiny_database, tmp_path, monkeypatch):
    settings = Settings(model=str(tiny_checkpoint.folder), dtype="float32", cache_dir=tmp_path, min_gain=0)
    failures = [BuildFailed("no space"), OSError("no process"), UnsupportedModel("files were changed")]
    slept, of_another_model = [], [True]
    read_only = [OSError(errno.EROFS, "Read-only file system", str(tmp_path))]

    def set_aside(*_):
        if read_only:
            raise read_only.pop()

    def build(_):
        yield "building"
        if failures:
            raise failures.pop(0)
        if of_another_model:
            of_another_model.pop()
            return
        shutil.copytree(tiny_database, default_database_folder(tiny_checkpoint, tmp_path))

    monkeypatch.setattr(engines, "build_while_serving", build)
    monkeypatch.setattr(engines, "set_damaged_aside", set_aside)
    monkeypatch.setattr(engines.time, "sleep", slept.append)
    first, *lines, second = load_engines(settings, tiny_checkpoint)
    assert first.map_reuse is None
    remedy = "; free space on the disk, give another folder by --cache-dir, or serve with --no-maps"
    assert [line.partition(": the server")[0] for line in lines if line != "building"] == [
        f"there is no new default database: {tmp_path}: Read-only file system{remedy}",
        "there is no new default database: no space",
        f"there is no new default database: a file: no process{remedy}",
        "there is no new default database: files were changed",
        "there is no new default database: the files of the model were changed during the build; put them "
        "back, or restart the server",
    ]
    assert slept == [60, 60, 120, 240, 480]
    assert second.map_reuse is not None


def test_builder_gets_its_settings_and_names_its_error_whatever_the_encoding_of_the_terminal(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    cache = tmp_path / os.fsdecode(b"\xe9")  # a name that is not UTF-8
    with pytest.raises(BuildFailed, match="model 'Modell-é' was not found"):
        list(build_while_serving(Settings(model="Modell-é", cache_dir=cache)))
