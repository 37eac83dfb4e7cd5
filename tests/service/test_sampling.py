"""A server keeps a sample of the texts that clients ask for, and renews its database from the sample."""

import asyncio
import errno
import logging
import os
import shutil
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from core_models import random_text
from fake_engine import FakeEngine
from fake_engine import serving as serving_fake
from following import following
from following import serving as serving_database
from running import until

from attncache_core import BuildOptions, build_database
from attncache_core.corpus.sample import TextSampler, read_sample, sample_folder
from attncache_core.engine.request import PrefillPart
from attncache_core.reuse.maps.generations import RENEWAL, RENEWALS, Renewal, Result, read_renewals
from service.loading import rebuild, regular_renewals, renewals
from service.loading.regular_renewals import RegularRenewals
from service.observability.metrics import Metrics
from service.settings import Settings
from service.state import Pause
from service.upkeep import sampling
from service.upkeep.sampling import Sampling

BUDGET = {"min_cosine": 0.3, "min_text_cosine": 0.0}
serving = partial(serving_database, sample=True)
OPTIONS = BuildOptions(heads="3", prototypes=4, training_steps=10, **BUDGET)


@pytest.fixture(scope="module")
def built(tiny_engine, tiny_corpus, tmp_path_factory):
    """A database with a low budget. Do not change it."""
    folder = tmp_path_factory.mktemp("databases") / "a.db"
    build_database(tiny_engine, tiny_corpus[::3], folder, OPTIONS)
    return folder


@pytest.fixture
def root(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "a.db"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sampling, "_SECONDS_BETWEEN_LOOKS", 0.005)
    monkeypatch.setattr(sampling, "_SECONDS_BETWEEN_SYNCS", 0.01)
    monkeypatch.setattr(renewals, "SECONDS_BETWEEN_LOOKS", 0.02)


def sampled(root):
    return sorted(tuple(text.token_ids) for text in read_sample(root))


async def test_all_requested_texts_are_sampled_once_hits_and_repeated_ones_too(
    tiny_checkpoint, tiny_engine, tiny_corpus, root
):
    texts = [sentence.text for sentence in tiny_corpus[:6]]  # two of them are recorded
    unlike = ["card card card card card card"]
    async with serving(tiny_checkpoint, root) as client:
        for inputs in (texts, texts[:2], unlike):
            answer = await client.post("/embed", json={"inputs": inputs})
            assert answer.status_code == 200
        await client.post("/v1/embeddings", json={"input": "stolen card"})
        expected = sorted(map(tuple, tiny_engine.tokenize([*texts, *unlike, "stolen card"])))
        await until(lambda: sampled(root) == expected)
        answered = (await client.get("/info")).json()
        assert answered["sample"] == {"texts": 8, "dropped": 0, "problem": None}
        assert "attncache_sample_texts 8.0" in (await client.get("/metrics")).text
    assert sampled(root) == expected


async def test_nothing_is_sampled_of_requests_that_take_no_maps_explanations_and_failed_requests(
    tiny_checkpoint, tiny_engine, root
):
    off = {"X-AttnCache-Reuse": "off"}
    async with serving(tiny_checkpoint, root, admin=True) as client:
        await client.post("/embed", json={"inputs": ["stolen card"]}, headers=off)
        refused = await client.post(
            "/embed", json={"inputs": ["get money", "bank " * 999], "truncate": False}
        )
        assert refused.status_code == 422
        explained = await client.post("/explain", json={"input": "wrong card"})
        assert explained.status_code == 200, explained.text
        labelled = {"inputs": ["late card"], "labels": ["bank account", "late payment"]}
        assert (await client.post("/classify", json=labelled)).status_code == 200
        assert (await client.post("/embed", json={"inputs": ["my card"]})).status_code == 200
        await until(lambda: sampled(root) != [])
    assert sampled(root) == [tuple(tiny_engine.tokenize(["my card"])[0])]


async def test_server_without_the_option_keeps_no_text(tiny_checkpoint, root):
    async with serving(tiny_checkpoint, root, sample=False) as client:
        assert (await client.post("/embed", json={"inputs": ["stolen card"]})).status_code == 200
        assert (await client.get("/info")).json()["sample"] is None
    assert not sample_folder(root).exists()


