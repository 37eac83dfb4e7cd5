"""Databases with several generations, made of two databases of the tiny corpus instead of by builds."""

import shutil
from pathlib import Path

from attncache_core.reuse.maps.generations import Renewal, Result, current_generation
from attncache_core.reuse.maps.publishing import building_folder, decide, renewing


def renew(root: Path, built: Path, result: Result = Result.PUBLISHED) -> int:
    """Renew the database in `root` by a copy of the database in `built`, and return the number."""
    with renewing(root):
        folder = building_folder(root)
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(built, partial)
            partial.rename(folder)
        number = int(folder.name)
        before = current_generation(root).number
        decide(root, Renewal("2026-11-25T03:00:00Z", result, before, number, "by a test"))
    return number
