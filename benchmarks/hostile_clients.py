"""Show what clients that send much, or slowly, cost a running server.

    attncache serve --header-seconds 60 --body-seconds 60
    python -m benchmarks hostile-clients --pid PID [--host 127.0.0.1] [--port 8080]

Each attack opens its connections, sends as much on each as the server takes, and keeps them open. Meanwhile
the script reads the server's memory, and asks /health and /embed. The limits of time are long, so that the
memory shows what is kept until a connection is cut. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import time
from http.client import HTTPConnection
from pathlib import Path

MIB = 2**20
# A server that does not read for so long has stopped reading.
PATIENCE_SECONDS = 0.02
HEALTH = b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"
CHUNKED = b"POST /embed HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
LONG = b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % (2 * MIB)
# Name -> number of connections, and what each of them sends.
ATTACKS = {
    "nothing": (1000, b""),
    "headers without an end": (1000, b"GET / HTTP/1.1\r\nX: x"),
    "60 KiB of headers without an end": (
        1000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"X: " + b"x" * 60_000,
    ),
    "18 MiB of trailers": (100, CHUNKED + b"0\r\n" + b"X-Trailer: yes\r\n" * (18 * MIB // 16)),
    "a chunk extension of 18 MiB": (100, CHUNKED + b"1;" + b"x" * 18 * MIB),
    "20,000 requests at once": (200, HEALTH * 20_000),
    "1 MiB of a body without an end": (200, LONG + b"x" * MIB),
}


def main() -> None:
    """Run all attacks, one after the other, and print a row of a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pid", type=int, required=True, help="the server's process")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    address = (options.host, options.port)
    print("| each connection sends | connections | sent, MiB | memory, MiB | /health | /embed |")
    print("|---|---|---|---|---|---|")
    for name, (count, payload) in ATTACKS.items():
        before = memory_mib(options.pid)
        with contextlib.ExitStack() as connections:
            sent = sum(
                send(connections.enter_context(socket.create_connection(address)), payload)
                for _ in range(count)
            )
            time.sleep(1)
            grown = memory_mib(options.pid) - before
            statuses = ask(address, "GET", "/health"), ask(address, "POST", "/embed", {"inputs": "a"})
        print(f"| {name} | {count} | {sent / MIB:.0f} | {grown:+.0f} | {statuses[0]} | {statuses[1]} |")
        time.sleep(1)


def send(client: socket.socket, payload: bytes) -> int:
    """Send until the server does not read any more. Returns the number of bytes sent."""
    client.settimeout(PATIENCE_SECONDS)
    sent = 0
    with contextlib.suppress(OSError):
        while sent < len(payload):
            sent += client.send(memoryview(payload)[sent:])
    return sent


def ask(address: tuple[str, int], method: str, path: str, content: object = None) -> int:
    """Return the status of a response."""
    connection = HTTPConnection(*address, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, json.dumps(content) if content else None)
        return connection.getresponse().status


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