async def test_api_keys_are_told_apart_and_not_named(tiny_checkpoint, root, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text(f"shop {'a' * 20}\nbank {'b' * 20}\n")
    keys.chmod(0o600)
    async with serving(tiny_checkpoint, root, api_keys=keys) as client:
        for secret in ("a" * 20, "b" * 20):
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await client.post("/embed", json={"inputs": ["stolen card"]}, headers=headers)
            assert answer.status_code == 200, answer.text
        await until(lambda: len(read_sample(root)) == 2)
    assert len({text.client for text in read_sample(root)} - {b""}) == 2
    assert b"shop" not in (sample_folder(root) / "0.log").read_bytes()


async def test_disk_that_fails_stops_sampling_and_nothing_else(tiny_checkpoint, root, monkeypatch, caplog):
    fails, failures = True, 0

    def sync(self, real=TextSampler.sync):
        nonlocal failures
        if fails:
            failures += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self)

    monkeypatch.setattr(TextSampler, "sync", sync)
    monkeypatch.setattr(sampling, "_RETRY_SECONDS", 0.02)
    async with serving(tiny_checkpoint, root) as client:

        async def state():
            return (await client.get("/info")).json()["sample"]

        async with asyncio.timeout(240):
            while (await state())["problem"] is None or (await state())["dropped"] < 3 or failures < 3:
                assert (await client.post("/embed", json={"inputs": ["stolen card"]})).status_code == 200
        assert (await state())["problem"] == "texts cannot be sampled: No space left on device"
        fails = False
        async with asyncio.timeout(240):
            while (await state())["problem"] is not None:
                await client.post("/embed", json={"inputs": ["late payment"]})
        await until(lambda: len(sampled(root)) >= 1)
        assert "attncache_sample_dropped_texts_total 0.0" not in (await client.get("/metrics")).text
    (line,) = [record for record in caplog.records if "cannot be sampled" in record.message]
    assert line.levelno == logging.ERROR
    assert str(root / "sample") in line.message


async def test_sampling_goes_on_in_the_next_database_when_the_present_one_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_RETRY_SECONDS", 0.02)
    root = tmp_path / "a.db"
    root.mkdir()
    kept = Sampling(100, 168.0, Metrics())
    kept.begin(root)
    kept.offer(None, [PrefillPart.of([[1, 2]])])
    await until(lambda: sampled(root) == [(1, 2)])
    root.rename(tmp_path / "aside")
    missing = "texts cannot be sampled: the folder of the database is missing"
    await until(lambda: kept.state.problem == missing)
    assert not root.exists()
    root.mkdir()
    async with asyncio.timeout(240):
        while sampled(root) != [(3, 4)] or kept.state.problem is not None:
            kept.offer(None, [PrefillPart.of([[3, 4]])])
            await asyncio.sleep(0.005)
    kept.close()
    assert sampled(tmp_path / "aside") == [(1, 2)]


async def test_texts_that_could_not_be_written_and_those_of_the_pause_behind_are_counted(
    tmp_path, monkeypatch
):
    def fail(_self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TextSampler, "sync", fail)
    kept = Sampling(100, 168.0, Metrics())
    kept.begin(tmp_path)
    kept.offer(None, [PrefillPart.of([[1, 2], [3, 4]])])
    await until(lambda: kept.state.problem)
    kept.offer(None, [PrefillPart.of([[5, 6]])])
    kept.close()
    assert kept.state.dropped == 3


def test_texts_beyond_the_bound_are_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_MAX_WAITING_TOKENS", 10)
    monkeypatch.setattr(sampling, "_SECONDS_BETWEEN_LOOKS", 3600)  # the thread takes nothing before the end
    kept = Sampling(100, 168.0, Metrics())
    kept.offer(None, [PrefillPart.of([[1, 2]])])  # before it has begun: not a candidate
    kept.begin(tmp_path)
    for number in range(4):
        kept.offer(None, [PrefillPart.of([[1, number, 2], [2, number]])])
    kept.close()
    assert kept.state.dropped == 4
    assert len(sampled(tmp_path)) == 4
    # What the thread has taken waits no longer.
    kept.offer(None, [PrefillPart.of([[1, 2]])])
    assert kept.state.dropped == 4


