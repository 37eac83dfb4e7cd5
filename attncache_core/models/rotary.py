"""Rotary positions (Su et al. 2021), with the table of angles made by the checkpoint's own module.

    rotated[i]       = x[i] cos(p θ_i) - x[i + r/2] sin(p θ_i)
    rotated[i + r/2] = x[i + r/2] cos(p θ_i) + x[i] sin(p θ_i)        for i < r/2 of r rotary dimensions

The module has already scaled the angles (linear, Llama 3, YaRN). A layout that pairs adjacent dimensions
instead of halves becomes this layout if the rows of Q and K are permuted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from attncache_core import native
from attncache_core.errors import UnsupportedModel
from attncache_core.runtime.devices import CPU

# positions int64 [1, L] -> (cos, sin), each [1, L, r]: the second half repeats the first.
Angles = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_FIRST_TABLE = 512  # positions
# `dynamic` and `longrope` scale the angles by the longest sequence of a batch, so a text's maps would depend
# on the batch.
_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")


class Rotary:
    """The rotation of Q and K by position. The table of angles grows with the longest sequence seen."""

    def __init__(self, angles: Angles) -> None:
        self._angles = angles
        self._tables = torch.empty(0, 0), torch.empty(0, 0)

    @property
    def half(self) -> int:
        """Half the number of rotary dimensions."""
        return self.tables(1)[1].shape[1]

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first r dimensions of each head of x [tokens, h, d]; positions: int64 [tokens].

        The compiled kernel works in place, so the caller must not use `x` afterwards.
        """
        tables = self.tables(int(positions.max()) + 1, x.device)
        kernel = native.kernel()
        if kernel and kernel.supports(x):
            kernel.rotate(x, *tables, positions)
            return x
        cos, sin = (table[positions][:, None] for table in tables)
        half = cos.shape[-1]
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat(
            [
                (first * cos - second * sin).to(x.dtype),
                (second * cos + first * sin).to(x.dtype),
                rest,
            ],
            dim=-1,
        )

    def tables(self, length: int, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each float32 [positions, r/2] on the device, for `length` positions or more."""
        cos, sin = self._tables
        if len(cos) < length:
            size = max(_FIRST_TABLE, 1 << (length - 1).bit_length())
            angles = self._angles(torch.arange(size, device=device)[None])
            cos, sin = (table[0].chunk(2, dim=-1)[0].contiguous() for table in angles)
            # Another thread may read the tables, so one assignment replaces both.
            self._tables = cos, sin
        return cos, sin


class LayerRotary:
    """The rotary positions of all layers of a model; layers of one type share a table."""

    def __init__(self, module: nn.Module, config: Any, width: int) -> None:
        """module: called with (x, positions) or (x, positions, layer type), for angles on the device of x.

        width: of what is rotated of each head. Raises UnsupportedModel if the angles depend on the batch, or
        if transformers ignores a part of what config.json says about them.
        """
        self._types: list[str] = getattr(config, "layer_types", None) or []
        # Some models have one set of angles for layers with a window and another for the other layers.
        parameters = config.rope_parameters
        kinds = {isinstance(entry, dict) for entry in parameters.values()}
        if len(kinds) > 1:
            # transformers adds what it misses, such as full_attention in Gemma 3, and ignores the rest.
            raise UnsupportedModel(
                "rope_parameters in config.json has entries that transformers ignores for the family "
                f"{config.model_type}; write rope_type and the rest into the objects full_attention and "
                "sliding_attention for gemma3_text and modernbert, and into none for other families",
                field="model",
            )
        self._by_type = kinds == {True}
        for angles in parameters.values() if self._by_type else [parameters]:
            if angles["rope_type"] not in _ROTARY_TYPES:
                raise UnsupportedModel(
                    f"rotary positions of the type {angles['rope_type']!r} (rope_type in config.json) are "
                    f"not served; served are: {', '.join(_ROTARY_TYPES)}",
                    field="model",
                )
        self._module, self._width = module, width
        self._rotaries: dict[tuple[str, ...], Rotary] = {}

    def __getitem__(self, number: int) -> Rotary:
        """Return the rotation of layer `number`.

        Raises UnsupportedModel if config.json gives the angles another width than what is rotated.
        """
        arguments = (self._types[number],) if self._by_type else ()
        if arguments not in self._rotaries:
            angles = partial(self._angles, arguments)
            cos, _ = angles(torch.zeros(1, 1, dtype=torch.long, device=next(self._module.buffers()).device))
            if cos.shape[-1] != self._width:
                raise UnsupportedModel(
                    f"rotary positions have {cos.shape[-1]} dimensions, and rotate {self._width} of a head: "
                    "head_dim or partial_rotary_factor in config.json does not fit the weights",
                    field="model",
                )
            self._rotaries[arguments] = Rotary(angles)
        return self._rotaries[arguments]

    def _angles(
        self, arguments: tuple[str, ...], positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Not of the default dtype, which transformers changes while another thread loads a model.
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        found = self._module(like, positions, *arguments)
        if isinstance(found, torch.Tensor):  # complex, [1, L, r/2]
            return found.real.repeat(1, 1, 2), found.imag.repeat(1, 1, 2)
        cos, sin = found
        return cos, sin
