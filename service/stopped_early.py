"""Lets SIGTERM and Ctrl+C end `attncache serve` with code 0 while modules are imported, which takes seconds.

Imported before torch. The other commands keep what these signals do by default.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os._exit(0)


# The server has its own handlers as soon as it has something to finish.
if sys.argv[1:2] == ["serve"]:
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, _end)
