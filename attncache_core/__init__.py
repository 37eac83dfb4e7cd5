"""AttnCache: prefill-only transformer inference that reuses attention maps.

checkpoint = find_checkpoint("all-MiniLM-L6-v2")
database = AttentionDatabase.open(Path("support.db"))
engine = PrefillEngine.load(checkpoint, database=database)
embeddings = engine.embed(["Where is my card?"])
"""

import attncache_core.openmp  # noqa: F401 - before anything that loads torch
from attncache_core.attention_maps.builder import BuildOptions, build_database
from attncache_core.attention_maps.calibration import Progress, calibrate_database
from attncache_core.attention_maps.database import AttentionDatabase, Manifest
from attncache_core.attention_maps.default import (
    build_default_database,
    open_default_database,
    set_damaged_aside,
)
from attncache_core.attention_maps.fetch import Fetch
from attncache_core.attention_maps.search import Outcome
from attncache_core.checkpoint import DEFAULT_MODEL, Checkpoint, Quantization, find_checkpoint
from attncache_core.classifier import LinearClassifier, fit_classifier
from attncache_core.corpus import CorpusSentence, default_corpus
from attncache_core.engine import PrefillEngine, PrefillResult
from attncache_core.errors import (
    AttnCacheError,
    BuildFailed,
    CorruptDatabase,
    DatabaseRefused,
    InputTooLong,
    InvalidInput,
    ModelNotFound,
    NoClassifier,
    NotFinite,
    UnsupportedModel,
)
from attncache_core.outputs import class_scores, normalize
from attncache_core.variant import find_variant

__all__ = [
    "DEFAULT_MODEL",
    "AttentionDatabase",
    "AttnCacheError",
    "BuildFailed",
    "BuildOptions",
    "Checkpoint",
    "CorpusSentence",
    "CorruptDatabase",
    "DatabaseRefused",
    "Fetch",
    "InputTooLong",
    "InvalidInput",
    "LinearClassifier",
    "Manifest",
    "ModelNotFound",
    "NoClassifier",
    "NotFinite",
    "Outcome",
    "PrefillEngine",
    "PrefillResult",
    "Progress",
    "Quantization",
    "UnsupportedModel",
    "build_database",
    "build_default_database",
    "calibrate_database",
    "class_scores",
    "default_corpus",
    "find_checkpoint",
    "find_variant",
    "fit_classifier",
    "normalize",
    "open_default_database",
    "set_damaged_aside",
]
