"""Serve a simulated month with a static database, a database renewed nightly, and one built for each day.

    Month: the texts of all days
      -> texts of an arm on a day -> build_database -> AttentionDatabase
      -> the day's texts through the engine, as calibrated                           -> Served
      -> the same texts, every hit verified by the service's verifier, which tightens -> Served
Served, and HitCosts of the machine                                                 -> Total of each arm

What an arm does on a day is kept in a file, so a month that was stopped continues. Builds continue too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    CorpusSentence,
    InvalidInput,
    PrefillEngine,
    Progress,
    build_database,
)
from attncache_core.calibration.trial import full_outputs
from attncache_core.runtime.files import write_whole
from benchmarks.measuring.hit_costs import HitCosts, measure_costs
from benchmarks.measuring.month import Day, Reservoir
from benchmarks.measuring.verified import Served, serve

_COST_LENGTHS = (0.05, 0.35, 0.65, 0.95)  # quantiles of the lengths of the month at which costs are measured
_COST_PAIRS = 31
_SECONDS_OF_A_DAY = 86_400


class Arm(StrEnum):
    """How a database follows the traffic."""

    STATIC = "static"  # built from the first day
    RENEWED = "renewed nightly"  # built each night from a sample of the days before
    DAILY = "built for the day"  # built from other texts of the very day, as nobody could know them


@dataclass(frozen=True)
class ArmDay:
    """One arm on one day."""

    day: int  # from 1
    arm: Arm
    built: (
        int  # number of texts that the database was built from, or 0 if it is the database of the day before
    )
    build_seconds: float  # of the processor, in the process that finished the build
    heads: int
    calibrated: Served  # with the policy as the build has calibrated it
    tightened: Served  # with verification
    steps: tuple[int, ...]  # of tightening, at the end of the day: of each length group, and of the limit


_ARM_DAY = TypeAdapter(ArmDay)


@dataclass(frozen=True)
class Month:
    """A month and how databases are built in it."""

    days: Sequence[Day]
    half_life_days: float
    build: BuildOptions
    seed: int

    def texts(self, arm: Arm, day: int) -> list[str]:
        """Return the texts that an arm's database on a day is built from. day: from 2."""
        if arm is Arm.DAILY:
            return sorted(self.days[day - 1].sampled)
        capacity = len(self.days[0].sampled)
        reservoir = Reservoir(capacity, self.half_life_days, np.random.default_rng([self.seed, 1]))
        for past in range(1, 2 if arm is Arm.STATIC else day):
            reservoir.offer(past, self.days[past - 1].sampled)
        return reservoir.texts()

    def digest(self) -> str:
        """Return what tells this month from others."""
        parts = [self.half_life_days, asdict(self.build), self.seed, [asdict(day) for day in self.days]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Simulation:
    """Runs a month in a folder, which keeps what is measured."""

    def __init__(self, engine: PrefillEngine, month: Month, folder: Path, progress: Progress) -> None:
        """engine: without a database. Raises InvalidInput if the folder has results of another month."""
        self._engine, self._month, self._folder, self._progress = engine, month, folder, progress
        folder.mkdir(parents=True, exist_ok=True)
        digest = month.digest() + engine.checkpoint.fingerprint()
        if self._kept("month.json", lambda: digest) != digest:
            raise InvalidInput(
                f"{folder} has results of another month; choose another folder", field="output"
            )

    def run(self) -> Iterator[ArmDay]:
        """Yield each arm on each day from the second day on."""
        for day in range(2, len(self._month.days) + 1):
            for arm in Arm:
                yield self._arm_day(arm, day)

    def costs(self) -> dict[str, HitCosts]:
        """Return what hits save on this machine, measured once with the static database."""

        def measured() -> dict[str, Any]:
            database = self._database(Arm.STATIC, 2)
            lengths = [len(ids) for day in self._month.days for ids in self._engine.tokenize(day.served)]
            known = np.array(sorted(database.search.prototypes.means))
            nearest = {
                int(known[np.abs(known - length).argmin()]) for length in np.quantile(lengths, _COST_LENGTHS)
            }
            costs = measure_costs(
                self._engine, database.search, database.mask.order, sorted(nearest), _COST_PAIRS
            )
            return {shape: cost.as_json() for shape, cost in costs.items()}

        return {
            shape: HitCosts.of_json(lengths) for shape, lengths in self._kept("costs.json", measured).items()
        }

    def _kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the content of a file of the folder, and make it if there is none."""
        path = self._folder / name
        if not path.exists():
            write_whole(path, json.dumps(make(), indent=1).encode())
        return json.loads(path.read_text("utf-8"))

    def _database(self, arm: Arm, day: int) -> AttentionDatabase:
        """Build the database of an arm on a day, unless it exists, and return it."""
        folder = self._database_folder(arm, day)
        if not folder.exists():
            stage = f"day {day}, {arm}: "
            corpus = [CorpusSentence(text, text) for text in self._month.texts(arm, day)]
            started = time.process_time()
            build_database(
                self._engine,
                corpus,
                folder,
                self._month.build,
                lambda name, done, total: self._progress(stage + name, done, total),
            )
            seconds = time.process_time() - started
            write_whole(folder.with_suffix(".json"), json.dumps(seconds).encode())
        return AttentionDatabase.open(folder)

    def _database_folder(self, arm: Arm, day: int) -> Path:
        name = arm.name.lower() if arm is Arm.STATIC else f"{arm.name.lower()}-{day:02}"
        return self._folder / f"{name}.db"

    def _arm_day(self, arm: Arm, day: int) -> ArmDay:
        if arm is Arm.RENEWED and day == 2:
            # The sample after one day is this day, so the first renewal is the static database.
            return replace(self._arm_day(Arm.STATIC, day), arm=arm)
        name = f"{day:02}-{arm.name.lower()}.json"
        return _ARM_DAY.validate_python(self._kept(name, lambda: asdict(self._served(arm, day))))

    def _served(self, arm: Arm, day: int) -> ArmDay:
        """Build the database if it is new, serve the day's texts, and remove the database if it ends."""
        database = self._database(arm, day)
        served = self._engine.tokenize(self._month.days[day - 1].served)
        exact = full_outputs(self._engine, served)
        budget = database.search.policy.budget
        unbound = replace(database.search, policy=database.search.policy.without_budget())
        calibrated, _ = serve(self._engine, replace(database, search=unbound), served, exact, budget)
        tightened, policy = serve(self._engine, database, served, exact, budget)
        is_new = arm is not Arm.STATIC or day == 2
        taken = database.folder.with_suffix(".json")
        seconds = json.loads(taken.read_text("utf-8")) if is_new else 0.0
        if arm is not Arm.STATIC:
            shutil.rmtree(database.folder)
        return ArmDay(
            day,
            arm,
            database.manifest.build["texts"] if is_new else 0,
            seconds,
            database.mask.total,
            calibrated,
            tightened,
            (*policy.steps.groups, policy.steps.limit),
        )


@dataclass(frozen=True)
class Total:
    """An arm over all days."""

    arm: Arm
    hit_rate: float
    mean: float | None  # cosine over all hits
    below: float  # share of the hits
    windows: int
    kept: int
    saved: dict[str, float]  # shape of batch -> share of the time without reuse
    build_seconds: float  # of the processor, mean of the builds
    # Building takes this share of a day of one processor, mean over the days.
    build_share: float

    @property
    def kept_share(self) -> float:
        """The share of the windows that keep the budget; 1 without a window."""
        return self.kept / self.windows if self.windows else 1.0


def total(
    arm: Arm, days: Sequence[ArmDay], served: Callable[[ArmDay], Served], costs: Mapping[str, HitCosts]
) -> Total:
    """Return the figures of an arm over all days. served: what counts, as calibrated or with verification."""
    of_arm = [day for day in days if day.arm is arm]
    each = [served(day) for day in of_arm]
    hits = sum(part.hits for part in each)
    means = [(part.mean, part.hits) for part in each if part.mean is not None]
    builds = [day.build_seconds for day in of_arm if day.built]
    return Total(
        arm,
        hits / sum(part.texts for part in each),
        sum(mean * count for mean, count in means) / hits if hits else None,
        sum(part.below for part in each) / hits if hits else 0.0,
        sum(part.windows for part in each),
        sum(part.kept for part in each),
        {shape: saved_share(of_arm, served, of_shape) for shape, of_shape in costs.items()},
        fmean(builds),
        sum(builds) / len(of_arm) / _SECONDS_OF_A_DAY,
    )


def saved_share(days: Sequence[ArmDay], served: Callable[[ArmDay], Served], costs: HitCosts) -> float:
    """Return the share of the time without reuse that reuse saves on some days."""
    saved = sum(costs.saved_microseconds(served(day).lengths, day.heads) for day in days)
    return saved / sum(costs.full_microseconds(served(day).lengths) for day in days)


# The databases built for each day must save this share of the time more than the static database.
MIN_MORE_SAVED = 0.01


def should_renew(static: Total, daily: Total) -> bool:
    """Return whether renewing by itself can pay: it saves time in full batches, or keeps more windows."""
    more = daily.saved["full batch"] - static.saved["full batch"]
    return more >= MIN_MORE_SAVED or daily.kept_share > static.kept_share
