"""Measure how fast a server embeds over HTTP for clients that wait for each response.

    a URL       -> find_endpoint -> Endpoint       the API that answers there, and its address
    Endpoint    -> measure       -> Measurement    texts per second and percentiles under one Load

Only responses with status 200 count for the speed. All other results are errors, counted by kind: a status,
"timeout" or "connection".
"""

from __future__ import annotations

import asyncio
import itertools
import random
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
    """No server at the URL answers with embeddings. The message lists the endpoints that were tried."""

    code = "no_endpoint"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of an endpoint for embeddings, and its API."""

    url: URL
    api: Api
    model: str
    headers: Mapping[str, str]

    def body(self, texts: Sequence[str]) -> dict[str, object]:
        """Return the body of a request for the embeddings of these texts."""
        if self.api == "openai":
            return {"input": texts, "model": self.model}
        return {"inputs": texts}

    def holds_embedding(self, content: bytes) -> bool:
        """Return whether the content of a response to one text is an embedding in this API's format."""
        try:
            answer = orjson.loads(content)
            embedding = answer["data"][0]["embedding"] if self.api == "openai" else answer[0]
            return isinstance(embedding[0], int | float)
        except (ValueError, TypeError, LookupError):
            return False


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one measurement."""

    clients: int  # concurrent clients
    batch: int  # texts per request
    texts: int  # texts in total
    # Draw each text by Zipf's law with this exponent: text k of the list k^exponent times as rarely as the
    # first. None: the texts of the list in order, over and over.
    zipf: float | None = None


class Answer(NamedTuple):
    """The result of one request."""

    texts: int
    seconds: float  # from sending the request to the last byte of the response
    error: str | None  # None for status 200


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one load. Percentiles are over requests with status 200; None without such requests."""

    clients: int
    batch: int
    texts: int  # texts with status 200
    texts_per_second: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    errors: dict[str, int]  # kind of error -> requests


async def find_endpoint(
    url: str, api: Api | None = None, *, model: str = "default", headers: Mapping[str, str] | None = None
) -> Endpoint:
    """Return the first endpoint at this URL, or below it, that answers one text with an embedding.

    api: None tries both APIs. Raises InvalidInput if `url` is not a URL, and NoEndpoint if no endpoint
    answers with an embedding.
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
    """Put a load on the server, and pass the figures to `on_measured`.

    texts: sent in order, and again from the start if the load has more texts. warmup: the number of texts
    that the clients send before, which do not count. If cancelled, the figures so far are passed on first.
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
    """Return the figures of a load. elapsed_seconds: the duration of the load."""
    good = [answer for answer in answers if answer.error is None]
    texts = sum(answer.texts for answer in good)
    # Errors are not in the percentiles, because quick refusals would flatter the server.
    milliseconds = np.array([answer.seconds for answer in good]) * 1e3
    p50, p95, p99 = np.percentile(milliseconds, [50, 95, 99]).tolist() if good else (None, None, None)
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    return Measurement(
        load.clients, load.batch, texts, texts / elapsed_seconds, p50, p95, p99, dict(sorted(errors.items()))
    )


def _session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    # No limit on connections, because the number of clients is the limit.
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
    """Yield the URL itself with both APIs, if the URL has a path; then the known paths below the URL."""
    if url.path.strip("/"):
        yield url, "openai"
        yield url, "tei"
    for path, api in _PATHS:
        yield url / path, api


async def _probe(session: aiohttp.ClientSession, endpoint: Endpoint) -> tuple[int, bytes]:
    """Return status and content of the response to one short text. Raises NoEndpoint without a response."""
    try:
        async with _post(session, endpoint, ["text"]) as response:
            return response.status, await response.read()
    # UnicodeError is raised for a host name that cannot be resolved.
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
        # All clients take batches from one iterator, so that all clients end together.
        for batch in batches:
            on_answer(await _ask(session, endpoint, batch))

    await asyncio.gather(*(client() for _ in range(load.clients)))


def _batches(texts: Sequence[str], load: Load) -> Iterator[list[str]]:
    endless = itertools.cycle(texts) if load.zipf is None else _drawn(texts, load.zipf)
    for sent in range(0, load.texts, load.batch):
        yield list(itertools.islice(endless, min(load.batch, load.texts - sent)))


def _drawn(texts: Sequence[str], exponent: float) -> Iterator[str]:
    """Yield texts for ever, always the same ones, drawn by Zipf's law."""
    weights = list(itertools.accumulate(rank**-exponent for rank in range(1, len(texts) + 1)))
    generator = random.Random(0)
    while True:
        yield from generator.choices(texts, cum_weights=weights, k=1000)


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
    # No redirects, because two requests would be measured as one.
    return session.post(endpoint.url, json=endpoint.body(texts), allow_redirects=False)
