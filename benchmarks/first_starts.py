"""Start a server with an empty cache several times, and see when it answers and what it decides about reuse.

    python -m benchmarks first-starts --starts 10 --neighbours 1
    python -m benchmarks first-starts --starts 10 --neighbours 1 --database FOLDER

Prints for each start the seconds until the first answer, the resident memory then, and what the server
decided: whether reuse can pay, or with --database whether it pays. The server decides nothing while other
programs use the processors. Each neighbour is a process that multiplies matrices all the time. Of a given
database, a copy without gain.json is served.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.hostile_clients import memory_mib

NEIGHBOUR = "import numpy as np\na = np.ones((600, 600))\nwhile True: a @ a"


@contextlib.contextmanager
def running(*command: str, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the `with` block, and kill its process at the end."""
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(log.open("wb")) if log else subprocess.DEVNULL
        process = subprocess.Popen(command, stderr=file)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def start(folder: Path, database: Path | None, patience: float) -> tuple[float, float, str]:
    """Start one server. Returns the seconds until its first answer, its MiB then, and its decision."""
    log, options = folder / "log", []
    if database is not None:
        copied = shutil.copytree(database, folder / "a.db", ignore=shutil.ignore_patterns("gain.json"))
        options = ["--database", str(copied)]
    serve = ("-c", "from service.cli import main; main()", "serve", "--port", "0")
    started = time.perf_counter()
    with running(sys.executable, *serve, "--cache-dir", str(folder), *options, log=log) as server:
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            if server.poll() is not None:
                raise SystemExit(log.read_text()[-2000:])
            time.sleep(0.02)
        with httpx.Client(base_url=found[1]) as client:
            while client.post("/embed", json={"inputs": "Where is my parcel?"}).status_code != 200:
                time.sleep(0.02)
            answered, memory = time.perf_counter() - started, memory_mib(server.pid)
            while time.perf_counter() - started < patience:
                info = client.get("/info").json()
                if decision := decided(info):
                    return answered, memory, decision
                time.sleep(0.2)
    return answered, memory, "nothing in time"


def decided(info: dict[str, object]) -> str | None:
    """Return what a server has decided about reuse; None: nothing yet."""
    preparing = str(info["preparing"] or "")
    if "measures again" in preparing:
        return "undecided, so exact"
    if "building" in preparing:
        return "reuse can pay"
    if info["gain"]:
        reuses = any(group["reuses"] for group in info["gain"]["groups"])  # type: ignore[index]
        return "reuses" if reuses else "exact"
    return "reuse cannot pay" if info["reuse_off"] and not preparing else None


def main() -> None:
    """Start the servers one after the other, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--neighbours", type=int, default=0)
    parser.add_argument("--database", type=Path)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for a decision")
    options = parser.parse_args()
    decisions: Counter[str] = Counter()
    with contextlib.ExitStack() as opened:
        for _ in range(options.neighbours):
            opened.enter_context(running(sys.executable, "-c", NEIGHBOUR))
        for number in range(options.starts):
            with tempfile.TemporaryDirectory() as folder:
                answered, memory, decision = start(Path(folder), options.database, options.patience)
            decisions[decision] += 1
            print(
                f"start {number + 1}: first answer after {answered:.1f} s, with {memory:.0f} MiB; {decision}",
                flush=True,
            )
    print(", ".join(f"{decision}: {count}" for decision, count in decisions.items()))
