"""The database that a server without one builds for its model at the first start, from the shipped corpus."""

from __future__ import annotations

import re
from pathlib import Path

from platformdirs import user_cache_path

from attncache_core.attention_maps.builder import build_database
from attncache_core.attention_maps.calibration import Progress
from attncache_core.attention_maps.database import FORMAT_VERSION
from attncache_core.checkpoint import Checkpoint
from attncache_core.corpus import default_corpus
from attncache_core.devices import Device, Dtype
from attncache_core.engine import PrefillEngine


def default_database_folder(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Path:
    """Where the default database of this model, used in this way, and of this format lies."""
    name = re.sub(r"[^\w.-]+", "-", Path(checkpoint.name).name)
    base = cache_dir or user_cache_path("attncache")
    return base / "databases" / f"{name}-{checkpoint.use_fingerprint()[:12]}-v{FORMAT_VERSION}"


def build_default_database(
    checkpoint: Checkpoint,
    *,
    cache_dir: Path | None = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: int | None = None,
    progress: Progress = lambda *_: None,
) -> Path:
    """The folder of the model's default database, built first if it is not there.

    Several processes may call this at once: one builds, the others wait. Raises BuildFailed.
    """
    folder = default_database_folder(checkpoint, cache_dir)
    if not folder.exists():
        engine = PrefillEngine.load(checkpoint, dtype=dtype, device=device, threads=threads)
        build_database(engine, default_corpus(), folder, progress=progress, keep_existing=True)
    return folder
