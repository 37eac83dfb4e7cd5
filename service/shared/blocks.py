"""Blocks of keys and values in the shared store: BlockValues of attncache_core/reuse/kv/remote.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.settings.cluster import SharedAddress
from service.shared.client import BlockingClient, Circuit, is_of_another_type

_PREFIX = "attncache:kv:"
# While a batch waits.
_LOOK_SECONDS = 0.02
# For a value, and for each part of it. Within a second, 5 Mbit/s suffice for a block of 565 KB, and 1 Gbit/s
# for one of 100 MB.
_VALUE_SECONDS, _PART_SECONDS = 1.0, 0.25
_CLEARED_TOGETHER = 1000


class SharedBlocks:
    """Keeps blocks in the shared store."""

    def __init__(self, address: SharedAddress) -> None:
        self._circuit = Circuit(address, "prefixes that this server does not know are computed")
        self._looking = BlockingClient(address, self._circuit, _LOOK_SECONDS)
        self._reading = BlockingClient(address, self._circuit, _VALUE_SECONDS, _PART_SECONDS)

    def heads(self, names: Sequence[str], size: int) -> list[bytes]:
        """See BlockValues."""

        def question(server: Any) -> list[bytes]:
            pipeline = server.pipeline(transaction=False)
            for name in names:
                pipeline.getrange(_PREFIX + name, 0, size - 1)
            return [_head(found) for found in pipeline.execute(raise_on_error=False)]

        return self._looking.ask(question)

    def get(self, name: str) -> bytes | None:
        """See BlockValues."""
        return self._reading.ask(lambda server: server.get(_PREFIX + name))

    def contains(self, name: str) -> bool:
        """See BlockValues."""
        return self._reading.ask(lambda server: bool(server.exists(_PREFIX + name)))

    def put(self, name: str, value: bytes, seconds: float | None = None) -> None:
        """See BlockValues."""
        px = None if seconds is None else round(seconds * 1000)
        self._reading.ask(lambda server: server.set(_PREFIX + name, value, px=px))

    def remove(self, name: str) -> None:
        """See BlockValues."""
        self._reading.ask(lambda server: server.unlink(_PREFIX + name))

    def clear(self) -> None:
        """See BlockValues."""
        cursor = self._clear_some(0)
        while cursor:
            cursor = self._clear_some(cursor)

    def _clear_some(self, cursor: int) -> int:
        """Remove the blocks among some keys, and return where the next keys are; 0 at the end."""

        def question(server: Any) -> int:
            following, names = server.scan(cursor, match=f"{_PREFIX}*", count=_CLEARED_TOGETHER)
            if names:
                server.unlink(*names)
            return int(following)

        return self._reading.ask(question)

    def close(self) -> None:
        """See BlockValues."""
        self._looking.close()
        self._reading.close()


def _head(found: bytes | Exception) -> bytes:
    """Return the beginning of a value; of a value of another type, what no block begins with."""
    if not isinstance(found, Exception):
        return found
    if is_of_another_type(found):
        return b"\0"
    raise found
