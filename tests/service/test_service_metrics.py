import asyncio
import re
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import CORRUPT, FakeEngine, serving
from forked import forked
from full_disk import largest_file
from prometheus_client.core import CounterMetricFamily
from running import samples

from attncache_core import AttnCacheError, errors
from service import errors as service_errors
from service.errors import QueueFull
from service.observability.engine_numbers import _of_length_groups
from service.observability.metrics import STATUSES, Metrics, count_for_all_workers
from service.upkeep.group import Group, Worker


def test_every_metric_is_found_by_its_name_which_starts_with_attncache():
    metrics = Metrics()
    names = {name for name, *_ in samples(metrics.render().decode())}
    assert all(name.startswith("attncache_") for name in names)
    assert {name for name, *_ in samples(metrics.render(names).decode())} == names
    chosen = {"attncache_database_records", "attncache_tokens_total"}
    assert {name for name, *_ in samples(metrics.render(chosen).decode())} == chosen


def test_worker_that_is_started_again_goes_on_counting_in_files_that_have_their_place_on_the_disk(tmp_path):
    def count(folder):
        count_for_all_workers(folder, 1)
        metrics = Metrics()
        metrics.observe_request("/embed", 200, 0.1)
        return samples(metrics.render().decode())["attncache_requests_total", "/embed", "200"]

    assert [forked(count, tmp_path)() for _ in range(3)] == [1, 2, 3]
    files = list(tmp_path.iterdir())
    assert len(files) == 6
    assert all(file.stat().st_blocks * 512 >= file.stat().st_size >= 2**19 for file in files)


def test_metrics_are_read_while_the_files_of_another_worker_do_not_fit_on_the_disk(tmp_path):
    def read(folder):
        count_for_all_workers(folder, 0)
        metrics = Metrics()
        with largest_file(2**18), suppress(OSError):
            count_for_all_workers(folder, 1)
        return "attncache_workers" in metrics.render().decode()

    assert forked(read, tmp_path)()


def test_counts_of_the_engine_go_on_too_and_what_all_workers_share_counts_once(tmp_path):
    def count(folder, number):
        count_for_all_workers(folder, number)
        metrics = Metrics()
        renewals = CounterMetricFamily("attncache_renewals", "of the folder", labels=("result",))
        renewals.add_metric(("published",), 5)
        stalls = CounterMetricFamily("attncache_kv_load_stall_seconds", "of this worker", value=0)
        metrics._engine = SimpleNamespace(collect=lambda: (renewals, stalls))
        for seconds in (1.0, 1.5):
            stalls.samples[0] = stalls.samples[0]._replace(value=seconds)
            asyncio.run(Group(Worker(number, 2, folder), None, metrics)._publish())
        found = samples(metrics.render().decode())
        return found["attncache_renewals_total", "published"], found["attncache_kv_load_stall_seconds_total",]

    started = [forked(count, tmp_path, number)() for number in (0, 1, 1, 0)]
    assert started == [(5, 1.5), (5, 3.0), (5, 4.5), (5, 6.0)]


def test_every_error_status_has_a_metric():
    assert QueueFull.status in STATUSES
    classes = [*vars(errors).values(), *vars(service_errors).values()]
    known = {
        class_.status for class_ in classes if isinstance(class_, type) and issubclass(class_, AttnCacheError)
    }
    assert known <= set(STATUSES)


async def test_requests_change_the_metrics():
    async with serving(FakeEngine(stored={"a"}, prototypes={"b"})) as client:
        await client.post("/embed", json={"inputs": ["a", "bb", "b"]})
        await client.post("/embed", json={"inputs": [CORRUPT]}, headers={"X-AttnCache-Reuse": "off"})
        await client.post("/embed", json={"inputs": []})
        await client.get("/elsewhere")
        values = samples((await client.get("/metrics")).text)
    before = samples(Metrics().render().decode())  # of another app
    expected = {
        ("attncache_requests_total", "/embed", "200"): 2,
        ("attncache_requests_total", "/embed", "400"): 1,
        ("attncache_requests_total", "other", "404"): 1,
        ("attncache_request_seconds_count", "/embed"): 3,
        ("attncache_sequences_total", "hit"): 1,
        ("attncache_sequences_total", "prototype_hit"): 1,
        ("attncache_sequences_total", "miss"): 1,
        ("attncache_sequences_total", "not_searched"): 1,
        ("attncache_similarity_count",): 3,
        ("attncache_tokenize_seconds_count",): 2,
        ("attncache_queue_seconds_count",): 2,
        ("attncache_batch_tokens_sum",): 4 + len(CORRUPT),
        ("attncache_database_corrupt_records_total",): 1,
        ("attncache_database_records",): 7,
        ("attncache_database_bytes",): 4096,
    }
    assert {name: values[name] for name in expected} == expected
    # Every series is there before the first request, without the length groups of a database.
    assert {name: before[name] for name in expected} == dict.fromkeys(expected, 0.0)
    assert {name for name, *_ in values.keys() - before.keys()} == {
        "attncache_threshold",
        "attncache_reuse_off",
    }


