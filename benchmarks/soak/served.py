"""The server process: starts it, knows its address and its memory, and stops it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

_COMMAND = "from service.cli import main; main()"
_STOP_SECONDS = 60
_START_SECONDS = 600


@dataclass(frozen=True)
class Process:
    """A server that runs."""

    process: subprocess.Popen[bytes]
    url: str

    def memory(self) -> tuple[float, float]:
        """Return the memory that only this process has, and the mapped files in memory, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        sizes = {name: int(size) / 1024 for name, size in re.findall(r"^(Rss\w+):\s+(\d+) kB", status, re.M)}
        return sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"]

    def files(self) -> int:
        """Return the number of open files and sockets."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def reload(self) -> None:
        """Let the server read its keys again."""
        self.process.send_signal(signal.SIGHUP)


@contextmanager
def serving(log: Path, options: Sequence[str]) -> Iterator[Process]:
    """Start `attncache serve` on a free port and yield the process once it is ready. Stop it by SIGTERM."""
    command = [sys.executable, "-c", _COMMAND, "serve", "--port", "0", *options]
    with log.open("wb") as written:
        started = subprocess.Popen(command, stdout=written, stderr=written)
        try:
            yield Process(started, _ready_at(started, log))
            started.terminate()
            if started.wait(_STOP_SECONDS):
                raise RuntimeError(f"the server ended with code {started.returncode}")
        finally:
            started.kill()
            started.wait()


def _ready_at(started: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address of a server once it is ready. Raises RuntimeError if it ends before."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and started.poll() is None:
        found = re.search(r"listening on (http://[\d.:]+)", log.read_text(encoding="utf-8"))
        if found and _is_ready(found[1]):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not get ready:\n{log.read_text(encoding='utf-8')[-2000:]}")


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/ready") as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False
