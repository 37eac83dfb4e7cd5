"""Tell the name of the processor."""

from __future__ import annotations

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
