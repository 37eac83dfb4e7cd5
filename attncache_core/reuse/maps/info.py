"""What a database and its policy are, as plain data for people and for /info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GroupInfo:
    """One length group of a policy."""

    lengths: str  # in tokens, "1-8" or "9-"
    searched: bool  # sequences are compared with the records; else the mean of the length serves
    threshold: Mapping[str, float]  # kind of record -> θ
    tightened: int  # steps, since the calibration
    reuses: bool  # whether sequences of these lengths may hit at all


@dataclass(frozen=True)
class PolicyInfo:
    """The policy that holds at present."""

    budget: Mapping[str, Any]  # the fields of policy.Budget
    strangeness: Mapping[str, Any] | None  # the limit of strangeness; None: any text may hit
    groups: list[GroupInfo]


@dataclass(frozen=True)
class DatabaseInfo:
    """An open database."""

    records: int  # of sentences
    prototypes: int  # synthetic records
    bytes: int  # of all segment files
    lengths: list[int]  # shortest and longest sequence with a record, in tokens
    lost_lengths: list[int]  # lengths whose file was cut short or cannot be read
    dtype: str  # of the records
    reused_heads: list[int]  # layer -> heads of the reuse mask
    heads: int  # of all layers
    refitted: bool  # whether hits take weights of their own
    policy: PolicyInfo
    quality: Mapping[str, Any]  # as measured when the policy was chosen
    cold_hits: int = 0  # sequences computed because their record was not in memory, since the start
    generation: int = 0  # number of the generation; 0: the database was never renewed
    created: str | None = None  # UTC, when the build of the generation ended
    renewals: Mapping[str, int] = field(default_factory=dict)  # result -> number of renewals and rollbacks
    last_renewal: Mapping[str, Any] | None = None  # the last line of renewals.jsonl
