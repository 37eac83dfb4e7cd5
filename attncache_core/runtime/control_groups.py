"""What the control groups of this process allow, by version 1 and 2; see cgroups(7).

A limit of a group holds for the groups below it too, so the least one on the way to the root counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Where the groups are mounted, and which of them this process belongs to.
_MOUNTED, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allowed_processors(mounted: Path = _MOUNTED, own: Path = _OWN) -> float:
    """Return how many processors the process may use by its quota; infinity without one."""
    quotas = [math.inf]
    for group in _groups("cpu", mounted, own):
        with suppress(OSError, ValueError):  # a limit may be the word "max"
            limit, period = (group / "cpu.max").read_text().split()
            quotas.append(int(limit) / int(period))
        with suppress(OSError, ValueError):
            limit = (group / "cpu.cfs_quota_us").read_text()
            if int(limit) > 0:
                quotas.append(int(limit) / int((group / "cpu.cfs_period_us").read_text()))
    return min(quotas)


def allowed_bytes(mounted: Path = _MOUNTED, own: Path = _OWN) -> float:
    """Return the bytes of memory that the process can still use; infinity without a limit.

    Pages of files that were not used lately do not count as used: the system takes them back first.
    """
    left = [math.inf]
    for group in _groups("memory", mounted, own):
        for limit, used, unused_files in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):
                most, taken = (int((group / name).read_text()) for name in (limit, used))
                left.append(most - taken + _statistic(group / "memory.stat", unused_files))
    return max(0, min(left))


def _groups(controller: str, mounted: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the groups that may limit the process, from its own ones to the roots.

    In a container, its own group may be mounted as the root, and the path to it be unknown.
    """
    yield from (mounted, mounted / controller)
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = mounted / controller if controllers else mounted
                below = Path(path.lstrip("/"))
                yield from (root / group for group in (below, *below.parents) if ".." not in group.parts)


def _statistic(file: Path, name: str) -> int:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
