"""What a worker does for the other workers of its server, beside requests: it looks into the store that they
share.

alive/ID           this worker runs, and keeps its locks
serving/NUMBER     the id of the process that answers as this worker, and does what is asked of all
findings/KIND/ID   how often verification has tightened each part of a policy
asked              commands of operators that not all workers have done yet, each under a random name
done/NAME/NUMBER   what this worker has answered
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from attncache_core.runtime.files import write_whole
from service.errors import InvalidSettings, StoreUnavailable, log_failure
from service.observability.metrics import Metrics
from service.store import SqliteStore, Store
from service.upkeep.verifying import LaterVerifier

logger = logging.getLogger(__name__)

_LOOK_SECONDS, _PUBLISH_SECONDS = 0.2, 1.0
# The locks of a worker whose event loop does not run for so long count as left behind.
_ALIVE_SECONDS = 5.0
_ANSWER_SECONDS = 600.0
# Between two looks whether all workers have done what is asked.
_ANSWERS_SECONDS = 0.02
# The ends of the names of SQLite's files. There is also a journal, for a moment.
_OF_STORES = (".sqlite", ".sqlite-wal", ".sqlite-shm")

# Does here what an operator asks of all workers, and returns the answer.
Obey = Callable[[dict[str, Any]], Awaitable[bytes]]
Commands = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Worker:
    """One of several processes that serve one address."""

    number: int  # from 0
    count: int
    folder: Path  # private, of all workers

    def store(self, name: str, *bounds: float) -> SqliteStore:
        """Return a store of all workers, in a file of its own, so that none can be filled through another.

        bounds: see SqliteStore. Raises StoreUnavailable.
        """
        return SqliteStore(self.folder / f"{name}.sqlite", *bounds)

    def store_files(self) -> dict[str, int]:
        """Return the names and the inodes of the files of all stores, which stay while a worker runs."""
        with suppress(FileNotFoundError):
            files = os.scandir(self.folder)
            return {file.name: file.inode() for file in files if file.name.endswith(_OF_STORES)}
        return {}

    @property
    def ready(self) -> Path:
        """The file that exists once this worker, or one before it in its place, has been ready."""
        return self.folder / f"ready-{self.number}"

    def require_model(self, fingerprint: str) -> None:
        """Raise InvalidSettings unless the server began with this model. The first worker loads it alone.

        The files of a model or a classifier may change before a worker is started again.
        """
        path = self.folder / "model"
        if not path.exists():  # only one worker is there
            write_whole(path, fingerprint.encode())
        elif path.read_text(encoding="ascii") != fingerprint:
            raise InvalidSettings(
                "the files of the model or of the classifier are not those that the server began with; put "
                "them back, or restart the server"
            )

    def all_have_been_ready(self) -> bool:
        """Return whether every worker has been ready once."""
        return all((self.folder / f"ready-{number}").exists() for number in range(self.count))


class Group:
    """The workers of one server, as one of them sees them. Used on the event loop."""

    def __init__(self, worker: Worker, store: Store, metrics: Metrics) -> None:
        """store: of all workers."""
        self.worker = worker
        self.process = secrets.token_hex(8)  # the name of this process in the store
        self.verifier: LaterVerifier | None = None
        self.is_serving = False
        self._store, self._metrics = store, metrics
        self._done: Set[str] = set()  # names in `asked` of what is done here
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, obey: Obey) -> None:
        """Look into the store from now on. Raises StoreUnavailable."""
        await self._look()
        loops = (
            repeated(self._look, _LOOK_SECONDS),
            # By itself, because it waits while hits are verified.
            repeated(self._share_findings, _LOOK_SECONDS),
            repeated(lambda: self._do(obey), _LOOK_SECONDS),
            repeated(self._publish, _PUBLISH_SECONDS),
        )
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def close(self) -> None:
        """Look no more, and let nobody wait for this worker."""
        for task in self._tasks:
            task.cancel()
        with suppress(StoreUnavailable):
            await self._store.put(f"serving/{self.worker.number}", None)

    async def ask(self, command: dict[str, Any], pause: Callable[[float], Awaitable[None]]) -> list[bytes]:
        """Let the other workers that serve do something. Returns their answers, empty ones of failures.

        pause: waits. Raises StoreUnavailable, and what `pause` raises.
        """
        name = secrets.token_hex(8)
        asked = {**command, "from": self.process, "process": os.getpid()}
        await self._change_commands(lambda commands: {**commands, name: asked})
        try:
            while (answers := await self._answers(name)) is None:
                await pause(_ANSWERS_SECONDS)
        finally:
            with suppress(StoreUnavailable):
                # It may hold texts.
                await self._change_commands(
                    lambda commands: {key: commands[key] for key in commands if key != name}
                )
        return answers

    async def _answers(self, name: str) -> list[bytes] | None:
        found = []
        for other in {*range(self.worker.count)} - {self.worker.number}:
            answer = await self._store.get(f"done/{name}/{other}")
            if answer is not None:
                found.append(answer)
            elif _runs(await self._store.get(f"serving/{other}")):
                return None
        return found

    async def _change_commands(self, change: Callable[[Commands], Commands]) -> None:
        is_changed = False
        while not is_changed:
            before = await self._store.get("asked")
            after = orjson.dumps(change(_awaited(before)))
            # A worker that is killed forgets nothing, so everything is forgotten after a while.
            is_changed = await self._store.compare_and_set("asked", before, after, _ANSWER_SECONDS)

    async def _look(self) -> None:
        if self.is_serving:
            self.worker.ready.touch()  # also if the store fails
        await self._store.put(f"alive/{self.process}", b"", _ALIVE_SECONDS)
        if self.is_serving:
            await self._store.put(f"serving/{self.worker.number}", b"%d" % os.getpid())

    async def _publish(self) -> None:
        # In a thread, because the engine describes itself in milliseconds.
        await asyncio.to_thread(self._metrics.publish, first=self.worker.number == 0)

    async def _share_findings(self) -> None:
        """Let the other workers know how tight the policy is here, and make it as tight as theirs."""
        verifier = self.verifier
        if verifier is None:
            return
        steps = verifier.steps()
        key = f"findings/{type(verifier).__name__}/{verifier.subject}"
        content = await self._store.get(key)
        known = [0] * len(steps) if content is None else orjson.loads(content)
        tightest = [max(pair) for pair in zip(steps, known, strict=True)]
        if tightest != known:
            # If another worker is faster, the next look finds what it has written.
            await self._store.compare_and_set(key, content, orjson.dumps(tightest))
        if tightest != steps:
            await asyncio.to_thread(verifier.follow, tightest)

    async def _do(self, obey: Obey) -> None:
        """Do what is asked of all workers and not done here yet."""
        if not self.is_serving:
            return
        commands = _awaited(await self._store.get("asked"))
        for name, command in commands.items():
            if name not in self._done and command["from"] != self.process:
                answer = b""
                try:
                    answer = await obey(command)
                except Exception as error:
                    log_failure(logger, "what was asked of all workers is not done here", error)
                await self._store.put(f"done/{name}/{self.worker.number}", answer, _ANSWER_SECONDS)
        self._done = commands.keys()


def _awaited(asked: bytes | None) -> Commands:
    """Return the commands that a running worker waits for, of all that are stored."""
    commands: Commands = orjson.loads(asked or b"{}")
    return {name: command for name, command in commands.items() if _runs(command["process"])}


def _runs(process: bytes | int | None) -> bool:
    """Return whether a worker runs, by the id of its process. One that is stopped, or hangs, runs too.

    A process of another user has the id of a worker that has ended.
    """
    if process is None:
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


async def repeated(look: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Call a function again and again, with pauses. Errors are logged."""
    while True:
        try:
            await look()
        except StoreUnavailable:
            pass  # the store has logged why
        except Exception as error:
            log_failure(logger, "a server cannot look at what others share", error)
        await asyncio.sleep(seconds)
