"""A process of the real server listens, gets ready, answers and stops."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_process import address, process, wait_until_ready

# Runs the command line, and hangs in the import of torch.
SLOW_IMPORTS = """
import sys, time

class Hanging:
    def find_spec(self, name, *_):
        if name == "torch":
            print("importing", flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Hanging())
from service.cli import main
main()
"""


def test_server_finishes_its_requests_after_sigterm_and_ends_with_0() -> None:
    with process("loads") as server, httpx.Client(base_url=address(server), timeout=30) as client:
        assert client.get("/health").status_code == 200
        wait_until_ready(str(client.base_url).rstrip("/"))
        assert client.get("/embed").status_code == 405
        with ThreadPoolExecutor() as clients:
            pending = clients.submit(
                httpx.post, f"{client.base_url}/embed", json={"inputs": ["a", "b"]}, timeout=30
            )
            while "attncache_tokenize_seconds_count 1.0" not in client.get("/metrics").text:
                time.sleep(0.01)
            server.send_signal(signal.SIGTERM)
            response = pending.result()
        assert (response.status_code, response.headers["X-AttnCache-Hits"]) == (200, "0/2")
        client.close()
        _, logged = server.communicate(timeout=60)
        assert server.returncode == 0
        assert "Traceback" not in logged


def test_server_that_gets_sigterm_while_loading_ends_with_0() -> None:
    with process("never-loads") as server:
        with httpx.Client(base_url=address(server)) as client:
            assert client.get("/ready").status_code == 503
        server.send_signal(signal.SIGTERM)
        _, logged = server.communicate(timeout=60)
        assert server.returncode == 0
        assert "Traceback" not in logged


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("serve", signal.SIGTERM, 0),
        ("serve", signal.SIGINT, 0),
        ("embed", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_signal_during_the_imports_ends_the_server_with_0_and_others_as_usual(
    command: str, number: int, code: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORTS, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"importing\n"
        started.send_signal(number)
        _, logged = started.communicate(timeout=60)
    assert (started.returncode, logged) == (code, b"")


def test_server_that_cannot_load_ends_and_returns_the_error() -> None:
    with process("refuses") as server:
        _, logged = server.communicate(timeout=60)
        assert logged.splitlines()[-1] == "failed with ModelNotFound"
        assert "Traceback" not in logged


def test_endless_headers_are_refused_and_the_next_request_is_served() -> None:
    with process("loads") as server, httpx.Client(base_url=address(server), timeout=30) as client:
        response = client.get("/health", headers={f"X-{number}": "x" * 50_000 for number in range(20)})
        assert response.status_code == 431
        assert client.get("/health", headers={"X-1": "x" * 50_000}).status_code == 200


def test_client_that_leaves_is_noticed_by_the_real_server() -> None:
    with process("loads") as server, httpx.Client(base_url=address(server), timeout=30) as client:
        wait_until_ready(str(client.base_url).rstrip("/"))
        try:
            httpx.post(f"{client.base_url}/embed", json={"inputs": "gone"}, timeout=0.1)
        except httpx.ReadTimeout:
            gone = 'attncache_requests_total{route="/embed",status="499"} 1.0'
            while gone not in client.get("/metrics").text:
                time.sleep(0.01)
        assert client.post("/embed", json={"inputs": "next"}).status_code == 200


def test_database_that_is_refused_after_the_start_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    arguments = ["serve", "--port", "0", "--log-level", "error", "--database", str(absent)]
    ended = subprocess.run(
        [sys.executable, "-c", "from service.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("attncache: ")
    assert str(absent) in line
