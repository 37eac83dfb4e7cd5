"""Build, open and set aside the default database, which a server builds at its first start.

The default database is built from the shipped corpus.

databases/NAME-FINGERPRINT-vVERSIONS                 built once, then opened at every start
databases/NAME-FINGERPRINT-vVERSIONS.damaged-TIME    the last database that was found damaged
"""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

from platformdirs import user_cache_path

from attncache_core.build.builder import build_database
from attncache_core.calibration.calibrate import Progress
from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.corpus import default_corpus
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import CorruptDatabase, DatabaseRefused
from attncache_core.native import MAPS_VERSION
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.manifest import FORMAT_VERSION
from attncache_core.runtime.devices import Device, Dtype
from attncache_core.runtime.files import locked, refused_read

# Raised when calibration keeps a budget that it did not keep before: servers then build the database anew.
_CALIBRATION_VERSION = 3


# The stages of a build, and which share of a default build's processor time is over when each one begins.
_STAGE_BEGINS = {
    "measuring heads": 0.0,
    "writing records": 0.14,
    "comparing maps": 0.24,
    "training the projector": 0.25,
    "measuring masks": 0.40,
    "measuring unfamiliar texts": 0.64,
    "checking the strangeness limit": 0.96,
}


def share_done(stage: str, done: int, total: int) -> float:
    """Return which share of a default build is done, from a call of its Progress.

    Stages that run again start again, so the share may become smaller.
    """
    begins = [*_STAGE_BEGINS.values(), 1.0]
    index = list(_STAGE_BEGINS).index(stage) if stage in _STAGE_BEGINS else 0
    within = done / total if stage in _STAGE_BEGINS and total else 0.0
    return begins[index] + within * (begins[index + 1] - begins[index])


def databases_folder(cache_dir: Path | None) -> Path:
    """Return the folder of the databases that servers make or download by themselves."""
    return (cache_dir or user_cache_path("attncache")) / "databases"


def default_database_folder(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Path:
    """Return the folder of the model's default database.

    The name depends on the model, its use (pooling, prompts), the database format, and the versions of the
    map kernel and of the calibration.
    """
    name = re.sub(r"[^\w.-]+", "-", Path(checkpoint.name).name)
    version = f"v{FORMAT_VERSION}.{MAPS_VERSION}.{_CALIBRATION_VERSION}"
    return databases_folder(cache_dir) / f"{name}-{checkpoint.use_fingerprint()[:12]}-{version}"


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


def open_default_database(
    checkpoint: Checkpoint,
    cache_dir: Path | None = None,
    *,
    threshold: float | None = None,
    heads: str | None = None,
) -> AttentionDatabase:
    """Open the model's default database. `threshold` and `heads` override the values of its manifest.

    Raises CorruptDatabase for any defect of the files, because the operator did not choose these files.
    Raises InvalidInput in the same cases as AttentionDatabase.open.
    """
    folder = default_database_folder(checkpoint, cache_dir)
    try:
        database = AttentionDatabase.open(folder, threshold=threshold, heads=heads)
        # The name of the folder contains this fingerprint.
        database.require_fingerprint(checkpoint.fingerprint(), checkpoint.name)
        database.decisions  # noqa: B018 - reading the property checks the file
    except DatabaseRefused as error:
        what = "cannot be read" if refused_read(error) else "is damaged"
        raise CorruptDatabase(f"the default database {what}: {error}", field="database") from error
    return database


def set_damaged_aside(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Path | None:
    """Rename the model's default database if it is damaged, so that a new database can be built.

    Returns the new path of the damaged database. Returns None if no database is damaged, for example because
    another process renamed or rebuilt the database. Waits while another process builds. Removes databases
    that were set aside earlier. Raises OSError if the folder cannot be renamed, or if the system does not let
    this process read a file, which may be sound.
    """
    folder = default_database_folder(checkpoint, cache_dir)
    # A finished build is moved into place under the same lock, so the folder cannot change between the check
    # and the rename.
    with locked(folder, on_wait=lambda: None):
        if not folder.exists():
            return None
        try:
            open_default_database(checkpoint, cache_dir)
            return None
        except CorruptDatabase as error:
            if reason := refused_read(error):
                raise OSError(reason.errno, reason.strerror, reason.filename or str(folder)) from error
        earlier = list(folder.parent.glob(f"{folder.name}.damaged-*"))
        time = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = folder.rename(folder.with_name(f"{folder.name}.damaged-{time}"))
        for path in earlier:
            shutil.rmtree(path, ignore_errors=True)
        return aside
