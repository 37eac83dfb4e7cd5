"""Build the default database in a process of its own, while the server goes on answering.

the server                        the builder, `python -m service.rebuild`
build_beside_serving    ------->  settings, a line of JSON on its standard input
waits                             builds, at the lowest priority
learns how it ended     <-------  its exit code, and what was refused on its standard output
ends, or is killed      ------->  its standard input ends, and so does the builder
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from attncache_core import AttnCacheError, BuildFailed, build_default_database
from service.commands.options import checkpoint_of
from service.settings import Settings

_LOWEST_PRIORITY = 19


def build_beside_serving(settings: Settings) -> None:
    """Build the default database of these settings in another process, and wait for it.

    Nothing happens if the database is there. Raises BuildFailed if it could not be built.
    """
    # The builder imports what the server does, whatever lies in the folder that the server was started in.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "service.rebuild"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        # Ctrl-C in a terminal is for the server alone.
        start_new_session=True,
    ) as builder:
        assert builder.stdin is not None
        assert builder.stdout is not None
        os.setpriority(os.PRIO_PROCESS, builder.pid, _LOWEST_PRIORITY)
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            builder.stdin.write(f"{settings.model_dump_json()}\n")
            builder.stdin.flush()
        refused = builder.stdout.read().strip()
    if builder.returncode != 0:
        raise BuildFailed(refused or f"the process that builds it ended with code {builder.returncode}")


def main() -> None:
    """Build the default database of the settings on the standard input; end when the input does."""
    settings = Settings.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    with contextlib.suppress(OSError):
        # Where memory runs out, Linux ends this process and not the server.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        build_default_database(
            checkpoint_of(settings),
            cache_dir=settings.cache_dir,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
        )
    except AttnCacheError as error:
        print(error)
        sys.exit(2)


def _end_with_the_server() -> None:
    # Not through sys.stdin, whose lock this thread would still hold when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
