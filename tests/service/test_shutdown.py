"""The server drains, within its time, and ends, whatever hangs."""

from __future__ import annotations

import signal

import pytest
from fake_engine import FakeEngine
from raw_http import HEALTH, PATIENCE_SECONDS, post, read_response, read_to_end, served
from server_process import address, connect, process, wait_until_computed, wait_until_ready

READY = HEALTH.replace(b"/health", b"/ready")
EMBED = post(b'{"inputs": "a"}', b"X-AttnCache-Reuse: off")


def test_drain_answers_what_arrives_and_closes_connections() -> None:
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
        not_ready = server.ask(READY)
        assert (not_ready.status, not_ready.code) == (503, "shutting_down")
        late = server.ask(HEALTH)
        assert (late.status, late.headers["connection"]) == (200, "close")
        engine.may_run.set()
        finished = read_response(open_before)
        assert (finished.status, finished.headers["connection"]) == (200, "close")
        for client in (idle, open_before):
            client.close()


def test_requests_that_do_not_end_in_time_get_503() -> None:
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


def test_process_ends_with_0_though_a_batch_hangs_and_a_client_stalls() -> None:
    with process("loads", drain_seconds=2) as server:
        url = address(server)
        wait_until_ready(url)
        with connect(url) as hangs, connect(url) as stalls:
            stalls.sendall(EMBED[:-1])
            hangs.sendall(post(b'{"inputs": "hang"}'))
            wait_until_computed(url)
            # There is no file to read again, so the signal ends the server like SIGTERM.
            server.send_signal(signal.SIGHUP)
            assert read_response(hangs).code == "shutting_down"
        _, logged = server.communicate(timeout=PATIENCE_SECONDS)
        assert server.returncode == 0
        assert "did not close in time" in logged


@pytest.mark.parametrize("workers", [1, 2])
def test_process_ends_with_0_though_the_interpreters_clean_up_hangs(workers: int) -> None:
    with process("never-cleans-up", drain_seconds=2, workers=workers) as server:
        wait_until_ready(address(server))
        server.send_signal(signal.SIGTERM)
        _, logged = server.communicate(timeout=PATIENCE_SECONDS)
        assert server.returncode == 0
        assert "stopped" in logged
        assert "did not close in time" not in logged


def test_process_ends_with_0_though_the_event_loop_hangs() -> None:
    with process("loads", drain_seconds=2, stuck_seconds=0.2) as server:
        wait_until_ready(address(server))
        server.send_signal(signal.SIGUSR1)
        assert server.stderr is not None
        logged = ""
        while "hang_loop" not in logged:  # the stack of the event loop's thread
            logged += server.stderr.readline()
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=PATIENCE_SECONDS)
        assert server.returncode == 0


def test_process_whose_interpreter_hangs_ends_itself_if_told_to() -> None:
    with process("loads", stuck_seconds=1, exit_when_stuck=True) as server:
        wait_until_ready(address(server))
        server.send_signal(signal.SIGUSR2)
        _, logged = server.communicate(timeout=PATIENCE_SECONDS)
        assert server.returncode == 1
        assert "in hang_interpreter" in logged


def test_second_signal_ends_the_process_at_once() -> None:
    with process("loads") as server:
        url = address(server)
        wait_until_ready(url)
        with connect(url) as hangs, connect(url) as client:
            hangs.sendall(post(b'{"inputs": "hang"}'))
            wait_until_computed(url)
            server.send_signal(signal.SIGTERM)
            client.sendall(READY)
            read_to_end(client)  # the first signal has arrived
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=PATIENCE_SECONDS)
        assert server.returncode == 128 + signal.SIGTERM


def test_stuck_process_ends_itself_if_told_to() -> None:
    with process("loads", stuck_seconds=0.5, exit_when_stuck=True) as server:
        url = address(server)
        wait_until_ready(url)
        with connect(url) as hangs:
            hangs.sendall(post(b'{"inputs": ["hang", "Sesam"]}'))
            _, logged = server.communicate(timeout=PATIENCE_SECONDS)
        assert server.returncode == 70
        assert "time.sleep(HANG_SECONDS" in logged  # where the batch hangs
        assert "Sesam" not in logged
