"""Whether an engine blends the chunks of a prompt, and how: the gate of its model, applied to sequences."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attncache_core.reuse.blend.chunks import Blend
from attncache_core.reuse.blend.gate import BlendGate, tighten
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.text.segments import Segmented


@dataclass(frozen=True)
class BlendInfo:
    """What is blended, for people and `/info`."""

    ratio: float | None  # None: nothing is blended
    off: str | None  # why
    check_layer: int
    measure: str  # of the budget
    least: float  # mean of the measure that answers must keep
    steps: int  # how often verification has tightened the gate
    separator: str


class Blending:
    """The gate of an engine's model. Any thread may call the methods."""

    def __init__(self, key_values: KeyValueReuse, gate: BlendGate, path: Path | None = None) -> None:
        """path: the file of the gate, in which tightening is kept; None: it is not kept."""
        self._key_values, self._path = key_values, path
        self._changing = threading.Lock()
        self.gate = gate

    def blend(self, sequence: Segmented, ids: Sequence[int], salt: bytes) -> Blend | None:
        """Return how a sequence is blended; None if it is computed exactly.

        ids: of the sequence with its plan's continuation. Fewer than two chunks are a prefix, which is exact.
        """
        recomputation = self.gate.recomputation
        if recomputation is None or len(sequence.spans) < 2:
            return None
        return Blend.of(self._key_values, ids, sequence.spans, sequence.opening, salt, recomputation)

    def tighten(self, gate: BlendGate) -> None:
        """Tighten the gate by a step, unless it is not `gate` any more."""
        with self._changing:
            if self.gate == gate:
                self.gate = tighten(self._path, gate) if self._path else gate.tightened()

    def info(self) -> BlendInfo:
        """Return what is blended."""
        gate = self.gate
        return BlendInfo(
            gate.ratio,
            gate.off(),
            gate.check_layer,
            gate.budget.measure.value,
            gate.budget.least,
            gate.steps,
            gate.separator,
        )
