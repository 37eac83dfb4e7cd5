"""What test_policy_state does to a policy in processes of their own."""

import os
import resource
import time
from pathlib import Path

from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget, KindPolicy, LengthGroup, ReusePolicy, StrangenessLimit
from attncache_core.reuse.maps.policy_state import ServedPolicy
from attncache_core.reuse.maps.verification import Band, Window
from attncache_core.reuse.storage.layout import RecordKind

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
# A window of a group that neither of the two processes tightens, so its hits are never dropped.
SHARED = Window(1, Band.USUAL)


def tighten_beside_another(folder: Path, number: int) -> None:
    """Take five steps and add a hundred hits, while the other process takes five steps of another part."""
    served = ServedPolicy(folder, POLICY)
    (folder / f"ready {number}").touch()
    while len(list(folder.glob("ready *"))) < 2:
        time.sleep(0.001)
    for _ in range(5):
        served.tighten([0, None][number])
        assert served.keep({SHARED: [number / 10] * 20}, patience_seconds=60)


def fill_the_disk(folder: Path) -> list[str]:
    """Fail to keep a step because no byte can be written, as on a full disk."""
    served = ServedPolicy(folder, POLICY)
    assert served.keep({}) is not None
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return fail_to_keep(served)


def lack_permission(folder: Path) -> list[str]:
    """Fail to keep a step because of a missing write permission. Root always has it, so drop root first."""
    served = ServedPolicy(folder, POLICY)
    if os.getuid() == 0:
        os.setuid(NOBODY)
    return fail_to_keep(served)


def fail_to_keep(served: ServedPolicy) -> list[str]:
    """Require that a step cannot be kept and switches reuse off, and return the reason."""
    served.tighten(0)
    assert served.keep({}) is None
    assert all(each.is_off for each in served.policy.groups)
    return served.reuse_off
