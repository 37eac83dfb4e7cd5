"""A way to spend a quality budget: how a model is run, other than exactly.

    Way()                                              the exact model in its default dtype
    Way(quantization=INT8)                             int8
    Way(quantization=INT8, drop_attention=(3,))        int8 + no attention in 3

A way has a part of each kind at most once: a dtype, a quantisation, layers without attention, layers that are
left out, and the reuse of attention maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attncache_core.checkpoints.checkpoint import Checkpoint, DroppedLayers, Quantization
from attncache_core.errors import InvalidInput
from attncache_core.runtime.stored import Stored

# The ways that an operator may choose from; quantisations have the names of --quantize.
WAYS = ("dtype", *(kind.value for kind in Quantization), "attention", "blocks", "maps")
EXACT = "exact"
# The kinds of parts. Maps come last, because a combination with maps needs a database of its own.
KINDS = ("dtype", "quantization", "attention", "blocks", "maps")


@dataclass(frozen=True)
class Way(Stored):
    """A way to run a model. Layers are numbered from 0 in the checkpoint's order, ascending."""

    dtype: Literal["bfloat16", "float32"] | None = None  # None: the operator's dtype
    quantization: Quantization | None = None
    drop_attention: tuple[int, ...] = ()  # layers without attention
    drop_blocks: tuple[int, ...] = ()  # layers that are left out as a whole
    maps: bool = False  # whether attention maps of a database are reused

    @property
    def parts(self) -> dict[str, str]:
        """The parts by kind, in words."""
        words = (
            self.dtype,
            self.quantization.value if self.quantization else None,
            f"no attention in {_numbers(self.drop_attention)}" if self.drop_attention else None,
            f"no layer {_numbers(self.drop_blocks)}" if self.drop_blocks else None,
            "maps" if self.maps else None,
        )
        return {kind: word for kind, word in zip(KINDS, words, strict=True) if word}

    @property
    def name(self) -> str:
        """The name of the way, for people."""
        return " + ".join(self.parts.values()) or EXACT

    @property
    def changes_model(self) -> bool:
        """Whether the way runs a variant of the model, which classifiers and databases are bound to."""
        return bool(self.quantization or self.drop_attention or self.drop_blocks)

    def with_part(self, other: Way) -> Way | None:
        """Return this way with the parts of another way too; None if a kind would occur twice or be empty."""
        if self.parts.keys() & other.parts.keys():
            return None
        blocks = {*self.drop_blocks, *other.drop_blocks}
        joined = Way(
            self.dtype or other.dtype,
            self.quantization or other.quantization,
            # A layer that is left out has no attention to drop.
            tuple(sorted({*self.drop_attention, *other.drop_attention} - blocks)),
            tuple(sorted(blocks)),
            self.maps or other.maps,
        )
        return joined if len(joined.parts) == len(self.parts) + len(other.parts) else None

    def variant_of(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint as this way runs it, without the variant that it may have."""
        return replace(
            checkpoint,
            quantization=self.quantization,
            dropped=DroppedLayers(frozenset(self.drop_attention), frozenset(self.drop_blocks)),
        )


def parse_ways(text: str) -> tuple[str, ...]:
    """Return the names of ways in a comma-separated list. Raises InvalidInput if a name is unknown."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in WAYS:
            raise InvalidInput(f"{name!r} is not a known way; the ways are {', '.join(WAYS)}", field="ways")
    return names


def _numbers(layers: Sequence[int]) -> str:
    """Return layer numbers as --drop-attention and --drop-block read them."""
    return ",".join(map(str, layers))
