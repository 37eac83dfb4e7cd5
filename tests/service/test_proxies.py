"""The client behind trusted proxies, and what a load balancer needs while a server ends."""

import asyncio
import os
import signal
import time

import pytest
from fake_engine import FakeEngine, begun, serving
from queueing import queued
from raw_http import EMBED, read_response, wait_until
from server_process import get

from service.errors import InvalidSettings
from service.settings import read_settings
from service.web.proxies import TrustedProxies

TRUSTED = TrustedProxies.of("10.0.0.0/8, fd00::/8,192.0.2.7")


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["198.51.100.7"], "198.51.100.7"),
        (["198.51.100.7:4711"], "198.51.100.7"),
        (["203.0.113.1, 198.51.100.7,10.1.2.3 , 192.0.2.7"], "198.51.100.7"),
        (["203.0.113.1", "198.51.100.7", "10.1.2.3"], "198.51.100.7"),  # a header that repeats
        (["10.9.9.9, 10.1.2.3"], "10.9.9.9"),  # a client inside
        (["2001:db8:1:2:3::4"], "2001:db8:1:2::/64"),
        (["[2001:db8:1:2:3::4]:4711, [fd00::1], fd00::2"], "2001:db8:1:2::/64"),
        (["::ffff:198.51.100.7"], "198.51.100.7"),
        (["invented, <script>, 198.51.100.7"], "198.51.100.7"),
        (["unknown"], None),
        (["198.51.100.7, unknown, 10.1.2.3"], None),
        (["198.51.100.7,"], None),
        (["198.51.100.7:http"], None),
        ([""], None),
        (["\xff, \xb2.0.0.1"], None),
        ([", ".join(["10.1.2.3"] * 6000)], None),
        ([], None),
    ],
)
def test_client_is_the_rightmost_address_that_is_no_trusted_proxy(forwarded, client):
    headers = [(b"host", b"test"), *((b"x-forwarded-for", value.encode("latin-1")) for value in forwarded)]
    for peer in ("10.0.0.1", "::ffff:10.0.0.1", "fd00::1", "192.0.2.7"):
        assert TRUSTED.client_of({"client": (peer, 80), "headers": headers}) == client
    for peer in (("11.0.0.1", 80), ("fc00::1", 80), ("192.0.2.8", 80), ("test", 1), None):
        assert TRUSTED.client_of({"client": peer, "headers": headers}) is None
    by_socket = TrustedProxies.of("unix, 10.0.0.0/8,fd00::/8,192.0.2.7")
    assert by_socket.client_of({"client": None, "headers": headers}) == client


@pytest.mark.parametrize("names", ["10.0.0.1/8", "proxy.example", "10.0.0.0/8,", "10.0.0.0/33", "*", " "])
def test_names_that_are_no_networks_are_refused(names):
    with pytest.raises(InvalidSettings, match=r"trusted-proxies .*such as 10\.0\.0\.0/8"):
        read_settings({"trusted_proxies": names})


@pytest.mark.parametrize(
    ("trusted", "takes_turns"), [("127.0.0.1", True), ("10.0.0.0/8", False), (None, False)]
)
async def test_clients_of_one_connection_take_turns_if_the_proxy_is_trusted(trusted, takes_turns):
    engine = FakeEngine()

    def ask(address, *texts):
        headers = {"X-Forwarded-For": f"203.0.113.{time.monotonic_ns() % 200}, {address}"}
        return client.post("/embed", json={"inputs": texts}, headers=headers)

    async with serving(engine, trusted_proxies=trusted, max_batch_tokens=16) as client:
        answered = [await begun(engine, ask("198.51.100.1", "held"))]
        batcher = client._transport.app.state.service.serving().batcher
        for waiting, texts in enumerate(([f"many {number}" for number in range(40)], ["single"]), 1):
            answered.append(asyncio.create_task(ask(f"198.51.100.{waiting}", *texts)))
            await queued(batcher, 39 + waiting)
        engine.may_run.set()
        assert [(await response).status_code for response in answered] == [200] * 3
    assert any("single" in batch for batch in engine.batches[:4]) == takes_turns


@pytest.mark.parametrize("workers", [1, 2])
def test_server_serves_on_during_the_delay_until_a_second_signal(start, workers):
    server = start("loads", workers=workers, drain_delay_seconds=500).wait_until_ready()
    with server.connect() as kept, server.connect() as idle:
        for client in (kept, idle):
            client.sendall(get("/health"))
            read_response(client)
        for process in (server.number("pid"), *server.workers()):  # as systemd signals all of them
            os.kill(process, signal.SIGTERM)
        wait_until(lambda: server.ask(get("/ready")).status == 503)
        not_ready = server.ask(get("/ready"))
        assert (not_ready.code, not_ready.headers["x-attncache-error"]) == ("shutting_down", "shutting_down")
        for _ in range(3):
            kept.sendall(EMBED)
            answer = read_response(kept)
            assert answer.status == 200
            assert "connection" not in answer.headers
        assert server.ask(EMBED).status == 200
        kept.sendall(EMBED)
        time.sleep(0.05)
        server.send(signal.SIGTERM)
        assert read_response(kept).status == 200
    assert server.end() == 0


def test_server_ends_after_its_delay(start):
    server = start("loads", drain_delay_seconds=0.5, drain_seconds=5).wait_until_ready()
    with server.connect() as client:
        server.send(signal.SIGTERM)
        client.sendall(EMBED)
        assert read_response(client).status == 200
    assert server.number("code") == 0
    assert "did not close in time" not in server.log
