"""The shared store as a Store: values by key, which all machines see; see service/store.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from service.errors import SharedUnavailable
from service.settings.cluster import SharedAddress
from service.shared.client import RUN, Circuit, Client, is_of_another_type

# The value of a key is compared and changed without another machine in between, in one round trip. What
# another program has put under the key is no value, and is replaced.
_COMPARE_AND_SET = """
local found = redis.pcall('GET', KEYS[1])
if type(found) == 'table' then
    if not string.find(found.err, 'WRONGTYPE') then return found end
    found = false
end
if (ARGV[1] == '') == (found ~= false) or (found and found ~= ARGV[2]) then return 0 end
if ARGV[3] == '' then redis.call('DEL', KEYS[1])
elseif ARGV[5] == '' then redis.call('SET', KEYS[1], ARGV[4])
else redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5]) end
return 1
"""
_PATIENCE_SECONDS = 0.25
# `count` looks at so many keys at most, in so many questions.
_LOOKED, _LOOKS = 1000, 10


class SharedStores:
    """The stores of one event loop."""

    def __init__(self, address: SharedAddress, on_failure: Callable[[str], None]) -> None:
        """on_failure: is called with the use of a store, for each question that fails."""
        without = "`append` gets status 503, and quotas are counted on each machine for itself"
        self.circuit = Circuit(address, without)
        self._client = Client(address, self.circuit, _PATIENCE_SECONDS)
        self._on_failure = on_failure

    def store(self, use: str) -> SharedStore:
        """Return the store for one use."""
        # A store that starts again may hold older histories, and an append to one of them would lose turns.
        # Older quotas do no harm.
        prefix = f"{use}:{RUN}" if use == "sessions" else use
        return SharedStore(self._client, prefix, lambda: self._on_failure(use))

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()


class SharedStore:
    """Keeps values in the shared store, under a prefix."""

    def __init__(self, client: Client, prefix: str, on_failure: Callable[[], None]) -> None:
        """on_failure: is called before an error is raised."""
        self._client, self._prefix, self._on_failure = client, f"attncache:{prefix}:", on_failure

    async def get(self, key: str, seconds: float | None = None) -> bytes | None:
        """See Store. What another program has put there is no value."""
        name = self._prefix + key

        async def question(server: Any) -> bytes | None:
            try:
                found: bytes | None = await (
                    server.get(name) if seconds is None else server.getex(name, px=_milliseconds(seconds))
                )
            except Exception as error:
                if not is_of_another_type(error):
                    raise
                return None
            return found

        return await self._ask(question)

    async def put(self, key: str, value: bytes | None, seconds: float | None = None) -> None:
        """See Store."""
        name = self._prefix + key
        if value is None:
            await self._ask(lambda server: server.delete(name))
        else:
            px = None if seconds is None else _milliseconds(seconds)
            await self._ask(lambda server: server.set(name, value, px=px))

    async def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes | None, seconds: float | None = None
    ) -> bool:
        """See Store."""
        arguments = [
            *_optional(expected),
            *_optional(value),
            b"" if seconds is None else _milliseconds(seconds),
        ]
        name = self._prefix + key
        return bool(
            await self._ask(lambda server: server.register_script(_COMPARE_AND_SET)([name], arguments))
        )

    async def count(self, prefix: str = "") -> int:
        """See Store. Of a large store, a sample of the keys is looked at, and the number is an estimate."""
        pattern = re.sub(r"([*?\[\]\\^-])", r"\\\1", self._prefix + prefix) + "*"
        cursor, found = 0, 0
        for _ in range(_LOOKS):
            cursor, names = await self._ask(
                lambda server, at=cursor: server.scan(at, match=pattern, count=_LOOKED)  # type: ignore[misc]
            )
            found += len(names)
            if not cursor:
                return found
        keys = await self._ask(lambda server: server.dbsize())
        return round(found * max(1.0, keys / (_LOOKED * _LOOKS)))

    async def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return await self._client.ask(question)
        except SharedUnavailable:
            self._on_failure()
            raise


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _optional(value: bytes | None) -> tuple[bytes, bytes]:
    """Return whether there is a value, and the value, as arguments of a script."""
    return (b"", b"") if value is None else (b"1", value)
