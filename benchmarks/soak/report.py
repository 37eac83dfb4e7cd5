"""What a soak found: the table, the plot and what was wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.soak.clients import MIN_COSINE, Record

# After the warm-up, a third of the time.
MAX_GROWTH = 0.05
_MIN_GROWTH_MIB = 32.0


@dataclass(frozen=True)
class Sample:
    """The process at one moment."""

    second: float  # since the load began
    own_mib: float
    mapped_mib: float
    files: int
    texts: int  # that were answered until now


@dataclass(frozen=True)
class Report:
    """A whole soak. `problems` is empty if the server has done what it promises."""

    record: Record
    samples: list[Sample]
    disturbances: Counter[str]

    @property
    def warm(self) -> list[Sample]:
        """The samples after the warm-up."""
        return self.samples[len(self.samples) // 3 :]

    @property
    def growth_mib(self) -> float:
        """How much its own memory has grown after the warm-up, by a line through the samples."""
        seconds = np.array([sample.second for sample in self.warm])
        slope = np.polyfit(seconds, [sample.own_mib for sample in self.warm], 1)[0]
        return float(slope * (seconds[-1] - seconds[0]))

    @property
    def problems(self) -> list[str]:
        """What was wrong, in sentences."""
        found = list(self.record.wrong)
        allowed = max(_MIN_GROWTH_MIB, MAX_GROWTH * self.warm[0].own_mib)
        if self.growth_mib > allowed:
            found.append(
                f"memory grew by {self.growth_mib:.0f} MiB after the warm-up; {allowed:.0f} are allowed"
            )
        if self.record.least_cosine < MIN_COSINE:
            found.append(f"an exact answer has cosine {self.record.least_cosine:.6f}")
        return found

    def table(self) -> str:
        """Return the figures as Markdown."""
        record, last = self.record, self.samples[-1]
        statuses = Counter[int]()
        for (_, status), count in record.statuses.items():
            statuses[status] += count
        times = np.array(record.seconds) * 1000
        rows = {
            "load": f"{last.second:.0f} s, {len(times)} requests, {last.texts} texts",
            "statuses": ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items())),
            "errors": ", ".join(f"{code} {count}" for code, count in sorted(record.codes.items())),
            "clients that left": str(record.left),
            "files and keys": ", ".join(
                f"{what} {count}" for what, count in sorted(self.disturbances.items())
            ),
            "answers compared": f"{record.compared}, exact ones: least cosine {record.least_cosine:.6f}",
            "answers that reused maps": f"{record.hits}, least cosine {record.least_cosine_of_hits:.4f}",
            "time of a request": "p50 {:.0f} ms, p99 {:.0f} ms".format(*np.percentile(times, (50, 99))),
            "memory of its own": f"{self.samples[0].own_mib:.0f} MiB at first, "
            f"{self.warm[0].own_mib:.0f} after the warm-up, {last.own_mib:.0f} at last, "
            f"{max(sample.own_mib for sample in self.samples):.0f} at most; "
            f"{self.growth_mib:+.0f} since the warm-up",
            "mapped files": f"{last.mapped_mib:.0f} MiB",
            "open files": f"{self.samples[0].files} at first, {last.files} at last",
            "problems": str(len(self.problems)),
        }
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])

    def plot(self, path: Path) -> None:
        """Draw memory and texts per second over time."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        memory, speed = figure.subplots(2, 1, sharex=True)
        seconds = [sample.second for sample in self.samples]
        memory.plot(seconds, [sample.own_mib for sample in self.samples], label="of its own")
        memory.plot(seconds, [sample.mapped_mib for sample in self.samples], label="mapped files")
        memory.axvline(self.warm[0].second, color="grey", linestyle=":", label="end of the warm-up")
        memory.set(ylabel="memory, MiB", ylim=(0, None))
        memory.legend()
        counted = np.interp(np.arange(0, seconds[-1], 5), seconds, [sample.texts for sample in self.samples])
        speed.plot(np.arange(0, seconds[-1], 5)[1:], np.diff(counted) / 5)
        speed.set(ylabel="texts per second", xlabel="seconds of full load", ylim=(0, None))
        figure.savefig(path, dpi=100)
