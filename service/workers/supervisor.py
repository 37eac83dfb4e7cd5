"""Start the workers of one server, keep them running, and end them.

    the supervisor        listens, loads no model, and starts no thread
      worker 0            a server on the supervisor's sockets
      worker 1 ...        start when worker 0 is ready, so that only one of them builds a default database and
                          measures the gain of reuse

A worker is a fork of the supervisor, which has imported everything: it starts in milliseconds, and shares the
memory of the imported code. The fork is safe because the supervisor has one thread. Workers share the sockets
and a folder with their store and their metrics.

SIGTERM, Ctrl+C             end the workers, which finish what was received. Another one ends their delay or,
                            behind the delay, all at once
SIGHUP                      let the workers read files again. If there are none, end the workers, but not
                            under nohup
a worker ends               start it again, with a delay that grows
a worker was never ready    end all, and return its error
shared files are removed    end all, because a worker that starts again would know no session of the others
the supervisor is killed    the workers end
"""

from __future__ import annotations

import fcntl
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client.multiprocess import mark_process_dead

from attncache_core import AttnCacheError
from service.conversations.sessions import CAPACITY_BYTES
from service.ending import IGNORES_HANGUP, early_hangups, end_process
from service.errors import InvalidSettings
from service.observability.metrics import count_for_all_workers
from service.settings import Settings
from service.state import Loaded
from service.upkeep.group import Worker
from service.web.listeners import Listener, certificate_of
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
# Between two looks at signals and files. The end of a worker is noticed at once.
_TICK_SECONDS = 0.1
# As the command line ends for an error that the operator can correct.
_REFUSED_CODE = 2
# What the files of a server and of each worker may take: sessions and the journal of SQLite; metrics.
_SERVER_BYTES, _WORKER_BYTES = CAPACITY_BYTES + 16 * 2**20, 5 * 2**20


def serve_with_workers(settings: Settings, load: Load, listeners: Sequence[Listener]) -> BaseException:
    """Serve, with as many processes as the settings ask for, until a signal arrives; then end with code 0.

    Returns the exception that prevents the start; see run_server.
    """
    count = worker_count(settings)
    settings = share_of(settings, count)
    if count == 1:
        failure = run_server(settings, lambda: load(settings, 0), listeners)
    else:
        try:
            with _shared_folder(count) as folder:
                failure = Supervisor(settings, count, load, listeners, folder).run()
        except InvalidSettings as error:
            failure = error
        finally:
            for listener in listeners:
                listener.close()
    if failure is None:
        # The interpreter's clean-up takes seconds, which --drain-seconds does not allow, waits for a thread
        # that loads a model for minutes, and can crash while a thread computes.
        end_process(0)
    return failure


@dataclass(slots=True)
class _Place:
    """A worker that runs, or will be started."""

    worker: Worker
    start_at: float | None = None  # by time.monotonic; None: it runs, or waits for the first worker
    process: ForkProcess | None = None
    started_at: float = 0.0
    delay: float = _FIRST_DELAY_SECONDS
    refusal: Connection | None = None  # from which comes a sentence that says why the worker could not start


