"""Servers follow the generations of their database: between two batches, or not at all if one is damaged."""

import asyncio
import ctypes
import gc
import logging
import os
import random
import re
import shutil
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from core_models import flip
from following import following, publish
from following import serving as serving_database
from running import Clock, until, until_metric

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    DatabaseRefused,
    MachineBusy,
    PrefillEngine,
    build_database,
    fit_classifier,
)
from attncache_core.calibration import gain
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.heads.comparator import Measure
from attncache_core.native import memory
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.maps.publishing import roll_back
from attncache_core.runtime.files import write_whole
from service.loading import engines, renewals
from service.loading.engines import MEASURING_GAIN
from service.observability.metrics import Metrics
from service.state import Pause
from service.upkeep.group import Group, Worker
from service.upkeep.verifier import Verifier

# `make kills` sets 200.
SWAPS = int(os.environ.get("ATTNCACHE_SWAPS", "6"))
MEBIBYTE = 2**20
serving = partial(serving_database, result_memory_bytes=0)
WHILE_MEASURING = Pause(0.0, MEASURING_GAIN)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(renewals, "SECONDS_BETWEEN_LOOKS", 0.01)


@pytest.fixture(scope="module")
def other_mask(tiny_engine, tiny_corpus, tmp_path_factory):
    """A database of half of the corpus, with a smaller mask. Do not change it."""
    folder = tmp_path_factory.mktemp("databases") / "other.db"
    options = BuildOptions(heads="5", threshold=0.0, prototypes=0, training_steps=20)
    build_database(tiny_engine, tiny_corpus[::2], folder, options)
    return folder


async def database_info(client):
    return (await client.get("/info")).json()["database"]


async def until_generation(client, number):
    async with asyncio.timeout(240):
        while (await database_info(client))["generation"] != number:
            await asyncio.sleep(0.005)


async def embed(client, texts):
    return await client.post("/embed", json={"inputs": texts})


def rows(answer):
    assert answer.status_code == 200, answer.text
    return np.array(answer.json(), dtype=np.float32)


def texts_like(corpus, count):
    """Return texts that no database has recorded."""
    return [f"{sentence.text.split()[0]} {sentence.text}" for sentence in corpus[:count]]


def embeddings(checkpoint, database, texts):
    return PrefillEngine.load(checkpoint, database=database, dtype="float32").embed(texts)


def near(one, other):
    return np.abs(one - other).max(axis=-1) < 1e-5


async def test_published_generation_serves_the_next_batch(
    tiny_checkpoint, tiny_corpus, tiny_database, tiny_prototypes_database, root, caplog
):
    caplog.set_level(logging.INFO)
    texts = texts_like(tiny_corpus, 20)
    expected = [
        embeddings(tiny_checkpoint, AttentionDatabase.open(folder), texts)
        for folder in (tiny_database, tiny_prototypes_database)
    ]
    assert not near(*expected).all()
    async with serving(tiny_checkpoint, root) as client:
        before = rows(await embed(client, texts))
        publish(root, tiny_prototypes_database)
        await until_generation(client, 1)
        after = rows(await embed(client, texts))
        info = await database_info(client)
        metrics = (await client.get("/metrics")).text
        roll_back(root)
        await until_generation(client, 0)
        again = rows(await embed(client, texts))
    for answer, oracle in ((before, expected[0]), (after, expected[1]), (again, expected[0])):
        assert near(answer, oracle).all()
    assert info["renewals"] == {"published": 1, "refused": 0, "no_gain": 0, "rolled_back": 0}
    assert info["last_renewal"]["result"] == "published"
    assert "attncache_database_generation 1.0" in metrics
    assert 'attncache_renewals_total{result="published"} 1.0' in metrics
    assert float(re.search(r"^attncache_database_age_seconds (\S+)", metrics, re.MULTILINE)[1]) > 0
    assert "generation 1 serves from now on, instead of generation 0" in caplog.text
    assert "generation 0 serves from now on, instead of generation 1" in caplog.text


