"""The compiled attention kernel: attention.c, for the level of this processor.

    kernel()  ->  attend(...)   maps @ V of packed sequences, the maps computed or read from records

It is called with plain pointers, lets go of the interpreter lock, and works with the threads that torch has.
Where it was not built, or tensors live on another device, attention runs on torch's own operators.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import torch

_NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTERS = ("query", "key", "value", "context", "offsets", "maps", "kept", "runs")
_ROWS = ("query_row", "value_row", "context_row")
_COUNTS = ("run_count", "heads", "width", "type", "map_type")


class _Attention(ctypes.Structure):
    """`attention` in attention.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _ROWS),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("next", ctypes.c_int32),
    )


class AttentionKernel:
    """One compiled level of the kernel."""

    def __init__(self, level: str, library: Path) -> None:
        self.level = level
        loaded = ctypes.CDLL(str(library))
        loaded.attend.argtypes = [ctypes.c_void_p]
        loaded.attend.restype = None
        loaded.set_parallel.argtypes = [ctypes.c_void_p]
        self._attend = loaded.attend
        pool = _torch_openmp()
        if pool is not None:
            loaded.set_parallel(ctypes.cast(pool.GOMP_parallel, ctypes.c_void_p))

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the kernel computes on tensors of this dtype and device."""
        return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: np.ndarray,
        scale: float,
        context: torch.Tensor,
        kept: np.ndarray | None = None,
    ) -> None:
        """Write softmax(scale Q Kᵀ) V to `context`, sequence by sequence.

        query, key, value, context: [tokens, heads, head_dim] of one dtype, the numbers of a token's heads
        contiguous, Q and K with the same step from token to token. offsets: int64 [sequences + 1], the
        first token of each sequence. Sums are taken in float32; with bfloat16 on a processor that
        multiplies it, maps are rounded to it before they meet V, as if they were stored.

        kept: uint64 [sequences], addresses to which each sequence's maps are written as well, contiguous
        [heads, L, L] of V's dtype: as `apply_maps` reads them.
        """
        if query.stride(0) != key.stride(0):
            raise ValueError("Q and K need the same step from token to token")
        job = self._job(value, offsets, context)
        job.query, job.key, job.query_row = query.data_ptr(), key.data_ptr(), query.stride(0)
        runs = np.arange(len(offsets))
        job.runs, job.run_count, job.scale = runs.ctypes.data, len(offsets) - 1, scale
        if kept is not None:
            job.kept = kept.ctypes.data
        self._attend(ctypes.addressof(job))

    def apply_maps(
        self,
        maps: np.ndarray,
        map_dtype: torch.dtype,
        runs: np.ndarray,
        value: torch.Tensor,
        offsets: np.ndarray,
        context: torch.Tensor,
    ) -> None:
        """Write maps @ V to `context`, the maps read where they lie.

        maps: uint64 [sequences], the addresses of contiguous maps [heads, L, L] of `map_dtype`. runs: int64
        [runs + 1], the first sequence of each run of neighbours that share length and maps: their maps are
        read once. The others are as `attend` has them.
        """
        job = self._job(value, offsets, context)
        job.maps, job.map_type = maps.ctypes.data, _NUMBER_TYPES[map_dtype]
        job.runs, job.run_count = runs.ctypes.data, len(runs) - 1
        self._attend(ctypes.addressof(job))

    def _job(self, value: torch.Tensor, offsets: np.ndarray, context: torch.Tensor) -> _Attention:
        job = _Attention()
        job.value, job.value_row = value.data_ptr(), value.stride(0)
        job.context, job.context_row = context.data_ptr(), context.stride(0)
        job.offsets = offsets.ctypes.data
        _, job.heads, job.width = value.shape
        job.type, job.threads = _NUMBER_TYPES[value.dtype], torch.get_num_threads()
        return job


@cache
def kernel() -> AttentionKernel | None:
    """The kernel for this processor; None where it was not built."""
    for level in _levels():
        library = Path(__file__).with_name(f"attention_{level}{EXTENSION_SUFFIXES[0]}")
        if library.is_file():
            # A library that is damaged, or may not be executed, is as good as none.
            with contextlib.suppress(OSError):
                return AttentionKernel(level, library)
    return None


def level() -> str | None:
    """The level of the kernel, `avx512_bf16` and the like; None where it was not built."""
    compiled = kernel()
    return compiled.level if compiled else None


def _levels() -> list[str]:
    """The levels that this processor runs, the best first."""
    capability = torch.backends.cpu.get_cpu_capability()
    levels = []
    if capability == "AVX512" and torch.cpu._is_avx512_bf16_supported():
        levels.append("avx512_bf16")
    if capability == "AVX512":
        levels.append("avx512")
    if capability in ("AVX512", "AVX2"):
        levels.append("avx2")
    return levels or ["neon"]


def _torch_openmp() -> ctypes.CDLL | None:
    """GNU OpenMP as torch has loaded it; None where torch uses another one, and the kernel one thread."""
    for path in Path(torch.__file__).parent.glob("lib/libgomp*.so*"):
        return ctypes.CDLL(str(path))
    return None
