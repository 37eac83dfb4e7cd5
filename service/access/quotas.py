"""How much one API key may ask for, per minute and at a time.

Requests and tokens are taken from buckets that hold the amount of one minute, and are refilled all the time.
How many tokens a request has is known when it has ended. Until then, a guess from its texts is taken, but no
more than the bucket holds. So the bucket of tokens may go below zero when a request ends. Then further
requests are refused until the debt is paid. A request that has failed, or whose client has left, is charged
for what was begun for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import orjson
from pydantic import BaseModel, FiniteFloat, ValidationError

from service.errors import QuotaExceeded, StoreUnavailable
from service.store import Store

logger = logging.getLogger(__name__)

# When a request in flight ends is not known.
_RETRY_IN_FLIGHT_SECONDS = 1
# Other processes may count between a look and a change.
_MAX_TRIES = 100
_MAX_PAUSE_SECONDS = 0.02
_FULL_SECONDS = 60.0  # in which an empty bucket is filled
_LONGEST_SECONDS = 3600.0  # that requests of other machines are believed to take


@dataclass(frozen=True, slots=True)
class Quotas:
    """What one key may ask for. None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight: int | None = None  # requests that are being answered


class QuotaUse:
    """Counts what one key asks for, in a store that other processes may count in too.

    What this process has in flight is known here, and each change tells the store. So nothing is lost if a
    store cannot be used for a while.
    """

    def __init__(
        self,
        name: str,
        quotas: Quotas,
        *stores: Store,
        max_seconds: float,
        clock: Callable[[], float] | None = None,
        process: str | None = None,
    ) -> None:
        """name: of the key's holder. stores: the first one that can be used counts; only the last one is of
        this machine. clock: by default, the time of day if there are several stores, because machines share
        it, and otherwise the time since the machine started, which nobody sets.

        max_seconds: that a request may take. A process that was killed no longer counts as having requests in
        flight after that time. process: the name of this process, without a dot, if the last store holds
        `alive/NAME` of all processes that run; a process that was killed then no longer counts there.
        """
        self._name = name
        self._quotas = quotas
        self._stores = stores
        self._max_seconds = max_seconds
        self._clock = clock or (time.time if len(stores) > 1 else time.monotonic)
        self._alive_in = stores[-1] if process is not None else None
        # A process has several uses of one key if its quotas change while requests are answered.
        self._process = f"{process or ''}.{secrets.token_hex(8)}"
        self._in_flight = 0  # requests of this process
        self._waiting: list[_Change] = []  # changes that are not written yet
        self._writing = asyncio.Lock()
        # With other quotas, everything is counted from the beginning.
        self._key = f"quota/{name}/{quotas.requests_per_minute}/{quotas.tokens_per_minute}/{quotas.in_flight}"

    async def begin(self) -> bool:
        """Count a request that begins; `end` must follow. Returns whether it was counted.

        Raises QuotaExceeded, and then counts nothing.
        """

        def count(used: _Used) -> None:
            maximum, now = self._quotas.in_flight, self._clock()
            if maximum is not None and used.total_in_flight(now, self._max_seconds) >= maximum:
                requests = "request" if maximum == 1 else "requests"
                raise QuotaExceeded(
                    f"the key has {maximum} {requests} in flight, which is all that it may have",
                    quota="in_flight",
                    retry_after_seconds=_RETRY_IN_FLIGHT_SECONDS,
                )
            _require_one(used.requests, "requests_per_minute", now)
            _require_one(used.tokens, "tokens_per_minute", now)
            if used.requests is not None:
                used.requests.level -= 1

        return await self._change(_Change(count, in_flight=1))

    async def take(self, tokens: int, *, admitted: bool = False) -> int:
        """Take about as many tokens as a request will have, until it ends. Returns how many were taken.

        admitted: whether the request has taken tokens before. Otherwise raises QuotaExceeded if none are
        left, because requests in flight have taken them. The request that is refused then counts as none of
        `requests_per_minute`.
        """
        if self._quotas.tokens_per_minute is None:
            return 0
        taken = 0

        def count(used: _Used) -> None:
            nonlocal taken
            assert used.tokens is not None
            if admitted:
                used.tokens.refill(self._clock())
            else:
                _require_one(used.tokens, "tokens_per_minute", self._clock())
            taken = max(0, min(tokens, math.floor(used.tokens.level)))
            used.tokens.level -= taken

        def give_back(used: _Used) -> None:
            if used.requests is not None:
                used.requests.level += 1

        try:
            return taken if await self._change(_Change(count)) else 0
        except QuotaExceeded:
            await self._change(_Change(give_back))
            raise

    async def end(self, tokens: int, *, taken: int | None = 0) -> None:
        """Count the end of a request. tokens: of all that was computed, or begun, for the request.

        taken: what `take` has returned; None if `begin` was not called, or has not counted the request.
        """
        if not (tokens or taken is not None):
            return

        def count(used: _Used) -> None:
            if used.tokens is not None:
                used.tokens.refill(self._clock())
                used.tokens.level -= tokens - (taken or 0)

        await self._change(_Change(count, in_flight=-(taken is not None)))

    async def _change(self, change: _Change) -> bool:
        """Change what is used. Returns whether it was; if not, the request is answered all the same.

        Changes that come while another one is written are written together, so that a process never competes
        with itself for the value. Raises what `count` raises.
        """
        if self._quotas == Quotas():
            return False
        self._waiting.append(change)
        try:
            async with self._writing:
                if not change.is_done:
                    await self._write(list(self._waiting))
        finally:
            # Another change may have been written with this one, or this one be given up.
            if change in self._waiting:
                self._waiting.remove(change)
        if change.error is not None:
            raise change.error
        return change.is_counted

    async def _write(self, changes: list[_Change]) -> None:
        """Count changes in the first store that can be used, all at once."""
        counted = False
        for store in self._stores:
            # A store logs its errors. What was read in one store says nothing to another one.
            with suppress(StoreUnavailable):
                counted = await self._count_in(store, changes)
                break
        for change in changes:
            change.is_done, change.is_counted = True, counted and change.error is None
            if not counted:
                change.error = None
            if change.is_counted or change.in_flight < 0:
                self._in_flight += change.in_flight
            if change in self._waiting:
                self._waiting.remove(change)

    async def _count_in(self, store: Store, changes: list[_Change]) -> bool:
        """Count changes in a store. Returns False if others always were faster. Raises StoreUnavailable."""
        after: bytes | None = None
        for tries in range(_MAX_TRIES):
            before, now = await store.get(self._key), self._clock()
            if before is not None and before == after:
                # Written, though the store said otherwise: it was asked twice, and the second answer came.
                return True
            used = _Used.read(before, self._quotas, now)
            if store is self._alive_in:
                await self._drop_killed(store, used)
            used.set_in_flight(self._process, self._in_flight, now + self._max_seconds)
            is_changed = [change.apply(used, self._process, now + self._max_seconds) for change in changes]
            after, seconds = used.written(), used.seconds(self._clock())
            if not any(is_changed) or await store.compare_and_set(self._key, before, after, seconds):
                return True
            # Other machines try again too.
            await asyncio.sleep(random.uniform(0, min(_MAX_PAUSE_SECONDS, 0.001 * 2**tries)))
        logger.error("requests of key %s are not counted: too many others are counted", self._name)
        return False

    async def _drop_killed(self, store: Store, used: _Used) -> None:
        """Count nothing as in flight of processes that have ended without a word."""
        for counted in used.in_flight.keys() - {self._process}:
            if await store.get(f"alive/{counted.partition('.')[0]}") is None:
                del used.in_flight[counted]


