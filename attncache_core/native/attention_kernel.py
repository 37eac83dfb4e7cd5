"""Python binding of the compiled attention kernel, attention.c, at the best level of this processor.

    kernel()  ->  attend(...)       compute the maps of packed sequences, and maps @ V
                  apply_maps(...)   maps @ V of packed sequences, with maps read from records
                  rotate(...)       rotary positions

A level is an instruction set: avx512_amx, avx512_bf16, avx512_vnni, avx512, avx2_vnni, avx2 or neon. The
binding passes plain pointers, releases the interpreter lock, and uses torch's pool of threads. If the kernel
was not built, or tensors are on another device, attention runs on torch's own operators.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

# The version of the recorded maps and of the results computed from them. Increase this number when a change
# to a model's layers, to recording or to this kernel alters recorded maps or their products with V. Databases
# of another version are refused, and the default database is built again. Levels may differ in last digits.
MAPS_VERSION = 1

NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTERS = ("offsets", "maps", "kept", "runs", "positions", "bias")
_COUNTS = (
    *("run_count", "heads", "key_width", "width", "type", "map_type", "before", "after", "bias_positions"),
    "packed",
)
NO_BOUND = 2**31 - 1
_MACHINES = ("x86_64", "aarch64")  # that setup.py compiles for
_CAPABILITY = "ATEN_CPU_CAPABILITY"  # torch's variable, which lowers the instruction set


def _tensor_fields(name: str) -> tuple[tuple[str, type], ...]:
    """Return the fields of a C `tensor`.

    They go directly into the outer structure, because setting them is then faster.
    """
    return (name, ctypes.c_void_p), (f"{name}_token", ctypes.c_int64), (f"{name}_head", ctypes.c_int64)


class DistanceTermFields(ctypes.Structure):
    """The structure `distance_term` of distances.h."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("columns", ctypes.c_int32),
        ("head_words", ctypes.c_int32),
    )


class _Attention(ctypes.Structure):
    """The structure `attention` of attention.c."""

    _fields_ = (
        *_tensor_fields("query"),
        *_tensor_fields("key"),
        *_tensor_fields("value"),
        *_tensor_fields("context"),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, DistanceTermFields) for name in ("query_term", "key_term")),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("next", ctypes.c_int32),
    )


class _Rotation(ctypes.Structure):
    """The structure `rotation` of rotary.h."""

    _fields_ = (
        *_tensor_fields("x"),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "positions")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "half", "type", "threads")),
        ("next", ctypes.c_int64),
    )


_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
# What the functions of the library return, and what they take: most of them a structure.
_FUNCTIONS: dict[str, tuple[type | None, Sequence[type]]] = {
    **dict.fromkeys(("attend", "rotate", "run_product", "run_normalizers", "run_rows"), (None, [_POINTER])),
    **dict.fromkeys(("run_stack", "find_nearest"), (ctypes.c_int32, [_POINTER])),
    **dict.fromkeys(("pool_states", "run_norm"), (None, [*[_POINTER] * 3, _COUNT, _COUNT])),
    "set_parallel": (None, [_POINTER]),
    "wait_for_helpers": (None, []),
}
_SHORT_FUNCTIONS: dict[str, tuple[type | None, Sequence[type]]] = {
    "wake_helpers": (None, [ctypes.c_int32]),
    "scale_to_unit_length": (None, [_POINTER, _POINTER, _COUNT, _COUNT]),
    "choose_records": (None, [_POINTER]),
    "measure_strangeness": (ctypes.c_int32, [_POINTER]),
}


def _declare(library: ctypes.CDLL, functions: Mapping[str, tuple[type | None, Sequence[type]]]) -> None:
    for name, (returned, taken) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returned, taken


@cache
def short_calls(library: ctypes.CDLL) -> ctypes.PyDLL:
    """Return the library for the functions that take microseconds, which keep the interpreter lock.

    A thread that gave up the lock for them would wait longer.
    """
    holding = ctypes.PyDLL(None, handle=library._handle)
    _declare(holding, _SHORT_FUNCTIONS)
    return holding


