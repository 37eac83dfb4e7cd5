"""A store of keys and values with a disk, for the tests of kv and of blending."""

import pytest
from kv_models import settled, store_of

from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.opening import block_layout
from attncache_core.reuse.kv.transfer import Transfers


@pytest.fixture
def open_store(model, tmp_path):
    """Open stores over one folder, one after the other, as restarts do."""
    opened = []

    def close():
        for store in opened:
            settled(store)
            store.close()

    def open_one(memory=2**24, buffer=1000, most=2**24):
        close()
        disk = DiskTier(tmp_path / "kv", block_layout(model).part_bytes, most)
        opened[:] = [store_of(model, memory, transfers=Transfers(disk, buffer))]
        return opened[0]

    yield open_one
    close()
