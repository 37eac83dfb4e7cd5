"""How long the threads of this process waited for a processor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attncache_core.runtime.processor import processor_name, waited_seconds


def test_processor_has_a_name() -> None:
    assert processor_name()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no such statistics")
def test_process_that_shares_its_processor_waits_for_it() -> None:
    # Two processes compute on one processor, so each waits for the other.
    program = """
import os, signal, time
from attncache_core.runtime.processor import waited_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = os.fork()
if other == 0:
    while True:
        pass
before, until = waited_seconds(), time.process_time() + 0.3
while time.process_time() < until:
    pass
print(waited_seconds() - before)
os.kill(other, signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.05


def test_waiting_never_becomes_less() -> None:
    readings = [waited_seconds() for _ in range(5)]
    assert readings == sorted(readings)
