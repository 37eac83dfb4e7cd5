"""Servers that follow the generations of a database."""

import shutil
from contextlib import asynccontextmanager

from fake_engine import ready, starting

from attncache_core.reuse.maps.generations import Renewal, Result, current_generation
from attncache_core.reuse.maps.publishing import building_folder, decide, renewing
from service.loading.engines import load_engines
from service.loading.renewals import with_renewals
from service.settings import Settings


def publish(root, built):
    """Publish a copy of the database in `built`, and return its number."""
    with renewing(root):
        building_folder(root).parent.mkdir()
        shutil.copytree(built, building_folder(root))
        number = int(building_folder(root).name)
        before = current_generation(root).number
        decide(root, Renewal("2026-11-25T03:00:00Z", Result.PUBLISHED, before, number, "by a test"))
    return number


def following(checkpoint, root, renews=True, **values):
    """Yield what a server with this database loads."""
    values = {"dtype": "float32", "min_gain": 0, **values}
    settings = Settings(model=str(checkpoint.folder), database=root, **values)
    return with_renewals(load_engines(settings, checkpoint), settings, renews=renews)


@asynccontextmanager
async def serving(checkpoint, root, **given):
    """Yield a client of a server that follows the database in `root`."""
    values = {"verify_rate": 0, "min_gain": 0, **given}
    async with starting(lambda: following(checkpoint, root, **values), database=root, **values) as client:
        await ready(client)
        yield client
