"""Several worker processes behind one address: real processes around the fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import embedding_of
from raw_http import PATIENCE_SECONDS, Response, post, read_response, wait_until

SCRIPT = Path(__file__).with_name("serve_fakes.py")
KEYS = "keys.txt"
SPREAD = 24
KEY, ADMIN_KEY, NEW_KEY = "k" * 20, "a" * 20, "n" * 20


class Running:
    """A server that runs; see serve_fakes.py."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name

    @property
    def log(self) -> str:
        path = self.folder / f"{self.name}.log"
        return path.read_text() if path.exists() else ""

    def number(self, kind: str) -> int:
        """Return the process id or, once the server has ended, the exit code."""
        path = self.folder / f"{self.name}.{kind}"
        wait_until(path.exists)
        return int(path.read_text())

    def send(self, number: int) -> None:
        os.kill(self.number("pid"), number)

    def url(self, name: str = "public") -> str:
        wait_until(lambda: f"({name})" in self.log)
        return next(iter(re.findall(rf"listening on (\S+) \({name}\)", self.log)))

    def connect(self) -> socket.socket:
        url = self.url()
        if url.startswith("unix:"):
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(PATIENCE_SECONDS)
            client.connect(url.removeprefix("unix:"))
            return client
        host, port = url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)

    def ask(self, request: bytes) -> Response:
        """Send a request over a connection of its own."""
        with self.connect() as client:
            client.sendall(request)
            return read_response(client)

    def workers(self) -> list[int]:
        """The process ids of the workers, by their number; of those that were replaced, the last."""
        found = dict(re.findall(r"worker (\d) has process id (\d+)", self.log))
        return [int(found[number]) for number in sorted(found)]

    def wait_until_ready(self) -> Running:
        wait_until(lambda: "all workers are ready" in self.log)
        wait_until(lambda: self.ask(get("/ready")).status == 200)
        return self

    def metric(self, name: str) -> float:
        lines = self.ask(get("/metrics", b"X-API-Key: " + ADMIN_KEY.encode())).body.decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"attncache_{name} "))

    def end(self) -> int:
        """Wait for the end of the process. Returns the exit code; no worker is left, and no file."""
        code = self.number("code")
        wait_until(lambda: not any(map(is_running, self.workers())))
        wait_until(lambda: not list((self.folder / self.name).iterdir()))
        return code


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def get(path: str, *headers: bytes) -> bytes:
    return b"\r\n".join([b"GET %s HTTP/1.1" % path.encode(), b"Host: test", *headers]) + b"\r\n\r\n"


def embed(body: dict[str, Any], *headers: bytes) -> bytes:
    return post(json.dumps(body).encode(), *headers)


def worker_of(response: Response) -> str:
    """Return the beginning of the request ids that one worker gives."""
    return response.headers["x-request-id"][:16]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2", "-nodes"]
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run([openssl, "req", "-x509", *curve, *files, *names], check=True, capture_output=True)
    return folder


Servers = dict[str, Running]


