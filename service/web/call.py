"""One HTTP request while it is answered: its headers and body, who sent it, and how long it may take.

FastAPI does not read the body, because it would read a body of any size.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import Depends
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from attncache_core import AttnCacheError, InvalidInput, PrefillEngine, PrefillResult
from service.access.keys import KeyHolder
from service.errors import (
    BodyTooLarge,
    ClientGone,
    DeadlineExceeded,
    MalformedBody,
    ModelMismatch,
    QuotaExceeded,
)
from service.observability.finished import Timing
from service.schemas import Schema, checked
from service.state import ServiceState, Serving

# The status that the metrics show for a request that was not answered.
NOT_ANSWERED = 499
# Key in the ASGI scope of a request: its Call.
CALL = "attncache.call"
REUSE_HEADER = "X-AttnCache-Reuse"
REQUIRE_MODEL_HEADER = "X-AttnCache-Require-Model"
MODEL_HEADER = "X-AttnCache-Model"
TIMEOUT_HEADER = "X-AttnCache-Timeout"

# A shorter beginning could be the beginning of another model's fingerprint too.
_PINNED = re.compile("[0-9a-f]{8,64}")
# A client that leaves earlier is noticed when its text is computed. Watching costs a task, and most requests
# are answered earlier.
_WATCH_AFTER_SECONDS = 0.05

_PART_BYTES = 256 * 1024  # of an answer
T = TypeVar("T")


class Answer(NamedTuple):
    """A response: its body, and headers beside those that every response has."""

    content: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    status: int = 200

    async def send(self, send: Send) -> None:
        """Send the response."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(self.content)),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        # In parts, so that the request is in flight until its client has read nearly everything.
        for first in range(0, max(1, len(self.content)), _PART_BYTES):
            end = first + _PART_BYTES
            more = end < len(self.content)
            await send({"type": "http.response.body", "body": self.content[first:end], "more_body": more})


