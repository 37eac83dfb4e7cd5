"""AttnCache: prefill-only transformer inference that reuses attention maps.

checkpoint = find_checkpoint("all-MiniLM-L6-v2")
database = AttentionDatabase.open(Path("support.db"))
engine = PrefillEngine.load(checkpoint, database=database)
embeddings = engine.embed(["Where is my card?"])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import attncache_core.runtime.openmp  # noqa: F401 - before anything that loads torch

# A name is imported when it is first used, because models and builders take seconds to import.
if TYPE_CHECKING:
    from attncache_core.build.builder import build_database as build_database
    from attncache_core.build.default import build_default_database as build_default_database
    from attncache_core.build.options import BuildOptions as BuildOptions
    from attncache_core.calibration.calibrate import Progress as Progress
    from attncache_core.calibration.database import calibrate_database as calibrate_database
    from attncache_core.calibration.gain import require_gain as require_gain
    from attncache_core.checkpoints.checkpoint import Checkpoint as Checkpoint
    from attncache_core.checkpoints.checkpoint import Quantization as Quantization
    from attncache_core.checkpoints.description import DEFAULT_MODEL as DEFAULT_MODEL
    from attncache_core.checkpoints.description import find_checkpoint as find_checkpoint
    from attncache_core.checkpoints.template import Template as Template
    from attncache_core.corpus import CorpusSentence as CorpusSentence
    from attncache_core.corpus import default_corpus as default_corpus
    from attncache_core.corpus import unfamiliar_texts as unfamiliar_texts
    from attncache_core.engine.prefill import PrefillEngine as PrefillEngine
    from attncache_core.engine.request import PrefillRequest as PrefillRequest
    from attncache_core.engine.result import PrefillResult as PrefillResult
    from attncache_core.errors import AttnCacheError as AttnCacheError
    from attncache_core.errors import BuildFailed as BuildFailed
    from attncache_core.errors import CorruptDatabase as CorruptDatabase
    from attncache_core.errors import DatabaseRefused as DatabaseRefused
    from attncache_core.errors import InputTooLong as InputTooLong
    from attncache_core.errors import InvalidInput as InvalidInput
    from attncache_core.errors import MachineBusy as MachineBusy
    from attncache_core.errors import ModelNotFound as ModelNotFound
    from attncache_core.errors import NoClassifier as NoClassifier
    from attncache_core.errors import NotFinite as NotFinite
    from attncache_core.errors import UnsupportedModel as UnsupportedModel
    from attncache_core.heads.classifier import LinearClassifier as LinearClassifier
    from attncache_core.heads.classifier import fit_classifier as fit_classifier
    from attncache_core.heads.comparator import Measure as Measure
    from attncache_core.heads.decisions import class_scores as class_scores
    from attncache_core.heads.vectors import normalize as normalize
    from attncache_core.heads.zero_shot import ZeroShot as ZeroShot
    from attncache_core.models.variant import find_variant as find_variant
    from attncache_core.reuse.kv.opening import KeyValueOptions as KeyValueOptions
    from attncache_core.reuse.maps.database import AttentionDatabase as AttentionDatabase
    from attncache_core.reuse.maps.default import open_default_database as open_default_database
    from attncache_core.reuse.maps.default import set_damaged_aside as set_damaged_aside
    from attncache_core.reuse.maps.manifest import Manifest as Manifest
    from attncache_core.reuse.maps.policy import Budget as Budget
    from attncache_core.reuse.mask import ReuseMask as ReuseMask
    from attncache_core.reuse.plan import Outcome as Outcome
    from attncache_core.reuse.plan import ReusePlan as ReusePlan
    from attncache_core.reuse.plan import no_reuse as no_reuse
    from attncache_core.reuse.strategy import ReuseStrategy as ReuseStrategy
    from attncache_core.text.pairs import PairTokens as PairTokens

_MODULES = {
    "DEFAULT_MODEL": "checkpoints.description",
    "AttentionDatabase": "reuse.maps.database",
    "AttnCacheError": "errors",
    "Budget": "reuse.maps.policy",
    "BuildFailed": "errors",
    "BuildOptions": "build.options",
    "Checkpoint": "checkpoints.checkpoint",
    "CorpusSentence": "corpus",
    "CorruptDatabase": "errors",
    "DatabaseRefused": "errors",
    "InputTooLong": "errors",
    "InvalidInput": "errors",
    "KeyValueOptions": "reuse.kv.opening",
    "LinearClassifier": "heads.classifier",
    "MachineBusy": "errors",
    "Manifest": "reuse.maps.manifest",
    "Measure": "heads.comparator",
    "ModelNotFound": "errors",
    "NoClassifier": "errors",
    "NotFinite": "errors",
    "Outcome": "reuse.plan",
    "PairTokens": "text.pairs",
    "PrefillEngine": "engine.prefill",
    "PrefillRequest": "engine.request",
    "PrefillResult": "engine.result",
    "Progress": "calibration.calibrate",
    "Quantization": "checkpoints.checkpoint",
    "ReuseMask": "reuse.mask",
    "ReusePlan": "reuse.plan",
    "ReuseStrategy": "reuse.strategy",
    "Template": "checkpoints.template",
    "UnsupportedModel": "errors",
    "ZeroShot": "heads.zero_shot",
    "build_database": "build.builder",
    "build_default_database": "build.default",
    "calibrate_database": "calibration.database",
    "class_scores": "heads.decisions",
    "default_corpus": "corpus",
    "find_checkpoint": "checkpoints.description",
    "find_variant": "models.variant",
    "fit_classifier": "heads.classifier",
    "no_reuse": "reuse.plan",
    "normalize": "heads.vectors",
    "open_default_database": "reuse.maps.default",
    "require_gain": "calibration.gain",
    "set_damaged_aside": "reuse.maps.default",
    "unfamiliar_texts": "corpus",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
