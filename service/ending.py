"""Ends the process at once, whatever its threads do."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import NoReturn

logger = logging.getLogger(__name__)

_MAX_LOG_SECONDS = 1.0


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
