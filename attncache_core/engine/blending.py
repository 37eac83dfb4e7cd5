"""What an engine blends: whether its model's chunks can be, and how the gate of its model lets it.

gate of a file -> Blending -> Blend of a sequence of chunks, or None: the sequence is computed exactly
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attncache_core.errors import InvalidInput
from attncache_core.reuse.blend.chunks import Blend, Recomputation
from attncache_core.reuse.blend.gate import BlendGate, read_gate, tighten
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.text.labels import LabelTokens
from attncache_core.text.segments import Segmented

# The value of PrefillEngine.key_values_off if nobody asked for keys and values.
SWITCHED_OFF = "switched off"


class Blending:
    """The blending of one engine. Any thread may call the methods."""

    def __init__(self, key_values: KeyValueReuse | None, off: str, labels: LabelTokens | None) -> None:
        """off: why there are no keys and values, if `key_values` is None. labels: the operator's labels."""
        self._key_values, self._key_values_off, self._labels = key_values, off, labels
        self._path: Path | None = None
        self._changing = threading.Lock()
        self.gate: BlendGate | None = None  # None: chunks are computed exactly

    @property
    def refusal(self) -> str | None:
        """Why keys and values of the model can be used in no other order; None if they can, or are off."""
        if self._key_values is None:
            return None if self._key_values_off == SWITCHED_OFF else self._key_values_off
        if not self._key_values.reads_last:
            return "pooling reads all tokens, and tokens that are not computed again have no last state"
        return None

    def off(self, listwise: bool = False) -> str | None:
        """Return why chunks cannot be blended now; None if they can. listwise: in listwise reranking."""
        if self._key_values is None:
            return self._key_values_off
        if reason := self.refusal:
            return reason
        if not self._key_values.store.memory.pool.places:
            return "there is no memory for keys and values (--kv-memory-bytes)"
        if self._key_values.approximation:
            return "saved keys and values are approximate already (--kv-disk-dtype)"
        if not listwise and self._labels and not self._labels.one_token_each:
            return "labels of several tokens make several sequences, and each would be blended by itself"
        return None

    def require(self, listwise: bool = False) -> KeyValueReuse:
        """Return the keys and values that can be blended. Raises InvalidInput, which says why they cannot."""
        if reason := self.off(listwise):
            raise InvalidInput(f"chunks cannot be blended: {reason}", field="segments")
        assert self._key_values is not None
        return self._key_values

    def open(self, gate: BlendGate, path: Path | None = None) -> None:
        """Take a gate of this engine's model. path: its file, in which tightening is kept."""
        self.gate, self._path = gate, path

    def tighten(self, gate: BlendGate) -> tuple[BlendGate, bool]:
        """Tighten the gate by a step, unless it is not `gate` any more.

        Returns the gate, and whether its file holds the step.
        """
        with self._changing:
            is_kept = True
            if self.gate is gate:
                self.gate, is_kept = tighten(self._path, gate) if self._path else (gate.tightened(), True)
            assert self.gate is not None
            return self.gate, is_kept

    def follow_file(self) -> None:
        """Tighten the gate as far as another server has tightened it in its file."""
        with self._changing:
            if self._path is None or self.gate is None:
                return
            with suppress(InvalidInput):
                kept = read_gate(self._path)
                if kept.steps > self.gate.steps and kept.is_of(self.gate):
                    self.gate = kept

    def blend(self, sequence: Segmented, ids: Sequence[int], salt: bytes) -> Blend | None:
        """Return how a sequence is blended; None if it is computed exactly.

        ids: of the sequence with its plan's continuation. salt: chunks of one salt share keys and values.
        Fewer than two chunks are a prefix, which is exact. Prompts of other shapes than the gate's are exact.
        """
        gate = self.gate  # another thread may tighten it
        if gate is None or len(sequence.spans) < 2:
            return None
        again = gate.recomputation
        if again is None or gate.shapes.outside(sequence.spans, len(sequence.ids)):
            return None
        return self.blend_with(sequence, ids, salt, again)

    def blend_with(
        self, sequence: Segmented, ids: Sequence[int], salt: bytes, recomputation: Recomputation
    ) -> Blend:
        """Return how a sequence is blended, whatever the gate says. Raises as `require`."""
        key_values = self.require(listwise=True)  # of labels, nothing is known here
        return Blend.of(key_values, ids, sequence.spans, sequence.opening, salt, recomputation)

    def info(self) -> dict[str, Any] | None:
        """Return what is blended, for people and `/info`; None without a gate."""
        gate = self.gate
        if gate is None:
            return None
        return {
            "ratio": gate.ratio,  # None: nothing is blended
            "off": gate.off(),  # why
            "check_layer": gate.check_layer,
            "measure": gate.budget.measure.value,
            "least": gate.budget.least,  # mean of the measure that answers must keep
            "steps": gate.steps,  # how often verification has tightened the gate
            "separator": gate.separator,
            "shapes": asdict(gate.shapes),  # of the prompts that are blended
            "listwise": gate.listwise,  # whether it is for listwise reranking, and not for other prompts
        }
