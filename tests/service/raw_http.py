"""The real server in this process, and clients that write bytes to its sockets."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from fake_engine import FakeEngine
from running import PATIENCE_SECONDS

from attncache_core import PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from service.app import create_app
from service.settings import Settings
from service.web.listeners import open_listeners
from service.workers.server import Server

HEALTH = b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"
READY = HEALTH.replace(b"/health", b"/ready")


@dataclass
class Served:
    """A server that runs in a thread."""

    engine: FakeEngine | PrefillEngine
    server: Server
    addresses: list[Any]

    def connect(self, listener=0, receive_buffer=None):
        address = self.addresses[listener]
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        client = socket.socket(family, socket.SOCK_STREAM)
        client.settimeout(PATIENCE_SECONDS)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(address)
        return client

    def ask(self, request, listener=0):
        with self.connect(listener) as client:
            client.sendall(request)
            return read_response(client)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.addresses[0][1]}"

    def connections(self):
        return list(self.server.server_state.connections)

    def metric(self, name):
        body = self.ask(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n", len(self.addresses) - 1).body
        (line,) = [line for line in body.decode().splitlines() if line.startswith(f"attncache_{name} ")]
        return float(line.split()[-1])


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self):
        """The code of an error."""
        return json.loads(self.body)["error"]["code"]


@contextmanager
def served(engine=None, **settings):
    """Yield the real server with an engine that is loaded, by default a fake one, on free ports."""
    engine = engine or FakeEngine()
    if "unix_socket" not in settings:
        settings["port"] = 0
    read = Settings(verify_rate=0, **settings)
    listeners = open_listeners(read)
    addresses = [listener.socket.getsockname() for listener in listeners]
    server = Server(create_app(read, lambda: iter([engine])), read, listeners)
    thread = threading.Thread(target=server.run)
    thread.start()
    running = Served(engine, server, addresses)
    try:
        if not any(listener.certificate for listener in listeners):
            wait_until(lambda: running.ask(READY).status == 200)
        yield running
    finally:
        if isinstance(engine, FakeEngine):
            engine.may_run.set()
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        for listener in listeners:
            listener.close()
    assert not thread.is_alive()


@contextmanager
def serving_model(folder, key_values=None, **settings):
    """Serve the model of a folder, in float32, and yield the server's URL once it is ready."""
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32", key_values=key_values)
    with served(engine, model=str(folder), **settings) as server:
        yield server.url


_ECDSA = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make_certificate(folder, name, address="IP:127.0.0.1", kind=_ECDSA):
    """Write NAME.pem, a certificate for this address, and NAME.key. Skips the test without openssl.

    kind: of the key, as openssl's -newkey takes it.
    """
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes certificates")
    files = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem", "-days", "3650", "-nodes"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={address}"]
    made = ["openssl", "req", "-x509", "-newkey", *kind, *files, *names]
    subprocess.run(made, check=True, capture_output=True)


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def post(body, *headers, path=b"/embed"):
    lines = [b"POST %s HTTP/1.1" % path, b"Host: test", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


# Computed each time, also if the text was computed before.
EMBED = post(b'{"inputs": "a"}', b"X-AttnCache-Reuse: off")


def post_chunked(*chunks):
    """Return the headers and the given chunks of a body, without its end."""
    head = b"POST /embed HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


def read_response(client):
    """Read one response with a Content-Length."""
    return read_responses(client, 1)[0]


def read_responses(client, count):
    """Read this number of responses with a Content-Length each."""
    responses, rest = [], b""
    for _ in range(count):
        while b"\r\n\r\n" not in rest:
            rest += _some_of(client)
        head, _, rest = rest.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(headers["content-length"])
        while len(rest) < size:
            rest += _some_of(client)
        responses.append(Response(int(first.split()[1]), headers, rest[:size]))
        rest = rest[size:]
    assert not rest, "more responses were sent"
    return responses


def read_to_end(client):
    """Read until the server closes the connection."""
    received = b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass  # the server closed while this client was sending
    return received


def _some_of(client):
    part = client.recv(65536)
    assert part, "the server closed the connection before its response"
    return part


async def request_and_leave(app, content, leave):
    """Send POST /embed to the app as a server does; the client disconnects when `leave` is set."""
    messages = [{"type": "http.request", "body": orjson.dumps(content), "more_body": False}]
    answered = []

    async def receive():
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        answered.append(message)

    scope = {"type": "http", "method": "POST", "path": "/embed", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return answered