async def test_thresholds_of_length_groups_are_there_once_the_engine_is_loaded():
    assert not any(name == "attncache_threshold" for name, *_ in samples(Metrics().render().decode()))
    engine = FakeEngine()
    async with serving(engine) as client:
        loaded = samples((await client.get("/metrics")).text)
        engine.map_reuse.tighten(1)
        tightened = samples((await client.get("/metrics")).text)
    of_groups = ("attncache_threshold", "attncache_reuse_off")
    assert {labels: value for labels, value in loaded.items() if labels[0] in of_groups} == {
        ("attncache_threshold", "stored", "1-8"): 0.9,
        ("attncache_threshold", "prototype", "1-8"): 0.95,
        ("attncache_threshold", "stored", "9-"): 0.9,
        ("attncache_threshold", "prototype", "9-"): 0.95,
        ("attncache_reuse_off", "1-8"): 0,
        ("attncache_reuse_off", "9-"): 0,
    }
    assert tightened["attncache_threshold", "stored", "9-"] == pytest.approx(0.95)
    assert tightened["attncache_threshold", "stored", "1-8"] == 0.9


def test_cosine_that_rounding_takes_beyond_1_is_counted_as_1():
    metrics = Metrics()
    metrics.observe_verified(np.array([1.0000001, 0.99995]))
    values = samples(metrics.render().decode())
    of_buckets = {
        bound: values["attncache_verify_cosine_bucket", bound] for bound in ("0.9999", "1.0", "+Inf")
    }
    assert of_buckets == {"0.9999": 0, "1.0": 2, "+Inf": 2}


async def test_clients_cannot_make_labels():
    async with serving() as client:
        before = len(samples((await client.get("/metrics")).text))
        for number in range(20):
            await client.get(f"/path/{number}")
            await client.request(f"VERB{number}", "/embed")
        text = (await client.get("/metrics")).text
    assert len(samples(text)) == before
    assert not re.search("path|VERB", text)


async def test_routes_beside_inference_are_counted_by_their_paths_without_names_of_clients():
    async with serving(FakeEngine(), model="fake") as client:
        for path in ("/docs", "/openapi.json", "/v1/models", "/v1/models/fake", "/v1/models/Sesam"):
            await client.get(path)
        text = (await client.get("/metrics")).text
    values = samples(text)
    for route in ("/docs", "/openapi.json", "/v1/models", "/v1/models/{model}"):
        assert values["attncache_requests_total", route, "200"] == 1
    assert values["attncache_requests_total", "/v1/models/{model}", "404"] == 1
    assert values["attncache_request_seconds_count", "other"] == 0
    assert "Sesam" not in text


def groups_shown_by_worker(folder, number, databases):
    """Return the length groups that all workers show whenever this worker has changed the database."""
    count_for_all_workers(folder, number)
    metrics, shown = Metrics(), []
    for groups in databases:
        infos = [SimpleNamespace(lengths=lengths, threshold={}, reuses=False) for lengths in groups]
        metrics._engine = SimpleNamespace(collect=lambda infos=infos: _of_length_groups(infos))
        metrics.publish(first=number == 0)
        shown.append(sorted(re.findall(r'reuse_off\{lengths="(.*)"\} 1', metrics.render().decode())))
    return shown


def test_workers_show_no_length_groups_of_a_database_that_served_before(tmp_path):
    before, after = ["1-8"], ["1-4", "5-8"]
    assert forked(groups_shown_by_worker, tmp_path, 0, [before, after])() == [before, after]
    # What one worker shows no more is shown while another worker has it.
    assert forked(groups_shown_by_worker, tmp_path, 1, [before, after])() == [
        sorted([*before, *after]),
        after,
    ]
