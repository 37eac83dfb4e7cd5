"""How much one API key may ask for, per minute and at a time, and how many bytes all requests may have.

Requests and tokens are taken from buckets that hold the amount of one minute, and are refilled all the time.
How many tokens a request has is known when it is answered, so the bucket of tokens may go below zero. Then
further requests are refused until the debt is paid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.errors import QueueFull, QuotaExceeded

# When a request in flight ends is not known.
_RETRY_IN_FLIGHT_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Quotas:
    """What one key may ask for. None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight: int | None = None  # requests that are being answered


class QuotaUse:
    """Counts what one key asks for. Used on the event loop."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._most_in_flight = quotas.in_flight
        self._in_flight = 0
        self._clock = clock
        now = clock()
        self._requests = _Bucket(quotas.requests_per_minute, now) if quotas.requests_per_minute else None
        self._tokens = _Bucket(quotas.tokens_per_minute, now) if quotas.tokens_per_minute else None

    def begin(self) -> None:
        """Count a request that begins; `end` must follow. Raises QuotaExceeded, and then counts nothing."""
        if self._most_in_flight is not None and self._in_flight >= self._most_in_flight:
            raise QuotaExceeded(
                f"the key may have {self._most_in_flight} requests in flight",
                quota="in_flight",
                retry_after_seconds=_RETRY_IN_FLIGHT_SECONDS,
            )
        now = self._clock()
        for quota, bucket in (("requests_per_minute", self._requests), ("tokens_per_minute", self._tokens)):
            if bucket is not None and (seconds := bucket.seconds_until_one(now)):
                raise QuotaExceeded(
                    f"the key may ask for {bucket.per_minute} {quota.replace('_', ' ')}",
                    quota=quota,
                    retry_after_seconds=math.ceil(seconds),
                )
        self._in_flight += 1
        if self._requests is not None:
            self._requests.level -= 1

    def end(self, tokens: int) -> None:
        """Count the end of a request. tokens: of all that was computed for the request."""
        self._in_flight -= 1
        if self._tokens is not None and tokens:
            self._tokens.refill(self._clock())
            self._tokens.level -= tokens


class ByteBudget:
    """Counts the bytes of request bodies from their arrival until their response. Used on the event loop."""

    def __init__(self, most: int) -> None:
        """most: bytes of all requests together."""
        self._most = most
        self.taken = 0

    def take(self, count: int) -> None:
        """Count bytes that arrive. Raises QueueFull if they would be too many."""
        if self.taken + count > self._most:
            raise QueueFull(
                f"requests with {self.taken} bytes are being answered, and at most {self._most} are accepted",
                retry_after_seconds=1,
            )
        self.taken += count

    def give(self, count: int) -> None:
        """Count bytes of a request that was answered as free."""
        self.taken -= count


class _Bucket:
    """A bucket that is refilled all the time, up to the amount of a minute."""

    __slots__ = ("level", "per_minute", "refilled_at")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self.refilled_at = now

    def refill(self, now: float) -> None:
        gained = (now - self.refilled_at) * self.per_minute / 60
        self.level = min(float(self.per_minute), self.level + gained)
        self.refilled_at = now

    def seconds_until_one(self, now: float) -> float:
        """Return the seconds until the bucket holds 1; 0 if it does."""
        self.refill(now)
        return max(0.0, (1 - self.level) * 60 / self.per_minute)