class AttentionKernel:
    """The kernel compiled for one level."""

    def __init__(self, level: str, library: Path) -> None:
        """Raises OSError if the library cannot be loaded, or without AMX where it needs AMX."""
        self.level = level
        self.library = loaded = ctypes.CDLL(str(library))
        if level == "avx512_amx" and not loaded.allow_tiles():
            raise OSError("the processor or the system does not allow AMX")
        _declare(loaded, _FUNCTIONS)
        self._attend, self._rotate = loaded.attend, loaded.rotate
        pool = _torch_openmp()
        if pool is not None:
            loaded.set_parallel(ctypes.cast(pool.GOMP_parallel, ctypes.c_void_p))

    def supports(self, tensor: torch.Tensor) -> bool:
        """Return whether the kernel supports the tensor's dtype and device."""
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
        before: int | None = None,
        after: int | None = None,
    ) -> None:
        """Write softmax(scale Q Kᵀ) V of each sequence to `context`.

        query, key: [tokens, heads, key_width]. value, context: [tokens, heads, width]. All four have the same
        dtype, and the elements of a head are contiguous. offsets: int64 [sequences + 1], the first token of
        each sequence. Sums are in float32. With bfloat16 and widths that are multiples of 32, levels
        avx512_bf16 and avx512_amx round maps to bfloat16 before the product with V, as if they came from a
        record.

        before, after: how many tokens before and after itself a token attends to; None means no bound
        (causal: after 0; a sliding window of w: before w - 1, after 0). Scores outside this band are not
        computed.

        kept: uint64 [sequences], an address per sequence to which its maps are written too: contiguous
        [heads, L, L] of V's dtype, in the form that `apply_maps` reads, with zeros outside the band.
        """
        assert query.shape[1:] == key.shape[1:]
        assert query.dtype == key.dtype == value.dtype
        assert query.stride(2) == key.stride(2) == 1
        job = _job(value, offsets, context, before, after)
        job.query, (job.query_token, job.query_head, _) = query.data_ptr(), query.stride()
        job.key, (job.key_token, job.key_head, _) = key.data_ptr(), key.stride()
        job.key_width = query.shape[2]
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
        packed: bool = False,
        before: int | None = None,
        after: int | None = None,
    ) -> None:
        """Write maps @ V of each sequence to `context`. Reads the maps in place.

        maps: uint64 [sequences], the addresses of contiguous maps [heads, L, L] of `map_dtype`, which are
        zero outside the band of `before` and `after`. packed: whether the maps are only lower triangles, row
        by row, L (L + 1) / 2 elements per head; `after` then counts as 0. runs: int64 [runs + 1], the first
        sequence of each run; a run is a group of adjacent sequences that share length and maps, and its maps
        are read once. The other arguments are those of `attend`.
        """
        job = _job(value, offsets, context, before, 0 if packed else after)
        job.maps, job.map_type, job.packed = maps.ctypes.data, NUMBER_TYPES[map_dtype], packed
        job.runs, job.run_count = runs.ctypes.data, len(runs) - 1
        self._attend(ctypes.addressof(job))

    def rotate(
        self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Rotate the first r dimensions of each head of `x` [tokens, heads, d] by position, in place.

        Dimensions i and i + r/2 form a pair (Su et al. 2021, in the layout of Hugging Face's `rotate_half`).
        cosine, sine: contiguous float32 [positions, r/2]. positions: contiguous int64 [tokens], row indices
        of `cosine` and `sine`. The elements of a head of `x` are contiguous. Results are computed in float32
        and rounded once.
        """
        assert x.stride(2) == 1
        assert cosine.dtype == sine.dtype == torch.float32
        assert cosine.is_contiguous()
        assert sine.is_contiguous()
        assert positions.dtype == torch.int64
        assert positions.is_contiguous()
        job = _Rotation()
        job.x, (job.x_token, job.x_head, _) = x.data_ptr(), x.stride()
        job.cosine, job.sine, job.positions = cosine.data_ptr(), sine.data_ptr(), positions.data_ptr()
        job.tokens, job.heads, _ = x.shape
        job.half, job.type, job.threads = sine.shape[1], NUMBER_TYPES[x.dtype], torch.get_num_threads()
        self._rotate(ctypes.addressof(job))


def _job(
    value: torch.Tensor, offsets: np.ndarray, context: torch.Tensor, before: int | None, after: int | None
) -> _Attention:
    """Make a job with the fields that `attend` and `apply_maps` share."""
    assert value.shape[1:] == context.shape[1:]
    assert value.dtype == context.dtype
    assert value.stride(2) == context.stride(2) == 1
    job = _Attention()
    job.value, (job.value_token, job.value_head, _) = value.data_ptr(), value.stride()
    job.context, (job.context_token, job.context_head, _) = context.data_ptr(), context.stride()
    job.offsets = offsets.ctypes.data
    _, job.heads, job.width = context.shape
    job.before = NO_BOUND if before is None else min(before, NO_BOUND)
    job.after = NO_BOUND if after is None else min(after, NO_BOUND)
    job.type, job.threads = NUMBER_TYPES[value.dtype], torch.get_num_threads()
    return job


@cache
def kernel() -> AttentionKernel | None:
    """Return the kernel for this processor, or None if it was not built."""
    for level in levels():
        library = _library(level)
        if library.is_file():
            # A library that is damaged or not executable counts as missing.
            with contextlib.suppress(OSError):
                return AttentionKernel(level, library)
    return None


def level() -> str | None:
    """Return the level of the kernel, such as `avx512_bf16`, or None if the kernel was not built."""
    compiled = kernel()
    return compiled.level if compiled else None


def compiled_off() -> str | None:
    """Return in one line why the kernel is missing, and what helps; None if there is a kernel."""
    if kernel() is not None:
        return None
    system, machine = {"darwin": "macOS"}.get(sys.platform, platform.system()), platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES:
        return (
            f"there is compiled code for Linux on x86-64 and aarch64 only, and this is {system} on {machine}"
        )
    if machine == "x86_64" and levels() == ["neon"]:
        if _CAPABILITY in os.environ:
            value = os.environ[_CAPABILITY]
            return f"{_CAPABILITY}={value} switches the compiled code off; unset this variable to use it"
        return "compiled code needs a processor with AVX2, and this processor has none"
    present = [_library(level) for level in levels() if _library(level).is_file()]
    found = f"{present[0].name} cannot be loaded" if present else "it was not compiled at installation"
    return f"{found}; `pip install --verbose --editable .` compiles it again and shows the compiler's message"


def levels() -> list[str]:
    """Return the levels that this processor supports, best first."""
    capability = torch.backends.cpu.get_cpu_capability()
    supported = []
    if capability == "AVX512":
        has_vnni = torch.cpu._is_vnni_supported()
        has_bfloat16 = has_vnni and torch.cpu._is_avx512_bf16_supported()
        supported += ["avx512_amx"] if has_bfloat16 and torch.cpu._init_amx() else []
        supported += ["avx512_bf16"] if has_bfloat16 else []
        supported += ["avx512_vnni"] if has_vnni else []
        supported.append("avx512")
    if capability in ("AVX512", "AVX2"):
        supported += ["avx2_vnni"] if _has_avx_vnni() else []
        supported.append("avx2")
    return supported or ["neon"]


def _has_avx_vnni() -> bool:
    """Return whether the processor multiplies bytes without AVX-512. An older torch does not tell."""
    capabilities: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    return bool(capabilities().get("avx_vnni"))


def _library(level: str) -> Path:
    return Path(__file__).with_name(f"attention_{level}.so")


def _torch_openmp() -> ctypes.CDLL | None:
    """Return torch's GNU OpenMP library, or None. Without the library, the kernel uses one thread."""
    for path in Path(torch.__file__).parent.glob("lib/libgomp*.so*"):
        return ctypes.CDLL(str(path))
    return None
