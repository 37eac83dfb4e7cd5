"""Notices work that does not end: a batch in its engine thread, or the event loop.

up to stuck_seconds   fine
longer                overdue: /ready has status 503, and the log has the stacks of all threads
twice as long         stuck: the log has the stacks again, and /health has status 503, or the process ends
                      with EXIT_CODE
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from enum import Enum

from service.ending import end_process, nonblocking

logger = logging.getLogger(__name__)

# EX_SOFTWARE of sysexits.h: an internal error.
EXIT_CODE = 70
_MAX_INTERVAL_SECONDS = 1.0


class Condition(Enum):
    """What the watchdog has found."""

    FINE = "fine"
    OVERDUE = "overdue"
    STUCK = "stuck"


class Watchdog:
    """Keeps the time of batches and of the event loop. Thread safe."""

    def __init__(
        self,
        stuck_seconds: float,
        *,
        exit_when_stuck: bool = False,
        tell: Callable[[float], None] = lambda _: None,
    ) -> None:
        """exit_when_stuck: end the process once the condition is STUCK.

        tell: is called with `overdue_seconds` at each look, in the watchdog's thread.
        """
        self.stuck_seconds = stuck_seconds
        self._tell = tell
        self._exit_when_stuck = exit_when_stuck
        # When each thread began its batch, by time.monotonic. Single operations on a dict need no lock.
        self._began: dict[int, float] = {}
        self._asked_loop_at: float | None = None  # None: the event loop has answered
        self._reported = Condition.FINE
        self._stop = threading.Event()
        # A dump into a pipe that nobody reads would never end.
        self._last_words = nonblocking() if exit_when_stuck else -1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the time of one batch of this thread, or of a part of it, which is watched by itself."""
        thread = threading.get_ident()
        before = self._began.get(thread)
        self._began[thread] = time.monotonic()
        try:
            yield
        finally:
            if before is None:
                self._began.pop(thread, None)
            else:
                self._began[thread] = before

    @property
    def overdue_seconds(self) -> float:
        """Seconds by which the longest work exceeds `stuck_seconds`; 0 if none does."""
        return max(0.0, self._longest() - self.stuck_seconds)

    @property
    def condition(self) -> Condition:
        """What is to be said of the work that has taken longest."""
        longest = self._longest()
        if longest > 2 * self.stuck_seconds:
            return Condition.STUCK
        return Condition.OVERDUE if longest > self.stuck_seconds else Condition.FINE

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch this event loop and all batches, in a thread, until `stop`."""
        threading.Thread(target=self._watch, args=(loop,), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._exit_when_stuck:
            faulthandler.cancel_dump_traceback_later()

    def _longest(self) -> float:
        began = [*self._began.values(), *filter(None, [self._asked_loop_at])]
        return time.monotonic() - min(began) if began else 0.0

    # In the watchdog's thread.

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        interval = min(_MAX_INTERVAL_SECONDS, self.stuck_seconds / 4)
        self._watch_interpreter()
        while not self._stop.wait(interval):
            self._watch_interpreter()
            if self._asked_loop_at is None:
                self._asked_loop_at = time.monotonic()
                # RuntimeError: the loop has been closed, so the app has ended.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._loop_answers)
            self._tell(self.overdue_seconds)
            self._report()

    def _watch_interpreter(self) -> None:
        """End the process if this thread, too, cannot run: compiled code holds the interpreter's lock.

        A thread of faulthandler that needs no lock does this, with exit code 1.
        """
        if self._exit_when_stuck and sys.__stderr__ is not None and not self._stop.is_set():
            faulthandler.dump_traceback_later(2 * self.stuck_seconds, exit=True, file=self._last_words)

    def _report(self) -> None:
        condition, self._reported, before = self.condition, self.condition, self._reported
        if condition is Condition.FINE or condition is before:
            return
        is_stuck = condition is Condition.STUCK
        # Also when it is stuck, because something else may have been overdue before.
        logger.error(
            "a batch or the event loop takes longer than %g seconds; the threads are at\n%s",
            self.stuck_seconds * (2 if is_stuck else 1),
            _stacks(),
        )
        if is_stuck and self._exit_when_stuck:
            end_process(EXIT_CODE, "a batch or the event loop is stuck: the process ends")
        elif is_stuck:
            logger.critical("a batch or the event loop is stuck: /health has status 503")

    # On the event loop.

    def _loop_answers(self) -> None:
        self._asked_loop_at = None


def _stacks() -> str:
    """Return the stacks of all threads: files, lines and functions, and no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(identity, identity)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for identity, frame in sys._current_frames().items()
    )
