"""Python binding of pooling.h: states of tokens -> vectors of sequences, and unit length."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attncache_core import native
from attncache_core.native.attention_kernel import short_calls
from attncache_core.native.memory import address

# The numbers of pooling_mode in pooling.h.
_MODES = {"cls": 0, "lasttoken": 1, "max": 2, "mean": 3, "mean_sqrt_len_tokens": 4, "weightedmean": 5}


@dataclass(frozen=True)
class CompiledNorm:
    """A norm of rows: x minus its mean (LayerNorm), divided by its deviation, times weight, plus bias."""

    weight: torch.Tensor  # float32 [width]
    bias: torch.Tensor | None  # float32 [width]
    epsilon: float
    subtracts_mean: bool


@dataclass(frozen=True)
class CompiledPooling:
    """One vector for each sequence, made of the output of the last layer, as data."""

    modes: Sequence[str]  # see heads/pooling.py; their vectors follow each other
    norm: CompiledNorm | None = None  # of each token, before pooling


class NormFields(ctypes.Structure):
    """The structure `norm` of pooling.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


class NativeNorm:
    """A norm of rows by compiled code, in float32."""

    def __init__(self, library: ctypes.CDLL, norm: CompiledNorm) -> None:
        self._library = library
        self._kept = [
            None if each is None else each.float().contiguous() for each in (norm.weight, norm.bias)
        ]
        addresses = [None if each is None else each.data_ptr() for each in self._kept]
        self._fields = NormFields(*addresses, norm.epsilon, 1 if norm.subtracts_mean else 2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed rows of x [rows, width], float32."""
        assert self._kept[0] is None or self._kept[0].shape == x.shape[1:]
        x = x.float().contiguous()
        normed = torch.empty_like(x)
        self._library.run_norm(ctypes.addressof(self._fields), x.data_ptr(), normed.data_ptr(), *x.shape)
        return normed


class PoolingFields(ctypes.Structure):
    """The structure `pooling` of pooling.h."""

    _fields_ = (
        ("last", NormFields),
        *((name, ctypes.c_void_p) for name in ("skipped", "vectors", "finite")),
        ("modes", ctypes.c_int32),
        ("mode", ctypes.c_int32 * len(_MODES)),
    )

    @classmethod
    def of(cls, modes: Sequence[str]) -> PoolingFields:
        """Return the structure for these modes. Raises ValueError if a mode is unknown."""
        if unknown := set(modes) - _MODES.keys():
            raise ValueError(f"unknown pooling mode {min(unknown)}")
        made = cls(modes=len(modes))
        made.mode[: len(modes)] = [_MODES[mode] for mode in modes]
        return made

    def write_to(self, vectors: np.ndarray, finite: np.ndarray, skipped: np.ndarray | None) -> None:
        """Set where the results go, and what is left out; the structure does not keep the arrays."""
        self.vectors, self.finite = address(vectors), address(finite)
        if skipped is not None:
            assert skipped.dtype == np.int64
            assert skipped.shape == finite.shape
            self.skipped = address(skipped)


def pool_states(
    states: torch.Tensor, offsets: np.ndarray, modes: Sequence[str], skipped: np.ndarray | None
) -> np.ndarray | None:
    """Return the pooled vectors of sequences, float32 [n, modes * width]; None if nothing was compiled.

    states: float32 [tokens, width]. offsets: int64 [n + 1], first token of each sequence. skipped: int64 [n],
    tokens at the front that are left out; None: none. Each sum is added token by token.
    """
    kernel = native.kernel() if states.device.type == "cpu" else None
    if kernel is None:
        return None
    states = states.contiguous()
    count, width = len(offsets) - 1, states.shape[1]
    vectors, finite = np.empty((count, len(modes) * width), np.float32), np.empty(count, np.bool_)
    pooling = PoolingFields.of(modes)
    pooling.write_to(vectors, finite, skipped)
    kernel.library.pool_states(ctypes.addressof(pooling), states.data_ptr(), address(offsets), count, width)
    return vectors


def unit_length(rows: np.ndarray) -> np.ndarray | None:
    """Return float32 rows [n, d] scaled to unit length; None if nothing was compiled. Zeros stay zeros."""
    kernel = native.kernel()
    if kernel is None:
        return None
    rows = np.ascontiguousarray(rows, np.float32)
    scaled = np.empty_like(rows)
    short_calls(kernel.library).scale_to_unit_length(address(rows), address(scaled), *rows.shape)
    return scaled
