"""Compiled code and its Python bindings: attention, rotary positions, quantised rows and the SIGBUS guard."""

from attncache_core.native.attention_kernel import (
    MAPS_VERSION,
    AttentionKernel,
    compiled_off,
    kernel,
    level,
)

__all__ = ["MAPS_VERSION", "AttentionKernel", "compiled_off", "kernel", "level"]