def test_torn_log_and_texts_of_the_future_are_logged(tmp_path, caplog):
    with closing(TextSampler.open(tmp_path, max_texts=100, half_life_hours=1)) as sampler:
        for number in (5, 6):
            sampler.offer([number, number], None, time.time() + 24 * 3600)
        sampler.sync()
    with (sample_folder(tmp_path) / "0.log").open("ab") as log:
        log.write(b"torn")
    kept = Sampling(100, 168.0, Metrics())
    kept.begin(tmp_path)
    kept.close()
    torn, later = [record.getMessage() for record in caplog.records]
    assert torn.startswith("4 bytes at the end of a log")
    assert later.startswith("2 sampled texts were asked later than now")


def test_pairs_are_not_sampled(tmp_path):
    kept = Sampling(100, 168.0, Metrics())
    kept.begin(tmp_path)
    pair = PrefillPart.of([[1, 2, 3]])
    pair.pairs = [[1, 2, 3]]
    kept.offer(None, [pair, PrefillPart.of([[5, 6]])])
    kept.close()
    assert sampled(tmp_path) == [(5, 6)]


async def test_sessions_are_not_sampled(monkeypatch):
    """A session grows turn by turn, and its texts would stand in the sample many times."""
    sampled = []
    monkeypatch.setattr(Sampling, "offer", lambda _self, _client, parts: sampled.extend(parts))
    engine = FakeEngine()
    engine.map_reuse = None  # its database has no folder
    async with serving_fake(engine, sample=True) as client:
        session = {"session_id": "s", "transcript": ["hello"]}
        assert (await client.post("/embed", json=session)).status_code == 200
        assert sampled == []
        assert (await client.post("/embed", json={"inputs": ["bye"]})).status_code == 200
        assert len(sampled) == 1


def decided(result, hours_ago):
    moment = time.gmtime(time.time() - hours_ago * 3600)
    return Renewal(time.strftime("%Y-%m-%dT%H:%M:%SZ", moment), result, 0, 1, "why")


class Renewing:
    """A process that renews, as RegularRenewals sees it."""

    def __init__(self):
        self.returncode, self.printed, self.killed, self.is_awaited = None, "", False, False

    def ends(self, returncode, printed):
        self.returncode, self.printed = returncode, printed

    def poll(self):
        return self.returncode

    def communicate(self):
        self.is_awaited = True
        return self.printed, None

    def kill(self):
        self.killed = True


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    processes = []

    def start(_settings, job):
        assert job == "renew"
        processes.append(Renewing())
        return processes[-1]

    monkeypatch.setattr(regular_renewals, "start_builder", start)
    return processes


@pytest.fixture
def regular(tmp_path):
    return RegularRenewals(Settings(sample=True, renew_hours=24, database=tmp_path), tmp_path)


def begin_sample(root, hours_ago):
    TextSampler.open(root, max_texts=1000, half_life_hours=1).close()
    moment = time.time() - hours_ago * 3600
    os.utime(sample_folder(root) / "key", (moment, moment))


def write_decision(root, renewal):
    (root / RENEWALS).write_bytes(RENEWAL.dump_json(renewal) + b"\n")


@pytest.mark.parametrize(
    ("sampling_hours", "decided_hours", "due"),
    [
        (None, None, False),
        (23, None, False),
        (25, None, True),
        (99, 23, False),
        (99, 25, True),
        (23, 25, False),
    ],
)
def test_renewal_is_due_after_so_many_hours(tmp_path, regular, started, sampling_hours, decided_hours, due):
    if sampling_hours:
        begin_sample(tmp_path, sampling_hours)
    if decided_hours:
        write_decision(tmp_path, decided(Result.PUBLISHED, decided_hours))
    regular.look()
    regular.look()
    assert len(started) == due


