"""What one worker has to do with the others: whose sessions are whose, the metrics of all, one cache for all.

A session belongs to the worker that the hash of its salt and id names, so that it is found whichever worker a
connection reaches, without a table that somebody would have to keep.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path

from service.access.quotas import Quotas
from service.conversations.sessions import Session
from service.errors import WorkerUnavailable
from service.state import ServiceState
from service.web.call import Answer, AnsweredElsewhere, Call
from service.workers.added_metrics import (
    Family,
    added,
    decoded,
    encoded,
    families_of,
    read_again,
    rendered,
    write_down,
)
from service.workers.board import Board
from service.workers.messages import Message, Peer, listen
from service.workers.passing import answer_passed, pass_on
from service.workers.shared_quotas import SharedQuotaUse

# Metrics of a worker that does not answer in time are those that it has written down.
_METRICS_SECONDS = 2.0
QUOTAS = "quotas"


class Team:
    """One worker among others. Used on the event loop."""

    def __init__(
        self, worker: int, count: int, board: Board, folder: Path, on_serving: Callable[[], None]
    ) -> None:
        """worker: the number of this one, from 0. folder: private, for sockets and files of all workers.

        on_serving: called when this worker is ready for the first time.
        """
        self.worker = worker
        self.count = count
        self.board = board
        self.answering = 0  # requests that others have passed on
        self._on_serving: Callable[[], None] | None = on_serving
        self._folder = folder
        self._others = {other: Peer(self._socket(other)) for other in range(count) if other != worker}
        self._server: asyncio.Server | None = None
        self._collecting = asyncio.Lock()
        # What the workers counted whose place this one has taken.
        self._counted_before = read_again(self._counts(worker))

    async def open(self, state: ServiceState, answering: Callable[[Call], Awaitable[Answer]]) -> None:
        """Answer what other workers ask. answering: answers a request that another worker has admitted."""

        async def answer(question: Message, gone: asyncio.Event) -> Message:
            if question.fields["kind"] == "metrics":
                return Message({}, encoded(await self._own_metrics(state)))
            self.answering += 1
            try:
                return await answer_passed(question, gone, state, answering, self)
            finally:
                self.answering -= 1

        self._server = await listen(self._socket(self.worker), answer)

    def close(self) -> None:
        """Answer nothing any more."""
        if self._server is not None:
            self._server.close()
        for peer in self._others.values():
            peer.close()

    @property
    def all_started(self) -> bool:
        """Whether all workers have been ready."""
        return self.board.all_started

    def write(self, *, serves: bool, connections: int) -> None:
        """Let the other workers know how this one is; see Board. Called often."""
        self.board.write(self.worker, serves=serves, connections=connections)
        if serves and self._on_serving is not None:
            self._on_serving()
            self._on_serving = None

    def is_drained(self, *, nothing_in_flight: bool) -> bool:
        """Let the others know, while this worker ends, whether it has something left to answer. Called often.

        nothing_in_flight: whether its own connections are answered. Returns whether the worker may end: it
        has answered what others have passed on and, if all workers end, nobody will pass on anything more.
        """
        done = nothing_in_flight and not self.answering
        self.board.write(self.worker, serves=False, connections=0, drained=done)
        return done and (not self.board.all_end or self.board.others_are_drained(self.worker))

    def quota_use(self, name: str, quotas: Quotas) -> SharedQuotaUse:
        """Return what counts the use of the quotas of an API key's holder, over all workers."""
        return SharedQuotaUse(self._folder / QUOTAS, name, quotas, self.worker, self.count)

    def owner_of(self, session: Session) -> int:
        """Return the number of the worker that keeps a session."""
        salt, name = session
        key = hashlib.blake2b(salt, digest_size=32).digest()
        digest = hashlib.blake2b(name.encode(), key=key, digest_size=8).digest()
        return int.from_bytes(digest) % self.count

    async def pass_to_owner(self, call: Call, content: bytes, session: Session) -> None:
        """Do nothing if this worker keeps the session. Else let the worker answer that keeps it.

        content: the body of the request. Raises AnsweredElsewhere, and what prevents the answer:
        WorkerUnavailable, ClientGone or DeadlineExceeded.
        """
        owner = self.owner_of(session)
        if owner == self.worker:
            return
        try:
            passed = await pass_on(call, content, self._others[owner])
        except WorkerUnavailable as error:
            raise WorkerUnavailable(
                "the worker process that keeps this session does not run at present; it starts again, and "
                "then needs the whole conversation as transcript",
                retry_after_seconds=error.retry_after_seconds,
            ) from error
        call.results.extend(passed.results)
        raise AnsweredElsewhere(passed.answer)

    async def ask_all(self, call: Call, content: bytes = b"") -> list[Answer]:
        """Let all other workers answer a request too, unless another worker has passed the request on.

        Returns their answers. Raises WorkerUnavailable, ClientGone and DeadlineExceeded.
        """
        if call.is_passed_on:
            return []
        passed = await asyncio.gather(*(pass_on(call, content, peer) for peer in self._others.values()))
        return [own.answer for own in passed]

    async def metrics(self, state: ServiceState, names: Collection[str]) -> bytes:
        """Return the metrics of all workers in Prometheus' text format.

        names: of the time series to return; if there are none, all are returned.
        """
        asking = [asyncio.create_task(self._metrics_of(other)) for other in self._others]
        own = await self._own_metrics(state)
        theirs = await asyncio.gather(*asking)
        return await asyncio.to_thread(lambda: rendered(added([own, *map(decoded, theirs)]), names))

    async def _own_metrics(self, state: ServiceState) -> list[Family]:
        state.metrics.observe_sessions(state.sessions.count)

        def collect() -> list[Family]:
            families = added([families_of(state.metrics.registry), self._counted_before])
            write_down(self._counts(self.worker), families)
            return families

        # In a thread, because a thousand numbers would block the event loop; in one, because of the file.
        async with self._collecting:
            return await asyncio.to_thread(collect)

    async def _metrics_of(self, other: int) -> bytes:
        with suppress(WorkerUnavailable, TimeoutError):
            async with asyncio.timeout(_METRICS_SECONDS):
                return (await self._others[other].ask(Message({"kind": "metrics"}))).body
        return encoded(read_again(self._counts(other)))

    def _socket(self, worker: int) -> Path:
        return self._folder / f"{worker}.sock"

    def _counts(self, worker: int) -> Path:
        return self._folder / f"{worker}.counts"
