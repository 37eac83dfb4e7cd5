"""Start the workers of one server, keep them running, and end them.

    the supervisor        listens, loads no model, and starts no thread
      worker 0            a server on the supervisor's sockets
      worker 1 ...        start when worker 0 is ready, so that only one of them builds a default database and
                          measures the gain of reuse

A worker is a fork of the supervisor, which has imported everything: it starts in milliseconds, and shares the
memory of the imported code. The fork is safe because the supervisor has one thread. Workers share the sockets
and a folder with their store and their metrics.

SIGTERM, Ctrl+C             end the workers, which finish what was received; at once if a second one arrives
SIGHUP                      let the workers read files again, or end them if there are none
a worker ends               start it again, with a delay that grows
a worker was never ready    end all, and return its error
the supervisor is killed    the workers end
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from attncache_core import AttnCacheError
from service.ending import end_process
from service.observability.metrics import MULTIPROCESS_FOLDER
from service.settings import Settings
from service.state import Loaded
from service.upkeep.group import Worker
from service.web.listeners import Listener
from service.workers.server import run_server
from service.workers.shares import share_of, worker_count

logger = logging.getLogger(__name__)

# Returns the engines of a worker: its settings, and its number.
Load = Callable[[Settings, int], Iterator[Loaded]]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORK = multiprocessing.get_context("fork")
_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS = 0.25, 30.0
# A worker that ran so long is started again after the first delay.
_STEADY_SECONDS = 60.0
# After --drain-seconds a worker ends by itself, unless its interpreter hangs.
_KILL_SECONDS = 1.0
# A worker's report that it is ready; any other report is the sentence of an error.
_READY = b""
# As the command line ends for an error that the operator can correct.
_REFUSED_CODE = 2


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
class _Place:
    """A worker that runs, or will be started."""

    number: int
    start_at: float | None = None  # by time.monotonic; None: it runs, or waits for the first worker
    process: ForkProcess | None = None
    reports: Connection | None = None
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
        self._settings, self._load, self._listeners, self._folder = settings, load, listeners, folder
        self._places = [_Place(number) for number in range(count)]
        self._signals: list[int] = []  # that have arrived
        # A byte for each signal, so that `wait` ends.
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._kill_at: float | None = None  # by time.monotonic, once the workers are to end
        self._failure: BaseException | None = None

    def run(self) -> BaseException | None:
        """Serve until a signal arrives, or until a worker ends that was never ready.

        Returns the error of that worker, or None.
        """
        for listener in self._listeners:
            logger.info(
                "listening on %s (%s), %d workers, loading %s",
                *(listener.url, listener.name, len(self._places), self._settings.model),
            )
        self._places[0].start_at = time.monotonic()
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: self._signals.append(number))
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
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

    def _act_on_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP and (self._settings.api_keys or self._settings.tls_cert):
                self._send(number)
            elif self._kill_at is not None and self._failure is None:
                sys.exit(128 + number)
            else:
                self._finish()

    def _finish(self) -> None:
        """Let all workers finish what they have received, and end."""
        self._kill_at = time.monotonic() + self._settings.drain_seconds + _KILL_SECONDS
        for place in self._places:
            place.start_at = None
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for process in self._running():
            assert process.pid is not None
            # A process that has ended keeps its id until `exitcode` is read.
            os.kill(process.pid, number)

    # Workers.

    def _running(self) -> list[ForkProcess]:
        return [place.process for place in self._places if place.process is not None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for place in self._places:
            if place.start_at is not None and place.start_at <= now:
                place.start_at, place.started_at, place.refusal = None, now, None
                place.reports, reports = _FORK.Pipe(duplex=False)
                place.process = _FORK.Process(target=self._be_worker, args=(place.number, reports))
                assert threading.active_count() == 1, "a fork would copy locks that other threads hold"
                # A signal would be lost between the fork and the handlers of the worker.
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                # Objects that exist now stay on pages that all processes share.
                gc.freeze()
                place.process.start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                reports.close()
                logger.info("worker %d has process id %d", place.number, place.process.pid)

    def _be_worker(self, number: int, reports: Connection) -> None:
        """Serve, in the process of a worker, and end it."""
        code = 1
        try:
            self._forget_supervisor()
            worker = Worker(number, len(self._places), self._folder)
            # The supervisor removes the file of a Unix socket.
            listeners = [replace(listener, unix_socket=None) for listener in self._listeners]
            os.environ[MULTIPROCESS_FOLDER] = str(self._folder)
            failure = run_server(
                self._settings,
                lambda: self._load(self._settings, number),
                listeners,
                worker,
                lambda: reports.send_bytes(_READY),
            )
            if isinstance(failure, AttnCacheError):
                raise failure
            code = 0 if failure is None else 1
        except AttnCacheError as error:
            reports.send_bytes(str(error).encode())
            code = _REFUSED_CODE
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            logger.exception("a worker failed")
        finally:
            end_process(code)

    def _forget_supervisor(self) -> None:
        """Let signals do what they do by default, until the server handles them. End with the supervisor."""
        signal.set_wakeup_fd(-1)
        for own in _SIGNALS:
            # Files that SIGHUP asks to read again are read after this anyway.
            signal.signal(own, signal.SIG_IGN if own == signal.SIGHUP else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        # Ctrl+C in a terminal reaches the supervisor alone.
        os.setsid()
        supervisor = multiprocessing.parent_process()
        assert supervisor is not None

        def follow() -> None:
            supervisor.join()
            _clean_up(self._folder, self._listeners)
            end_process(1, "the supervisor is gone: its worker ends")

        threading.Thread(target=follow, daemon=True).start()

    def _wait(self) -> None:
        """Wait for a signal, a report, the end of a worker, or what is due next."""
        due = [place.start_at for place in self._places if place.start_at is not None]
        due += [] if self._kill_at is None else [self._kill_at]
        reports = [place.reports for place in self._places if place.reports is not None]
        ends = [process.sentinel for process in self._running()]
        wait([self._woken, *reports, *ends], max(0.0, min(due) - time.monotonic()) if due else None)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _read_reports(self) -> None:
        for place in self._places:
            while place.reports is not None and place.reports.poll():
                try:
                    report = place.reports.recv_bytes()
                except EOFError:
                    place.reports.close()
                    place.reports = None
                else:
                    if report == _READY:
                        self._note_ready(place)
                    else:
                        place.refusal = report.decode()

    def _note_ready(self, place: _Place) -> None:
        place.has_been_ready = True
        if self._kill_at is not None:
            return
        for other in self._places:
            if other.process is None and not other.has_been_ready and other.start_at is None:
                other.start_at = time.monotonic()
        if all(other.has_been_ready for other in self._places):
            logger.info("all workers are ready")

    def _note_ends(self) -> None:
        for place in self._places:
            if place.process is not None and (code := place.process.exitcode) is not None:
                self._read_reports()
                mark_process_dead(place.process.pid, str(self._folder))  # type: ignore[no-untyped-call]
                place.process.close()
                place.process = None
                if self._kill_at is None:
                    self._replace(place, code)

    def _replace(self, place: _Place, code: int) -> None:
        """Start a worker again that has ended by itself, or end all if it was never ready."""
        if not place.has_been_ready:
            # The other workers would not be able to start either.
            if place.refusal is not None:
                self._failure = AttnCacheError(place.refusal)
            else:
                why = f"worker {place.number} ended with code {code} before it was ready"
                self._failure = RuntimeError(why)
                logger.critical("%s", why)
            self._finish()
            return
        now = time.monotonic()
        if now - place.started_at > _STEADY_SECONDS:
            place.delay = _FIRST_DELAY_SECONDS
        logger.error(
            "worker %d ended with code %d%s; it starts again in %g seconds",
            *(place.number, code, f" ({place.refusal})" if place.refusal is not None else "", place.delay),
        )
        place.start_at = now + place.delay
        place.delay = min(2 * place.delay, _MAX_DELAY_SECONDS)


def _clean_up(folder: Path, listeners: Sequence[Listener]) -> None:
    """Remove what workers share, and the file of a Unix socket."""
    shutil.rmtree(folder, ignore_errors=True)
    for listener in listeners:
        listener.close()