@dataclass(slots=True, eq=False)
class Call:
    """One HTTP request. Used on the event loop only."""

    scope: Scope
    receive: Receive
    state: ServiceState
    headers: dict[bytes, bytes]  # lower-case names; of repeated headers, the last
    # Requests of one flow wait for each other; flows take turns. From the outside in: a key, a connection
    # or, behind trusted proxies, an address.
    flow: tuple[object, ...]
    request_id: str
    namespace: bytes = b""  # separates what is kept for the client from what is kept for others
    is_relayed: bool = False  # whether another worker has received the request and asks all workers
    holder: KeyHolder | None = None  # of the API key, if keys are set
    taken_tokens: int | None = None  # by the quotas of the holder, until the end; None: it is not counted
    timings: list[Timing] = field(default_factory=list)  # of all that was queued for it
    results: list[PrefillResult] = field(default_factory=list)  # of what was computed
    started: float = field(default_factory=time.perf_counter)
    status: int = NOT_ANSWERED  # of the response, once it begins
    body_bytes: int = 0  # that are counted as in flight
    answer_bytes: int = 0  # that are counted as being made, or as not read yet
    answered_by: str | None = None  # fingerprint of the model, once it is known
    reuse: bool = True  # as the header X-AttnCache-Reuse asks for, if its route reads it
    content_read: bytes | None = None  # the body, if it is read several times
    _seconds: float = float("inf")  # that the request may take; set by `serving`
    _serving: Serving | None = None

    def header(self, name: str) -> str | None:
        """Return the value of a header, or None."""
        value = self.headers.get(name.lower().encode())
        return None if value is None else value.decode("latin-1").strip()

    @property
    def key(self) -> str | None:
        """The name of the API key; None: no keys are set."""
        return None if self.holder is None else self.holder.name

    @property
    def tokens(self) -> int:
        """The tokens of all that was computed, or begun, for the request, also if it has failed."""
        return sum(timing.tokens for timing in self.timings)

    @property
    def query_params(self) -> QueryParams:
        """The parameters of the query."""
        return QueryParams(self.scope["query_string"])

    def serving(self) -> Serving:
        """Return the engine and the other parts that serve this request, the same ones until its end.

        Raises NotReady while the engine is loading, ModelMismatch if the request requires another model, and
        InvalidInput if the required fingerprint, or the timeout, is malformed.
        """
        if self._serving is None:
            serving = self.state.serving()
            self.answered_by = serving.engine.fingerprint
            self._require_timeout()
            self._require_model(serving.engine.fingerprint)
            self._serving = serving
        return self._serving

    @property
    def engine(self) -> PrefillEngine:
        """The engine that serves this request. Raises as `serving`."""
        return self.serving().engine

    async def count_in_quota(self, holder: KeyHolder, tokens: int | None = None) -> None:
        """Count the request as one of its key, and again once some of its texts are known.

        tokens: a guess; None: no text is known yet. Raises QuotaExceeded, but not because of what the request
        itself has taken.
        """
        try:
            if tokens is None:
                self.taken_tokens = 0 if await holder.use.begin() else None
            elif self.taken_tokens is not None:
                self.taken_tokens += await holder.use.take(tokens, admitted=self.taken_tokens > 0)
        except QuotaExceeded as error:
            self.state.metrics.observe_refusal(holder.name, error.quota)
            raise

    def reuse_requested(self) -> bool:
        """Return whether the header X-AttnCache-Reuse is on, as it is by default. Raises InvalidInput."""
        value = self.header(REUSE_HEADER)
        if value is None:
            return True
        if value.lower() not in ("on", "off"):
            raise InvalidInput(f"{REUSE_HEADER} must be on or off", field=REUSE_HEADER)
        return value.lower() == "on"

    def truncates(self, truncate: bool | None) -> bool:
        """Return whether texts that are too long are cut. truncate: of the body; None: as the server does."""
        return self.state.settings.truncate if truncate is None else truncate

    def salt(self, cache_salt: str | None = None) -> bytes:
        """Return what separates requests: the namespace of the client, and the salt of the body."""
        return self.namespace + (cache_salt or "").encode()

    async def read(self, schema: type[Schema]) -> Schema:
        """Read and check the request's body.

        Raises BodyTooLarge, MalformedBody, InvalidInput, QueueFull if too many bytes are in flight, and
        ClientGone.
        """
        body = await self._bytes() if self.content_read is None else self.content_read
        read = checked(body, schema)
        if not body.isascii() or b"\\u" in body:
            # Each character of a text takes as many bytes in memory as the widest one, up to 4.
            self._count(max(len(body), _bytes_of_texts(read.__dict__.values())))
        return read

    async def content(self) -> bytes:
        """Read the request's body and keep it for `read`, without a check. Raises as `read`."""
        if self.content_read is None:
            self.content_read = await self._bytes()
        return self.content_read

    def count_answer(self, size: int) -> None:
        """Count an answer of this many bytes until it is sent. Raises QueueFull if too many are counted.

        The first part of each answer is free, so that only large ones are refused.
        """
        answers = self.state.answers
        counted = min(max(0, size - _PART_BYTES), answers.maximum)
        answers.take(counted - self.answer_bytes)
        self.answer_bytes = counted

    @asynccontextmanager
    async def turn_to_write(self, made: int) -> AsyncIterator[None]:
        """Wait for the turn to make a further part of the answer. made: bytes of the answer so far.

        However many large answers are made at once, other requests are served after each part. Raises
        QueueFull, as `count_answer`, and as `require_client`.
        """
        # More may be counted already, for what is still to be made.
        self.count_answer(max(made, self.answer_bytes + _PART_BYTES))
        async with self.state.writing:
            await self.require_client()
            yield

    async def pause(self, seconds: float) -> None:
        """Wait for a short time. Raises ClientGone and DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, lambda: None if over.done() else over.set_result(None))
        try:
            await self.wait(over)
        finally:
            timer.cancel()

    async def wait(self, pending: asyncio.Future[T]) -> T:
        """Wait for a result. If the client leaves before, or the deadline passes, the work is dropped.

        Raises the error of the result, ClientGone or DeadlineExceeded.
        """
        loop = pending.get_loop()
        watches: list[asyncio.Task[None]] = []
        timer = loop.call_later(
            # Since the request began, because a request may wait for short times, one after the other.
            self._seconds_left(min(_WATCH_AFTER_SECONDS, self._seconds)),
            lambda: watches.append(loop.create_task(self._give_up(pending))),
        )
        try:
            result = await pending
        finally:
            timer.cancel()
            for watch in watches:
                watch.cancel()
        if isinstance(result, PrefillResult):
            self.results.append(result)
        return result

    async def require_client(self) -> None:
        """Raise DeadlineExceeded if the request's time is over, and ClientGone if the client has left.

        The body must have been read.
        """
        if not self.seconds_left:
            raise self._overdue()
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await self._until_gone()
            raise ClientGone("the client left before its answer")

    async def _until_gone(self) -> None:
        # A body that the route does not read comes before the message that the client has left.
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _give_up(self, pending: asyncio.Future[Any]) -> None:
        """Fail `pending` when the client leaves or the deadline passes."""
        error: AttnCacheError = ClientGone("the client left before its answer")
        try:
            async with asyncio.timeout(self.seconds_left):
                await self._until_gone()
        except TimeoutError:
            error = self._overdue()
        if not pending.done():
            pending.set_exception(error)

    async def _bytes(self) -> bytes:
        if self.headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
            raise MalformedBody(
                "a body with Content-Encoding is not read; send the body uncompressed, without this header"
            )
        maximum = self.state.settings.max_body_bytes
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit():
            # The header only refuses early: the bytes that arrive are counted. 20 digits exceed any limit.
            _require_small(int(announced[:20]), maximum)
        chunks: list[bytes] = []
        size, is_whole = 0, False
        while not is_whole:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left before its body was complete")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            _require_small(size, maximum)
            self._count(size)
            is_whole = not message.get("more_body", False)
        return b"".join(chunks)

    def _count(self, size: int) -> None:
        """Count this many bytes as in flight for the body. Raises QueueFull."""
        counted = min(size, self.state.bodies.maximum)
        self.state.bodies.take(counted - self.body_bytes)
        self.body_bytes = counted

    @property
    def seconds_left(self) -> float:
        """The seconds until the request must be answered."""
        return self._seconds_left(self._seconds)

    def _seconds_left(self, seconds: float) -> float:
        """Return the seconds until the request is this old; 0 if it is older."""
        return max(0.0, self.started + seconds - time.perf_counter())

    def _require_timeout(self) -> None:
        """Read how many seconds the request may take. Raises InvalidInput for a wrong header."""
        self._seconds = self.state.settings.request_seconds
        requested = self.header(TIMEOUT_HEADER)
        if requested is None:
            return
        seconds = number(requested)
        if not 0 < seconds < float("inf"):
            raise InvalidInput(
                f"{TIMEOUT_HEADER} must be a number of seconds above 0, such as 2.5", field=TIMEOUT_HEADER
            )
        self._seconds = min(self._seconds, seconds)

    def _require_model(self, fingerprint: str) -> None:
        header = self.header(REQUIRE_MODEL_HEADER)
        if header is None:
            return
        required = header.lower()
        if not _PINNED.fullmatch(required):
            raise InvalidInput(
                f"{REQUIRE_MODEL_HEADER} must be a model's fingerprint, or at least its first 8 characters; "
                f"{MODEL_HEADER} and /info show the fingerprint",
                field=REQUIRE_MODEL_HEADER,
            )
        if not fingerprint.startswith(required):
            raise ModelMismatch(
                f"this server serves {self.state.settings.model}, fingerprint {fingerprint[:12]}, and the "
                "request requires another model; send the request to a server of that model, or compute "
                f"stored embeddings again with this model and require its fingerprint, which {MODEL_HEADER} "
                "holds",
                field=REQUIRE_MODEL_HEADER,
            )

    def _overdue(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the request was not answered within {self._seconds:g} seconds and was dropped; send fewer "
            f"texts, or allow more time by {TIMEOUT_HEADER} or --request-seconds"
        )


async def call_of(request: Request) -> Call:
    """Return the call of a request."""
    call: Call = request.scope[CALL]
    return call


# What the function of a route takes.
CurrentCall = Annotated[Call, Depends(call_of)]


def number(text: str) -> float:
    """Return the number that a header or a query parameter holds; nan if it holds none.

    Python reads 1_0 as 10, and no client means that.
    """
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def _bytes_of_texts(values: Iterable[object]) -> int:
    """Return the bytes that the texts among some values, and in lists among them, take in memory."""
    texts = 0
    for value in values:
        if isinstance(value, str):
            texts += sys.getsizeof(value)
        elif isinstance(value, list | tuple):
            texts += _bytes_of_texts(value)
    return texts


def _require_small(size: int, maximum: int) -> None:
    """Raise BodyTooLarge if a body has more than `maximum` bytes."""
    if size > maximum:
        raise BodyTooLarge(
            f"the body must have at most {maximum} bytes; send fewer or shorter texts per request, or start "
            "the server with a larger --max-body-bytes"
        )