async def test_generation_of_equal_heads_shares_the_model_and_another_one_loads_it(
    tiny_checkpoint, tiny_database, tiny_prototypes_database, other_mask, root
):
    loaded = following(tiny_checkpoint, root)
    engines = []
    for built in (tiny_prototypes_database, other_mask, tiny_database):
        engines.append(next(engine for engine in loaded if isinstance(engine, PrefillEngine)))
        publish(root, built)
    engines.append(next(engine for engine in loaded if isinstance(engine, PrefillEngine)))
    assert [engine.map_reuse.database.generation.number for engine in engines] == [0, 1, 2, 3]
    assert engines[0].model is engines[1].model
    assert len({id(engine.model) for engine in engines}) == 3
    assert len({engine.fingerprint for engine in engines}) == 1
    with pytest.raises(ValueError, match="packed again"):
        engines[0].with_database(engines[2].map_reuse.database)


async def test_generation_of_another_mask_brings_no_other_classifier_and_is_tried_again(
    tiny_checkpoint, other_mask, root, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(renewals, "_RETRY_SECONDS", 0.01)
    fingerprint, random = tiny_checkpoint.embedding_fingerprint(), np.random.default_rng(1)
    vectors = random.normal(size=(6, 32)).astype(np.float32)
    for labels in (["a", "b"], ["c", "d"]):
        made = fit_classifier(vectors, labels * 3, fingerprint=fingerprint, model="tiny")
        made.save(tmp_path / labels[0])
    loaded = following(tiny_checkpoint, root, classifier=tmp_path / "a")
    first = next(engine for engine in loaded if isinstance(engine, PrefillEngine))
    shutil.copytree(tmp_path / "a", tmp_path / "kept")
    shutil.copytree(tmp_path / "c", tmp_path / "a", dirs_exist_ok=True)
    publish(root, other_mask)
    for _ in range(4):
        assert isinstance(next(loaded), Pause)
        time.sleep(0.05)
    assert caplog.text.count("generation 1 cannot be used: the files of the classifier were changed") == 1
    shutil.copytree(tmp_path / "kept", tmp_path / "a", dirs_exist_ok=True)
    last = next(engine for engine in loaded if isinstance(engine, PrefillEngine))
    assert last.map_reuse.database.generation.number == 1
    assert last.decisions.labels == first.decisions.labels == ("a", "b")


async def test_generation_of_a_model_that_was_replaced_meanwhile_is_refused(
    tiny_checkpoint, tiny_corpus, root, tmp_path, caplog
):
    folder = Path(shutil.copytree(tiny_checkpoint.folder, tmp_path / "model"))
    loaded = following(read_checkpoint(folder), root)
    first = next(engine for engine in loaded if isinstance(engine, PrefillEngine))
    named, opened = first.fingerprint, first.map_reuse.database
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    new = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    options = BuildOptions(heads=str(opened.mask.total), threshold=0.0, prototypes=0, training_steps=20)
    build_database(new, tiny_corpus, tmp_path / "new.db", options)
    publish(root, tmp_path / "new.db")
    assert isinstance(next(loaded), Pause)
    assert isinstance(next(loaded), Pause)
    assert "generation 1 cannot be used: " in caplog.text
    assert replace(first, strategy=None).fingerprint == named != new.fingerprint


async def test_step_of_another_server_is_adopted_though_nothing_is_verified(tiny_checkpoint, root):
    manifest = AttentionDatabase.open(root).manifest
    replace(manifest, policy=replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))).write(root)
    async with serving(tiny_checkpoint, root, verify_rate=0.0) as client:
        other = MapReuse(AttentionDatabase.open(root))
        other.tighten(0)
        other.keep_verified({})
        async with asyncio.timeout(240):
            while (await database_info(client))["policy"]["groups"][0]["tightened"] != 1:
                await asyncio.sleep(0.005)


