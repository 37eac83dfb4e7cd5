"""The real server around a tiny model, in a thread of this process, for clients that need a URL."""

import threading
import time
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from attncache_core import PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from service.app import create_app
from service.observability.finished import FinishedRequest
from service.settings import Settings
from service.web.listeners import open_listeners
from service.workers.server import Server


@contextmanager
def running(folder, adapted=lambda app: app, key_values=None, **settings):
    """Serve the model of a folder, in float32, and yield the server's URL once it is ready."""
    served = Settings(**{"model": str(folder), "port": 0, **settings})

    def load_engines():
        checkpoint = adapted(read_checkpoint(folder))
        yield PrefillEngine.load(checkpoint, dtype="float32", key_values=key_values)

    listeners = open_listeners(served)
    server = Server(create_app(served, load_engines), served, listeners)
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


class Clock:
    """A clock that a test sets."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


def samples(text):
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


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def keys_file(folder, text=FILE):
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    return path


ANSWERED = FinishedRequest("id-1", "POST", "/embed", 200, 10.0, 10.25, 1e9, "one", 2, 30, 20, 1, [], {})
