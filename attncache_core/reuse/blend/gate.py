"""The gate of blending for one model: how much is computed again so that answers keep a declared budget.

    calibration/blending.py -> BlendGate, in a file -> the server, which verifies it and tightens it in steps

Without a gate, nothing is blended: chunks are computed exactly. A gate belongs to the model, its
template and its labels.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from attncache_core.errors import InvalidInput
from attncache_core.reuse.blend.chunks import Recomputation
from attncache_core.reuse.maps.policy import Budget
from attncache_core.runtime.files import locked_within, write_whole
from attncache_core.runtime.stored import Stored

FORMAT = 2
# A ratio pays if a blended answer takes at most this share of the time of an exact one, alone and under load.
MAX_SECONDS = 0.95


@dataclass(frozen=True)
class MeasuredRatio:
    """What was measured with one recompute ratio."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    ratio: Annotated[float, Field(ge=0, le=1)]
    mean: float  # of the budget's measure over the prompts
    lower_bound: float  # of the mean, with 95 % confidence
    keeps_budget: bool
    # Time to answer, as a share of the exact answer's behind the stored first chunk: median of the prompts.
    seconds: Annotated[float, Field(ge=0)]
    floor: float | None = None  # the cosine that 99 of 100 prompts keep, with 95 % confidence
    # The same share where full batches keep all engine threads busy.
    loaded_seconds: Annotated[float, Field(ge=0)] = 0.0

    @property
    def serves(self) -> bool:
        """Whether this ratio may be served."""
        return self.keeps_budget and max(self.seconds, self.loaded_seconds) <= MAX_SECONDS