async def test_each_answer_is_of_one_generation_or_exact_while_batches_tightening_and_swaps_interleave(
    tiny_checkpoint, tiny_corpus, tiny_database, other_mask, root
):
    texts = texts_like(tiny_corpus, 40)
    known = [
        embeddings(tiny_checkpoint, None, texts),
        embeddings(tiny_checkpoint, AttentionDatabase.open(tiny_database), texts),
        embeddings(tiny_checkpoint, AttentionDatabase.open(other_mask), texts),
    ]
    chance, seen, ended = random.Random(0), set(), asyncio.Event()
    async with serving(tiny_checkpoint, root) as client:
        state = client._transport.app.state.service

        async def ask():
            while not ended.is_set():
                chosen = chance.sample(range(len(texts)), chance.randint(1, 20))
                answer = rows(await embed(client, [texts[index] for index in chosen]))
                of = [near(answer, oracle[chosen]) for oracle in known]
                assert np.any(of, axis=0).all()
                seen.update(np.flatnonzero(np.any(of, axis=1)).tolist())

        async def tighten():
            while not ended.is_set():
                reuse = state.serving().engine.map_reuse
                if chance.random() < 0.5:
                    await asyncio.to_thread(reuse.tighten, 0)
                await asyncio.sleep(0.02)

        async def swap():
            for number in range(SWAPS):
                built = (other_mask, tiny_database)[number % 2]
                published = await asyncio.to_thread(publish, root, built)
                await until_generation(client, published)
                await asyncio.sleep(0.05)
            await until(lambda: 0 in seen)  # the last generation is tightened so far that an answer is exact
            ended.set()

        await asyncio.gather(ask(), ask(), tighten(), swap())
    assert seen == {0, 1, 2}


def open_files():
    return len(os.listdir("/proc/self/fd"))


