"""The gate of blending for one model: how much is computed again so that answers keep a declared budget.

    calibration/blending.py -> BlendGate, in a file -> the server, which verifies it and tightens it in steps

Without a gate, nothing is blended: chunks are computed exactly. A gate belongs to the model, its
template and its labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from attncache_core.errors import InvalidInput
from attncache_core.reuse.blend.chunks import Recomputation
from attncache_core.reuse.maps.budget import Budget
from attncache_core.runtime.files import locked_within, write_whole

FORMAT = 1
# A ratio pays if a blended answer takes at most this share of the time of an exact one.
MOST_SECONDS = 0.95


@dataclass(frozen=True)
class MeasuredRatio:
    """What was measured with one recompute ratio."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    ratio: float
    mean: float  # of the budget's measure over the prompts
    lower_bound: float  # of the mean, with 95 % confidence
    keeps_budget: bool
    seconds: float  # time to answer, as a share of the exact answer's: the median of the prompts

    @property
    def serves(self) -> bool:
        """Whether this ratio may be served."""
        return self.keeps_budget and self.seconds <= MOST_SECONDS


@dataclass(frozen=True)
class BlendGate:
    """Which ratios keep the budget of a model."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fingerprint: str  # of the engine that was measured, see PrefillEngine.fingerprint
    budget: Budget
    separator: str  # between segments
    prompts: int  # that were measured
    measured: tuple[MeasuredRatio, ...]  # by ratio, rising
    check_layer: int = 1
    listwise: bool = False  # measured with prompts of listwise reranking, and for these only
    format: int = FORMAT
    steps: int = 0  # how often verification has tightened it

    @property
    def ratios(self) -> list[float]:
        """The ratios that may be served, rising: from the least one on, all ratios keep the budget."""
        served: list[float] = []
        for own in reversed(self.measured):
            if not own.keeps_budget:
                break
            served.append(own.ratio)
        pays = {own.ratio for own in self.measured if own.serves}
        return [ratio for ratio in reversed(served) if ratio in pays]

    @property
    def ratio(self) -> float | None:
        """The ratio that is served now; None: nothing is blended."""
        return self.ratios[self.steps] if self.steps < len(self.ratios) else None

    @property
    def recomputation(self) -> Recomputation | None:
        """What is computed again; None: everything, exactly."""
        return None if self.ratio is None else Recomputation(self.ratio, self.check_layer)

    def tightened(self) -> BlendGate:
        """Return the gate with the next larger ratio, or closed if there is none."""
        return replace(self, steps=self.steps + 1)

    def off(self) -> str | None:
        """Return why nothing is blended, for people; None if something is."""
        if self.ratio is not None:
            return None
        if self.steps and self.ratios:
            return "verified answers did not keep the budget"
        if not any(own.keeps_budget for own in self.measured):
            return "no recompute ratio kept the budget"
        return "no recompute ratio that kept the budget saved time"

    def require(self, fingerprint: str, model: str) -> None:
        """Raise InvalidInput unless the gate was measured with this engine."""
        if self.fingerprint != fingerprint:
            raise InvalidInput(
                f"the file of --blend was measured with another model, template or labels than {model} has; "
                "run `attncache calibrate --segments` with the server's options again",
                field="blend",
            )


_GATE = TypeAdapter(BlendGate)


def read_gate(path: Path) -> BlendGate:
    """Read a gate from a file. Raises InvalidInput if there is none, or if it cannot be read."""
    try:
        gate = _GATE.validate_json(path.read_bytes())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidInput(f"the file of --blend, {path}, cannot be read: {reason}", field="blend") from error
    except ValidationError as error:
        raise InvalidInput(
            f"{path} is no file that `attncache calibrate --segments` has written", field="blend"
        ) from error
    if gate.format != FORMAT:
        raise InvalidInput(
            f"{path} has format {gate.format}, and {FORMAT} is read; calibrate again", field="blend"
        )
    return gate


def write_gate(path: Path, gate: BlendGate) -> None:
    """Write a gate to a file, whole or not at all. Raises OSError."""
    write_whole(path, _GATE.dump_json(gate, indent=2) + b"\n")


def tighten(path: Path, gate: BlendGate, patience_seconds: float = 1.0) -> BlendGate:
    """Return a gate one step tighter, and keep the step in its file for other servers and later starts.

    If the file was tightened meanwhile, its steps count instead. A file that cannot be locked or written, or
    that was calibrated again, stays as it is.
    """
    own = gate.tightened()
    try:
        with locked_within(path, patience_seconds) as is_locked:
            if is_locked:
                kept = read_gate(path)
                if replace(kept, steps=0) == replace(gate, steps=0):
                    own = replace(own, steps=max(own.steps, kept.steps))
                    write_gate(path, own)
    except (OSError, InvalidInput):
        pass
    return own
