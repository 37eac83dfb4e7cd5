"""One worker process: a fork of the supervisor, which it tells how it begins and ends."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from attncache_core import AttnCacheError
from service.ending import end_process

logger = logging.getLogger(__name__)

# Signals that the supervisor and its workers act on. The supervisor passes them on.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What a worker reports.
READY, REFUSED = "ready", "refused"

Report = Callable[[str, str], None]
# Serves until a signal arrives. Returns the exception that prevented it, or None.
Serve = Callable[[Report], BaseException | None]

# As the command line ends for an error that the operator can correct.
_REFUSED_CODE = 2


@dataclass(frozen=True, slots=True)
class Process:
    """A worker process, as its supervisor sees it."""

    id: int
    pipe: int  # its reports
    _unread: bytearray = field(default_factory=bytearray)  # the beginning of a report

    def reports(self) -> list[tuple[str, str]]:
        """Return what the worker has reported and nobody has read: READY or REFUSED, and a message.

        A long report arrives in parts, and is returned when it is complete.
        """
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.pipe, 2**16):
                self._unread.extend(part)
        *lines, rest = self._unread.split(b"\n")
        self._unread[:] = rest
        return [(kind, message) for kind, message in map(json.loads, lines)]

    def exit_code(self) -> int | None:
        """Return the exit code of a process that has ended, negative for a signal; None while it runs.

        Not to be called again after a code was returned.
        """
        found, status = os.waitpid(self.id, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None


def start(serve: Serve, life: int, not_needed: Iterable[int], on_orphaned: Callable[[], None]) -> Process:
    """Fork a process that calls `serve`. The caller has only one thread.

    life: a pipe that ends when the supervisor does. not_needed: descriptors that only the supervisor needs.
    on_orphaned: called in the process if the supervisor is gone; the process ends then.
    """
    assert threading.active_count() == 1, "a fork would copy locks that other threads hold"
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    # A signal would be lost between the fork and the handlers of the worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # Objects that exist now stay on pages that all processes share.
    gc.freeze()
    process = os.fork()
    if process == 0:
        for own in (reading, *not_needed):
            os.close(own)
        _run(serve, writing, life, on_orphaned)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.close(writing)
    return Process(process, reading)


def _run(serve: Serve, pipe: int, life: int, on_orphaned: Callable[[], None]) -> NoReturn:
    """Be the worker process, and end it."""

    def report(kind: str, message: str) -> None:
        line = json.dumps([kind, message]).encode() + b"\n"
        while line:
            line = line[os.write(pipe, line) :]

    code = 1
    try:
        _forget_signals()
        # Ctrl+C in a terminal reaches the supervisor alone.
        os.setsid()
        threading.Thread(target=_end_with_supervisor, args=(life, on_orphaned), daemon=True).start()
        failure = serve(report)
        if isinstance(failure, AttnCacheError):
            report(REFUSED, str(failure))
            code = _REFUSED_CODE
        elif failure is None:
            code = 0
    except AttnCacheError as error:
        report(REFUSED, str(error))
        code = _REFUSED_CODE
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        logger.exception("a worker failed")
    finally:
        end_process(code)


def _forget_signals() -> None:
    """Let signals do what they do by default, until the server handles them."""
    signal.set_wakeup_fd(-1)
    for number in (*SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # Files that SIGHUP asks to read again are read after this anyway.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _end_with_supervisor(life: int, on_orphaned: Callable[[], None]) -> None:
    os.read(life, 1)
    on_orphaned()
    end_process(1, "the supervisor is gone: its worker ends")
