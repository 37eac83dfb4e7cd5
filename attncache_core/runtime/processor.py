"""Tell the name of the processor, and how long this process waited for it."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def processor_name() -> str:
    """Return the processor's name as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def waited_seconds() -> float:
    """Return the seconds in which other programs kept the threads of this process from running.

    Since the threads started: the time in which they were ready and queued for a processor, and the time in
    which the machine's host ran other machines. Only differences of two calls tell anything. Returns 0 where
    the system does not tell (it must have /proc).
    """
    return _queued_seconds() + _stolen_seconds()


def _queued_seconds() -> float:
    """Return the seconds that the threads were queued; see sched-stats in the kernel's documentation."""
    queued = 0
    try:
        for thread in Path("/proc/self/task").iterdir():
            try:
                queued += int((thread / "schedstat").read_bytes().split()[1])
            except (OSError, IndexError):
                continue  # the thread has ended, or the kernel keeps no such statistics
    except OSError:
        return 0.0
    return queued * 1e-9


def _stolen_seconds() -> float:
    """Return the seconds that the machine's host gave to others; see steal in proc_stat(5)."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