@pytest.fixture(scope="module")
def servers(certificates: Path) -> Iterator[Servers]:
    """The servers of all tests, by name. All of them start at once, because imports take seconds."""
    # A short path, because the path of a Unix socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    (folder / KEYS).write_text(f"client {KEY} requests_per_minute=5\nops {ADMIN_KEY} admin\n")
    tls = {"tls_cert": str(certificates / "cert.pem"), "tls_key": str(certificates / "key.pem")}
    described: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("loads", {"workers": 3}),
        "keys": ("loads", {"workers": 2, "api_keys": str(folder / KEYS)}),
        "sockets": ("loads", {"workers": 2, "unix_socket": str(folder / "public"), "admin_port": 0, **tls}),
        "drains": ("loads", {"workers": 2}),
        "stuck": ("loads", {"workers": 2, "stuck_seconds": 0.5, "exit_when_stuck": True}),
        "refuses": ("refuses", {"workers": 2}),
        "fails": ("fails", {"workers": 2}),
    }
    (folder / "servers.json").write_text(json.dumps(described))
    running = {name: Running(folder, name) for name in described}
    with subprocess.Popen([sys.executable, str(SCRIPT), str(folder)]) as started:
        try:
            yield running
        finally:
            started.kill()
            for server in running.values():
                for process_id in (server.number("pid"), *server.workers()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def at_the_same_time(count: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(function, range(count)))


def test_connections_that_stay_open_are_spread_over_all_workers(servers: Servers) -> None:
    server = servers["plain"].wait_until_ready()
    clients = [server.connect() for _ in range(SPREAD)]
    for number, client in enumerate(clients):
        client.sendall(embed({"inputs": f"text {number}"}))
    responses = [read_response(client) for client in clients]
    for client in clients:
        client.close()
    assert {response.status for response in responses} == {200}
    spread = Counter(map(worker_of, responses))
    assert len(spread) == 3
    assert max(spread.values()) <= SPREAD * 2 / 3


def test_metrics_of_any_worker_are_the_sums_of_all(servers: Servers) -> None:
    server = servers["plain"].wait_until_ready()
    names = (
        'requests_total{route="/embed",status="200"}',
        'request_seconds_count{route="/embed"}',
        'sequences_total{outcome="miss"}',
    )
    before = [server.metric(name) for name in names]
    at_the_same_time(SPREAD, lambda number: server.ask(embed({"inputs": [f"a{number}", f"b{number}"]})))
    expected = [before[0] + SPREAD, before[1] + SPREAD, before[2] + 2 * SPREAD]
    # A request is counted after its response was sent.
    wait_until(lambda: [server.metric(name) for name in names] == expected)
    clients = [server.connect() for _ in range(9)]
    answered = []
    for client in clients:
        client.sendall(get("/metrics"))
        answered.append(read_response(client))
        assert f"attncache_{names[0]} {expected[0]}\n" in answered[-1].body.decode()
    for client in clients:
        client.close()
    assert len(set(map(worker_of, answered))) == 3
    assert [server.metric(name) for name in ("workers", "ready", 'build_info{version="0.1.0"}')] == [3, 1, 1]
    chosen = server.ask(get("/metrics?name[]=attncache_workers")).body.decode()
    assert chosen.splitlines()[2:] == ["attncache_workers 3.0"]
    assert json.loads(server.ask(get("/info")).body)["settings"]["workers"] == 3


def test_session_is_found_by_whichever_worker_a_connection_reaches(servers: Servers) -> None:
    server = servers["plain"].wait_until_ready()
    counted = 'requests_total{route="/embed",status="200"}'
    before = server.metric(counted)
    said = "hello"
    server.ask(embed({"session_id": "s", "transcript": said}))
    clients = [server.connect() for _ in range(9)]
    answered = []
    for number, client in enumerate(clients):
        said += f" {number}"
        client.sendall(embed({"session_id": "s", "append": f" {number}", "normalize": False}))
        answered.append(read_response(client))
        assert json.loads(answered[-1].body)[0] == embedding_of(list(map(ord, said))).tolist()
    for client in clients:
        client.close()
    assert len(set(map(worker_of, answered))) == 3
    assert len({response.headers["x-request-id"] for response in answered}) == 9
    # Every response has the same headers, whoever has computed it.
    assert len({tuple(response.headers) for response in answered}) == 1
    wait_until(lambda: server.metric(counted) == before + 10)
    assert server.metric("sessions") == 1

    unknown = at_the_same_time(
        9, lambda number: server.ask(embed({"session_id": f"x{number}", "append": "a"}))
    )
    assert {(response.status, response.code) for response in unknown} == {(404, "unknown_session")}
    named = at_the_same_time(
        9,
        lambda number: server.ask(
            embed({"session_id": f"y{number}", "transcript": "a"}, b"X-Request-Id: mine")
        ),
    )
    assert {response.headers["x-request-id"] for response in named} == {"mine"}


def test_requests_of_one_session_take_turns_over_all_workers(servers: Servers) -> None:
    server = servers["plain"].wait_until_ready()
    server.ask(embed({"session_id": "turns", "transcript": "a"}))
    at_the_same_time(SPREAD, lambda _: server.ask(embed({"session_id": "turns", "append": "b"})))
    whole = server.ask(embed({"session_id": "turns", "append": "c", "normalize": False}))
    assert json.loads(whole.body)[0] == embedding_of(list(map(ord, "a" + SPREAD * "b" + "c"))).tolist()


def test_killed_worker_is_replaced_while_the_others_answer(servers: Servers) -> None:
    server = servers["plain"].wait_until_ready()
    sessions = [f"kept {number}" for number in range(12)]
    for session in sessions:
        server.ask(embed({"session_id": session, "transcript": "a"}))
    counted = 'requests_total{route="/embed",status="200"}'
    before = server.metric(counted)
    killed = server.workers()[1]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not is_running(killed))
    statuses = Counter(server.ask(embed({"inputs": "a"})).status for _ in range(10))
    wait_until(lambda: server.workers()[1] != killed)
    wait_until(lambda: server.metric("workers") == 3)
    assert statuses == {200: 10}
    # What the killed worker had counted is still counted.
    assert server.metric(counted) >= before + 10
    assert "worker 1 ended with code -9" in server.log

    # The others have the sessions of the killed worker.
    assert {server.ask(embed({"session_id": own, "append": "b"})).status for own in sessions} == {200}


def test_quotas_keys_and_counts_of_keys_hold_over_all_workers(servers: Servers) -> None:
    server = servers["keys"].wait_until_ready()
    clients = [server.connect() for _ in range(8)]
    answered = []
    for number, client in enumerate(clients):
        body: dict[str, Any] = (
            {"session_id": f"s{number}", "transcript": "a"} if number % 2 else {"inputs": "a"}
        )
        client.sendall(embed(body, b"X-API-Key: " + KEY.encode()))
        answered.append(read_response(client))
    assert len(set(map(worker_of, answered))) == 2
    assert [response.status for response in answered] == [200] * 5 + [429] * 3
    wait_until(lambda: server.metric('key_requests_total{key="client"}') == 8)
    assert server.metric('quota_refusals_total{key="client",quota="requests_per_minute"}') == 3
    assert server.metric('key_tokens_total{key="client"}') == 5
    for client in clients:
        client.close()


