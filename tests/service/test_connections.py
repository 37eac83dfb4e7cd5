"""Clients that take long, send much or read nothing, over raw sockets to the real server."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
from fake_engine import FakeEngine
from raw_http import (
    EMBED,
    HEALTH,
    PATIENCE_SECONDS,
    READY,
    post,
    post_chunked,
    read_response,
    read_responses,
    read_to_end,
    served,
    wait_until,
)

# Its response has 2 MB. The buffers of both sockets hold a few of such responses, and not eight.
LARGE = post(json.dumps({"inputs": ["a"] * 4096}).encode())
MIB = 2**20


@pytest.fixture(scope="module")
def server():
    """A server with usual limits."""
    with served() as running:
        yield running


def connection_of(server, client):
    """Return the server's side of the connection of a client."""
    (connection,) = [each for each in server.connections() if each.client == client.getsockname()]
    return connection


@contextlib.contextmanager
def computing(server, client, sent=EMBED):
    """Send a request, whose computation waits for the end of the block."""
    server.engine.may_run.clear()
    client.sendall(sent)
    assert server.engine.runs.acquire(timeout=PATIENCE_SECONDS)
    yield
    server.engine.may_run.set()


@pytest.fixture(scope="module")
def hasty():
    """A server that waits for clients only shortly."""
    with served(
        header_seconds=0.3,
        body_seconds=0.3,
        write_seconds=0.3,
        keep_alive_seconds=0.3,
        max_request_inputs=4096,
        max_queue_sequences=65536,
    ) as running:
        yield running


@contextlib.contextmanager
def counted(server, reason, cuts=1):
    """Check that the metric of cut connections grows by `cuts`."""
    name = f'connections_cut_total{{reason="{reason}"}}'
    before = server.metric(name)
    yield
    wait_until(lambda: server.metric(name) == before + cuts)


class RecordedTransport:
    """A transport of a connection that tells what was written at once."""

    def __init__(self, transport):
        self.transport, self.written = transport, []

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def write(self, data):
        self.written.append(data)
        self.transport.write(data)


@pytest.mark.parametrize("request_bytes", [EMBED, HEALTH, HEALTH.replace(b"GET", b"HEAD")])
def test_head_and_body_of_an_answer_are_written_at_once(server, request_bytes):
    with server.connect() as client:
        client.sendall(HEALTH)
        assert read_response(client).status == 200
        responses = connection_of(server, client)._responses
        responses._transport = recorded = RecordedTransport(responses._transport)
        for _ in range(2):
            client.sendall(request_bytes)
            answer = client.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert recorded.written == [answer]
            recorded.written.clear()


# Time.


@pytest.mark.parametrize(
    ("first", "more", "answer"),
    [(b"GET /health HTTP/1.1\r\n", b"X-More: 1\r\n", b"HTTP/1.1 408 "), (b"", b"\r\n", b"")],
    ids=["headers", "empty lines"],
)
def test_connection_on_which_lines_trickle_in_is_ended(hasty, first, more, answer):
    with hasty.connect() as client:
        client.settimeout(0.05)
        client.sendall(first)
        received = None
        while received is None:
            try:
                client.sendall(more)
                received = client.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                received = b""
        assert received[:13] == answer


@pytest.mark.parametrize("requests", [0, 2])
def test_idle_connection_is_closed_without_a_word(hasty, requests):
    with hasty.connect() as client:
        for _ in range(requests):
            client.sendall(HEALTH)
            assert read_response(client).status == 200
        assert read_to_end(client) == b""


ENDLESS_REQUESTS = {
    "first line": b"GET /hea",
    "headers": b"POST /embed HTTP/1.1\r\nHost: test\r\nX-Endless: ",
    "body without its last byte": post(b"x" * 100)[:-1],
    "chunks": post_chunked(b'{"inputs":'),
    "trailers": post_chunked(b"{}") + b"0\r\nX-Trailer: ",
    "chunk extension": post_chunked(b"{}") + b"5;extension=",
}


