"""Run the real server process around the fake engine: `python serve_fake.py MANNER [JSON]`.

JSON: settings by field name; by default the port is free. A batch takes 0.3 s, and a batch with the text
"hang" hangs. SIGUSR1 hangs the event loop. SIGUSR2 hangs all threads that need the interpreter.
"""

import atexit
import ctypes
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fake_engine import FakeEngine, texts_of

from attncache_core import ModelNotFound, PrefillRequest, PrefillResult
from service.commands.serve import configure_logging
from service.settings import Settings
from service.web.listeners import open_listeners
from service.workers.supervisor import serve_with_workers

HANG_SECONDS = 600


class SlowEngine(FakeEngine):
    def run(self, requests: Sequence[PrefillRequest]) -> PrefillResult:
        time.sleep(HANG_SECONDS if "hang" in texts_of(requests) else 0.3)
        return super().run(requests)


def serve(manner: str, given: dict[str, Any]) -> None:
    def load_engines(*_: object) -> Iterator[FakeEngine]:
        match manner:
            case "never-loads":
                time.sleep(60)
            case "refuses":
                raise ModelNotFound("there is no such model")
            case "fails":
                raise RuntimeError("a bug")
        yield SlowEngine()

    if manner == "never-cleans-up":
        atexit.register(time.sleep, HANG_SECONDS)
    signal.signal(signal.SIGUSR1, hang_loop)
    signal.signal(signal.SIGUSR2, hang_interpreter)
    settings = Settings(**({} if "unix_socket" in given else {"port": 0}) | given)
    configure_logging("info")
    failure = serve_with_workers(settings, load_engines, open_listeners(settings))
    print(failure, file=sys.stderr)
    sys.exit(f"failed with {type(failure).__name__}")


def hang_loop(*_: object) -> None:
    time.sleep(HANG_SECONDS)


def hang_interpreter(*_: object) -> None:
    ctypes.PyDLL(None).sleep(HANG_SECONDS)  # keeps the interpreter's lock


if __name__ == "__main__":
    serve(sys.argv[1], json.loads((sys.argv[2:] or ["{}"])[0]))
