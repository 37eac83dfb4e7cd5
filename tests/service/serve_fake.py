"""Run the real server process around the fake engine, on a free port: `python serve_fake.py MANNER`."""

import sys
import time
from collections.abc import Iterator, Sequence

from fake_engine import FakeEngine

from attncache_core import ModelNotFound, PrefillRequest, PrefillResult
from service.commands.serve import configure_logging
from service.settings import Settings
from service.web.server import bind, run_server


class SlowEngine(FakeEngine):
    def run(self, requests: Sequence[PrefillRequest]) -> PrefillResult:
        time.sleep(0.3)
        return super().run(requests)


def load_engines() -> Iterator[FakeEngine]:
    match sys.argv[1]:
        case "never-loads":
            time.sleep(60)
        case "refuses":
            raise ModelNotFound("there is no such model")
    yield SlowEngine()


configure_logging("info")
failure = run_server(Settings(), load_engines, bind("127.0.0.1", 0))
sys.exit(0 if failure is None else f"failed with {type(failure).__name__}")
