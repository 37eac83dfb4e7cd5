"""Start the workers of one server, keep them running, and end them.

    the supervisor        listens, loads no model, and starts no thread
      worker 0            a server on the supervisor's sockets
      worker 1 ...        start when worker 0 is ready, so that only one of them builds a default database and
                          measures the gain of reuse

A worker is a fork of the supervisor, which has imported everything: it starts in milliseconds, and shares the
memory of the imported code. The fork is safe because the supervisor has one thread.

SIGTERM, Ctrl+C             end the workers, which finish what was received; at once if a second one arrives
SIGHUP                      let the workers read files again, or end them if there are none
a worker ends               start it again, with a delay that grows
a worker was never ready    end all, and return its error
the supervisor is killed    the workers end
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from attncache_core import AttnCacheError
from service.ending import end_process
from service.settings import Settings
from service.state import Loaded
from service.web.listeners import Listener
from service.workers.board import Board
from service.workers.process import READY, SIGNALS, Process, Report, start
from service.workers.server import run_server
from service.workers.shared_quotas import forget_in_flight
from service.workers.shares import share_of, worker_count
from service.workers.team import QUOTAS, Team

logger = logging.getLogger(__name__)

# Returns the engines of a worker: its settings, and its number.
Load = Callable[[Settings, int], Iterator[Loaded]]

_FIRST_DELAY_SECONDS, _MOST_DELAY_SECONDS = 0.25, 30.0
# A worker that ran so long is started again after the first delay.
_STEADY_SECONDS = 60.0
# After --drain-seconds a worker ends by itself, unless its interpreter hangs.
_KILL_SECONDS = 1.0


def serve_with_workers(settings: Settings, load: Load, listeners: Sequence[Listener]) -> BaseException:
    """Serve, with as many processes as the settings ask for, until a signal arrives; then end with code 0.

    Returns the exception that prevents the start; see run_server.
    """
    failure = _serve(settings, load, listeners)
    if failure is None:
        # The interpreter's clean-up takes seconds, which --drain-seconds does not allow, waits for a thread
        # that loads a model for minutes, and can crash while a thread computes.
        end_process(0)
    return failure


def _serve(settings: Settings, load: Load, listeners: Sequence[Listener]) -> BaseException | None:
    """Serve until a signal arrives. Returns the exception that prevents the start, or None."""
    count = worker_count(settings)
    settings = share_of(settings, count)
    if count == 1:
        return run_server(settings, lambda: load(settings, 0), listeners)
    folder = Path(tempfile.mkdtemp(prefix="attncache-"))
    try:
        return Supervisor(settings, count, load, listeners, folder).run()
    finally:
        _clean_up(folder, listeners)


@dataclass(slots=True)
class _Worker:
    """A worker that runs, or will be started."""

    number: int
    start_at: float | None = None  # by time.monotonic; None: it runs, or waits for the first worker
    process: Process | None = None
    started_at: float = 0.0
    has_been_ready: bool = False
    refusal: str | None = None  # why it could not start
    delay: float = _FIRST_DELAY_SECONDS


class Supervisor:
    """Owns the worker processes of one server."""

    def __init__(
        self, settings: Settings, count: int, load: Load, listeners: Sequence[Listener], folder: Path
    ) -> None:
        """settings: of each worker. folder: private, and removed by the caller."""
        self._settings = settings
        self._load = load
        self._listeners = listeners
        self._folder = folder
        (folder / QUOTAS).mkdir()
        self._board = Board(count)
        self._workers = [_Worker(number) for number in range(count)]
        self._signals: list[int] = []  # that have arrived
        # A byte for each signal, so that `select` ends.
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        # The workers see the end of this pipe if the supervisor is gone.
        self._life, self._alive = os.pipe()
        self._failure: BaseException | None = None
        self._kill_at: float | None = None  # when workers that still run are killed; None: none is to end

    def run(self) -> BaseException | None:
        """Run until all workers have ended. Returns the exception that prevents the start, or None."""
        for listener in self._listeners:
            logger.info(
                "listening on %s (%s), %d workers load %s",
                listener.url,
                listener.name,
                len(self._workers),
                self._settings.model,
            )
        self._workers[0].start_at = time.monotonic()
        with self._signals_noted():
            try:
                while self._kill_at is None or self._running():
                    self._start_due()
                    self._wait()
                    self._read_reports()
                    self._note_ends()
                    self._act_on_signals()
                    if self._kill_at is not None and time.monotonic() > self._kill_at:
                        self._send(signal.SIGKILL)
            finally:
                self._send(signal.SIGKILL)
        logger.info("stopped")
        return self._failure

    # Signals.

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (*SIGNALS, signal.SIGCHLD)}
        woken_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken_before)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _act_on_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP and self._reads_files_again():
                self._send(number)
            elif number != signal.SIGCHLD:
                self._end(number)

    def _reads_files_again(self) -> bool:
        return self._settings.api_keys is not None or self._settings.tls_cert is not None

    def _end(self, number: int) -> None:
        """End all workers; at once if they are ending already."""
        if self._kill_at is not None and self._failure is None:
            sys.exit(128 + number)
        self._finish()

    def _finish(self) -> None:
        """Let all workers finish what they have received, and end."""
        self._kill_at = time.monotonic() + self._settings.drain_seconds + _KILL_SECONDS
        for worker in self._workers:
            worker.start_at = None
        self._board.set_all_end()
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for process in self._running():
            os.kill(process.id, number)

    # Workers.

    def _running(self) -> list[Process]:
        # A process that has ended keeps its id until `exit_code` has returned its code.
        return [worker.process for worker in self._workers if worker.process is not None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.start_at is not None and worker.start_at <= now:
                worker.start_at = None
                worker.started_at = now
                worker.refusal = None
                own = [self._woken.fileno(), self._wake.fileno(), self._alive]
                pipes = [process.pipe for process in self._running()]
                worker.process = start(
                    partial(self._serve, worker.number),
                    self._life,
                    [*own, *pipes],
                    partial(_clean_up, self._folder, self._listeners),
                )
                logger.info("worker %d has process id %d", worker.number, worker.process.id)

    def _serve(self, number: int, report: Report) -> BaseException | None:
        """Serve, in the process of a worker."""
        team = Team(number, len(self._workers), self._board, self._folder, lambda: report(READY, ""))
        # The supervisor removes the file of a Unix socket.
        listeners = [replace(listener, unix_socket=None) for listener in self._listeners]
        return run_server(self._settings, lambda: self._load(self._settings, number), listeners, team)

    def _wait(self) -> None:
        """Wait for a signal, a report, or what is due next."""
        due = [worker.start_at for worker in self._workers if worker.start_at is not None]
        due += [] if self._kill_at is None else [self._kill_at]
        seconds = max(0.0, min(due) - time.monotonic()) if due else None
        pipes = [process.pipe for process in self._running()]
        select.select([self._woken.fileno(), *pipes], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _read_reports(self) -> None:
        for worker in self._workers:
            for kind, message in worker.process.reports() if worker.process else ():
                if kind == READY:
                    self._note_ready(worker)
                else:
                    worker.refusal = message

    def _note_ready(self, worker: _Worker) -> None:
        worker.has_been_ready = True
        if self._kill_at is not None:
            return
        for other in self._workers:
            if other.process is None and not other.has_been_ready and other.start_at is None:
                other.start_at = time.monotonic()
        if all(other.has_been_ready for other in self._workers) and not self._board.all_started:
            self._board.set_all_started()
            logger.info("all workers are ready")

    def _note_ends(self) -> None:
        for worker in self._workers:
            if worker.process is None:
                continue
            code = worker.process.exit_code()
            if code is not None:
                self._read_reports()
                os.close(worker.process.pipe)
                worker.process = None
                self._board.clear(worker.number)
                forget_in_flight(self._folder / QUOTAS, worker.number)
                if self._kill_at is None:
                    self._replace(worker, code)

    def _replace(self, worker: _Worker, code: int) -> None:
        """Start a worker again that has ended by itself, or end all if it was never ready."""
        if not worker.has_been_ready:
            # The other workers would not be able to start either.
            self._failure = (
                AttnCacheError(worker.refusal)
                if worker.refusal is not None
                else RuntimeError(f"worker {worker.number} ended with code {code} before it was ready")
            )
            if worker.refusal is None:
                logger.critical("%s", self._failure)
            self._finish()
            return
        now = time.monotonic()
        if now - worker.started_at > _STEADY_SECONDS:
            worker.delay = _FIRST_DELAY_SECONDS
        logger.error(
            "worker %d ended with code %d%s; it starts again in %g seconds",
            worker.number,
            code,
            f" ({worker.refusal})" if worker.refusal is not None else "",
            worker.delay,
        )
        worker.start_at = now + worker.delay
        worker.delay = min(2 * worker.delay, _MOST_DELAY_SECONDS)


def _clean_up(folder: Path, listeners: Sequence[Listener]) -> None:
    """Remove what workers share, and the file of a Unix socket."""
    shutil.rmtree(folder, ignore_errors=True)
    for listener in listeners:
        listener.close()
