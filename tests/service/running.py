"""What tests of a server share: a clock, metrics by name, API keys, and a request that was answered."""

import asyncio
import re
from inspect import isawaitable

from service.observability.finished import FinishedRequest

# No test waits that long, unless it fails. A busy machine takes minutes to start a server.
PATIENCE_SECONDS = 240


class Clock:
    """A clock that a test sets."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


async def until(holds):
    """Wait until a function, which may be a coroutine function, returns something true."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await found if isawaitable(found := holds()) else found):
            await asyncio.sleep(0.001)


def samples(text):
    """Return a dictionary: (name, label value, ...) -> value.

    The parser of prometheus_client, by which test_monitoring.py reads the metrics, takes ten times as long.
    """
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            found[(name, *re.findall('="([^"]*)"', labels))] = float(value)
    return found


async def metrics_of(client):
    return samples((await client.get("/metrics")).text)


async def until_metric(client, least, *series):
    """Wait until a metric of a server is at least so large. Return all metrics."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (values := await metrics_of(client))[series] < least:
            await asyncio.sleep(0.001)
    return values


ONE = "first-key-0123456789"

TWO = "second-key-0123456789"

OPS = "operator-key-0123456789"

FILE = f"""# who    key
one   {ONE}   # the shop
two   {TWO}

ops   {OPS}   admin requests_per_minute=6 tokens_per_minute=600 in_flight=2
"""


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def keys_file(folder, text=FILE):
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    return path


ANSWERED = FinishedRequest("id-1", "POST", "/embed", 200, 10.0, 10.25, 1e9, "one", 2, 30, 20, 1, [], {})
