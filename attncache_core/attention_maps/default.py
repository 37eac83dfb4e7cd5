"""The database that a server without one builds for its model at the first start, from the shipped corpus.

databases/NAME-FINGERPRINT-vFORMAT                   built once, then opened at every start
databases/NAME-FINGERPRINT-vFORMAT.damaged-TIME      the last one that was found damaged, set aside
"""

from __future__ import annotations

import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

from platformdirs import user_cache_path

from attncache_core.attention_maps.builder import build_database
from attncache_core.attention_maps.calibration import Progress
from attncache_core.attention_maps.database import FORMAT_VERSION, AttentionDatabase
from attncache_core.checkpoint import Checkpoint
from attncache_core.corpus import default_corpus
from attncache_core.devices import Device, Dtype
from attncache_core.engine import PrefillEngine
from attncache_core.errors import CorruptDatabase, DatabaseRefused
from attncache_core.files import locked
from attncache_core.native import MAPS_VERSION


def default_database_folder(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Path:
    """Where the default database of this model, used in this way, lies: of this format, by this kernel."""
    name = re.sub(r"[^\w.-]+", "-", Path(checkpoint.name).name)
    base = cache_dir or user_cache_path("attncache")
    version = f"v{FORMAT_VERSION}.{MAPS_VERSION}"
    return base / "databases" / f"{name}-{checkpoint.use_fingerprint()[:12]}-{version}"


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


def open_default_database(
    checkpoint: Checkpoint,
    cache_dir: Path | None = None,
    *,
    threshold: float | None = None,
    heads: str | None = None,
) -> AttentionDatabase:
    """Open the model's default database; `threshold` and `heads` override what its manifest says.

    Raises CorruptDatabase for whatever is wrong with the files, since nobody chose them, and InvalidInput as
    AttentionDatabase.open does.
    """
    folder = default_database_folder(checkpoint, cache_dir)
    try:
        database = AttentionDatabase.open(folder, threshold=threshold, heads=heads)
        # The folder's name promises this fingerprint.
        database.require_fingerprint(checkpoint.fingerprint(), checkpoint.name)
        database.decisions  # noqa: B018 - reads them
    except DatabaseRefused as error:
        raise CorruptDatabase(f"the default database is damaged: {error}", field="database") from error
    return database


def set_damaged_aside(checkpoint: Checkpoint, cache_dir: Path | None = None) -> Path | None:
    """Rename the model's default database if it is damaged, so that a new one can be built in its place.

    Returns where the damaged one lies now, or None if there is no damaged one: another process may have set
    it aside, or have built a new one. Waits while another process builds. Removes the damaged ones of before.
    Raises OSError if the folder cannot be renamed or is not ours to read.
    """
    folder = default_database_folder(checkpoint, cache_dir)
    # A finished build is moved into place under the same lock, so what is renamed is what was opened.
    with locked(folder, on_wait=lambda: None):
        if not folder.exists() or not _is_damaged(checkpoint, cache_dir):
            return None
        if not os.access(folder, os.R_OK):
            raise PermissionError(f"{folder} belongs to another user")
        earlier = list(folder.parent.glob(f"{folder.name}.damaged-*"))
        time = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = folder.rename(folder.with_name(f"{folder.name}.damaged-{time}"))
        for path in earlier:
            shutil.rmtree(path, ignore_errors=True)
        return aside


def _is_damaged(checkpoint: Checkpoint, cache_dir: Path | None) -> bool:
    try:
        open_default_database(checkpoint, cache_dir)
    except CorruptDatabase:
        return True
    return False
