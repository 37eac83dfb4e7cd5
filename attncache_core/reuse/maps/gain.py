"""Hold the measured gain of reuse on each machine, and read it from the file DIR/gain.json of a database.

calibration/gain.py measures the gain and writes the file. The gain decides in which length groups a server
reuses maps, and in batches of how many tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from attncache_core.reuse.maps.info import GainInfo, GroupGainInfo
from attncache_core.reuse.maps.policy import ReusePolicy

MOST_KEPT = 16  # measurements in the file


@dataclass(frozen=True)
class Gain:
    """How much faster passes are with reuse: seconds without reuse / seconds with reuse - 1."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    one_text: float  # in batches of one text
    full_batch: float  # in batches of 1,024 tokens


@dataclass(frozen=True)
class MeasuredGain:
    """The gains measured on one machine, and the length groups that were chosen to reuse maps there."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    circumstances: dict[str, Any]  # processor, threads, versions, mask, policy
    min_gain: float  # least gain of a group that reuses
    groups: dict[int, Gain]  # index of each length group that may approximate -> gain
    paying: tuple[int, ...]  # indices of the groups that reuse
    together: Gain  # for the mix of all lengths, of all groups that reuse; if none does, of all groups
    least_tokens: int = 0  # batches with fewer tokens reuse nothing, because they would gain too little

    def info(self, names: Sequence[str]) -> GainInfo:
        """Return the figures for people and /info. names: of the policy's length groups."""
        groups = [
            GroupGainInfo(names[index], gain.one_text, gain.full_batch, index in self.paying)
            for index, gain in self.groups.items()
        ]
        return GainInfo(self.min_gain, groups, asdict(self.together), self.least_tokens)


@dataclass(frozen=True)
class Traffic:
    """The lengths of the calibration texts, and the share of hits in each length group."""

    lengths: Mapping[int, int]  # tokens -> number of texts
    hit_rates: Mapping[int, float]  # index of each length group that may approximate -> share of hits

    def of_group(self, policy: ReusePolicy, index: int) -> dict[int, int]:
        """Return the lengths in the policy's length group `index`: tokens -> number of texts."""
        return {
            length: count for length, count in self.lengths.items() if policy.group_index(length) == index
        }

    def token_share(self, policy: ReusePolicy, indices: Collection[int]) -> float:
        """Return the share of all tokens that belongs to the length groups with these indices."""
        tokens = [length * count for length, count in self.lengths.items()]
        inside = [policy.group_index(length) in indices for length in self.lengths]
        return float(np.dot(tokens, inside) / max(1, sum(tokens)))


# The content of the file, newest measurement first.
KEPT_GAINS = TypeAdapter(list[MeasuredGain])


def read_gains(path: Path) -> list[MeasuredGain]:
    """Return the kept measurements, newest first; an empty list if the file is missing or unreadable."""
    try:
        return KEPT_GAINS.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return []


def newest_of_machine(kept: Sequence[MeasuredGain], circumstances: Mapping[str, Any]) -> MeasuredGain | None:
    """Return the newest measurement with the same processor, device and number of threads, or None."""
    names = ("processor", "device", "threads")
    return next(
        (
            entry
            for entry in kept
            if all(entry.circumstances.get(name) == circumstances[name] for name in names)
        ),
        None,
    )
