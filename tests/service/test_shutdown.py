"""The server drains, within its time, and ends, whatever hangs."""

import signal
import threading
from collections import Counter

import pytest
from fake_engine import FakeEngine
from raw_http import (
    HEALTH,
    PATIENCE_SECONDS,
    post,
    read_response,
    read_responses,
    read_to_end,
    served,
    wait_until,
)

READY = HEALTH.replace(b"/health", b"/ready")
EMBED = post(b'{"inputs": "a"}', b"X-AttnCache-Reuse: off")


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


@pytest.fixture
def not_below_nohup():
    """Start processes that a SIGHUP ends, also if these tests run below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("not_below_nohup")
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
    told = {"stuck_seconds": 0.5, "exit_when_stuck": True}
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