@pytest.mark.parametrize(
    ("result", "said", "seconds", "begun"),
    [
        (Result.REFUSED, "generation 1 is removed, and generation 0 serves on: why", 0, 1),
        (None, "could not be renewed: the newest tenth of the 9 texts has too few", 3601, 2),
        (Result.NO_GAIN, "until the server is started again", 10**10, 1),
    ],
    ids=["refused", "failed", "reuse cannot pay"],
)
def test_one_renewal_runs_at_a_time_and_its_end_says_when_the_next_one_begins(
    tmp_path, regular, started, caplog, monkeypatch, result, said, seconds, begun
):
    caplog.set_level(logging.INFO)
    begin_sample(tmp_path, 99)
    for _ in range(3):
        regular.look()
    assert len(started) == 1
    if result is None:
        started[0].ends(2, "the newest tenth of the 9 texts has too few\n")
    else:
        # Other lines may be those of a library.
        started[0].ends(0, f"loaded\n{RENEWAL.dump_json(decided(result, 0)).decode()}\n")
    if result is Result.REFUSED:
        write_decision(tmp_path, decided(result, 0))
    for _ in range(3):
        regular.look()
    assert said in caplog.text
    assert len(started) == 1
    later = time.time() + seconds
    monkeypatch.setattr(regular_renewals, "time", SimpleNamespace(time=lambda: later))
    regular.look()
    assert len(started) == begun
    regular.close()
    assert started[-1].killed == (begun == 2)
    assert started[-1].is_awaited


def test_clock_that_was_ahead_delays_no_renewal(tmp_path, regular, started, monkeypatch):
    begin_sample(tmp_path, -9999)
    with monkeypatch.context() as patch:
        patch.setattr(regular_renewals, "time", SimpleNamespace(time=lambda: 10**10))
        regular.look()
        started.pop().ends(2, "no memory\n")
        regular.look()
    regular.look()
    assert len(started) == 1


@pytest.mark.parametrize("moment", ["yesterday", "9999-01-01T00:00:00Z"])
def test_damaged_time_of_a_renewal_is_no_obstacle(tmp_path, regular, started, moment):
    begin_sample(tmp_path, 99)
    write_decision(tmp_path, replace(decided(Result.PUBLISHED, 0), time=moment))
    regular.look()
    assert len(started) == 1


@pytest.mark.parametrize("hours", [24, 0.5])
def test_process_that_cannot_be_started_is_tried_again_later(tmp_path, hours, monkeypatch, caplog):
    regular = RegularRenewals(Settings(sample=True, renew_hours=hours, database=tmp_path), tmp_path)
    begin_sample(tmp_path, 99)
    monkeypatch.setattr(regular_renewals, "start_builder", lambda *_: os.open(tmp_path / "absent", 0))
    regular.look()
    regular.look()
    assert caplog.text.count("the database cannot be renewed from its sample") == 1


def test_only_one_worker_renews(tiny_checkpoint, root, started, monkeypatch):
    monkeypatch.setattr(renewals, "SECONDS_BETWEEN_LOOKS", 0.0)
    begin_sample(root, 99)
    for renews in (False, True):
        loaded = following(tiny_checkpoint, root, renews, sample=True, renew_hours=24)
        pauses = 0
        while pauses < 3:
            pauses += isinstance(next(loaded), Pause)
        loaded.close()
        assert len(started) == renews
    assert started[0].killed


async def test_server_renews_its_database_from_what_it_was_asked(tiny_checkpoint, root, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rebuild, "_LOWEST_PRIORITY", 0)  # the test waits for the renewal
    random = np.random.default_rng(5)
    texts = [random_text(random, words) for words in np.repeat(np.arange(4, 8), 65)]
    async with serving(tiny_checkpoint, root, max_request_inputs=400) as client:
        assert (await client.post("/embed", json={"inputs": texts})).status_code == 200
    assert len(sampled(root)) > 230
    begin_sample(root, 99)
    # The process that renews gets the settings without the secret of the store.
    store = {"shared": "valkey://name:password@127.0.0.1:1/0", "shared_uses": "kv"}
    async with serving(tiny_checkpoint, root, renew_hours=24, **store) as client, asyncio.timeout(240):
        while (await client.get("/info")).json()["database"]["last_renewal"] is None:
            assert "could not be renewed" not in caplog.text, caplog.text
            await asyncio.sleep(0.1)
        (renewal,) = read_renewals(root)
        while (await client.get("/info")).json()["database"]["generation"] != (
            renewal.result is Result.PUBLISHED
        ):
            await asyncio.sleep(0.05)
    assert renewal.result in (Result.PUBLISHED, Result.REFUSED)
    assert renewal.measured["held_out"] >= 20