def test_request_that_does_not_end_is_answered_408(hasty):
    with counted(hasty, "request_timeout", len(ENDLESS_REQUESTS)), contextlib.ExitStack() as clients:
        waiting = {name: clients.enter_context(hasty.connect()) for name in ENDLESS_REQUESTS}
        for name, client in waiting.items():
            client.sendall(ENDLESS_REQUESTS[name])
        for name, client in waiting.items():
            response = read_response(client)
            assert (response.status, response.code) == (408, "request_timeout"), name
            assert response.headers["connection"] == "close", name
            assert read_to_end(client) == b"", name


def test_time_of_a_body_does_not_run_while_the_server_does_not_read_it(server):
    with server.connect() as client:
        client.sendall(EMBED[:-5])
        wait_until(lambda: any(each.client == client.getsockname() for each in server.connections()))
        connection, checked = connection_of(server, client), threading.Event()
        wait_until(lambda: connection.cycle)

        def check_much_later():
            later = connection.loop.time() + 10**6
            connection.flow.pause_reading()
            connection.check(later)
            connection.flow.resume_reading()
            connection.check(later + 1)
            checked.set()

        connection.loop.call_soon_threadsafe(check_much_later)
        assert checked.wait(PATIENCE_SECONDS)
        client.sendall(EMBED[-5:])
        assert read_response(client).status == 200


def test_request_that_is_computed_is_not_cut(hasty):
    with counted(hasty, "request_timeout"), hasty.connect() as client:
        # Another connection waits out the same limits meanwhile.
        with computing(hasty, client), hasty.connect() as other:
            other.sendall(b"GET /")
            assert read_response(other).status == 408
        assert read_response(client).status == 200


@pytest.mark.parametrize("reads", [0, 16_384])  # bytes at a time
def test_client_that_reads_nothing_or_slowly_is_cut(hasty, reads):
    with hasty.connect(receive_buffer=4096) as client, counted(hasty, "slow_reader"):
        client.sendall(LARGE * 8)
        for _ in range(25 if reads else 0):  # longer than write_seconds
            time.sleep(0.02)
            client.recv(reads)


LARGE_LIMITS = {"max_request_inputs": 4096, "max_queue_sequences": 65536, "max_inflight_bytes": 3 * MIB}


def test_large_responses_that_are_not_read_are_bounded_and_in_flight():
    with served(**LARGE_LIMITS, write_seconds=600) as server:
        answers = server.server.config.app.state.service.answers
        with server.connect(receive_buffer=4096) as slow:
            slow.sendall(LARGE * 8)
            wait_until(lambda: any(each.flow.write_paused for each in server.connections()))
            assert MIB < answers.taken < 2 * MIB
            refused = server.ask(LARGE)
            assert (refused.status, refused.code) == (429, "queue_full")
            assert b"not read yet" in refused.body
            assert server.ask(EMBED).status == 200
            assert [answer.status for answer in read_responses(slow, 8)] == [200] * 8
        wait_until(lambda: answers.taken == 0)
        assert server.ask(LARGE).status == 200


def test_client_has_less_time_to_read_while_large_responses_are_not_read(monkeypatch):
    monkeypatch.setattr("service.web.connection._CROWDED_SHARE", 0.0)
    with served(**LARGE_LIMITS, write_seconds=600) as server, server.connect(receive_buffer=4096) as slow:
        with counted(server, "slow_reader"):
            slow.sendall(LARGE * 8)
        assert server.ask(LARGE).status == 200


# Size.


@pytest.mark.parametrize("headers", [b"X: y\r\n" * 300, b"X: " + b"x" * 70_000 + b"\r\n"])
def test_headers_that_are_too_large_are_refused_though_they_come_at_once(server, headers):
    # Behind a request that is not answered yet, the response to that request comes, and nothing else.
    for first, status in ((b"", 431), (HEALTH, 200)):
        with counted(server, "headers_too_large"), server.connect() as client:
            client.sendall(first + b"GET /health HTTP/1.1\r\n" + headers + b"\r\n")
            assert read_response(client).status == status
            assert client.recv(1) == b""


