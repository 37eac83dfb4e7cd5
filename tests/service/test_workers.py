"""Several worker processes behind one address: real processes around the fake engine."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_engine import embedding_of
from raw_http import PATIENCE_SECONDS, make_certificate, post, read_response, wait_until
from server_process import get, is_running

SPREAD = 24
KEY, ADMIN_KEY, NEW_KEY = "k" * 20, "a" * 20, "n" * 20
ADMIN = b"X-API-Key: " + ADMIN_KEY.encode()


def embed(body, *headers):
    return post(json.dumps(body).encode(), *headers)


def worker_of(response):
    """Return the beginning of the request ids that one worker gives."""
    return response.headers["x-request-id"][:16]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder, "cert")
    return folder


@pytest.fixture(scope="module")
def servers(start, certificates, tmp_path_factory):
    """The servers of all tests, by name. All of them start at once."""
    keys, sockets = tmp_path_factory.mktemp("keys") / "keys", Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    keys.write_text(f"client {KEY} requests_per_minute=5\nops {ADMIN_KEY} admin\n")
    tls = {"tls_cert": str(certificates / "cert.pem"), "tls_key": str(certificates / "cert.key")}
    yield {
        "keys file": keys,
        "plain": start("quick", workers=3),
        "keys": start("quick", workers=2, api_keys=str(keys), unix_socket=str(sockets / "keys")),
        "sockets": start("loads", workers=2, unix_socket=str(sockets / "public"), admin_port=0, **tls),
        "drains": start("loads", workers=2),
        "loading": start("never-loads", workers=2),
        "stuck": start("loads", workers=2, stuck_seconds=3.0, exit_when_stuck=True),
        "hangs": start("loads", workers=2),
        "refuses": start("refuses", workers=2),
        "fails": start("fails", workers=2),
    }
    shutil.rmtree(sockets)


def ready(server):
    """Wait until all workers are ready."""
    wait_until(lambda: "all workers are ready" in server.log)
    return server.wait_until_ready()


def answers_of_all(server, workers, request_of, least=1):
    """Send requests over connections that stay open, until all workers have answered; return the responses.

    The system chooses the worker of a connection, so a busy machine may need many connections to reach all.
    """
    answered = []
    with contextlib.ExitStack() as connections:

        def reach():
            client = connections.enter_context(server.connect())
            client.sendall(request_of(len(answered)))
            answered.append(read_response(client))
            return len(answered) >= least and len(set(map(worker_of, answered))) == workers

        wait_until(reach)
    return answered


def at_the_same_time(count, function):
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(function, range(count)))


def test_connections_that_stay_open_are_spread_over_all_workers(servers):
    server = ready(servers["plain"])
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


def test_metrics_of_any_worker_are_the_sums_of_all(servers):
    server = ready(servers["plain"])
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
    for answer in answers_of_all(server, 3, lambda _: get("/metrics")):
        assert f"attncache_{names[0]} {expected[0]}\n" in answer.body.decode()
    assert [server.metric(name) for name in ("workers", "ready", 'build_info{version="0.1.0"}')] == [3, 1, 1]
    chosen = server.ask(get("/metrics?name[]=attncache_workers")).body.decode()
    assert chosen.splitlines()[2:] == ["attncache_workers 3.0"]
    assert json.loads(server.ask(get("/info")).body)["settings"]["workers"] == 3


def test_session_is_found_by_whichever_worker_a_connection_reaches(servers):
    server = ready(servers["plain"])
    counted = 'requests_total{route="/embed",status="200"}'
    before = server.metric(counted)
    server.ask(embed({"session_id": "s", "transcript": "hello"}))
    answered = answers_of_all(
        server, 3, lambda n: embed({"session_id": "s", "append": f" {n}", "normalize": False}), least=9
    )
    said = "hello"
    for number, answer in enumerate(answered):
        said += f" {number}"
        assert json.loads(answer.body)[0] == embedding_of(list(map(ord, said))).tolist()
    assert len({response.headers["x-request-id"] for response in answered}) == len(answered)
    # Every response has the same headers, whoever has computed it.
    assert len({tuple(response.headers) for response in answered}) == 1
    wait_until(lambda: server.metric(counted) == before + 1 + len(answered))
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


def test_requests_of_one_session_take_turns_over_all_workers(servers):
    server = ready(servers["plain"])
    server.ask(embed({"session_id": "turns", "transcript": "a"}))
    at_the_same_time(9, lambda _: server.ask(embed({"session_id": "turns", "append": "b"})))
    whole = server.ask(embed({"session_id": "turns", "append": "c", "normalize": False}))
    assert json.loads(whole.body)[0] == embedding_of(list(map(ord, "a" + 9 * "b" + "c"))).tolist()


def test_killed_worker_is_replaced_while_the_others_answer(servers):
    server = ready(servers["plain"])
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
    assert "worker 1 ended with signal SIGKILL" in server.log

    # The others have the sessions of the killed worker.
    assert {server.ask(embed({"session_id": session, "append": "b"})).status for session in sessions} == {200}


def test_server_ends_once_somebody_removes_what_its_workers_share(servers):
    server = ready(servers["plain"])
    [shared] = (server.folder / server.name).iterdir()
    # As systemd-tmpfiles looks whether a folder is in use.
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(shared, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    # The file that changes its time least, so that a cleaner may take it alone.
    (shared / "sessions.sqlite-shm").unlink()
    assert server.end() == 1
    assert f"share in {shared} were removed; set TMPDIR to a folder that nobody cleans" in server.log
    assert "Traceback" not in server.log


def test_server_ends_if_what_its_workers_share_is_removed_while_the_first_one_loads(servers):
    server = servers["loading"]
    wait_until(lambda: list((server.folder / server.name).glob("attncache-*/shared.sqlite-shm")))
    shutil.rmtree(next((server.folder / server.name).iterdir()))
    assert server.end() == 1
    assert "were removed; set TMPDIR to a folder that nobody cleans" in server.log


def test_quotas_keys_and_counts_of_keys_hold_over_all_workers(servers):
    server = ready(servers["keys"])

    def request(number):
        body = {"session_id": f"s{number}", "transcript": "a"} if number % 2 else {"inputs": "a"}
        return embed(body, b"X-API-Key: " + KEY.encode())

    answered = answers_of_all(server, 2, request, least=8)
    refused = len(answered) - 5
    assert [response.status for response in answered] == [200] * 5 + [429] * refused
    wait_until(lambda: server.metric('key_requests_total{key="client"}', ADMIN) == 5 + refused)
    assert server.metric('quota_refusals_total{key="client",quota="requests_per_minute"}', ADMIN) == refused
    assert server.metric('key_tokens_total{key="client"}', ADMIN) == 5


def test_sighup_lets_all_workers_read_the_keys_again(servers):
    server = ready(servers["keys"])
    servers["keys file"].write_text(f"other {NEW_KEY}\nops {ADMIN_KEY} admin\n")
    server.send(signal.SIGHUP)
    wait_until(lambda: server.log.count("SIGHUP: read again") == 2)
    for key, status in ((NEW_KEY, 200), (KEY, 401)):
        request = embed({"inputs": "a"}, b"X-API-Key: " + key.encode())
        answered = answers_of_all(server, 2, lambda _, sent=request: sent)
        assert {response.status for response in answered} == {status}


def test_killed_supervisor_ends_its_workers(servers):
    server = ready(servers["keys"])
    assert all(map(is_running, server.workers()))
    server.send(signal.SIGKILL)
    assert server.end() == -signal.SIGKILL
    wait_until(lambda: not Path(server.url().removeprefix("unix:")).exists())


def test_unix_socket_and_tls_are_served_by_all_workers_until_they_have_drained(servers, certificates):
    server = ready(servers["sockets"])
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


def test_no_request_is_lost_though_one_worker_has_drained_long_before_the_other(servers):
    server = ready(servers["drains"])
    clients = {}
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


def test_stuck_worker_is_replaced_and_a_second_signal_ends_all_at_once(servers):
    server = ready(servers["stuck"])
    before = server.workers()
    with server.connect() as hangs:
        hangs.sendall(embed({"inputs": "hang"}))
        wait_until(lambda: "ended with code 70" in server.log)
    wait_until(lambda: server.workers() != before)
    # A worker of this server hangs for as long as the signals take.
    server = ready(servers["hangs"])
    with server.connect() as hangs:
        hangs.sendall(embed({"inputs": "hang"}))
        wait_until(lambda: server.metric("tokenize_seconds_count") == 1)
        server.send(signal.SIGTERM)
        wait_until(lambda: server.ask(get("/ready")).status == 503)
        server.send(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM


def test_worker_that_cannot_start_ends_all_with_its_error(servers):
    refuses, fails = servers["refuses"], servers["fails"]
    assert (refuses.end(), fails.end()) == (1, 1)
    assert refuses.log.splitlines()[-2:] == ["there is no such model", "failed with AttnCacheError"]
    assert "Traceback" not in refuses.log
    assert fails.log.splitlines()[-1] == "failed with RuntimeError"
    assert fails.log.count("loading failed") == 1
