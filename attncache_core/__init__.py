"""AttnCache: prefill-only transformer inference that reuses attention maps.

checkpoint = find_checkpoint("all-MiniLM-L6-v2")
database = AttentionDatabase.open(Path("support.db"))
engine = PrefillEngine.load(checkpoint, database=database)
embeddings = engine.embed(["Where is my card?"])
"""

import attncache_core.runtime.openmp  # noqa: F401 - before anything that loads torch
from attncache_core.build.builder import build_database
from attncache_core.build.default import (
    build_default_database,
    open_default_database,
    set_damaged_aside,
)
from attncache_core.build.options import BuildOptions
from attncache_core.calibration.calibrate import Progress
from attncache_core.calibration.database import calibrate_database
from attncache_core.calibration.gain import require_gain
from attncache_core.checkpoints.checkpoint import Checkpoint, Quantization
from attncache_core.checkpoints.description import DEFAULT_MODEL, find_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.corpus import CorpusSentence, default_corpus, unfamiliar_texts
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest, PrefillResult
from attncache_core.errors import (
    AttnCacheError,
    BuildFailed,
    CorruptDatabase,
    DatabaseRefused,
    InputTooLong,
    InvalidInput,
    MachineBusy,
    ModelNotFound,
    NoClassifier,
    NotFinite,
    UnsupportedModel,
)
from attncache_core.heads.classifier import LinearClassifier, fit_classifier
from attncache_core.heads.comparator import Measure
from attncache_core.heads.decisions import class_scores
from attncache_core.heads.vectors import normalize
from attncache_core.heads.zero_shot import ZeroShot
from attncache_core.models.variant import find_variant
from attncache_core.reuse.kv.opening import KeyValueOptions
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.manifest import Manifest
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import Outcome, ReusePlan, no_reuse
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.text.pairs import PairTokens

__all__ = [
    "DEFAULT_MODEL",
    "AttentionDatabase",
    "AttnCacheError",
    "Budget",
    "BuildFailed",
    "BuildOptions",
    "Checkpoint",
    "CorpusSentence",
    "CorruptDatabase",
    "DatabaseRefused",
    "InputTooLong",
    "InvalidInput",
    "KeyValueOptions",
    "LinearClassifier",
    "MachineBusy",
    "Manifest",
    "Measure",
    "ModelNotFound",
    "NoClassifier",
    "NotFinite",
    "Outcome",
    "PairTokens",
    "PrefillEngine",
    "PrefillRequest",
    "PrefillResult",
    "Progress",
    "Quantization",
    "ReuseMask",
    "ReusePlan",
    "ReuseStrategy",
    "Template",
    "UnsupportedModel",
    "ZeroShot",
    "build_database",
    "build_default_database",
    "calibrate_database",
    "class_scores",
    "default_corpus",
    "find_checkpoint",
    "find_variant",
    "fit_classifier",
    "no_reuse",
    "normalize",
    "open_default_database",
    "require_gain",
    "set_damaged_aside",
    "unfamiliar_texts",
]