def test_headers_within_the_limit_are_served_and_larger_ones_refused_though_they_come_in_two_parts(server):
    assert server.ask(HEALTH[:-2] + b"X: " + b"x" * 50_000 + b"\r\n\r\n").status == 200
    with counted(server, "headers_too_large"), server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 40_000)
        server.ask(HEALTH)  # the first part has been read
        client.sendall(b"x" * 40_000 + b"\r\n\r\n")
        assert read_response(client).status == 431


CHUNK = post_chunked(b"{")


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"GET /health HTTP/1.1\r\nX: " + b"x" * MIB, id="one header"),
        pytest.param(b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 60_000, id="many headers"),
        pytest.param(b"GET /health HTTP/1.1\r\n" + b"x" * MIB, id="one name"),
        pytest.param(b"GET /" + b"x" * MIB, id="a URL"),
        pytest.param(CHUNK + b"0\r\n" + b"X-Trailer: yes\r\n" * MIB, id="trailers"),
        pytest.param(CHUNK + b"0\r\nX-Trailer: " + b"x" * 18 * MIB, id="one trailer"),
        pytest.param(CHUNK + b"1;" + b"x" * 18 * MIB, id="a chunk extension"),
        pytest.param(CHUNK + b"1;a=b\r\nx\r\n1" + b";a=b" * MIB, id="many chunk extensions"),
    ],
)
def test_endless_headers_trailers_and_extensions_are_answered_431(server, endless):
    with counted(server, "headers_too_large"), server.connect() as client:
        with contextlib.suppress(OSError):
            client.sendall(endless)
        response = read_response(client)
        assert (response.status, response.code) == (431, "headers_too_large")


def test_client_that_is_refused_has_time_to_read_why_before_it_is_cut(server, monkeypatch):
    monkeypatch.setattr("service.web.connection._LINGER_SECONDS", 60)

    async def is_cut_after(seconds):
        connection.check(connection._closing_since + seconds)
        return connection.transport.is_closing()

    with server.connect() as client:
        with contextlib.suppress(OSError):
            client.sendall(HEALTH[:-2] + b"X: " + b"x" * MIB)
        assert read_response(client).status == 431
        connection = connection_of(server, client)
        for seconds, is_cut in ((59, False), (61, True)):
            found = asyncio.run_coroutine_threadsafe(is_cut_after(seconds), connection.loop)
            assert found.result(240) == is_cut


def test_trailers_do_not_become_headers_of_the_next_request(server):
    first = post_chunked(b'{"inputs": "a"}') + b"0\r\nX-AttnCache-Reuse: neither\r\n\r\n"
    with server.connect() as client:
        client.sendall(first)
        assert read_response(client).status == 200
        client.sendall(EMBED)
        assert read_response(client).status == 200


def test_body_in_chunks_of_one_byte_is_served(server):
    body = b'{"inputs": "' + b"a" * 50_000 + b'"}'
    chunks = [body[index : index + 1] for index in range(len(body))]
    assert server.ask(post_chunked(*chunks) + b"0\r\n\r\n").status == 200


def test_body_that_is_not_read_is_held_back_in_the_client(server, monkeypatch):
    """The app does not read the body of GET /health, and the client could send it for ever."""
    monkeypatch.setattr("service.web.connection._LINGER_SECONDS", 0.3)
    request = post(b"", path=b"/health").replace(b"Content-Length: 0", b"Content-Length: %d" % (64 * MIB))
    with server.connect() as client:
        client.sendall(request)
        assert read_response(client).status == 405
        assert read_to_end(client) == b""


def test_request_that_begins_in_the_read_of_a_large_body_is_received(server):
    """The bytes in front of it are no framing of its body."""
    large = post(b" " * 300_000)
    with server.connect() as client:
        client.sendall(large[:1000])

        wait_until(lambda: any(each.client == client.getsockname() for each in server.connections()))
        connection = connection_of(server, client)
        wait_until(lambda: connection.cycle)
        read = large[1000:] + EMBED[:-5]
        connection.loop.call_soon_threadsafe(connection.data_received, read)
        assert read_response(client).status == 400
        client.sendall(EMBED[-5:])
        assert read_response(client).status == 200


