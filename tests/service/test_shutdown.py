"""The process of the server starts, gets ready, answers, drains within its time and ends, whatever hangs."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_engine import FakeEngine
from raw_http import (
    EMBED,
    HEALTH,
    PATIENCE_SECONDS,
    READY,
    post,
    read_response,
    read_responses,
    read_to_end,
    served,
    wait_until,
)
from server_process import get

from service.workers.server import allow_files


def refuses(server):
    """Return whether new connections are refused."""
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_drain_refuses_connections_and_answers_what_was_received():
    engine = FakeEngine()
    with served(engine) as server:
        idle, open_before = server.connect(), server.connect()
        for client in (idle, open_before):
            client.sendall(HEALTH)
            assert read_response(client).status == 200
        engine.may_run.clear()
        open_before.sendall(EMBED)
        assert engine.runs.acquire(timeout=PATIENCE_SECONDS)
        server.server.should_exit = True
        assert read_to_end(idle) == b""
        assert refuses(server)
        engine.may_run.set()
        finished = read_response(open_before)
        assert (finished.status, finished.headers["connection"]) == (200, "close")
        for client in (idle, open_before):
            client.close()


def test_drain_answers_all_requests_that_were_pipelined():
    engine = FakeEngine()
    with served(engine) as server, server.connect() as client:
        engine.may_run.clear()
        client.sendall(EMBED * 4)
        assert engine.runs.acquire(timeout=PATIENCE_SECONDS)
        wait_until(lambda: any(len(connection.pipeline) == 3 for connection in server.connections()))
        server.server.should_exit = True
        wait_until(lambda: refuses(server))
        engine.may_run.set()
        answers = read_responses(client, 4)
        assert [answer.status for answer in answers] == [200] * 4
        assert answers[-1].headers["connection"] == "close"
        assert read_to_end(client) == b""


@pytest.mark.parametrize("workers", [1, 2])
def test_every_client_gets_an_answer_or_is_refused(start, workers):
    """Clients connect again and again while the server ends: none is accepted and then cut."""
    server = start("quick", workers=workers).wait_until_ready()
    results, ended = Counter(), threading.Event()

    def ask_until_refused():
        while not ended.is_set():
            try:
                results[server.ask(EMBED).status] += 1
            except ConnectionRefusedError:
                return
            except OSError as error:
                results[type(error).__name__] += 1

    clients = [threading.Thread(target=ask_until_refused) for _ in range(8)]
    for client in clients:
        client.start()
    wait_until(lambda: results[200] >= 24)
    server.send(signal.SIGTERM)
    assert server.number("code") == 0
    ended.set()
    for client in clients:
        client.join()
    assert set(results) == {200}


def test_requests_that_do_not_end_in_time_get_503():
    engine = FakeEngine()
    with served(engine, drain_seconds=1) as server, server.connect() as computed, server.connect() as stalled:
        engine.may_run.clear()
        computed.sendall(EMBED)
        stalled.sendall(EMBED[:-1])
        assert engine.runs.acquire(timeout=PATIENCE_SECONDS)
        server.server.should_exit = True
        for client in (computed, stalled):
            response = read_response(client)
            assert (response.status, response.code) == (503, "shutting_down")
            assert response.headers["connection"] == "close"


HANG = post(b'{"inputs": ["hang", "Sesam"]}')


def wait_until_computed(server):
    """Wait until the first request with texts is tokenised."""
    wait_until(lambda: server.metric("tokenize_seconds_count") == 1)


def test_process_ends_with_0_though_a_batch_hangs_and_a_client_stalls(start):
    server = start("loads", drain_seconds=1).wait_until_ready()
    with server.connect() as hangs, server.connect() as stalls:
        stalls.sendall(EMBED[:-1])
        hangs.sendall(HANG)
        wait_until_computed(server)
        # There is no file to read again, so the signal ends the server like SIGTERM.
        server.send(signal.SIGHUP)
        assert read_response(hangs).code == "shutting_down"
    assert server.number("code") == 0
    assert "did not close in time" in server.log


@pytest.mark.parametrize("workers", [1, 2])
def test_process_ends_with_0_though_the_interpreters_clean_up_hangs(start, workers):
    server = start("never-cleans-up", drain_seconds=2, workers=workers).wait_until_ready()
    server.send(signal.SIGTERM)
    assert server.number("code") == 0
    assert "stopped" in server.log
    assert "did not close in time" not in server.log


def test_process_ends_with_0_though_the_event_loop_hangs(start):
    server = start("loads", drain_seconds=1, stuck_seconds=0.2).wait_until_ready()
    server.send(signal.SIGUSR1)
    wait_until(lambda: "hang_loop" in server.log)  # the stack of the event loop's thread
    server.send(signal.SIGTERM)
    assert server.number("code") == 0


def test_stuck_process_ends_itself_if_told_to(start):
    told = {"stuck_seconds": 2.0, "exit_when_stuck": True}
    computing, interpreter = start("loads", **told), start("loads", **told)
    interpreter.wait_until_ready().send(signal.SIGUSR2)
    with computing.wait_until_ready().connect() as hangs:
        hangs.sendall(HANG)
        assert computing.number("code") == 70
    assert "time.sleep(HANG_SECONDS" in computing.log  # where the batch hangs
    assert "Sesam" not in computing.log
    assert interpreter.number("code") == 1
    assert "in hang_interpreter" in interpreter.log


def test_second_signal_ends_the_process_at_once(start):
    server = start("loads").wait_until_ready()
    with server.connect() as hangs, server.connect() as client:
        hangs.sendall(HANG)
        wait_until_computed(server)
        server.send(signal.SIGTERM)
        client.sendall(READY)
        read_to_end(client)  # the first signal has arrived
        server.send(signal.SIGTERM)
        assert server.number("code") == 128 + signal.SIGTERM


# Starts and signals.

# Runs the command line, and hangs in the import of torch. The sleeps are short, because Python handles a
# signal that arrives just before a sleep only after the sleep.
SLOW_IMPORTS = """
import sys, time

