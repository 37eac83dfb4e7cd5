"""Tighten a policy in steps: the size of a step, and the number of steps of each part of a policy.

Servers tighten a length group, or the limit of strangeness, if verified hits do not keep the budget. A policy
only becomes tighter until the database is calibrated again, so the findings of several servers are merged by
taking the larger number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

# One step halves 1 - θ of a length group, or the distance of the limit from the usual strangeness.
KEPT_SHARE = 0.5
MOST_STEPS = 6  # from this step on, nothing hits any more


@dataclass(frozen=True)
class Steps:
    """How often each part of a policy was tightened since its calibration."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    groups: tuple[int, ...]  # steps of each length group
    limit: int  # steps of the limit of strangeness

    def __post_init__(self) -> None:
        """Raise ValueError if a number of steps is negative."""
        if min((*self.groups, self.limit)) < 0:
            raise ValueError("a policy cannot be loosened: a number of steps is negative")

    def tighter(self, other: Steps) -> Steps:
        """Return the larger number of steps for each group and for the limit.

        Both must have the same number of groups.
        """
        return Steps(tuple(map(max, self.groups, other.groups)), max(self.limit, other.limit))

    def since(self, start: Steps) -> Steps:
        """Return the number of steps of each part that has more steps than at the start, and 0 for others."""
        pairs = zip(self.groups, start.groups, strict=True)
        groups = tuple(taken if taken > before else 0 for taken, before in pairs)
        return Steps(groups, self.limit if self.limit > start.limit else 0)
