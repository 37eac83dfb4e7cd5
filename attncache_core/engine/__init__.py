"""The engine: runs token sequences through a model and returns embeddings or class logits."""

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.engine.result import PrefillResult

__all__ = ["PrefillEngine", "PrefillRequest", "PrefillResult"]