class Supervisor:
    """Owns the worker processes of one server."""

    def __init__(
        self, settings: Settings, count: int, load: Load, listeners: Sequence[Listener], folder: Path
    ) -> None:
        """settings: of each worker. folder: private, and removed by the caller."""
        self._settings, self._load, self._listeners, self._folder = settings, load, listeners, folder
        self._places = [_Place(Worker(number, count, folder)) for number in range(count)]
        self._all_were_ready = False
        self._store_files: dict[str, int] = {}  # inodes of the files that the workers share, by name
        self._signals = list(early_hangups)  # that have arrived
        self._kill_at: float | None = None  # by time.monotonic, once the workers are to end
        self._drain_at = 0.0  # by time.monotonic: until then, workers that are to end serve on
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
        try:
            while self._kill_at is None or self._running():
                self._start_due()
                wait([process.sentinel for process in self._running()], _TICK_SECONDS)
                self._note_ready()
                self._note_removed()
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
                self._read_certificate()
            elif number == signal.SIGHUP and IGNORES_HANGUP:
                continue
            elif self._kill_at is None:
                self._finish(self._settings.drain_delay_seconds)
            elif time.monotonic() < self._drain_at:
                self._finish(0.0)
            elif self._failure is None:
                sys.exit(128 + number)

    def _read_certificate(self) -> None:
        """Have the newest certificate for workers that begin later. Running workers log what is wrong."""
        if certificate := certificate_of(self._listeners):
            with suppress(AttnCacheError):
                certificate.read_again()

    def _finish(self, delay: float) -> None:
        """Let all workers serve on for so many seconds, finish what they have received, and end."""
        is_second = self._kill_at is not None
        self._drain_at = time.monotonic() + delay
        self._kill_at = self._drain_at + self._settings.drain_seconds + _KILL_SECONDS
        for place in self._places:
            place.start_at = None
        for listener in self._listeners:
            # As long as a copy of the socket is open, the system accepts connections, also for no worker.
            listener.socket.close()
        # Whoever signals all processes sends SIGTERM to the workers too: that must not end their delay.
        self._send(signal.SIGINT if is_second else signal.SIGTERM)

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
                place.start_at, place.started_at = None, now
                place.refusal, refuses = _FORK.Pipe(duplex=False)
                place.process = _FORK.Process(target=self._be_worker, args=(place.worker, refuses))
                assert threading.active_count() == 1, "a fork would copy locks that other threads hold"
                # A signal would be lost between the fork and the handlers of the worker.
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                # Objects that exist now stay on pages that all processes share.
                gc.freeze()
                place.process.start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                refuses.close()
                logger.info("worker %d has process id %d", place.worker.number, place.process.pid)

    def _be_worker(self, worker: Worker, refuses: Connection) -> None:
        """Serve, in the process of a worker, and end it. refuses: gets the reason if it cannot start."""
        code = 1
        try:
            self._forget_supervisor()
            # The supervisor removes the file of a Unix socket.
            listeners = [replace(listener, unix_socket=None) for listener in self._listeners]
            count_for_all_workers(self._folder, worker.number)
            failure = run_server(
                self._settings, lambda: self._load(self._settings, worker.number), listeners, worker
            )
            if isinstance(failure, AttnCacheError):
                raise failure
            code = 0 if failure is None else 1
        except (AttnCacheError, OSError) as error:
            refuses.send(str(error))
            code = _REFUSED_CODE
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            logger.exception("a worker failed")
        finally:
            end_process(code)

    def _forget_supervisor(self) -> None:
        """Let signals do what they do by default, until the server handles them. End with the supervisor."""
        for number in _SIGNALS:
            # Each worker reads the files that SIGHUP asks to read again after this anyway.
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        # Ctrl+C in a terminal reaches the supervisor alone.
        os.setsid()
        supervisor = multiprocessing.parent_process()
        assert supervisor is not None

        def follow() -> None:
            supervisor.join()
            shutil.rmtree(self._folder, ignore_errors=True)
            for listener in self._listeners:
                # Closing is not enough, because the event loop and other workers keep the socket open.
                with suppress(OSError):
                    listener.socket.shutdown(socket.SHUT_RDWR)
                listener.close()
            end_process(1, "the supervisor is gone: its worker ends")

        threading.Thread(target=follow, daemon=True).start()

    def _note_ready(self) -> None:
        """Start the other workers once the first one is ready."""
        if self._all_were_ready or self._kill_at is not None or not self._places[0].worker.ready.exists():
            return
        for place in self._places:
            if not place.started_at and place.start_at is None:
                place.start_at = time.monotonic()
        self._all_were_ready = self._places[0].worker.all_have_been_ready()
        if self._all_were_ready:
            logger.info("all workers are ready")

    def _note_removed(self) -> None:
        """End all workers if somebody has removed what they share."""
        found = self._places[0].worker.store_files()
        # The folder may be gone before the first look at its files.
        are_there = self._folder.exists() and self._store_files.items() <= found.items()
        if self._kill_at is None and not are_there:
            self._fail(
                f"the files that the workers share in {self._folder} were removed; set TMPDIR to a folder "
                "that nobody cleans",
                self._settings.drain_delay_seconds,
            )
        self._store_files |= found

    def _fail(self, why: str, delay: float = 0.0) -> None:
        self._failure = RuntimeError(why)
        logger.critical("%s", why)
        self._finish(delay)

    def _note_ends(self) -> None:
        for place in self._places:
            if place.process is not None and (code := place.process.exitcode) is not None:
                mark_process_dead(place.worker.number, str(self._folder))  # type: ignore[no-untyped-call]
                place.process.close()
                place.process = None
                if self._kill_at is None:
                    self._replace(place, code)

    def _replace(self, place: _Place, code: int) -> None:
        """Start a worker again that has ended by itself, or end all if it was never ready."""
        why = f"worker {place.worker.number} ended with {_named(code)}"
        refusal = None
        assert place.refusal is not None
        with place.refusal as sentence, suppress(EOFError):
            refusal = sentence.recv()
        was_ready = self._all_were_ready or place.worker.ready.exists()
        if refusal is not None and not (was_ready and any(other.process for other in self._places)):
            # What keeps one worker from starting keeps all of them.
            self._failure = AttnCacheError(refusal)
            self._finish(0.0)
            return
        if not was_ready:
            self._fail(f"{why} before it was ready")
            return
        now = time.monotonic()
        if now - place.started_at > _STEADY_SECONDS:
            place.delay = _FIRST_DELAY_SECONDS
        reason = "" if refusal is None else f" ({refusal})"
        logger.error("%s%s; it starts again in %g seconds", why, reason, place.delay)
        place.start_at = now + place.delay
        place.delay = min(2 * place.delay, _MAX_DELAY_SECONDS)


def _named(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    hint = " (is the disk of TMPDIR full?)" if -code == signal.SIGBUS else ""
    return f"signal {signal.Signals(-code).name}{hint}"


@contextmanager
def _shared_folder(workers: int) -> Iterator[Path]:
    """Make a private folder for the files that workers share, and remove it at the end.

    Raises InvalidSettings if there is no place for it, or the files would not fit.
    """
    try:
        temporary = TemporaryDirectory(prefix="attncache-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InvalidSettings(
            f"{workers} workers need a folder for files that they share ({error.strerror}); set TMPDIR to a "
            "folder that this user may write to, or serve with one worker"
        ) from error
    with temporary:
        folder = Path(temporary.name)
        # systemd-tmpfiles removes old files, but none below a folder that a process has locked. Not all file
        # systems have locks.
        with suppress(OSError):
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)
        free, needed = shutil.disk_usage(folder).free, _SERVER_BYTES + workers * _WORKER_BYTES
        if free < needed:
            raise InvalidSettings(
                f"{workers} workers need {needed >> 20} MiB for files that they share, and {folder.parent} "
                f"has {free >> 20} MiB; set TMPDIR to another folder, or serve with fewer workers"
            )
        yield folder
