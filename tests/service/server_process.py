"""The real server with a fake engine, as a process (serve_fake.py)."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

SCRIPT = Path(__file__).with_name("serve_fake.py")


@contextmanager
def process(manner: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT), manner, json.dumps(settings)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def address(server: subprocess.Popen[str]) -> str:
    """Return the address that the server logs."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"listening on (http://[\d.:]+)", line):
            return found[1]
    raise AssertionError("the server never listened")


def wait_until_ready(url: str) -> None:
    while httpx.get(f"{url}/ready").status_code != 200:
        time.sleep(0.01)


def wait_until_computed(url: str) -> None:
    """Wait until the first request with texts is tokenised."""
    while "attncache_tokenize_seconds_count 1.0" not in httpx.get(f"{url}/metrics").text:
        time.sleep(0.01)


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)
