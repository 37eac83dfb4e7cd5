"""A short soak: a server process at full load while clients, files and keys misbehave.

`make soak` takes ten minutes, and makes a table and a plot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
from raw_http import served

from attncache_core import PrefillEngine
from attncache_core.checkpoints.checkpoint import Checkpoint
from benchmarks.soak.clients import Clients, Record
from benchmarks.soak.report import Report, Sample
from benchmarks.soak.run import soak
from benchmarks.soak.texts import ask_idle, make_texts

TEXTS = make_texts(60, longest=40, seed=16)


def test_server_survives_a_short_soak(
    tiny_checkpoint: Checkpoint, tiny_database: Path, tmp_path: Path
) -> None:
    model = ["--model", str(tiny_checkpoint.folder), "--dtype", "float32", "--threads", "1"]

    report = soak(tiny_database, TEXTS, seconds=5, clients=8, serve=model)

    assert not report.problems, report.table()
    asked = {path for path, status in report.record.statuses if status == 200}
    assert asked == {"/embed", "/v1/embeddings", "/classify", "/similarity", "/rerank", "/tokenize"}
    assert report.record.hits > 0
    assert report.record.left > 0
    assert report.record.codes.keys() >= {"malformed_body"}, report.record.codes
    assert report.disturbances["change keys"] > 0
    assert report.disturbances.total() > report.disturbances["change keys"]
    report.plot(tmp_path / "soak.png")


def test_other_answers_than_the_idle_ones_are_found(tiny_engine: PrefillEngine) -> None:
    with served(tiny_engine) as server:
        host, port = server.addresses[0][:2]
        record = asyncio.run(ask_with_wrong_expectations(f"http://{host}:{port}"))

    assert record.least_cosine < 0.99
    for path in ("/embed", "/v1/embeddings", "/classify", "/similarity", "/rerank", "/tokenize"):
        assert any(path in complaint for complaint in record.wrong), path


def test_memory_that_grows_is_a_problem() -> None:
    seconds = np.arange(600.0)

    assert not report_of(seconds, 400 + 100 * np.minimum(seconds / 200, 1)).problems
    (problem,) = report_of(seconds, 400 + seconds / 5).problems
    assert problem == "memory grew by 80 MiB after the warm-up; 32 are allowed"


def report_of(seconds: np.ndarray, own_mib: np.ndarray) -> Report:
    samples = [Sample(second, mib, 200.0, 20, 0) for second, mib in zip(seconds, own_mib, strict=True)]
    return Report(Record(), samples, Counter())


async def ask_with_wrong_expectations(url: str) -> Record:
    async with aiohttp.ClientSession(url) as client:
        idle = await ask_idle(client, TEXTS)
    others = np.roll(np.arange(len(TEXTS)), 1)
    wrong = replace(
        idle,
        embeddings=idle.embeddings[others],
        scores=1 - idle.scores,
        ids=[idle.ids[number] for number in others],
    )
    clients = Clients(url, wrong, key="none", seed=2)
    await clients.run(8, seconds=2)
    return clients.record
