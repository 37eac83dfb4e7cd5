"""How fast a server embeds over HTTP, asked by clients that each wait for an answer before they ask again.

    a URL       -> find_endpoint -> Endpoint       which API answers there, and where
    Endpoint    -> measure       -> Measurement    texts a second and percentiles under one Load

Only what is answered with 200 counts as speed. All else is an error, counted by kind: a status, "timeout" or
"connection".
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import aiohttp
import numpy as np
import orjson
from yarl import URL

from attncache_core import AttnCacheError, InvalidInput, Progress

Api = Literal["openai", "tei"]

# infinity serves OpenAI's API without the version in the path.
_PATHS: tuple[tuple[str, Api], ...] = (
    ("v1/embeddings", "openai"),
    ("embeddings", "openai"),
    ("embed", "tei"),
)


class NoEndpoint(AttnCacheError):
    """No server at the URL answers with embeddings; the message lists what was tried."""

    code = "no_endpoint"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where embeddings are asked for, and in which API's words."""

    url: URL
    api: Api
    model: str
    headers: Mapping[str, str]

    def body(self, texts: Sequence[str]) -> dict[str, object]:
        """The request for the embeddings of these texts."""
        if self.api == "openai":
            return {"input": texts, "model": self.model}
        return {"inputs": texts}

    def holds_embedding(self, content: bytes) -> bool:
        """Whether an answer's content is what this API answers to one text."""
        try:
            answer = orjson.loads(content)
            embedding = answer["data"][0]["embedding"] if self.api == "openai" else answer[0]
            return isinstance(embedding[0], int | float)
        except (ValueError, TypeError, LookupError):
            return False


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients, each with so many texts a request, until so many texts were sent."""

    clients: int
    batch: int
    texts: int


class Answer(NamedTuple):
    """What became of one request."""

    texts: int
    seconds: float  # from its sending to the last byte of its answer
    error: str | None  # None if it was answered with 200


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one load came to. The percentiles are of requests answered with 200; None if there were none."""

    clients: int
    batch: int
    texts: int  # answered with 200
    texts_per_second: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    errors: dict[str, int]  # requests, by kind


async def find_endpoint(
    url: str, api: Api | None = None, *, model: str = "default", headers: Mapping[str, str] | None = None
) -> Endpoint:
    """The first of the endpoints at this URL and below it that answers one text with an embedding.

    Without `api`, both are tried. Raises InvalidInput if it is no URL, NoEndpoint if none answers so.
    """
    tried = []
    async with _session(headers or {}) as session:
        for candidate, kind in _candidates(_parse(url)):
            if api not in (None, kind):
                continue
            endpoint = Endpoint(candidate, kind, model, headers or {})
            status, content = await _probe(session, endpoint)
            if status == 200 and endpoint.holds_embedding(content):
                return endpoint
            tried.append(f"{candidate} ({kind}) {status}{' without an embedding' if status == 200 else ''}")
    raise NoEndpoint(f"no embeddings are served there; answers: {', '.join(tried)}")


async def measure(
    endpoint: Endpoint,
    texts: Sequence[str],
    load: Load,
    *,
    warmup: int = 0,
    progress: Progress = lambda *_: None,
    on_measured: Callable[[Measurement], None],
) -> None:
    """Put the load on the server, from the first text on and round again, and hand over what was measured.

    `warmup` texts are sent before, by as many clients, and not counted. If cancelled, what was measured until
    then is handed over first.
    """
    stage = f"{load.clients} clients, batch {load.batch}"
    answers: list[Answer] = []
    sent = 0

    def keep(answer: Answer) -> None:
        nonlocal sent
        answers.append(answer)
        sent += answer.texts
        progress(stage, sent, load.texts)

    async with _session(endpoint.headers) as session:
        before = Load(load.clients, load.batch, warmup)
        await _send(session, endpoint, texts, before, lambda _: None)
        started = time.perf_counter()
        try:
            await _send(session, endpoint, texts, load, keep)
        finally:
            if answers:
                on_measured(summarize(load, answers, time.perf_counter() - started))


def summarize(load: Load, answers: Sequence[Answer], elapsed_seconds: float) -> Measurement:
    """The figures of these answers, which took so long together."""
    good = [answer for answer in answers if answer.error is None]
    texts = sum(answer.texts for answer in good)
    # A refusal is quick: among the percentiles it would flatter the server.
    milliseconds = np.array([answer.seconds for answer in good]) * 1e3
    p50, p95, p99 = np.percentile(milliseconds, [50, 95, 99]).tolist() if good else (None, None, None)
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    return Measurement(
        load.clients, load.batch, texts, texts / elapsed_seconds, p50, p95, p99, dict(sorted(errors.items()))
    )


def _session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    # The number of clients is the limit on connections.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)


def _parse(url: str) -> URL:
    try:
        parsed = URL(url)
        if parsed.scheme in ("http", "https") and parsed.host:
            return parsed
    except ValueError:
        pass
    raise InvalidInput(f"--url must be like http://127.0.0.1:8080, not {url}", field="url")


def _candidates(url: URL) -> Iterator[tuple[URL, Api]]:
    """The URL itself, if it has a path, by both APIs; then the known paths below it."""
    if url.path.strip("/"):
        yield url, "openai"
        yield url, "tei"
    for path, api in _PATHS:
        yield url / path, api


async def _probe(session: aiohttp.ClientSession, endpoint: Endpoint) -> tuple[int, bytes]:
    """Status and content of the answer to one short text. Raises NoEndpoint if there is none."""
    try:
        async with _post(session, endpoint, ["text"]) as response:
            return response.status, await response.read()
    # UnicodeError: what no resolver takes for a name.
    except (TimeoutError, aiohttp.ClientError, UnicodeError) as error:
        reason = str(error) or type(error).__name__
        raise NoEndpoint(f"no answer from {endpoint.url}: {reason}") from error


async def _send(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    texts: Sequence[str],
    load: Load,
    on_answer: Callable[[Answer], None],
) -> None:
    batches = _batches(texts, load)

    async def client() -> None:
        # All clients draw on one supply, so that they end together.
        for batch in batches:
            on_answer(await _ask(session, endpoint, batch))

    await asyncio.gather(*(client() for _ in range(load.clients)))


def _batches(texts: Sequence[str], load: Load) -> Iterator[list[str]]:
    endless = itertools.cycle(texts)
    for sent in range(0, load.texts, load.batch):
        yield list(itertools.islice(endless, min(load.batch, load.texts - sent)))


async def _ask(session: aiohttp.ClientSession, endpoint: Endpoint, texts: Sequence[str]) -> Answer:
    started = time.perf_counter()
    try:
        async with _post(session, endpoint, texts) as response:
            await response.read()
        error = None if response.status == 200 else str(response.status)
    except TimeoutError:
        error = "timeout"
    except aiohttp.ClientError:
        error = "connection"
    return Answer(len(texts), time.perf_counter() - started, error)


def _post(
    session: aiohttp.ClientSession, endpoint: Endpoint, texts: Sequence[str]
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    # A redirect would be two requests measured as one.
    return session.post(endpoint.url, json=endpoint.body(texts), allow_redirects=False)
