"""Send the requests of a simulated fleet to real servers, and measure what the simulation predicts.

servers -> measured_fleet -> Fleet, with the servers' own speeds
Request, by arrival -> replay -> Replayed: the same figures as FleetReport
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from attncache_core import InvalidInput
from benchmarks.measuring.fleet_servers import Fleet, Request

_TIERS = "memory", "disk", "shared"  # as in /info
_MEASURED_PROMPTS = 8
_SHORT, _LONG, _READ = 32, 288, 272  # tokens; the last ones are a prefix
_TOKENS = 3, 100  # ids that every vocabulary has, and that are seldom special tokens
# Above the tokens of the requests themselves.
_MEASURING_SEED = 1 << 50  # times a small number
_SETTLE_SECONDS = 1.0  # until a server has saved what it computed


@dataclass(frozen=True, slots=True)
class Cluster:
    """Real servers, and the entrance in front of them."""

    entrance: str  # URL
    servers: Sequence[str]  # URLs


@dataclass(frozen=True, slots=True)
class Replayed:
    """What servers did with the second half of a trace; see FleetReport."""

    memory_hit_rate: float
    disk_hit_rate: float
    store_hit_rate: float
    computed_tokens: int
    p50_seconds: float
    p99_seconds: float
    statuses: dict[int, int]  # of all requests


async def measured_fleet(cluster: Cluster) -> Fleet:
    """Return a fleet with the speeds and the memory of real servers, which compute all at once.

    Raises InvalidInput if a server does not answer with 200, or stores no keys and values.
    """
    async with aiohttp.ClientSession() as session:
        stats = await _stats(session, cluster.servers[0])
        short, long = [await _seconds_per_prompt(session, cluster.servers, size) for size in (_SHORT, _LONG)]
        speed = (_LONG - _SHORT) / max(1e-9, long - short)
        has_store = _TIERS[-1] in stats["given_blocks"]
        return Fleet(
            servers=len(cluster.servers),
            tokens_per_second=speed,
            request_seconds=max(0.0, short - _SHORT / speed),
            memory_tokens=stats["memory"]["most_bytes"] * stats["block_tokens"] // stats["block_bytes"],
            has_store=has_store,
            store_tokens_per_second=await _store_speed(session, cluster) if has_store else 1.0,
        )


async def replay(cluster: Cluster, requests: Sequence[Request]) -> Replayed:
    """Send requests to the entrance when they arrive. Raises InvalidInput if none gets 200."""
    half = requests[-1].arrival / 2
    answers: list[tuple[Request, int, float, int]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        before: Counter[str] = Counter()
        started = time.perf_counter()

        async def send(number: int, request: Request) -> None:
            await asyncio.sleep(max(0.0, request.arrival - (time.perf_counter() - started)))
            ids = _ids(request, number)
            headers = {} if request.key is None else {"X-AttnCache-Affinity": str(request.key)}
            sent = time.perf_counter()
            status, cached = await _embed(session, cluster.entrance, ids, headers)
            answers.append((request, status, time.perf_counter() - sent, cached))

        async def look_at_half() -> None:
            await asyncio.sleep(half)
            before.update(await _given(session, cluster))

        await asyncio.gather(look_at_half(), *(send(*numbered) for numbered in enumerate(requests)))
        given = await _given(session, cluster)
        given.subtract(before)
    late = [answer for answer in answers if answer[0].arrival >= half]
    statuses = dict(Counter(status for _, status, *_ in answers))
    seconds = [seconds for _, status, seconds, _ in late if status == 200]
    if not seconds:
        raise InvalidInput(
            f"{cluster.entrance} answered no late request with 200; statuses: {statuses}", field="replay"
        )
    cached = sum(cached for *_, cached in late)
    prefixes = max(1, sum(request.prefix for request, *_ in late))
    rates = {tier: given[tier] / max(1, given.total()) * cached / prefixes for tier in _TIERS}
    return Replayed(
        memory_hit_rate=rates["memory"],
        disk_hit_rate=rates["disk"],
        store_hit_rate=rates[_TIERS[-1]],
        computed_tokens=sum(request.tokens for request, *_ in late) - cached,
        p50_seconds=float(np.percentile(seconds, 50)),
        p99_seconds=float(np.percentile(seconds, 99)),
        statuses=statuses,
    )


async def _seconds_per_prompt(
    session: aiohttp.ClientSession, servers: Sequence[str], size: int, *, seed: int = 0, prefix: int = 0
) -> float:
    """Return the seconds of a prompt of this size while all these servers compute.

    seed: another one makes other prompts. prefix: tokens that all seeds have in common.
    """

    async def compute(server: str, first: int) -> None:
        for number in range(first, first + _MEASURED_PROMPTS):
            shared = _random_ids(_MEASURING_SEED + number, prefix)
            rest = _random_ids(_MEASURING_SEED * (2 + seed) + 1000 * size + number, size - prefix)
            _check(server, (await _embed(session, server, shared + rest, {}))[0])

    started = time.perf_counter()
    numbers = range(0, _MEASURED_PROMPTS * len(servers), _MEASURED_PROMPTS)
    await asyncio.gather(*map(compute, servers, numbers))
    return (time.perf_counter() - started) / _MEASURED_PROMPTS


def _check(server: str, status: int) -> None:
    if status != 200:
        raise InvalidInput(
            f"{server} answered with status {status}, so nothing is measured", field="replay-server"
        )


async def _store_speed(session: aiohttp.ClientSession, cluster: Cluster) -> float:
    """Return the tokens per second that a server reads from the shared store, while the others rest."""
    if len(cluster.servers) < 2:
        raise InvalidInput("two servers are needed to measure the shared store", field="replay-server")
    seconds = []
    # The first server computes the prefixes, the second one reads them, and then has them in memory.
    for seed, server in enumerate((cluster.servers[0], cluster.servers[1], cluster.servers[1]), 1):
        seconds.append(await _seconds_per_prompt(session, [server], _LONG, seed=seed, prefix=_READ))
        await asyncio.sleep(_SETTLE_SECONDS)
    return _READ / max(1e-6, seconds[1] - seconds[2])


async def _embed(
    session: aiohttp.ClientSession, url: str, ids: list[int], headers: Mapping[str, str]
) -> tuple[int, int]:
    """Return the status of a request, and how many of its tokens were stored."""
    body = {"inputs": [ids]}
    async with session.post(f"{url}/embed", json=body, headers=headers) as response:
        await response.read()
        return response.status, int(response.headers.get("X-AttnCache-Cached-Tokens", "0").split("/")[0])


async def _given(session: aiohttp.ClientSession, cluster: Cluster) -> Counter[str]:
    total: Counter[str] = Counter()
    for server in cluster.servers:
        total.update((await _stats(session, server))["given_blocks"])
    return total


async def _stats(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/info") as response:
        _check(url, response.status)
        found = (await response.json()).get("key_values")
    if not found:
        raise InvalidInput(f"{url} stores no keys and values", field="replay-server")
    stats: dict[str, Any] = found
    return stats


def _ids(request: Request, number: int) -> list[int]:
    """Return the tokens of a request. Requests of one key begin with the same tokens."""
    if request.key is None:
        return _random_ids(_MEASURING_SEED // 2 + number, request.tokens)
    if request.key < 0:  # a conversation
        return _random_ids(-request.key, request.tokens)
    text = _random_ids(_MEASURING_SEED // 2 + number, request.tokens - request.prefix)
    return _random_ids(_MEASURING_SEED // 4 + request.key, request.prefix) + text


def _random_ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(*_TOKENS, count).tolist()
