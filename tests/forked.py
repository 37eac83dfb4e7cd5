"""Run a function in a fork of the test process, which has imported everything already."""

import multiprocessing
from collections.abc import Callable
from typing import TypeVar

_FORK = multiprocessing.get_context("fork")
Result = TypeVar("Result")


def forked(act: Callable[..., Result], *arguments: object) -> Callable[[], Result]:
    """Start `act` in a process of its own, and return what waits for its result.

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