@dataclass(slots=True, eq=False)
class _Change:
    """A change of what is used, which may be refused."""

    count: Callable[[_Used], None]  # raises QuotaExceeded, and then changes nothing
    in_flight: int = 0  # how many more requests are in flight then
    error: QuotaExceeded | None = None
    is_done: bool = False
    is_counted: bool = False

    def apply(self, used: _Used, process: str, ends_at: float) -> bool:
        """Change what is used. Returns False, and keeps the error, if that is refused."""
        self.error = None
        try:
            self.count(used)
        except QuotaExceeded as error:
            self.error = error
        else:
            before, _ = used.in_flight.get(process, (0, 0.0))
            used.set_in_flight(process, before + self.in_flight, ends_at)
        return self.error is None


@dataclass(slots=True)
class _Bucket:
    """A bucket that is refilled all the time, up to the amount of a minute."""

    per_minute: int
    level: float
    refilled_at: float

    def refill(self, now: float) -> None:
        # The clocks of two machines may differ. The time never goes back, because the same seconds would be
        # gained again. A clock that is ahead by more than it takes to fill the bucket is not believed: the
        # bucket is full then, because a refusal is not stored, so nothing would be gained by waiting.
        if self.refilled_at > now + _FULL_SECONDS:
            self.level, self.refilled_at = float(self.per_minute), now
        gained = max(0.0, now - self.refilled_at) * self.per_minute / 60
        self.level = min(float(self.per_minute), self.level + gained)
        self.refilled_at = max(now, self.refilled_at)

    def seconds_until_one(self, now: float) -> float:
        """Return the seconds until the bucket holds 1; 0 if it does."""
        self.refill(now)
        missing = max(0.0, (1 - self.level) * 60 / self.per_minute)
        return missing and missing + self.refilled_at - now

    def seconds_until_full(self, now: float) -> float:
        """Return the seconds until the bucket says nothing any more, with both clocks in doubt."""
        return (
            2 * _FULL_SECONDS + max(0.0, self.refilled_at - now) - min(0.0, self.level) * 60 / self.per_minute
        )


