"""Servers that run as processes of their own; see serve_fakes.py."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from raw_http import PATIENCE_SECONDS, read_response, wait_until

SCRIPT = Path(__file__).with_name("serve_fakes.py")


class Running:
    """A server that runs."""

    def __init__(self, folder, name):
        self.folder = folder
        self.name = name

    @property
    def log(self):
        path = self.folder / f"{self.name}.log"
        return path.read_text() if path.exists() else ""

    def number(self, kind):
        """Return the process id or, once the server has ended, the exit code."""
        path = self.folder / f"{self.name}.{kind}"
        wait_until(path.exists)
        return int(path.read_text())

    @property
    def has_ended(self):
        return (self.folder / f"{self.name}.code").exists()

    def send(self, number):
        os.kill(self.number("pid"), number)

    def let_go(self):
        """Let batches with the text "held" end."""
        (self.folder / f"{self.name}.go").touch()

    def url(self, name=None):
        """Return the address that the server logs; name: of one of several listeners."""
        found = re.compile(rf"listening on (\S+) \({name}\)" if name else r"listening on (\S+)")
        wait_until(lambda: found.search(self.log) or self.has_ended)
        assert found.search(self.log), self.log
        return found.search(self.log)[1]

    def connect(self):
        url = self.url()
        if url.startswith("unix:"):
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(PATIENCE_SECONDS)
            client.connect(url.removeprefix("unix:"))
            return client
        host, port = url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)

    def ask(self, request):
        """Send a request over a connection of its own."""
        with self.connect() as client:
            client.sendall(request)
            return read_response(client)

    def workers(self):
        """The process ids of the workers, by their number; of those that were replaced, the last."""
        found = dict(re.findall(r"worker (\d) has process id (\d+)", self.log))
        return [int(found[number]) for number in sorted(found)]

    def wait_until_ready(self):
        wait_until(lambda: self.ask(get("/ready")).status == 200)
        return self

    def metric(self, name, *headers):
        """Return a number that the server counts; 0 if the server does not know the name yet."""
        lines = self.ask(get("/metrics", *headers)).body.decode().splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"attncache_{name} ")), 0.0)

    def end(self):
        """Wait for the end of the process, its workers and its files. Return the exit code."""
        code = self.number("code")
        wait_until(lambda: not any(map(is_running, self.workers())))
        wait_until(lambda: not list((self.folder / self.name).iterdir()))
        return code


def is_running(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def get(path, *headers):
    return b"\r\n".join([b"GET %s HTTP/1.1" % path.encode(), b"Host: test", *headers]) + b"\r\n\r\n"


@contextlib.contextmanager
def starting_servers():
    """Yield a function that starts a server: (manner, **settings) -> Running. All end with the context."""
    # A short path, because the path of a Unix socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    running = []
    names = map(str, itertools.count())

    def start(manner, **settings):
        running.append(Running(folder, next(names)))
        started.stdin.write(json.dumps([running[-1].name, manner, settings]) + "\n")
        started.stdin.flush()
        return running[-1]

    command = [sys.executable, str(SCRIPT), str(folder)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run below nohup
    ) as started:
        try:
            yield start
        finally:
            for server in running:
                for process_id in [*([] if server.has_ended else [server.number("pid")]), *server.workers()]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGKILL)
                server.number("code")
            started.kill()
            shutil.rmtree(folder, ignore_errors=True)
