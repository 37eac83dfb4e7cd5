"""How often a server had to tighten each length group of a database's policy, kept in DIR/tightened.json.

A policy that was found too loose stays tight when the server starts again, until it is calibrated anew.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from attncache_core.attention_maps.policy import ReusePolicy
from attncache_core.files import write_whole


def keep_tightened(folder: Path, calibrated: ReusePolicy, tightened: ReusePolicy) -> None:
    """Keep how much tighter each group of `tightened` is than calibration left it. Raises OSError."""
    steps = [group.tightened for group in tightened.groups]
    content = {"policy": _digest(calibrated), "steps": steps}
    write_whole(_path(folder), json.dumps(content).encode())


def as_tightened(folder: Path, calibrated: ReusePolicy) -> ReusePolicy:
    """The policy with the steps that were kept for it; as it is if there are none, or they cannot be read."""
    try:
        content = json.loads(_path(folder).read_bytes())
        steps = content["steps"] if content["policy"] == _digest(calibrated) else []
        policy = calibrated
        for place, count in enumerate(steps):
            for _ in range(count):
                if policy.groups[place].is_off:
                    break
                policy = policy.tightened(place)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return calibrated
    return policy


def forget_tightened(folder: Path) -> None:
    """Begin anew, for a policy that was just calibrated. Raises OSError."""
    _path(folder).unlink(missing_ok=True)


def _path(folder: Path) -> Path:
    return folder / "tightened.json"


def _digest(policy: ReusePolicy) -> str:
    return hashlib.sha256(json.dumps(asdict(policy)).encode()).hexdigest()
