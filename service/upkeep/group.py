"""What a worker does for the other workers of its server, beside requests: it looks into the store that they
share.

alive/ID             this worker runs, and keeps its locks
serving/NUMBER       this worker answers, and does what is asked of all
started/NUMBER       this worker, or one before it in its place, has been ready once
findings/KIND        how often verification has tightened each part of a policy
asked/1, asked/2 ... what an operator asks of all workers, in order
done/1/NUMBER        what this worker has answered to asked/1
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from service.errors import StoreUnavailable, log_failure
from service.observability.metrics import Metrics
from service.store import SqliteStore, Store
from service.upkeep.verifying import LaterVerifier

logger = logging.getLogger(__name__)

_LOOK_SECONDS, _PUBLISH_SECONDS = 0.2, 1.0
# A worker whose event loop does not run for so long counts as ended.
_ALIVE_SECONDS = 5.0
_ANSWER_SECONDS = 600.0

# Does here what an operator asks of all workers, and returns the answer.
Obey = Callable[[dict[str, Any]], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Worker:
    """One of several processes that serve one address."""

    number: int  # from 0
    count: int
    folder: Path  # private, of all workers

    def store(self, name: str, *bounds: float) -> SqliteStore:
        """Return a store of all workers; bounds: see SqliteStore. Raises StoreUnavailable."""
        return SqliteStore(self.folder / "store.sqlite", name, *bounds)


class Group:
    """The workers of one server, as one of them sees them. Used on the event loop."""

    def __init__(self, worker: Worker, store: Store, metrics: Metrics) -> None:
        """store: of all workers."""
        self.process = secrets.token_hex(8)  # the name of this process in the store
        self.verifier: LaterVerifier[Any] | None = None
        self.is_serving = False
        self._worker, self._store, self._metrics = worker, store, metrics
        self._last_asked = 0  # the number of what was asked last and is done here
        self._all_started = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, obey: Obey) -> None:
        """Look into the store from now on. Raises StoreUnavailable."""
        await self._look()
        # What was asked of the workers before does not concern this one.
        while await self._store.get(f"asked/{self._last_asked + 1}") is not None:
            self._last_asked += 1
        loops = (
            _repeated(self._look, _LOOK_SECONDS),
            _repeated(lambda: self._do_next(obey), _LOOK_SECONDS),
            _repeated(self._publish, _PUBLISH_SECONDS),
        )
        self._tasks = [asyncio.create_task(own) for own in loops]

    async def close(self) -> None:
        """Look no more, and let nobody wait for this worker."""
        for task in self._tasks:
            task.cancel()
        with suppress(StoreUnavailable):
            await self._store.put(f"serving/{self._worker.number}", None)

    async def all_started(self) -> bool:
        """Return whether every worker has been ready once."""
        if not self._all_started:
            with suppress(StoreUnavailable):
                self._all_started = await self._store.count("started/") == self._worker.count
        return self._all_started

    async def ask(self, command: dict[str, Any]) -> int:
        """Ask something of all other workers. Returns its number, for `answers`. Raises StoreUnavailable."""
        content = orjson.dumps({**command, "from": self.process})
        number = self._last_asked + 1
        while not await self._store.compare_and_set(f"asked/{number}", None, content):
            number += 1
        return number

    async def answers(self, number: int) -> list[bytes] | None:
        """Return the answers of all others that serve, empty ones of those that failed; None: not all
        answered.
        """
        found = []
        for other in range(self._worker.count):
            answer = await self._store.get(f"done/{number}/{other}")
            if answer is not None:
                found.append(answer)
            elif other != self._worker.number and await self._store.get(f"serving/{other}") is not None:
                return None
        return found

    async def forget(self, number: int) -> None:
        """Delete what was asked, which may hold texts. Its number stays."""
        with suppress(StoreUnavailable):
            await self._store.put(f"asked/{number}", b"{}")

    async def _look(self) -> None:
        await self._store.put(f"alive/{self.process}", b"", _ALIVE_SECONDS)
        if self.is_serving:
            await self._store.put(f"serving/{self._worker.number}", b"", _ALIVE_SECONDS)
            await self._store.put(f"started/{self._worker.number}", b"")
        await self._share_findings()

    async def _publish(self) -> None:
        # In a thread, because the engine describes itself in milliseconds.
        await asyncio.to_thread(self._metrics.publish, first=self._worker.number == 0)

    async def _share_findings(self) -> None:
        """Let the other workers know how tight the policy is here, and make it as tight as theirs."""
        verifier = self.verifier
        if verifier is None:
            return
        own = verifier.steps()
        # Engines with another policy have other parts.
        key = f"findings/{type(verifier).__name__}/{len(own)}"
        content = await self._store.get(key)
        known = [0] * len(own) if content is None else orjson.loads(content)
        tightest = [max(pair) for pair in zip(own, known, strict=True)]
        if tightest != known:
            # If another worker is faster, the next look finds what it has written.
            await self._store.compare_and_set(key, content, orjson.dumps(tightest))
        if tightest != own:
            await asyncio.to_thread(verifier.follow, tightest)

    async def _do_next(self, obey: Obey) -> None:
        """Do what was asked next, if anything was."""
        number = self._last_asked + 1
        content = await self._store.get(f"asked/{number}")
        if content is None:
            return
        self._last_asked = number
        command = orjson.loads(content)
        if not self.is_serving or command.get("from") in (None, self.process):
            return
        answer = b""
        try:
            answer = await obey(command)
        except Exception as error:
            log_failure(logger, "what was asked of all workers is not done here", error)
        await self._store.put(f"done/{number}/{self._worker.number}", answer, _ANSWER_SECONDS)


async def _repeated(look: Callable[[], Awaitable[None]], seconds: float) -> None:
    while True:
        try:
            await look()
        except StoreUnavailable:
            pass  # the store has logged why
        except Exception as error:
            log_failure(logger, "a worker cannot look at what the others share", error)
        await asyncio.sleep(seconds)
