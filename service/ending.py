"""End the process at once, whatever its threads do.

The command line imports this module before torch: so SIGTERM and Ctrl+C end `attncache serve` with code 0
while modules are imported, which takes seconds, and SIGHUP is not lost. Other commands keep what these
signals do by default, but Ctrl+C during the imports shows one line and no traceback. Standard streams that
are closed become /dev/null: a connection would get their descriptors. Characters that the encoding of the
terminal lacks, such as θ in Latin-1, are printed as \\u03b8.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import stat
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn

logger = logging.getLogger(__name__)

_MAX_LOG_SECONDS = 1.0
_STANDARD_ERROR = 2


def nonblocking(file: int = _STANDARD_ERROR) -> int:
    """Return a new descriptor of a pipe, whose writes raise BlockingIOError while the pipe is full.

    Others who write to the pipe still wait for its reader. A file that is no pipe is returned as it is.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK)
    return file


def end_process(code: int, reason: str | None = None) -> NoReturn:
    """End with this exit code, without the interpreter's clean-up, which waits for threads that may hang.

    reason: logged before. Never blocks for long, also if the log cannot be written, and may be called by a
    signal handler.
    """
    # In a thread, because a thread that hangs may hold the lock of a log handler, and a pipe may be full.
    last_words = threading.Thread(target=_finish_logs, args=(reason,), daemon=True)
    last_words.start()
    last_words.join(_MAX_LOG_SECONDS)
    os._exit(code)


def _finish_logs(reason: str | None) -> None:
    if reason is not None:
        logger.critical("%s", reason)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("attncache: stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os._exit(0)


# Whether SIGHUP only asks to read files again, and ends nothing: nohup started this process.
IGNORES_HANGUP = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
early_hangups: list[int] = []  # that arrived before the server had its own handlers

# While modules are imported, no command is there yet to say that it was stopped.
sys.excepthook = _show_uncaught

# The server has its own handlers as soon as it has something to finish.
if sys.argv[1:2] == ["serve"]:
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, _end)
    if not IGNORES_HANGUP:
        signal.signal(signal.SIGHUP, lambda number, _: early_hangups.append(number))

for _descriptor, _name in enumerate(("stdin", "stdout", "stderr")):
    try:
        os.fstat(_descriptor)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(_descriptor, "w" if _descriptor else "r", closefd=False))  # noqa: SIM115
for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, io.TextIOWrapper):
        _stream.reconfigure(errors="backslashreplace")