def test_sighup_lets_all_workers_read_the_keys_again(servers: Servers) -> None:
    server = servers["keys"].wait_until_ready()
    (server.folder / KEYS).write_text(f"other {NEW_KEY}\nops {ADMIN_KEY} admin\n")
    server.send(signal.SIGHUP)
    wait_until(lambda: server.log.count("SIGHUP: read again") == 2)
    answered = []
    for key in (NEW_KEY, KEY):
        clients = [server.connect() for _ in range(12)]
        for client in clients:
            client.sendall(embed({"inputs": "a"}, b"X-API-Key: " + key.encode()))
            answered.append(read_response(client))
        for client in clients:
            client.close()
    assert [response.status for response in answered] == [200] * 12 + [401] * 12
    assert len(set(map(worker_of, answered[12:]))) == 2


def test_killed_supervisor_ends_its_workers(servers: Servers) -> None:
    server = servers["keys"].wait_until_ready()
    assert all(map(is_running, server.workers()))
    server.send(signal.SIGKILL)
    assert server.end() == -signal.SIGKILL


def test_unix_socket_and_tls_are_served_by_all_workers_until_they_have_drained(
    servers: Servers, certificates: Path
) -> None:
    server = servers["sockets"].wait_until_ready()
    context = ssl.create_default_context(cafile=certificates / "cert.pem")
    host, port = server.url("admin").removeprefix("https://").split(":")
    answered, open_connections = [], []
    for _ in range(6):
        plain = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
        open_connections.append(context.wrap_socket(plain, server_hostname=host))
        open_connections[-1].sendall(get("/metrics"))
        answered.append(read_response(open_connections[-1]))
    assert len(set(map(worker_of, answered))) == 2
    for client in open_connections:
        client.close()

    public = Path(server.url().removeprefix("unix:"))
    assert public.is_socket()
    clients = [server.connect() for _ in range(6)]
    for number, client in enumerate(clients):
        client.sendall(embed({"inputs": f"in flight {number}"}))
    time.sleep(0.05)  # most of them are being computed now; those that are not are answered too
    server.send(signal.SIGTERM)
    drained = [read_response(client) for client in clients]
    for client in clients:
        client.close()
    assert {response.status for response in drained} == {200}
    assert {response.headers["connection"] for response in drained} == {"close"}
    assert server.end() == 0
    assert not public.exists()
    assert "Traceback" not in server.log


def test_no_request_is_lost_though_one_worker_has_drained_long_before_the_other(servers: Servers) -> None:
    server = servers["drains"].wait_until_ready()
    clients: dict[str, list[socket.socket]] = {}
    for _ in range(8):
        client = server.connect()
        client.sendall(get("/health"))
        clients.setdefault(worker_of(read_response(client)), []).append(client)
    early, late = clients.values()
    requests = {
        client: embed({"session_id": f"d{number}", "transcript": "a"})
        for number, client in enumerate([*early, *late])
    }
    for client, request in requests.items():
        client.sendall(request[:-1])
    time.sleep(0.2)  # the workers have received them
    server.send(signal.SIGTERM)
    for client in early:
        client.sendall(requests[client][-1:])
    answered = [read_response(client).status for client in early]
    time.sleep(0.5)  # one of the workers has nothing left to answer
    for client in late:
        client.sendall(requests[client][-1:])
    answered += [read_response(client).status for client in late]
    for client in requests:
        client.close()
    assert answered == [200] * 8
    assert server.end() == 0


def test_stuck_worker_is_replaced_and_a_second_signal_ends_all_at_once(servers: Servers) -> None:
    server = servers["stuck"].wait_until_ready()
    before = server.workers()
    with server.connect() as hangs:
        hangs.sendall(embed({"inputs": "hang"}))
        wait_until(lambda: "ended with code 70" in server.log)
    wait_until(lambda: server.workers() != before)
    with server.connect() as hangs:
        hangs.sendall(embed({"inputs": "hang"}))
        time.sleep(0.1)
        server.send(signal.SIGTERM)
        wait_until(lambda: server.ask(get("/ready")).status == 503)
        server.send(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM


def test_worker_that_cannot_start_ends_all_with_its_error(servers: Servers) -> None:
    refuses, fails = servers["refuses"], servers["fails"]
    assert (refuses.end(), fails.end()) == (1, 1)
    assert refuses.log.splitlines()[-2:] == ["there is no such model", "failed with AttnCacheError"]
    assert "Traceback" not in refuses.log
    assert fails.log.splitlines()[-1] == "failed with RuntimeError"
    assert fails.log.count("loading failed") == 1