def own_memory():
    """The bytes that the process has allocated, without what the C library keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    content = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Anonymous:\s+(\d+)", content)[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_many_swaps_under_load_fail_no_request_and_leave_no_file_open(
    tiny_checkpoint, tiny_corpus, tiny_database, tiny_prototypes_database, root, monkeypatch
):
    # Mappings that generations share are given back when the last of these has gone, sooner if small.
    monkeypatch.setattr(memory, "_SHARED_BYTES", 2 * MEBIBYTE)
    monkeypatch.setattr(memory, "_pages", memory._SharedPages())
    texts, ended = texts_like(tiny_corpus, 40), asyncio.Event()
    figures, segments = [], []

    def held():
        """Return of how many generations an engine, or a batch that still runs, holds segments."""
        return sum(any(segment() is not None for segment in of_one) for of_one in segments)

    async with serving(tiny_checkpoint, root, verify_rate=0.2) as client:
        state = client._transport.app.state.service

        async def ask():
            while not ended.is_set():
                assert (await embed(client, random.sample(texts, 10))).status_code == 200

        async def swap():
            for number in range(SWAPS):
                built = (tiny_prototypes_database, tiny_database)[number % 2]
                published = await asyncio.to_thread(publish, root, built)
                gc.collect()
                gc.freeze()  # as service/workers/server.py does for each engine
                await until_generation(client, published)
                present = state.serving().engine.map_reuse.database.search.store.segments
                segments.append(list(map(weakref.ref, present.values())))
                del present
                if number in (SWAPS // 2 - 1, SWAPS - 1):
                    # The last batch of the generation before may still run.
                    await until(lambda: held() == 1)
                    gc.collect()
                    figures.append((open_files(), own_memory()))
            ended.set()

        await asyncio.gather(ask(), ask(), ask(), swap())
        gc.unfreeze()
        gc.collect()
        assert held() == 1
    (files, before), (files_later, after) = figures
    print(f"{SWAPS} swaps: {files} -> {files_later} open files, {after - before:+,} bytes of memory")
    assert files_later - files <= 4
    assert after - before < 16 * MEBIBYTE


# All other damaged files are refused with the same error: tests/reuse/test_database.py.
DAMAGES = {
    "index": lambda folder: flip(next(folder.glob("index/*.faiss")), 0),
    "maps": lambda folder: os.truncate(next(folder.glob("maps/*.maps")), 100),
    "folder": shutil.rmtree,
    "current": lambda folder: (folder.parent.parent / "current").write_bytes(b"q\n"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_generation_that_cannot_be_opened_is_logged_once_and_the_present_one_serves_on(
    tiny_checkpoint, tiny_corpus, tiny_database, tiny_prototypes_database, root, caplog, tmp_path, damage
):
    texts = texts_like(tiny_corpus, 10)
    expected = embeddings(tiny_checkpoint, AttentionDatabase.open(tiny_database), texts)
    damaged = Path(shutil.copytree(root, tmp_path / "damaged.db"))
    publish(damaged, tiny_prototypes_database)
    DAMAGES[damage](damaged / "generations" / "000001")
    async with serving(tiny_checkpoint, root) as client:
        if (damaged / "generations").exists():
            shutil.copytree(damaged / "generations", root / "generations")
        write_whole(root / "current", (damaged / "current").read_bytes())
        await until(lambda: "generation 0 serves on" in caplog.text)
        await asyncio.sleep(0.1)  # ten looks
        assert near(rows(await embed(client, texts)), expected).all()
        assert (await database_info(client))["generation"] == 0
        assert caplog.text.count("serves on") == 1
        assert "Traceback" not in caplog.text
        # The operator mends what is damaged: the next generation is tried.
        (root / "current").unlink()
        shutil.rmtree(root / "generations", ignore_errors=True)
        await asyncio.sleep(0.05)
        publish(root, tiny_prototypes_database)
        await until_generation(client, 1)


async def test_findings_of_the_generation_before_are_kept_with_it(
    tiny_checkpoint, tiny_corpus, tiny_engine, tiny_prototypes_database, tmp_path
):
    root = tmp_path / "a.db"
    options = BuildOptions(heads="all", min_cosine=0.3, min_text_cosine=0.0, prototypes=4, training_steps=10)
    build_database(tiny_engine, tiny_corpus, root, options)
    texts = texts_like(tiny_corpus, 15)
    async with serving(tiny_checkpoint, root, verify_rate=1) as client:
        answer = await embed(client, texts)
        hits = int(answer.headers["X-AttnCache-Hits"].split("/")[0])
        assert 0 < hits < 16  # findings about more hits are kept at once
        await until_metric(client, hits, "attncache_verify_cosine_count")
        before = (root / "tightened.json").read_bytes()
        publish(root, tiny_prototypes_database)
        await until_generation(client, 1)
        await until(lambda: (root / "tightened.json").read_bytes() != before)
    assert not (root / "generations" / "000001" / "tightened.json").exists()


async def test_workers_share_findings_of_one_policy_only(
    tiny_checkpoint, tiny_database, tiny_prototypes_database, tmp_path
):
    calibrated = Path(shutil.copytree(tiny_database, tmp_path / "calibrated.db"))
    manifest = AttentionDatabase.open(calibrated).manifest
    # A calibration keeps the id.
    replace(manifest, policy=replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))).write(calibrated)

    def verifier(folder):
        engine = PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(folder), dtype="float32")
        return Verifier(engine, 1.0, Metrics())

    groups = []
    for number, folder in enumerate((tiny_database, tiny_database, tiny_prototypes_database, calibrated)):
        worker = Worker(number, 4, tmp_path)
        groups.append(Group(worker, worker.store("shared"), Metrics()))
        groups[-1].verifier = verifier(folder)
    groups[0].verifier.follow([2, 0])
    for group in groups:
        await group._share_findings()
    assert [group.verifier.steps()[0] for group in groups] == [2, 2, 0, 0]


async def test_watching_ends_with_the_app(tiny_checkpoint, root):
    before = set(threading.enumerate())
    async with serving(tiny_checkpoint, root):
        (watching,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "load")
    watching.join(30)  # less than the wait before a generation that failed is tried again
    assert not watching.is_alive()


@pytest.fixture
def gain_of(monkeypatch):
    """A dictionary: generation -> what measures its gain."""
    measures = {}

    def require_gain(engine, *_, measure=True, **how):
        number = engine.map_reuse.database.generation.number
        engine.map_reuse.awaits_gain = number in measures
        if measure:
            measures[number](how["idle_mark"])
            engine.map_reuse.awaits_gain = False

    monkeypatch.setattr(engines, "require_gain", require_gain)
    monkeypatch.setattr(renewals, "require_gain", require_gain)
    return measures


def busy(*_):
    raise MachineBusy("others compute")


@pytest.mark.parametrize("number", [0, 1], ids=["at the start", "of the next generation"])
def test_gain_is_measured_ever_more_rarely_while_the_machine_is_busy_and_looks_go_on(
    tiny_checkpoint, tiny_prototypes_database, root, monkeypatch, gain_of, number
):
    clock, measured_at, adopted_at = Clock(), [], []
    monkeypatch.setattr(renewals, "SECONDS_BETWEEN_LOOKS", 20.0)
    monkeypatch.setattr(renewals, "time", SimpleNamespace(monotonic=clock))

    def measure(idle_mark):
        assert idle_mark() == first.runs.idle_mark()
        measured_at.append(clock())
        if len(measured_at) < 9:
            busy()

    gain_of[number] = measure
    loaded = following(tiny_checkpoint, root)
    first = next(loaded)
    monkeypatch.setattr(first.map_reuse, "adopt_findings", lambda: adopted_at.append(clock()))
    if number:
        publish(root, tiny_prototypes_database)
    lines = []
    while len(measured_at) < 9:
        found = next(loaded)
        if isinstance(found, Pause):
            clock.seconds += found.seconds
        else:
            lines.append(found)
    assert np.diff(measured_at).tolist() == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    waits = np.diff(adopted_at)
    assert waits.max() <= 20
    assert lines[0] == MEASURING_GAIN
    assert lines[1] == (
        f"others compute: maps of generation {number} are not reused, and the gain is measured again in 1 min"
    )
    # The next generation serves once its gain is known, which may be found with the last look.
    followed = chain(lines[-1:], loaded) if number else [first]
    engine = next(found for found in followed if isinstance(found, PrefillEngine))
    assert engine.map_reuse.database.generation.number == number
    assert not any(isinstance(found, PrefillEngine) for found in lines[:-1])


def test_generation_is_followed_before_the_gain_of_the_first_one_is_known(
    tiny_checkpoint, tiny_prototypes_database, root, gain_of
):
    gain_of[0] = busy
    loaded = following(tiny_checkpoint, root)
    assert next(loaded).map_reuse.awaits_gain
    publish(root, tiny_prototypes_database)
    second = next(engine for engine in loaded if isinstance(engine, PrefillEngine))
    assert second.map_reuse.database.generation.number == 1


def test_looks_go_on_while_a_measurement_waits_for_requests(tiny_checkpoint, root, gain_of):
    may_measure, adopted = threading.Event(), []
    gain_of[0] = lambda _: may_measure.wait()
    loaded = following(tiny_checkpoint, root)
    reuse = next(loaded).map_reuse
    reuse.adopt_findings = lambda: adopted.append(True)
    assert [next(loaded) for _ in range(3)] == [MEASURING_GAIN, WHILE_MEASURING, WHILE_MEASURING]
    assert len(adopted) == 2
    may_measure.set()
    assert next(found for found in loaded if found != WHILE_MEASURING) == Pause(0.01)
    assert not reuse.awaits_gain


def test_measurement_that_waits_for_requests_ends_when_another_generation_is_current(
    tiny_checkpoint, tiny_prototypes_database, root, monkeypatch, gain_of
):
    gain_of[0] = lambda _: None
    loaded = following(tiny_checkpoint, root)
    next(loaded)
    ended = threading.Event()

    def wait_until_idle(_engine, _min_gain, idle_mark):
        try:
            while True:
                idle_mark()
                time.sleep(0.001)
        finally:
            ended.set()

    monkeypatch.setattr(renewals, "require_gain", wait_until_idle)
    assert [next(loaded), next(loaded)] == [MEASURING_GAIN, WHILE_MEASURING]
    publish(root, tiny_prototypes_database)
    second = next(engine for engine in loaded if isinstance(engine, PrefillEngine))
    assert second.map_reuse.database.generation.number == 1
    assert ended.is_set()


def test_gain_is_measured_while_a_generation_that_cannot_be_used_is_current(
    tiny_checkpoint, tiny_prototypes_database, root, monkeypatch, gain_of
):
    def refuse(*_):
        raise DatabaseRefused("of another model", field="database")

    monkeypatch.setattr(renewals, "_of_current_generation", refuse)
    gain_of[0] = lambda _: None
    loaded = following(tiny_checkpoint, root)
    reuse = next(loaded).map_reuse
    publish(root, tiny_prototypes_database)
    for _ in range(10):
        next(loaded)
    assert not reuse.awaits_gain


def test_error_of_the_first_measurement_turns_reuse_off_and_following_goes_on(
    tiny_checkpoint, tiny_prototypes_database, root, gain_of, caplog
):
    gain_of[0] = lambda _: 1 / 0
    loaded = following(tiny_checkpoint, root)
    first = next(loaded)
    for _ in range(5):
        next(loaded)
    assert first.map_reuse.reuse_off == ["the gain of reuse cannot be measured; the log says why"]
    assert not any(group.reuses for group in first.map_reuse.info().policy.groups)
    assert "division by zero" in caplog.text
    publish(root, tiny_prototypes_database)
    second = next(engine for engine in loaded if isinstance(engine, PrefillEngine))
    assert second.map_reuse.database.generation.number == 1


def test_group_that_is_tightened_while_its_gain_is_measured_does_not_pay(tiny_checkpoint, root, monkeypatch):
    def measure(timing, traffic, *_):
        timing.engine.map_reuse.tighten(0)
        return SimpleNamespace(paying=tuple(traffic.hit_rates), least_tokens=0, groups={})

    monkeypatch.setattr(gain, "measure_gain", measure)
    monkeypatch.setattr(gain, "_kept_gain", lambda *_: None)
    engine = next(following(tiny_checkpoint, root))
    gain.require_gain(engine, 0.05)
    assert not engine.map_reuse.awaits_gain
    assert not engine.map_reuse.reuses(0)


def test_generation_that_is_taken_back_while_its_gain_is_measured_does_not_serve(
    tiny_checkpoint, tiny_prototypes_database, root, monkeypatch, caplog
):
    def take_back(engine, _, idle_mark):  # noqa: ARG001
        roll_back(root)
        engine.map_reuse.awaits_gain = False

    loaded = following(tiny_checkpoint, root)
    next(loaded)
    monkeypatch.setattr(renewals, "require_gain", take_back)
    monkeypatch.setattr(
        renewals, "prepare_reuse", lambda engine, _: setattr(engine.map_reuse, "awaits_gain", True)
    )
    assert next(loaded) == Pause(0.01)
    publish(root, tiny_prototypes_database)
    looks = (found for found in loaded if found != WHILE_MEASURING)
    assert [next(looks) for _ in range(3)] == [MEASURING_GAIN, Pause(0.01), Pause(0.01)]
    assert not caplog.messages  # neither an error nor a generation that serves from now on


def test_unexpected_error_of_a_measurement_does_not_end_the_following(
    tiny_checkpoint, tiny_prototypes_database, root, monkeypatch, caplog
):
    loaded = following(tiny_checkpoint, root)
    next(loaded)
    with monkeypatch.context() as patch:
        patch.setattr(
            renewals, "prepare_reuse", lambda engine, _: setattr(engine.map_reuse, "awaits_gain", True)
        )
        patch.setattr(renewals, "require_gain", lambda *_, **__: 1 / 0)
        publish(root, tiny_prototypes_database)
        looks = (found for found in loaded if found != WHILE_MEASURING)
        assert [next(looks) for _ in range(3)] == [Pause(0.01), MEASURING_GAIN, Pause(0.01)]
    assert "generation 1 cannot be used: division by zero; generation 0 serves on" in caplog.text
    publish(root, tiny_prototypes_database)
    assert next(loaded).map_reuse.database.generation.number == 2


def test_generation_that_cannot_be_used_is_tried_again_ever_more_rarely(
    tiny_checkpoint, tiny_prototypes_database, root, monkeypatch
):
    clock, tried_at = Clock(), []
    monkeypatch.setattr(renewals, "SECONDS_BETWEEN_LOOKS", 30.0)
    monkeypatch.setattr(renewals, "time", SimpleNamespace(monotonic=clock))

    def refuse(*_):
        tried_at.append(clock())
        raise DatabaseRefused("of another model", field="database")

    monkeypatch.setattr(renewals, "_of_current_generation", refuse)
    loaded = following(tiny_checkpoint, root)
    next(loaded)
    publish(root, tiny_prototypes_database)
    while len(tried_at) < 9:
        clock.seconds += next(loaded).seconds
    assert np.diff(tried_at).tolist() == [60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_server_that_stores_keys_and_values_keeps_its_heads(tiny_checkpoint, other_mask, root, caplog):
    loaded = following(tiny_checkpoint, root)
    engine = next(loaded)
    object.__setattr__(engine, "key_values", SimpleNamespace())
    publish(root, other_mask)
    assert next(loaded) == next(loaded) == Pause(0.01)
    assert "generation 1 cannot be used: it reuses other heads" in caplog.text
