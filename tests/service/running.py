"""The real server around a tiny model, in a thread of this process, for clients that need a URL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.checkpoints.description import read_checkpoint
from service.app import create_app
from service.observability.finished import FinishedRequest
from service.settings import Settings
from service.web.listeners import open_listeners
from service.workers.server import Server


@contextmanager
def running(
    folder: Path,
    adapted: Callable[[Checkpoint], Checkpoint] = lambda own: own,
    key_values: KeyValueOptions | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Serve the model of a folder, in float32, and yield the server's URL once it is ready."""
    own = Settings(**{"model": str(folder), "port": 0, **settings})

    def load_engines() -> Iterator[PrefillEngine]:
        checkpoint = adapted(read_checkpoint(folder))
        yield PrefillEngine.load(checkpoint, dtype="float32", key_values=key_values)

    listeners = open_listeners(own)
    server = Server(create_app(own, load_engines), own, listeners)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        url = listeners[0].url
        while not server.started or httpx.get(f"{url}/ready").status_code != 200:
            time.sleep(0.01)
        yield url
    finally:
        server.should_exit = True
        thread.join()
        for listener in listeners:
            listener.close()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return a dictionary: (name, label value, ...) -> value."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


ONE = "first-key-0123456789"

TWO = "second-key-0123456789"

OPS = "operator-key-0123456789"

FILE = f"""# who    key
one   {ONE}   # the shop
two   {TWO}

ops   {OPS}   admin requests_per_minute=6 tokens_per_minute=600 in_flight=2
"""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def keys_file(folder: Path, text: str = FILE) -> Path:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    return path


ANSWERED = FinishedRequest("id-1", "POST", "/embed", 200, 10.0, 10.25, 1e9, "one", 2, 30, 20, 1, [], {})
