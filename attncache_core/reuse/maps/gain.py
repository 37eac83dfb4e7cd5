"""Hold the measured gain of reuse on each machine, and read it from the file DIR/gain.json of a database.

calibration/gain.py measures the gain and writes the file. The gain decides in which length groups a server
reuses maps, and in batches of how many tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from attncache_core.reuse.maps.policy import ReusePolicy
from attncache_core.runtime.stored import Stored

MAX_KEPT = 16  # measurements in the file


@dataclass(frozen=True)
class Gain(Stored):
    """How much faster passes are with reuse: seconds without reuse / seconds with reuse - 1.

    The median of pairs of passes, and the bound that the true median keeps with 95 % confidence.
    """

    one_text: float  # in batches of one text
    one_text_bound: float
    full_batch: float  # in batches of 1,024 tokens
    full_batch_bound: float
    saved_per_token: float = 0.0  # seconds that a hit saves per token, median; 0: not measured


@dataclass(frozen=True)
class MeasuredGain(Stored):
    """The gains measured on one machine, and the length groups that were chosen to reuse maps there."""

    circumstances: dict[str, Any]  # processor, threads, versions, mask, policy
    min_gain: float  # least gain of a group that reuses
    groups: dict[int, Gain]  # index of each length group that may approximate -> gain
    paying: tuple[int, ...]  # indices of the groups that reuse
    together: Gain  # for the mix of all lengths, of all groups that reuse; if none does, of all groups
    required: (
        float  # least bound of `together` with which groups reuse: min_gain by their share of the tokens
    )
    least_tokens: int = 0  # batches with fewer tokens reuse nothing, because they would gain too little

    def info(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the figures for people and /info. names: of the policy's length groups."""
        groups = [
            {"lengths": names[index], **asdict(gain), "reuses": index in self.paying}
            for index, gain in self.groups.items()
        ]
        return {
            "min_gain": self.min_gain,
            "required": self.required,
            "groups": groups,
            "together": asdict(self.together),
            "least_tokens": self.least_tokens,
        }


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
