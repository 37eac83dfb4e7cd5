"""Clients that ask, leave, hurry and send rubbish, and compare answers with those of an idle server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from benchmarks.soak.texts import LABELS, REUSE, Idle, in_order_of_labels

MIN_COSINE = 0.9999
# Of scores between 0 and 1: their cosines differ by less than 1e-3, divided by the temperature 0.05.
_SCORE_TOLERANCE = 0.01
_COSINE_TOLERANCE = 1e-3
_MAX_TEXTS = 256


@dataclass
class Record:
    """What was asked and answered."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)  # by what was asked
    codes: Counter[str] = field(default_factory=Counter)  # of errors
    wrong: list[str] = field(default_factory=list)  # what should not have happened
    texts: int = 0  # that were answered
    compared: int = 0  # answers that were compared with those of the idle server
    least_cosine: float = 1.0  # of exact answers
    hits: int = 0  # answers that reused maps, which approximate
    least_cosine_of_hits: float = 1.0
    left: int = 0  # requests whose client left
    seconds: list[float] = field(default_factory=list)  # that each request took

    def complain(self, what: str) -> None:
        """Note something that should not have happened."""
        if len(self.wrong) < 1000:
            self.wrong.append(what)


class Clients:
    """Clients that ask in turns. `key` is sent by all of them, and may change at any time."""

    def __init__(self, url: str, idle: Idle, key: str, seed: int) -> None:
        self.key = key
        self.record = Record()
        self._url = url
        self._idle = idle
        self._random = Random(seed)
        self._ways: list[tuple[int, Callable[[aiohttp.ClientSession], Awaitable[None]]]] = [
            (30, self._embed),
            (15, self._openai),
            (10, self._classify),
            (10, self._similarity),
            (5, self._rerank),
            (5, self._tokenize),
            (5, self._embed_ids),
            (10, self._leave),
            (5, self._leave_behind_half_a_body),
            (5, self._hurry),
            (5, self._send_rubbish),
        ]

    async def run(self, count: int, seconds: float) -> None:
        """Let `count` clients ask for so long."""
        until = perf_counter() + seconds
        await asyncio.gather(*(self._ask(until) for _ in range(count)))

    async def _ask(self, until: float) -> None:
        weights, ways = zip(*self._ways, strict=True)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(self._url, timeout=timeout) as client:
            while perf_counter() < until:
                (way,) = self._random.choices(ways, weights)
                try:
                    await way(client)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    self.record.complain(f"{way.__name__}: {type(error).__name__}")

    def _some(self, maximum: int = _MAX_TEXTS) -> list[int]:
        """Return the numbers of 1 to `maximum` texts; few more often than many."""
        return self._random.choices(
            range(len(self._idle.texts)), k=round(maximum ** self._random.random() ** 2)
        )

    def _texts(self, chosen: list[int]) -> list[str]:
        return [self._idle.texts[number] for number in chosen]

    async def _post(
        self,
        client: aiohttp.ClientSession,
        path: str,
        content: Any,
        allowed: tuple[int, ...] = (200, 429),
        **headers: str,
    ) -> tuple[Any, Mapping[str, str]] | None:
        """Ask, and note the status. Return the JSON and the headers of status 200, and None of others.

        By default exact answers are asked for. A status that is not allowed is noted.
        """
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        fixed = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", REUSE: "off"}
        began = perf_counter()
        async with client.post(path, data=body, headers=fixed | headers) as response:
            answer = await response.json()
        self.record.seconds.append(perf_counter() - began)
        self.record.statuses[path, response.status] += 1
        if response.status == 200 and 200 in allowed:
            return answer, response.headers
        self.record.codes[_code(answer)] += 1
        if response.status not in allowed:
            self.record.complain(f"{path}: status {response.status}, {_code(answer)}")
        if response.status == 429:
            await asyncio.sleep(min(0.2, float(response.headers["Retry-After"])))
        return None

    # What is answered.

    async def _embed(self, client: aiohttp.ClientSession) -> None:
        chosen, reuse = self._some(), self._random.choice(["on", "off"])
        content = {"inputs": self._texts(chosen)}
        if answered := await self._post(client, "/embed", content, (200, 429), **{REUSE: reuse}):
            rows, headers = answered
            hits = int(headers.get("X-AttnCache-Hits", "0/0").split("/")[0])
            self._compare(f"/embed, reuse {reuse}", chosen, rows, hits)

    async def _openai(self, client: aiohttp.ClientSession) -> None:
        chosen, encoding = self._some(), self._random.choice(["float", "base64"])
        content = {"input": self._texts(chosen), "encoding_format": encoding}
        if answered := await self._post(client, "/v1/embeddings", content):
            rows = [entry["embedding"] for entry in answered[0]["data"]]
            if encoding == "base64":
                rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
            self._compare("/v1/embeddings", chosen, rows)

    async def _embed_ids(self, client: aiohttp.ClientSession) -> None:
        # Ids that are too long are cut as they are, without the token that closes a text.
        chosen = [
            index for index in self._some(16) if len(self._idle.ids[index]) <= self._idle.max_total_tokens
        ]
        if not chosen:
            return
        content = {"inputs": [self._idle.ids[number] for number in chosen]}
        if answered := await self._post(client, "/embed", content):
            self._compare("/embed of token ids", chosen, answered[0])

    async def _classify(self, client: aiohttp.ClientSession) -> None:
        chosen = self._some(64)
        content = {"inputs": self._texts(chosen), "labels": LABELS}
        if answered := await self._post(client, "/classify", content):
            found = np.array([in_order_of_labels(row) for row in answered[0]])
            self._near("/classify", found, self._idle.scores[chosen], _SCORE_TOLERANCE)

    async def _similarity(self, client: aiohttp.ClientSession) -> None:
        one, *others = self._some(64) + self._some(1)
        content = {"inputs": {"source_sentence": self._texts([one])[0], "sentences": self._texts(others)}}
        if answered := await self._post(client, "/similarity", content):
            expected = self._idle.similarities(one, others)
            self._near("/similarity", np.array(answered[0]), expected, _COSINE_TOLERANCE)

    async def _rerank(self, client: aiohttp.ClientSession) -> None:
        one, *others = self._some(32) + self._some(1)
        content = {"query": self._texts([one])[0], "texts": self._texts(others), "raw_scores": True}
        if answered := await self._post(client, "/rerank", content):
            ranks = sorted(answered[0], key=lambda entry: entry["index"])
            found = np.array([entry["score"] for entry in ranks])
            self._near("/rerank", found, self._idle.similarities(one, others), _COSINE_TOLERANCE)

    async def _tokenize(self, client: aiohttp.ClientSession) -> None:
        chosen = self._some()
        if answered := await self._post(client, "/tokenize", {"inputs": self._texts(chosen)}):
            self.record.compared += len(chosen)
            found = [[token["id"] for token in row] for row in answered[0]]
            if found != [self._idle.ids[number] for number in chosen]:
                self.record.complain("/tokenize: other tokens than those of the idle server")

    # What goes wrong.

    async def _hurry(self, client: aiohttp.ClientSession) -> None:
        chosen, seconds = self._some(), 10 ** self._random.uniform(-4, 0)
        content, timeout = {"inputs": self._texts(chosen)}, {"X-AttnCache-Timeout": f"{seconds:.6f}"}
        if answered := await self._post(client, "/embed", content, (200, 429, 504), **timeout):
            self._compare("/embed in a hurry", chosen, answered[0])

    async def _leave(self, client: aiohttp.ClientSession) -> None:
        path = self._random.choice(["/embed", "/v1/embeddings", "/classify"])
        texts = self._texts(self._some())
        content: dict[str, Any] = {"input": texts} if path.startswith("/v1") else {"inputs": texts}
        if path == "/classify":
            content["labels"] = LABELS
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._post(client, path, content), self._random.random() ** 3)
        self.record.left += 1

    async def _leave_behind_half_a_body(self, _: aiohttp.ClientSession) -> None:
        target = urlsplit(self._url)
        _reader, writer = await asyncio.open_connection(target.hostname, target.port)
        body = json.dumps({"inputs": self._texts(self._some())}).encode()
        head = f"POST /embed HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer {self.key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await asyncio.sleep(self._random.random() / 10)
            writer.close()
            await writer.wait_closed()
        self.record.left += 1

    async def _send_rubbish(self, client: aiohttp.ClientSession) -> None:
        whole = json.dumps({"inputs": self._texts(self._some(16))}).encode()
        cut = whole[: self._random.randrange(len(whole))]
        noise = self._random.randbytes(self._random.randrange(2000))
        wrong = b'{"inputs": %d}' % self._random.randrange(10**9)
        large = b'{"inputs": "%s"}' % (b"x" * 3_000_000)
        body = self._random.choice([cut, noise, wrong, b"[" * 100_000, large])
        await self._post(client, "/embed", body, (400, 413, 422, 429))

    # What is compared.

    def _compare(self, path: str, chosen: list[int], rows: Any, hits: int = 0) -> None:
        """Compare embeddings with those of the idle server. hits: how many of them may approximate."""
        record, found = self.record, np.array(rows, np.float32)
        expected = self._idle.embeddings[chosen]
        if found.shape != expected.shape:
            record.complain(f"embeddings of shape {found.shape} instead of {expected.shape}")
            return
        cosines = np.sum(found * expected, axis=1) / np.linalg.norm(found, axis=1)
        order = np.argsort(cosines)
        record.texts += len(chosen)
        record.compared += len(chosen)
        record.hits += hits
        # The answers do not say which of them approximate: count the furthest as those.
        if hits:
            record.least_cosine_of_hits = min(record.least_cosine_of_hits, float(cosines[order[0]]))
        for number in order[hits : hits + 1]:
            record.least_cosine = min(record.least_cosine, float(cosines[number]))
            if not cosines[number] >= MIN_COSINE:
                tokens = len(self._idle.ids[chosen[number]])
                record.complain(
                    f"{path}: cosine {cosines[number]:.6f} of a text of {tokens} tokens, "
                    f"with {hits} hits among {len(chosen)} texts"
                )

    def _near(self, path: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
        self.record.texts += len(found)
        self.record.compared += len(found)
        if found.shape != expected.shape or not np.abs(found - expected).max() <= tolerance:
            self.record.complain(f"{path}: other scores than those of the idle server")


def _code(answer: Any) -> str:
    """Return the code of an error, in any of the shapes."""
    if not isinstance(answer, dict):
        return "no error"
    error = answer.get("error")
    return str(error["code"] if isinstance(error, dict) else answer.get("error_type"))
