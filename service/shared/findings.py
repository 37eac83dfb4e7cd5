"""Findings of verification in the shared store: SharedFindings of reuse/maps/policy_state.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from service.settings.cluster import SharedAddress
from service.shared.client import BlockingClient, Circuit

_PREFIX = "attncache:findings:"
_PATIENCE_SECONDS = 0.25
_MAX_TRIES = 100


class FindingsOfAll:
    """Changes findings without another machine in between."""

    def __init__(self, address: SharedAddress) -> None:
        self.circuit = Circuit(
            address, "attention maps are not reused, because nothing would be known of other servers"
        )
        self._client = BlockingClient(address, self.circuit, _PATIENCE_SECONDS)

    def change(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """See SharedFindings."""

        def question(server: Any) -> None:
            # Tried again if another machine writes meanwhile.
            server.transaction(
                lambda pipeline: _set(pipeline, _PREFIX + name, change), _PREFIX + name, max_tries=_MAX_TRIES
            )

        self._client.ask(question)

    def close(self) -> None:
        """End all connections."""
        self._client.close()


# All engines of this process share one. Engines replace each other; a server has one store.
findings_of_all = cache(FindingsOfAll)


def _set(pipeline: Any, name: str, change: Callable[[bytes | None], bytes]) -> None:
    known = pipeline.get(name)
    content = change(known)
    pipeline.multi()
    if content != known:
        pipeline.set(name, content)
