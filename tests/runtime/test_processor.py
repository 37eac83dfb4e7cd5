"""How long the threads of this process waited for a processor."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from forked import forked

from attncache_core.runtime.processor import processor_name, waited_seconds


def test_processor_has_a_name() -> None:
    assert processor_name()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no such statistics")
def test_process_that_shares_its_processor_waits_for_it() -> None:
    assert forked(waited_beside_another)() > 0.05


def waited_beside_another() -> float:
    """Compute on one processor while another process computes there, so each waits for the other."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    other = os.fork()
    if other == 0:
        while True:
            pass
    before, until = waited_seconds(), time.process_time() + 0.3
    while time.process_time() < until:
        pass
    waited = waited_seconds() - before
    os.kill(other, signal.SIGKILL)
    return waited


def test_waiting_never_becomes_less() -> None:
    readings = [waited_seconds() for _ in range(5)]
    assert readings == sorted(readings)
