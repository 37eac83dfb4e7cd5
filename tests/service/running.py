"""The real server around a tiny model, in a thread of this process, for clients that need a URL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.checkpoints.description import read_checkpoint
from service.app import create_app
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
