"""Build the default database of a model, from the shipped corpus; see reuse/maps/default.py."""

from __future__ import annotations

from pathlib import Path

from attncache_core.build.builder import build_database
from attncache_core.calibration.calibrate import Progress
from attncache_core.checkpoints.checkpoint import Checkpoint, Device, Dtype
from attncache_core.corpus import default_corpus
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.reuse.maps.default import default_database_folder

# The stages of a build, and which share of a default build's time is over when each one begins.
_STAGE_BEGINS = {
    "measuring heads": 0.0,
    "writing records": 0.19,
    "comparing maps": 0.30,
    "training the projector": 0.31,
    "measuring masks": 0.38,
    "measuring unfamiliar texts": 0.74,
    "checking the strangeness limit": 0.94,
}


def share_done(stage: str, done: int, total: int) -> float:
    """Return which share of a default build is done, from a call of its Progress.

    Stages that run again start again, so the share may become smaller.
    """
    begins = [*_STAGE_BEGINS.values(), 1.0]
    index = list(_STAGE_BEGINS).index(stage) if stage in _STAGE_BEGINS else 0
    within = done / total if stage in _STAGE_BEGINS and total else 0.0
    return begins[index] + within * (begins[index + 1] - begins[index])


def build_default_database(
    checkpoint: Checkpoint,
    *,
    cache_dir: Path | None = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: int | None = None,
    progress: Progress = lambda *_: None,
) -> Path:
    """Return the folder of the model's default database, and build the database if the folder does not exist.

    If several processes call this function at once, one builds and the others wait. Raises BuildFailed if the
    build fails.
    """
    folder = default_database_folder(checkpoint, cache_dir)
    if not folder.exists():
        engine = PrefillEngine.load(checkpoint, dtype=dtype, device=device, threads=threads)
        build_database(engine, default_corpus(), folder, progress=progress, keep_existing=True)
    return folder
