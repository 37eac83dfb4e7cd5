"""The options of a build, with their default values and the default quality budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncache_core.build.training import TRAINING_STEPS
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.maps.projector import DIMENSIONS
from attncache_core.reuse.storage.layout import MapForm

MIN_COSINE = 0.985
MIN_TEXT_COSINE = 0.95
MIN_AGREEMENT = 0.98
PROTOTYPES = 16
MAX_LENGTH = 64


MAX_SEED = 2**63 - 1  # torch takes no larger one


@dataclass(frozen=True)
class BuildOptions:
    """The operator's choices for a build."""

    min_cosine: float = MIN_COSINE  # budget of embeddings: mean cosine over held-out hits
    min_text_cosine: float = MIN_TEXT_COSINE  # budget of embeddings: 1st percentile of the hits' cosine
    min_agreement: float = MIN_AGREEMENT  # budget of classes: share of the hits' decisions that stay
    heads: str | None = None  # see mask.parse_heads; None: calibration chooses the heads
    threshold: float | None = None  # θ; None: calibration chooses θ
    prototypes: int = PROTOTYPES  # maximum number of prototypes per length; 0: no synthetic records
    synthetic_only: bool = False  # no records of single texts: only means of at least eight texts serve
    refit: bool = False  # fit weights that only hits take; see refitting.py
    form: MapForm | None = None  # form of the stored maps; None: packed if the model is causal
    max_length: int = MAX_LENGTH  # in tokens; longer sentences are not recorded
    dimensions: int = DIMENSIONS  # size of the feature vectors
    training_steps: int = TRAINING_STEPS
    seed: int = 0


def bounds_of(budget: Budget) -> dict[str, Any]:
    """Return the options of a build that keeps this budget."""
    if budget.measure is Measure.AGREEMENT:
        return {"min_agreement": budget.least}
    return {"min_cosine": budget.least, "min_text_cosine": budget.floor}


def default_budget(engine: PrefillEngine, options: BuildOptions) -> Budget:
    """Return the budget in agreement of decisions if the engine has classes, else in cosine."""
    if engine.decisions.labels is not None:
        return Budget(Measure.AGREEMENT, options.min_agreement)
    return Budget(Measure.COSINE, options.min_cosine, options.min_text_cosine)
