"""Run a function in a fork: of the test process, or of a process that has only imported everything."""

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import TypeVar

_FORK = multiprocessing.get_context("fork")
_FORKSERVER = multiprocessing.get_context("forkserver")
# Importing them takes seconds, so one process does it for all that are started.
_FORKSERVER.set_forkserver_preload(
    [
        *("benchmarks.measuring.peers", "benchmarks.measuring.prefix_peers"),
        *("attncache_core.build.renewal", "service.cli"),
        # A calibration imports them when it fits curves.
        *("sklearn.isotonic", "sklearn.linear_model"),
    ]
)
Result = TypeVar("Result")


def forked(act: Callable[..., Result], *arguments: object) -> Callable[[], Result]:
    """Start `act` in a fork of the test process, and return what waits for its result.

    act: computes nothing with torch, whose threads a fork does not have. If it raises, waiting raises
    EOFError.
    """
    receiving, sending = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=lambda: sending.send(act(*arguments)))
    process.start()
    sending.close()

    def result() -> Result:
        try:
            return receiving.recv()
        finally:
            process.join()

    return result


def fresh(act: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """Start `act` in a process of its own, which may compute with torch.

    act: a function of a module. It and its arguments are pickled.
    """
    process = _FORKSERVER.Process(target=act, args=arguments)
    process.start()
    return process


def is_killed(act: Callable[..., object], *arguments: object) -> bool:
    """Run `act` in a process of its own. Return whether the process was killed, and did not end before."""
    process = fresh(act, *arguments)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0
