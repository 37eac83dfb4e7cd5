"""Build the default database, or renew a database, in another process while the server continues to serve.

the server                        the builder, `python -m service.loading.rebuild JOB`
start_builder           ------->  the settings, one line of JSON on standard input
                                  builds or renews, at the lowest priority
reads lines             <-------  "build": the share that is done, one line each; "renew": what was decided
reads the outcome       <-------  the exit code, and the message of an error as the last line
ends, or is killed      ------->  standard input ends, so the builder ends too
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from attncache_core import AttentionDatabase, AttnCacheError, BuildFailed, PrefillEngine
from attncache_core.errors import is_out_of_memory
from attncache_core.reuse.maps.default import default_database_folder
from attncache_core.reuse.maps.generations import RENEWAL
from service.loading.checkpoints import checkpoint_of
from service.settings import Settings

_LOWEST_PRIORITY = 19
_SHOWN_STEP = 0.05
# Of the settings, what a builder must not know: JSON holds no secrets, so they would be other ones.
_UNNEEDED = {"api_key", "shared", "shared_uses"}


def start_builder(settings: Settings, job: str) -> subprocess.Popen[str]:
    """Start a process of the lowest priority for a job, "build" or "renew". It ends with the server."""
    # The builder must import the same modules as the server, whatever the current folder contains.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    builder = subprocess.Popen(
        [sys.executable, "-P", "-m", "service.loading.rebuild", job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8:backslashreplace"},
        # A new group, so that Ctrl-C in a terminal reaches the server alone. Not a new session, because Linux
        # shares the processors evenly between sessions, whatever the priorities of their processes are.
        process_group=0,
    )
    assert builder.stdin is not None
    os.setpriority(os.PRIO_PROCESS, builder.pid, _LOWEST_PRIORITY)
    with contextlib.suppress(BrokenPipeError):  # the builder has ended already
        # Not by pydantic, which refuses names of files that are not UTF-8.
        builder.stdin.write(f"{json.dumps(settings.model_dump(exclude=_UNNEEDED), default=str)}\n")
        builder.stdin.flush()
    return builder


def build_while_serving(settings: Settings) -> Iterator[str]:
    """Build the model's default database in another process, and yield lines about its progress.

    The builder does nothing if the database exists. Raises BuildFailed if it could not be built.
    """
    yield _line(0.0)
    with start_builder(settings, "build") as builder:
        assert builder.stdout is not None
        refused, shown = "", 0.0
        for line in builder.stdout:
            try:
                share = float(line)
            except ValueError:
                refused = line.strip()
                continue
            # A stage may run several times, and what was shown only grows.
            if share >= shown + _SHOWN_STEP:
                shown = share
                yield _line(shown)
    if builder.returncode != 0:
        raise BuildFailed(refused or f"the process that builds the database {end_of(builder)}")


def end_of(builder: subprocess.Popen[str]) -> str:
    """Return how a process has ended that has printed no reason, for people."""
    if builder.returncode == -signal.SIGKILL:
        return "was killed, as Linux does if memory runs out"
    return f"ended with code {builder.returncode}"


def _line(share: float) -> str:
    return f"building a database of attention maps behind the requests: {share:.0%}"


def main() -> None:
    """Run a job with the settings on standard input. End when standard input ends."""
    settings = Settings.model_validate(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    with contextlib.suppress(OSError):
        # If memory runs out, Linux kills this process first and not the server.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        _JOBS[sys.argv[1]](settings)
    except Exception as error:
        if is_out_of_memory(error):
            print("memory ran out; leave more memory to the server, or start it with --no-maps")
        elif isinstance(error, (AttnCacheError, OSError)):
            print(error)
        else:
            raise
        sys.exit(2)


# A server imports nothing of what builds: only the builder does, in these functions.


def _build(settings: Settings) -> None:
    from attncache_core.build.default import build_default_database, share_done

    build_default_database(
        checkpoint_of(settings),
        cache_dir=settings.cache_dir,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        progress=lambda *stage: print(share_done(*stage), flush=True),
    )


def _renew(settings: Settings) -> None:
    """Renew the database from its sample, and print the renewal as JSON."""
    from attncache_core.build.renewal import renew_database

    checkpoint = checkpoint_of(settings)

    def load(database: AttentionDatabase | None) -> PrefillEngine:
        return PrefillEngine.load(
            checkpoint,
            database=database,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            max_tokens=settings.max_tokens,
        )

    folder = settings.database
    if not isinstance(folder, Path):
        folder = default_database_folder(checkpoint, settings.cache_dir)
    print(RENEWAL.dump_json(renew_database(load, folder, min_gain=settings.min_gain)).decode())


_JOBS = {"build": _build, "renew": _renew}


def _end_with_the_server() -> None:
    # os.read and not sys.stdin: this thread would still hold the lock of sys.stdin when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