@dataclass(frozen=True)
class PromptShapes:
    """The shapes of the prompts that were measured: the least and the greatest of each number of tokens.

    A few prompts are no measurement: the least and the greatest hundredth of the prompts, and at least one
    prompt on each side, do not count.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    chunks: tuple[int, int]  # their number
    chunk_tokens: tuple[int, int]  # of the shortest chunk of a prompt, and of the longest
    mean_chunk_tokens: tuple[float, float]
    all_chunk_tokens: tuple[int, int]
    other_tokens: tuple[int, int]  # outside the chunks: the query, its template and separators

    @classmethod
    def of(cls, prompts: Iterable[tuple[Sequence[tuple[int, int]], int]]) -> Self:
        """Return the shapes of prompts.

        Of each prompt: the first token and the end of each chunk, and the number of all tokens.
        """
        numbers = np.sort([_shape(*prompt) for prompt in prompts], axis=0)
        left_out = math.ceil(len(numbers) / 100)
        ends = numbers[[left_out, -1 - left_out]]
        chunks, shortest, longest, total, other = ends[:, :5].astype(int).T.tolist()
        means = ends[:, 5].tolist()
        return cls(tuple(chunks), (shortest[0], longest[1]), tuple(means), tuple(total), tuple(other))

    def outside(self, spans: Sequence[tuple[int, int]], tokens: int) -> str | None:
        """Return why a prompt has no shape that was measured; None if it has one. Arguments as in `of`."""
        chunks, shortest, longest, total, other, mean = _shape(spans, tokens)
        for number, (least, greatest), counted in (
            (chunks, self.chunks, "chunks"),
            (shortest, self.chunk_tokens, "tokens in the shortest chunk"),
            (longest, self.chunk_tokens, "tokens in the longest chunk"),
            (mean, self.mean_chunk_tokens, "tokens in a chunk on average"),
            (total, self.all_chunk_tokens, "tokens in all chunks together"),
            (other, self.other_tokens, "tokens outside the chunks"),
        ):
            if not least <= number <= greatest:
                return f"it has {number:g} {counted}, and {least:g} to {greatest:g} were measured"
        return None


def _shape(spans: Sequence[tuple[int, int]], tokens: int) -> tuple[float, ...]:
    lengths = [end - first for first, end in spans]
    total = sum(lengths)
    return len(spans), min(lengths), max(lengths), total, tokens - total, total / len(spans)


@dataclass(frozen=True)
class BlendGate(Stored):
    """Which ratios keep the budget of a model."""

    fingerprint: str  # of the engine that was measured, see PrefillEngine.fingerprint
    budget: Budget
    separator: str  # between segments
    prompts: int  # different ones, that were measured
    measured: tuple[MeasuredRatio, ...]  # by ratio, rising
    shapes: PromptShapes  # prompts of other shapes are computed exactly
    check_layer: Annotated[int, Field(ge=1)] = 1
    listwise: bool = False  # measured with prompts of listwise reranking, and for these only
    format: int = FORMAT
    steps: Annotated[int, Field(ge=0)] = 0  # how often verification has tightened it

    @property
    def ratios(self) -> list[float]:
        """The ratios that may be served, rising: from the least one on, all ratios keep the budget."""
        served: list[float] = []
        for measured in reversed(self.measured):
            if not measured.keeps_budget:
                break
            served.append(measured.ratio)
        pays = {measured.ratio for measured in self.measured if measured.serves}
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
        if not any(measured.keeps_budget for measured in self.measured):
            return "no recompute ratio kept the budget"
        return "no recompute ratio that kept the budget saved time"

    def is_of(self, other: BlendGate) -> bool:
        """Return whether both are the same gate, tightened by any number of steps."""
        return replace(self, steps=0) == replace(other, steps=0)

    @property
    def digest(self) -> str:
        """SHA-256 of the gate as it was calibrated, in hexadecimal."""
        return hashlib.sha256(_GATE.dump_json(replace(self, steps=0))).hexdigest()

    def require(self, fingerprint: str, model: str, layers: int) -> None:
        """Raise InvalidInput unless the gate was measured with this engine. layers: of its model."""
        if self.fingerprint != fingerprint:
            raise InvalidInput(
                f"the file of --blend was measured with another model, template or labels than {model} has; "
                "run `attncache calibrate --segments` with the server's options again",
                field="blend",
            )
        if self.check_layer >= layers:
            raise InvalidInput(
                f"the file of --blend compares in layer {self.check_layer}, and {model} has {layers} layers; "
                "calibrate again",
                field="blend",
            )


_GATE = TypeAdapter(BlendGate)


def read_gate(path: Path) -> BlendGate:
    """Read a gate from a file. Raises InvalidInput if there is none, or if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        checksum = content.pop("checksum", None) if isinstance(content, dict) else None
        known = content.get("format") if isinstance(content, dict) else None
        if known != FORMAT and isinstance(known, int):
            raise InvalidInput(
                f"{path} has format {known}, and {FORMAT} is read; calibrate again", field="blend"
            )
        gate = _GATE.validate_json(json.dumps(content), strict=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidInput(f"the file of --blend, {path}, cannot be read: {reason}", field="blend") from error
    except ValidationError as error:
        (first, *_) = error.errors()
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise InvalidInput(
            f"{path} is no file that `attncache calibrate --segments` has written ({place}: {first['msg']}); "
            "calibrate again",
            field="blend",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON; calibrate again", field="blend") from error
    ratios = [measured.ratio for measured in gate.measured]
    if ratios != sorted(set(ratios)):
        raise InvalidInput(f"{path} holds ratios that do not rise; calibrate again", field="blend")
    for measured in gate.measured:
        if measured.keeps_budget != gate.budget.kept_by(measured.lower_bound, measured.floor):
            raise InvalidInput(
                f"in {path}, keeps_budget of ratio {measured.ratio} contradicts the budget and the measured "
                "bounds; calibrate again",
                field="blend",
            )
    if checksum != checksum_of(content):
        raise InvalidInput(f"{path} was changed since it was written; calibrate again", field="blend")
    return gate


def write_gate(path: Path, gate: BlendGate) -> None:
    """Write a gate to a file, whole or not at all. Raises OSError."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666
    content = _GATE.dump_python(gate, mode="json")
    text = json.dumps(content | {"checksum": checksum_of(content)}, indent=2)
    write_whole(path, (text + "\n").encode(), mode)


def checksum_of(content: dict[str, Any]) -> int:
    """Return the CRC-32 of what is written as JSON, without its entry `checksum`."""
    covered = {name: value for name, value in content.items() if name != "checksum"}
    return zlib.crc32(json.dumps(covered, sort_keys=True).encode())


def tighten(path: Path, gate: BlendGate, patience_seconds: float = 1.0) -> tuple[BlendGate, bool]:
    """Return a gate one step tighter, and keep the step in its file for other servers and later starts.

    If the file was tightened meanwhile, its steps count instead. A file that cannot be locked or written, or
    that was calibrated again, stays as it is. Returns also whether the file holds the step.
    """
    tightened, is_kept = gate.tightened(), False
    path = path.resolve()  # what a link names is tightened, and not replaced
    try:
        with locked_within(path, patience_seconds) as is_locked:
            if is_locked:
                kept = read_gate(path)
                if kept.is_of(gate):
                    tightened = replace(tightened, steps=max(tightened.steps, kept.steps))
                    write_gate(path, tightened)
                    is_kept = True
    except (OSError, InvalidInput):
        pass
    return tightened, is_kept
