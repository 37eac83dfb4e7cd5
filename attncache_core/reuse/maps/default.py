"""Where the default database of a model is, how it is opened, and how a damaged one is set aside.

databases/NAME-FINGERPRINT-vVERSIONS                 built once (build/default.py), then opened at every start
databases/NAME-FINGERPRINT-vVERSIONS.damaged-TIME    the last database that was found damaged
"""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

from platformdirs import user_cache_path

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.errors import CorruptDatabase, DatabaseRefused, InvalidInput
from attncache_core.native import MAPS_VERSION
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.manifest import FORMAT_VERSION
from attncache_core.runtime.files import locked, refused_read

# Raised when calibration keeps a budget that it did not keep before: servers then build the database anew.
_CALIBRATION_VERSION = 5


def databases_folder(cache_dir: Path | None) -> Path:
    """Return the folder of the databases that servers make or download by themselves.

    Raises InvalidInput if no folder is given, and the user has no home.
    """
    try:
        return (cache_dir or user_cache_path("attncache")) / "databases"
    except RuntimeError as error:
        raise InvalidInput(
            "the user has no home folder for databases; set --cache-dir, or the variable HOME",
            field="cache_dir",
        ) from error


def default_database_folder(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Path:
    """Return the folder of the model's default database.

    The name depends on the model, its use (pooling, prompts), the database format, and the versions of the
    map kernel and of the calibration.
    """
    name = re.sub(r"[^\w.-]+", "-", Path(checkpoint.name).name)
    version = f"v{FORMAT_VERSION}.{MAPS_VERSION}.{_CALIBRATION_VERSION}"
    return databases_folder(cache_dir) / f"{name}-{checkpoint.use_fingerprint()[:12]}-{version}"


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
        database.require_fingerprint(checkpoint)
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
