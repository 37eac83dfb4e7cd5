"""What the garbage collector looks at while a server serves."""

import gc
import json
import time
import weakref

import pytest
from fake_engine import FAILING, NOT_FINITE
from forked import forked
from raw_http import HEALTH, post, read_response, served

from service.workers.server import look_at_requests_only


class Circle:
    def __init__(self):
        self.circle = self


def loaded_and_new():
    """Return whether a circle from before is kept, one from after is collected, and seldom."""
    circle = Circle()
    loaded = weakref.ref(circle)
    look_at_requests_only()
    new = weakref.ref(Circle())
    del circle
    gc.collect()
    return loaded() is not None, new() is None, gc.get_threshold()[0] > 700


def test_collector_looks_at_new_objects_only_and_less_often():
    # In a process of its own, because the collector of the tests is not to be changed.
    assert forked(loaded_and_new)() == (True, True, True)


def embedding(text, *headers, **fields):
    return post(json.dumps({"inputs": text, **fields}).encode(), *headers)


OFF = b"X-AttnCache-Reuse: off"
REQUESTS = {
    "kept": (200, embedding("a")),
    "computed": (200, embedding(["a", "b"], OFF)),
    "openai": (200, post(b'{"input": "a"}', OFF, path=b"/v1/embeddings")),
    "page": (404, HEALTH.replace(b"health", b"nothing")),
    "body": (400, post(b'{"inputs": 1}')),
    "length": (422, embedding("a" * 3000, OFF, truncate=False)),
    "count": (422, embedding(["a"] * 101)),
    "failing": (500, embedding(FAILING, OFF)),
    "not finite": (500, embedding(NOT_FINITE, OFF)),
    "late": (504, embedding("a", OFF, b"X-AttnCache-Timeout: 0.01")),
}


@pytest.fixture(scope="module")
def server():
    with served(max_request_inputs=100) as running:
        yield running


@pytest.mark.parametrize("kind", REQUESTS)
def test_request_leaves_nothing_to_the_collector(server, kind):
    status, request = REQUESTS[kind]
    count = 50
    if kind == "late":
        server.engine.may_run.clear()
    with server.connect() as client:

        def ask():
            client.sendall(request)
            assert read_response(client).status == status

        for _ in range(3):
            ask()
        time.sleep(0.05)  # so that what runs after a response has ended
        gc.collect()
        gc.disable()
        try:
            for _ in range(count):
                ask()
            time.sleep(0.05)
            assert gc.collect() < count
        finally:
            gc.enable()
            server.engine.may_run.set()
