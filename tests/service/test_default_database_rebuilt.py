"""Real servers with a damaged default database serve every text in full and build a new database."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import service
from attncache_core import AttentionDatabase, Checkpoint, PrefillEngine, default_corpus
from attncache_core.build.default import default_database_folder
from attncache_core.runtime.files import locked
from service.loading.engines import (
    DAMAGED,
    FIRST_WORKER_DECIDES,
    NO_DATABASE_YET,
    NOT_BUILT,
    load_engines,
)
from service.settings import Settings

RECORDED = default_corpus()[0].text


def change_a_byte_of_an_index(folder: Path) -> None:
    index = next(folder.glob("index/*.faiss"))
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)


def cut_a_segment(folder: Path) -> None:
    segment = next(folder.glob("maps/*.maps"))
    os.truncate(segment, segment.stat().st_size // 2)


def scramble_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"\x00garbage\xff")


@pytest.fixture
def folder(tiny_checkpoint: Checkpoint, tiny_database: Path, tmp_path: Path) -> Path:
    """The default database of the tiny model, in a cache folder."""
    folder = default_database_folder(tiny_checkpoint, tmp_path / "cache")
    return Path(shutil.copytree(tiny_database, folder))


def wait_for(happened: Callable[[], object]) -> None:
    for _ in range(6000):  # gives up after five minutes
        if happened():
            return
        time.sleep(0.05)
    pytest.fail("the expected state was not reached within five minutes")


class Server:
    """A process of `attncache serve`."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, log: Path) -> None:
        self._log = log
        # The builder must import the modules of the server, and not modules from the current folder.
        decoy = log.parent / "service"
        decoy.mkdir(exist_ok=True)
        (decoy / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
        program = (sys.executable, "-P", "-c", "from service.cli import main; main()", "serve")
        model = ("--model", str(checkpoint.folder), "--dtype", "float32", "--min-gain", "0")
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*program, *model, "--port", "0", "--cache-dir", str(folder.parent.parent)],
                stderr=file,
                cwd=log.parent,
                env={**os.environ, "PYTHONPATH": str(Path(service.__file__).parents[1])},
            )

    @property
    def logged(self) -> str:
        return self._log.read_text()

    def until(self, happened: Callable[[], object]) -> None:
        wait_for(lambda: happened() or self.process.poll() is not None)
        assert self.process.poll() is None, self.logged

    def until_ready(self) -> httpx.Client:
        self.until(lambda: "listening on" in self.logged)
        found = re.search(r"listening on (http://[\d.:]+)", self.logged)
        assert found
        client = httpx.Client(base_url=found[1], timeout=60)
        self.until(lambda: client.get("/ready").status_code == 200)
        return client

    def builders(self) -> list[int]:
        """Return the ids of the processes that the server has started."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]


@contextmanager
def serving(checkpoint: Checkpoint, folder: Path, name: str = "server") -> Iterator[Server]:
    server = Server(checkpoint, folder, folder.parent.parent.parent / f"{name}.log")
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def reuse_off(client: httpx.Client) -> list[str]:
    return list(client.get("/info").json()["reuse_off"])


def hits(client: httpx.Client) -> str:
    answer = client.post("/embed", json={"inputs": RECORDED})
    assert answer.status_code == 200
    return answer.headers["X-AttnCache-Hits"]


def test_two_servers_serve_in_full_until_one_of_them_has_built_a_new_database(
    tiny_checkpoint: Checkpoint, folder: Path
) -> None:
    change_a_byte_of_an_index(folder)
    with (
        serving(tiny_checkpoint, folder, "a") as one,
        serving(tiny_checkpoint, folder, "b") as other,
    ):
        servers = (one, other)
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
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 0
            assert "Traceback" not in server.logged
            shares = re.findall(r"building a database .*: (\d+)%", server.logged)
            assert shares[0] == "0"
            assert [int(share) for share in shares] == sorted({int(share) for share in shares})
    logs = [server.logged for server in servers]
    assert [log.count("the default database is damaged: ") for log in logs] == [1, 1]
    assert [log.count("serving exactly: the default database is damaged, and a new one") for log in logs] == [
        1,
        1,
    ]
    assert sum(log.count("the damaged database was set aside as") for log in logs) == 1
    (aside,) = folder.parent.glob("*.damaged-*")
    assert any(str(aside) in log for log in logs)
    assert AttentionDatabase.open(folder).verify() == []


@pytest.mark.parametrize(
    ("damage", "end", "code"),
    [(cut_a_segment, signal.SIGKILL, -9), (scramble_the_manifest, signal.SIGTERM, 0)],
    ids=["killed", "sigterm"],
)
def test_building_ends_with_the_server(
    tiny_checkpoint: Checkpoint,
    folder: Path,
    damage: Callable[[Path], None],
    end: signal.Signals,
    code: int,
) -> None:
    damage(folder)
    partial = folder.parent / f".{folder.name}.partial"
    with serving(tiny_checkpoint, folder) as server:
        server.until_ready()
        server.until(partial.exists)
        (builder,) = server.builders()
        assert os.getpriority(os.PRIO_PROCESS, builder) == 19
        server.process.send_signal(end)
        assert server.process.wait(timeout=60) == code
        wait_for(lambda: not Path(f"/proc/{builder}").exists())
        # The builder released its lock when it ended, so another build can continue.
        with locked(folder, on_wait=lambda: pytest.fail("the builder still holds the lock")):
            assert not folder.exists()


def test_failing_build_is_logged_once_and_the_server_serves_in_full(
    tiny_checkpoint: Checkpoint, folder: Path
) -> None:
    cut_a_segment(folder)
    # A file at the path of the folder that the build writes.
    (folder.parent / f".{folder.name}.partial").write_bytes(b"")
    with serving(tiny_checkpoint, folder) as server:
        client = server.until_ready()
        server.until(lambda: reuse_off(client) == [NOT_BUILT])
        assert hits(client) == "0/1"
        assert server.logged.count("there is no new default database: ") == 1
        assert "cannot be written" in server.logged
        assert "Traceback" not in server.logged


def test_database_that_cannot_be_renamed_is_logged_and_the_server_serves_in_full(
    tiny_checkpoint: Checkpoint, folder: Path
) -> None:
    scramble_the_manifest(folder)
    # A folder at the path of the lock file; file permissions would not stop root.
    lock = folder.parent / f".{folder.name}.lock"
    lock.mkdir()
    with serving(tiny_checkpoint, folder) as server:
        client = server.until_ready()
        server.until(lambda: reuse_off(client) == [NOT_BUILT])
        assert hits(client) == "0/1"
        assert server.logged.count("there is no new default database: ") == 1
        assert str(lock) in server.logged
        assert folder.exists()


def test_worker_that_finds_no_database_serves_until_another_process_has_built_it(
    tiny_checkpoint: Checkpoint, tiny_database: Path, tmp_path: Path
) -> None:
    settings = Settings(model=str(tiny_checkpoint.folder), dtype="float32", cache_dir=tmp_path, min_gain=0)
    engines = load_engines(settings, tiny_checkpoint, builds=False)
    first = next(engines)
    assert isinstance(first, PrefillEngine)
    assert (first.database, first.reuse_off) == (None, [NO_DATABASE_YET])
    shutil.copytree(tiny_database, default_database_folder(tiny_checkpoint, tmp_path))
    (second,) = engines
    assert first.reuse_off == [FIRST_WORKER_DECIDES]
    assert isinstance(second, PrefillEngine)
    assert second.database is not None