def _require_one(bucket: _Bucket | None, quota: str, now: float) -> None:
    """Raise QuotaExceeded unless the bucket holds 1."""
    if bucket is not None and (seconds := bucket.seconds_until_one(now)):
        raise QuotaExceeded(
            f"the key may ask for {bucket.per_minute} {quota.replace('_', ' ')}",
            quota=quota,
            retry_after_seconds=math.ceil(seconds),
        )


class _Stored(BaseModel):
    """The form in which `_Used` is stored."""

    requests: tuple[FiniteFloat, FiniteFloat] | None = None  # level, and when it was so high
    tokens: tuple[FiniteFloat, FiniteFloat] | None = None
    in_flight: dict[str, tuple[int, FiniteFloat]] = {}


@dataclass(slots=True)
class _Used:
    """What a key has used: two buckets, and the requests in flight of each process."""

    requests: _Bucket | None
    tokens: _Bucket | None
    in_flight: dict[str, tuple[int, float]]  # by process, how many, and when the last has ended at the latest

    @classmethod
    def read(cls, content: bytes | None, quotas: Quotas, now: float) -> _Used:
        """Return what was stored. What `written` has not made is logged, and counts as nothing."""
        try:
            stored = _Stored.model_validate_json(content or b"{}")
        except ValidationError:
            logger.error(
                "what a key has used is counted from the beginning: it was not stored by this version"
            )
            stored = _Stored()

        def bucket(level: tuple[float, float] | None, per_minute: int | None) -> _Bucket | None:
            return _Bucket(per_minute, *(level or (per_minute, now))) if per_minute else None

        return cls(
            bucket(stored.requests, quotas.requests_per_minute),
            bucket(stored.tokens, quotas.tokens_per_minute),
            stored.in_flight,
        )

    def written(self) -> bytes:
        buckets = (("requests", self.requests), ("tokens", self.tokens))
        levels = {name: (bucket.level, bucket.refilled_at) for name, bucket in buckets if bucket is not None}
        return orjson.dumps({**levels, "in_flight": self.in_flight})

    def seconds(self, now: float) -> float:
        """Return the seconds after which nothing of this counts any more."""
        buckets = [bucket.seconds_until_full(now) for bucket in (self.requests, self.tokens) if bucket]
        return max([1.0, *buckets, *(ends_at - now for _, ends_at in self.in_flight.values())])

    def total_in_flight(self, now: float, max_seconds: float) -> int:
        # A clock that is far ahead is not believed: what its process has counted would count long after the
        # process was killed. Requests of other machines may take longer than those of this one.
        latest = now + max(max_seconds, _LONGEST_SECONDS)
        self.in_flight = {
            process: requests for process, requests in self.in_flight.items() if now < requests[1] <= latest
        }
        return sum(count for count, _ in self.in_flight.values())

    def set_in_flight(self, process: str, count: int, ends_at: float) -> None:
        self.in_flight.pop(process, None)
        if count > 0:
            self.in_flight[process] = count, ends_at
