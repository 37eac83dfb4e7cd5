"""A process that tightens a policy: python tightening_process.py ACT FOLDER [NUMBER]."""

import os
import resource
import sys
import time
from pathlib import Path

from attncache_core.attention_maps.policy import (
    Budget,
    KindPolicy,
    LengthGroup,
    ReusePolicy,
    StrangenessLimit,
)
from attncache_core.attention_maps.store import RecordKind
from attncache_core.attention_maps.tightened import ServedPolicy
from attncache_core.attention_maps.verification import Band, Window
from attncache_core.outputs import Measure

NOBODY = 65534


def group(longest: int, theta: float, searched: bool = True) -> LengthGroup:
    return LengthGroup(
        longest, {kind: KindPolicy(theta, (0.5, 0.9), (0.2, 0.1)) for kind in RecordKind}, searched
    )


POLICY = ReusePolicy(
    Budget(Measure.COSINE, 0.9),
    (group(6, 0.5), group(8, 0.7, searched=False), group(9, 0.9).recorded_only()),
    StrangenessLimit(0.04, 0.02),
)
# No step of the two processes makes it start anew.
SHARED = Window(1, Band.USUAL)


def tighten_beside_another(folder: Path, number: str) -> None:
    """Five steps and a hundred hits, while the other of two processes takes five steps elsewhere."""
    served = ServedPolicy(folder, POLICY)
    (folder / f"ready {number}").touch()
    while len(list(folder.glob("ready *"))) < 2:
        time.sleep(0.001)
    for _ in range(5):
        served.tighten({"0": 0, "1": None}[number])
        assert served.keep({SHARED: [int(number) / 10] * 20}, patience_seconds=60)


def fill_the_disk(folder: Path) -> None:
    """The system refuses to write any byte more, as it does on a full disk."""
    served = ServedPolicy(folder, POLICY)
    assert served.keep({}) is not None
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    fail_to_keep(served)


def lack_permission(folder: Path) -> None:
    """The folder may not be written to, and nobody is an administrator whom that would not stop."""
    served = ServedPolicy(folder, POLICY)
    if os.getuid() == 0:
        os.setuid(NOBODY)
    fail_to_keep(served)


def fail_to_keep(served: ServedPolicy) -> None:
    served.tighten(0)
    assert served.keep({}) is None
    assert all(each.is_off for each in served.policy.groups)
    print(*served.reuse_off)


if __name__ == "__main__":
    act, folder, *more = sys.argv[1:]
    globals()[act](Path(folder), *more)