def test_unread_body_holds_a_bounded_number_of_bytes(server):
    """While a request waits behind another one, nobody reads its body."""
    with server.connect() as client, computing(server, client):
        client.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            client.sendall(post(b"")[:-19] + b"Content-Length: %d\r\n\r\n" % (64 * MIB))
            while True:
                sent += client.send(b"x" * 65536)
        connection = connection_of(server, client)
        assert len(connection.cycle.body) <= MIB / 2
        assert connection.flow.read_paused
        assert sent < 64 * MIB


# Requests one after the other.


def test_pipeline_is_bounded_and_what_was_accepted_is_answered(server):
    with server.connect() as client:
        with computing(server, client, EMBED + HEALTH * 10_000):
            assert len(connection_of(server, client).pipeline) <= 16
        received = read_to_end(client)
    assert 1 < received.count(b"HTTP/1.1 200 ") <= 17
    assert received.count(b"HTTP/1.1 ") == received.count(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET nonsense\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"]
)
def test_what_is_not_http_is_answered_400(server, garbage):
    with counted(server, "malformed_request"), server.connect() as client:
        client.sendall(garbage)
        response = read_response(client)
        assert (response.status, response.code) == (400, "malformed_request")
        assert read_to_end(client) == b""


@pytest.mark.parametrize("garbage", [b"nonsense\r\n\r\n", post_chunked() + b"nonsense\r\n"])
def test_garbage_behind_a_request_does_not_take_its_response(server, garbage):
    with server.connect() as client:
        with computing(server, client, EMBED + garbage):
            pass
        assert read_response(client).status == 200
        assert read_to_end(client) == b""


def test_client_that_leaves_with_pipelined_requests_is_not_computed(server):
    gone = 'requests_total{route="/embed",status="499"}'
    before = server.metric(gone)
    with server.connect() as client:
        with computing(server, client):
            with server.connect() as leaving:
                leaving.sendall(post(b'{"inputs": "left"}') + EMBED)
                wait_until(lambda: any(len(connection.pipeline) == 1 for connection in server.connections()))
            wait_until(lambda: server.metric(gone) == before + 1)
        assert read_response(client).status == 200
    assert ["left"] not in server.engine.batches


def test_body_that_is_refused_early_after_expect_closes_the_connection(server):
    head = post(b"", b"Expect: 100-continue").replace(b"Length: 0", b"Length: %d" % (64 * MIB))
    with server.connect() as client:
        client.sendall(head)
        response = read_response(client)
        assert (response.status, response.headers["connection"]) == (413, "close")
        assert read_to_end(client) == b""


EXPECTING = post(b'{"inputs": "a"}', b"Expect: 100-continue")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("waits", [True, False])
def test_connection_stays_open_after_expect_if_the_body_came_before_the_response(server, waits):
    head, body = EXPECTING.split(b"\r\n\r\n")
    with server.connect() as client:
        for _ in range(2):
            if waits:
                client.sendall(head + b"\r\n\r\n")
                assert client.recv(len(CONTINUE)) == CONTINUE
                client.sendall(body)
            else:
                client.sendall(EXPECTING)
                assert client.recv(len(CONTINUE)) == CONTINUE
            response = read_response(client)
            assert response.status == 200
            assert "connection" not in response.headers


@pytest.mark.parametrize("closes", ["client", "server"])
def test_connection_closes_after_expect_if_the_client_or_a_draining_server_wants_it(
    server, monkeypatch, closes
):
    wanted = b"Connection: close\r\nExpect" if closes == "client" else b"Expect"
    head, body = EXPECTING.replace(b"Expect", wanted).split(b"\r\n\r\n")
    with server.connect() as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(len(CONTINUE)) == CONTINUE
        [connection] = server.connections()
        monkeypatch.setattr(connection._of_listener, "draining", closes == "server")
        client.sendall(body)
        response = read_response(client)
        assert (response.status, response.headers["connection"]) == (200, "close")
        assert read_to_end(client) == b""


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@pytest.mark.parametrize("size", [1, 7, 100_000])  # of what arrives at a time, in bytes
def test_upgrade_is_ignored(server, protocol, size):
    fields = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol
    with_body = post(b'{"inputs": "GET /nowhere HTTP/1.1\\r\\n\\r\\n"}', fields)
    chunked = post_chunked(b'{"inputs": "', b'b"}').replace(b"Host", fields + b"\r\nHost") + b"0\r\n\r\n"
    requests = HEALTH.replace(b"Host", fields + b"\r\nHost") + with_body + chunked + EMBED
    with server.connect() as client:
        for first in range(0, len(requests), size):
            client.sendall(requests[first : first + size])
        assert [response.status for response in read_responses(client, 4)] == [200] * 4
        client.shutdown(socket.SHUT_WR)
        assert read_to_end(client) == b""


