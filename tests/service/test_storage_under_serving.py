"""Files of a real database fail while the real app serves: clients notice nothing, the log has a line."""

import logging
import mmap
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeEngine, serving
from running import metrics_of, samples, until, until_metric

from attncache_core import AttentionDatabase, PrefillEngine
from attncache_core.native.guard import guard
from attncache_core.reuse.storage.segment import Scrubbed
from service.observability.metrics import Metrics
from service.upkeep import scrubber

pytestmark = pytest.mark.skipif(guard() is None, reason="records were read and not mapped")

RECORDS_START, RECORD_BYTES = 2 * 4096, 4096
# Tolerance between the output of a hit on the text's own record, in 16 bits, and the full output.
SIXTEEN_BITS = 1e-3


@pytest.fixture
def engine(tiny_checkpoint, root):
    database = AttentionDatabase.open(root, threshold=1.0)
    return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")


def text_of(engine, corpus, length):
    texts = [sentence.text for sentence in corpus]
    return next(text for text, ids in zip(texts, engine.tokenize(texts), strict=True) if len(ids) == length)


async def embedded(client, text):
    """Embed a text and return the header of hits and the embedding."""
    response = await client.post("/embed", json={"inputs": text})
    assert response.status_code == 200
    return response.headers["X-AttnCache-Hits"], np.array(response.json()[0])


async def test_segment_that_is_cut_under_the_server_is_computed_in_full_counted_and_logged_once(
    engine, root, tiny_corpus, caplog
):
    text = text_of(engine, tiny_corpus, 7)
    async with serving(engine) as client:
        hits, before = await embedded(client, text)
        assert hits == "1/1"
        os.truncate(root / "maps" / "00007.maps", RECORDS_START)
        for _ in range(3):
            hits, after = await embedded(client, text)
            assert hits == "0/1"
            np.testing.assert_allclose(after, before, atol=SIXTEEN_BITS)
        assert (await metrics_of(client))[("attncache_database_lost_segments_total",)] == 1
        assert (await client.get("/info")).json()["database"]["lost_lengths"] == [7]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("records of 7 tokens are no longer used")


async def test_byte_that_changes_without_a_write_is_found_and_its_record_used_no_more(
    engine, root, tiny_corpus, caplog
):
    text = text_of(engine, tiny_corpus, 7)
    record = engine.map_reuse.database.search.store.record_of(engine.tokenize([text])[0])
    async with serving(engine) as client:
        hits, before = await embedded(client, text)
        assert hits == "1/1"
        with (root / "maps" / "00007.maps").open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            content[RECORDS_START + record * RECORD_BYTES + 1] ^= 0x20
        await until_metric(client, 1, "attncache_database_corrupt_records_total")
        hits, after = await embedded(client, text)
        assert hits == "0/1"
        np.testing.assert_allclose(after, before, atol=SIXTEEN_BITS)
    assert "records changed after they were checked, and are no longer used: 1" in caplog.text
    assert text not in caplog.text


def scrubbing():
    return [thread.name for thread in threading.enumerate() if thread.name == "scrub"]


async def test_scrubber_starts_and_ends_with_the_server_of_a_database(engine):
    assert scrubbing() == []
    async with serving(engine):
        assert scrubbing() == ["scrub"]
    without_database = FakeEngine()
    without_database.map_reuse = None
    async with serving(without_database):
        assert scrubbing() == []


async def test_scrubber_counts_each_changed_record_and_waits_after_many_bytes(monkeypatch):
    monkeypatch.setattr(scrubber, "_SECONDS_BETWEEN_ROUNDS", 0.0)
    went_on, metrics = threading.Event(), Metrics()

    def scrub(_step_bytes):
        yield Scrubbed(bytes=0, changed=2)
        yield Scrubbed(bytes=2**50, changed=1)
        went_on.set()

    def changed():
        return samples(metrics.render().decode())[("attncache_database_corrupt_records_total",)]

    of_store = scrubber.Scrubber(SimpleNamespace(scrub=scrub), metrics)
    await until(lambda: changed() >= 3)
    assert not went_on.is_set()
    of_store.stop()
    assert changed() == 3