class Hanging:
    def find_spec(self, name, *_):
        if name == "torch":
            print("importing", flush=True)
            for _ in range(6000):
                time.sleep(0.1)

sys.meta_path.insert(0, Hanging())
from service.cli import main
main()
"""


def test_server_notices_who_leaves_and_finishes_its_requests_after_sigterm(start):
    server = start("loads").wait_until_ready()
    with httpx.Client(base_url=server.url(), timeout=240) as client:
        with server.connect() as gone:
            gone.sendall(post(b'{"inputs": "held"}'))
            wait_until_computed(server)
        wait_until(lambda: server.metric('requests_total{route="/embed",status="499"}') == 1)
        server.let_go()
        with ThreadPoolExecutor() as clients:
            pending = clients.submit(client.post, "/embed", json={"inputs": ["a", "b"]})
            wait_until(lambda: server.metric("tokenize_seconds_count") == 2)
            server.send(signal.SIGTERM)
            response = pending.result()
    assert (response.status_code, response.headers["X-AttnCache-Hits"]) == (200, "0/2")
    assert server.number("code") == 0
    assert "Traceback" not in server.log


def test_server_that_gets_sigterm_while_loading_ends_with_0(start):
    server = start("never-loads")
    assert server.ask(get("/ready")).status == 503
    server.send(signal.SIGTERM)
    assert server.number("code") == 0
    assert "Traceback" not in server.log


# Imports what the command line imports first, and prints what SIGHUP has done until a line arrives.
FIRST_IMPORT = """
import os, sys
sys.argv[1:] = ["serve"]
from service import ending
print("imported", flush=True)
sys.stdin.readline()
print(len(ending.early_hangups), ending.IGNORES_HANGUP)
"""


@pytest.mark.parametrize(("ignored", "found"), [(False, b"1 False"), (True, b"0 True")])
def test_hangup_before_the_server_has_its_handlers_is_kept_and_nohup_is_noticed(ignored, found):
    handling = signal.SIG_IGN if ignored else signal.SIG_DFL
    with subprocess.Popen(
        [sys.executable, "-c", FIRST_IMPORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, handling),
    ) as started:
        assert started.stdout.readline() == b"imported\n"
        started.send_signal(signal.SIGHUP)
        assert started.communicate(b"\n", timeout=240)[0].strip() == found


def test_standard_streams_that_are_closed_become_dev_null(tmp_path):
    """A connection that got one of their descriptors could not be closed by libuv."""
    script = (
        "import os, sys\nfrom service import ending\nprint(1)\nprint(1, file=sys.stderr)\nsys.stdin.read()\n"
    )
    script += f"open({str(tmp_path / 'done')!r}, 'w').write(str([os.fstat(n).st_rdev for n in range(3)]))"
    closed = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: [os.close(n) for n in range(3)],
        timeout=240,
        check=False,
    )
    assert closed.returncode == 0
    assert (tmp_path / "done").read_text() == str([os.stat(os.devnull).st_rdev] * 3)


@pytest.mark.parametrize(
    ("command", "module", "number", "code", "shown"),
    [
        ("serve", "torch", signal.SIGTERM, 0, b""),
        ("serve", "torch", signal.SIGINT, 0, b""),
        ("embed", "torch", signal.SIGTERM, -signal.SIGTERM, b""),
        ("embed", "click", signal.SIGINT, -signal.SIGINT, b"attncache: stopped\n"),
        ("embed", "torch", signal.SIGINT, 130, b"attncache: stopped\n"),
    ],
)
def test_signal_during_the_imports_ends_the_server_with_0_and_others_as_usual(
    command, module, number, code, shown
):
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORTS.replace("torch", module), command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    ) as started:
        assert started.stdout.readline() == b"importing\n"
        started.send_signal(number)
        _, logged = started.communicate(timeout=240)
    assert (started.returncode, logged) == (code, shown)


def test_database_that_is_refused_after_the_start_is_one_line_and_exit_code_2(start, tmp_path):
    absent = str(tmp_path / "absent")
    arguments = ["serve", "--port", "0", "--log-level", "error", "--database", absent]
    server = start("command", arguments=arguments, folder=str(tmp_path))
    assert server.number("code") == 2
    (line,) = server.log.splitlines()
    assert line.startswith("attncache: ")
    assert absent in line


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "useful", "allowed", "warns"),
    [
        (1024, 4096, 500, 1000, None, False),
        (1024, 4096, 500, 2000, 2000, False),
        (1024, 4096, 3000, 9000, 4096, False),
        (1024, 4096, 5000, 9000, 4096, True),
        (1024, INFINITE, 5000, 9000, 9000, False),
        (INFINITE, INFINITE, 5000, 9000, None, False),
    ],
)
def test_process_may_open_as_many_files_as_are_useful(
    soft, hard, needed, useful, allowed, warns, monkeypatch, caplog
):
    changed = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    allow_files(needed, useful)
    assert changed == ([] if allowed is None else [(allowed, hard)])
    assert ("raise ulimit -n, or lower --max-connections" in caplog.text) == warns