@pytest.mark.parametrize(
    ("version", "connection"),
    [(b"1.1", b"Upgrade, close"), (b"1.0", b"Upgrade"), (b"1.0", b"keep-alive, Upgrade")],
)
@pytest.mark.parametrize("size", [1, 100_000])
def test_upgrade_is_ignored_on_connections_that_close(server, version, connection, size):
    fields = b"Upgrade: h2c\r\nConnection: " + connection
    for request in (HEALTH.replace(b"Host", fields + b"\r\nHost"), post(b'{"inputs": "a"}', fields)):
        sent = request.replace(b"HTTP/1.1", b"HTTP/" + version)
        with server.connect() as client:
            for first in range(0, len(sent), size):
                client.sendall(sent[first : first + size])
            assert read_response(client).status == 200
            client.shutdown(socket.SHUT_WR)
            assert read_to_end(client) == b""


def test_body_behind_an_upgrade_is_no_request(server):
    inner = HEALTH + HEALTH
    with server.connect() as client:
        client.sendall(post(b"", b"Connection: upgrade\r\nUpgrade: x").replace(b": 0", b": %d" % len(inner)))
        time.sleep(0.05)
        client.sendall(inner + EMBED)
        refused, embedded = read_responses(client, 2)
    assert (refused.status, refused.code) == (400, "malformed_body")
    assert b"not valid" in refused.body
    assert (embedded.status, embedded.body[:2]) == (200, b"[[")


# How many.


@pytest.fixture
def small():
    with served(FakeEngine(), max_connections=3) as running:
        yield running


def test_connections_beyond_the_limit_get_503_and_health_is_answered(small):
    with contextlib.ExitStack() as connections:
        for _ in range(3):
            client = connections.enter_context(small.connect())
            client.sendall(HEALTH)
            assert read_response(client).status == 200
        refused = small.ask(EMBED)
        assert (refused.status, refused.code) == (503, "too_many_connections")
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        assert [small.ask(request).status for request in (HEALTH, READY)] == [200, 200]
    wait_until(lambda: small.ask(EMBED).status == 200)


def test_health_is_answered_while_many_connections_say_nothing(small):
    with contextlib.ExitStack() as connections:
        silent = [connections.enter_context(small.connect()) for _ in range(40)]
        wait_until(lambda: len(small.connections()) >= 19)
        for _ in range(5):
            assert small.ask(HEALTH).status == 200
        # The oldest ones beyond the limit made room; those within the limit are still there.
        assert read_response(silent[3]).status == 503
        silent[0].sendall(EMBED)
        assert read_response(silent[0]).status == 200


# Who waits for whom.


def test_connections_of_a_unix_socket_take_turns(tmp_path):
    engine = FakeEngine()
    settings = {"max_batch_tokens": 64, "max_request_inputs": 64, "result_memory_bytes": 0}
    with (
        served(engine, unix_socket=tmp_path / "a.sock", **settings) as server,
        server.connect() as many,
        server.connect() as one,
        server.connect() as busy,
    ):
        with computing(server, busy):
            many.sendall(post(json.dumps({"inputs": [f"{n:032}" for n in range(40)]}).encode()))
            wait_until(lambda: server.metric("queue_sequences") == 40)
            one.sendall(post(b'{"inputs": "one text"}'))
            wait_until(lambda: server.metric("queue_sequences") == 41)
        for client in (many, one, busy):
            assert read_response(client).status == 200
    place = next(number for number, batch in enumerate(engine.batches) if "one text" in batch)
    # The busy text, and a turn of the connection that came before.
    assert place <= 2
