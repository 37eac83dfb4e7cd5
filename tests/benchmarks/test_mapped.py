"""The papers' way to read records: mapped side by side until the batch ends."""

import sys
from pathlib import Path

import numpy as np
import pytest
from core_models import attention_by, prefill

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.native.guard import guard
from attncache_core.reuse.execution.reused_maps import HitRecords
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.plan import Outcome
from benchmarks.papers.mapped import MapsSideBySide

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc"),
    pytest.mark.skipif(guard() is None, reason="without the guard, nothing is mapped"),
]


def side_by_side_mappings(path):
    """Return (address, bytes, offset in the file) of the shared mappings of a file.

    The mapping that the segment itself uses is private.
    """
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, offset, _, _, *name = line.split(maxsplit=5)
        first, end = (int(number, 16) for number in span.split("-"))
        if name == [str(path)] and access.endswith("s"):
            assert access == "r--s"
            found.append((first, end - first, int(offset, 16)))
    return found


@pytest.fixture
def strategy(tiny_database):
    return MapsSideBySide(AttentionDatabase.open(tiny_database, threshold=1.0))


@pytest.fixture
def sequences(tiny_engine, tiny_corpus):
    """Recorded sequences of two lengths; one of them twice."""
    ids = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])
    seven, nine = ([ids for ids in ids if len(ids) == length] for length in (7, 9))
    return [seven[0], seven[3], seven[3], nine[1], nine[5]]


def test_records_of_a_batch_are_mapped_side_by_side_until_the_batch_ends(
    tiny_checkpoint, tiny_database, strategy, sequences, monkeypatch
):
    engine = PrefillEngine.load(tiny_checkpoint, strategy=strategy, dtype="float32")
    segment = strategy.database.search.store.segments[7]
    seen = []

    class Spied(HitRecords):
        def records(self):
            seen.append((self._addresses[:3].tolist(), side_by_side_mappings(segment.path)))
            return super().records()

    monkeypatch.setattr("attncache_core.engine.layers.HitRecords", Spied)
    with attention_by("stack"):
        result = prefill(engine, sequences)
    size = segment.layout.record_bytes(7)
    (addresses, mapped), *_ = seen
    assert addresses == [address for address, *_ in mapped]
    assert np.diff(addresses).tolist() == [size, size]
    records = [segment.record_of(ids) for ids in sequences[:3]]
    assert sorted(offset for *_, offset in mapped) == sorted(
        segment.records_start + size * record for record in records
    )
    assert side_by_side_mappings(segment.path) == []
    in_place = MapReuse(AttentionDatabase.open(tiny_database, threshold=1.0))
    expected = prefill(PrefillEngine.load(tiny_checkpoint, strategy=in_place, dtype="float32"), sequences)
    assert result.outcomes == (Outcome.HIT,) * len(sequences) == expected.outcomes
    np.testing.assert_array_equal(result.outputs, expected.outputs)


def test_a_batch_that_failed_leaves_its_mappings_to_the_next_batch(strategy):
    segment = strategy.database.search.store.segments[7]
    addresses = segment.addresses(np.array([2, 0]))
    assert len(side_by_side_mappings(segment.path)) == len(addresses) == 2
    strategy._unmap()
    assert side_by_side_mappings(segment.path) == []


def test_records_that_cannot_be_mapped_are_an_error(strategy, monkeypatch):
    segment = strategy.database.search.store.segments[7]
    monkeypatch.setattr(segment, "records_start", 17)  # no multiple of a page
    with pytest.raises(OSError, match="cannot be mapped") as caught:
        segment.addresses(np.array([1]))
    assert caught.value.filename == str(segment.path)
