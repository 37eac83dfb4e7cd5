"""Run batches in a thread while the database's files are damaged, as a process of test_failing_storage.

The process ends with code 0 if the engines answered to the end and every answer was the full model's.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from core_models import attention_by, prefill
from core_reference import SIXTEEN_BITS

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.reuse.maps.database import AttentionDatabase

RECORDS_START = 2 * 4096
BATCHES_AFTER_A_FAULT = 5


def serve_by_all(
    model: Path, folders: dict[str, Path], sequences: list[list[int]], lost: Connection, log: Path
) -> None:
    """Serve with each way of computing, and send the lengths whose segments it lost. log: gets errors."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    for computing, folder in folders.items():
        with attention_by(computing):
            lost.send(lost_lengths(model, folder, sequences))


def lost_lengths(model: Path, folder: Path, sequences: list[list[int]]) -> list[int]:
    database = AttentionDatabase.open(folder, threshold=1.0)
    engine = PrefillEngine.load(read_checkpoint(model), database=database, dtype="float32")
    full = prefill(engine, sequences, reuse=False).outputs
    results, done = [], threading.Event()

    def serve() -> None:
        while not done.is_set():
            results.append(prefill(engine, sequences))

    def scrub() -> None:
        while not done.is_set():
            for _ in database.search.store.scrub(4096):
                pass

    threads = [threading.Thread(target=work) for work in (serve, scrub)]
    for thread in threads:
        thread.start()

    def wait_for_batches() -> None:
        enough = len(results) + BATCHES_AFTER_A_FAULT
        while len(results) < enough:
            assert threads[0].is_alive()
            time.sleep(0.001)

    for fault in (overwrite, cut_behind_a_record, replace, cut, delete):
        wait_for_batches()
        fault(folder / "maps")
    wait_for_batches()
    done.set()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_allclose(result.outputs, full, atol=SIXTEEN_BITS)
    return sorted(length for result in results for length in result.report.lost_lengths)


def overwrite(maps: Path) -> None:
    with (maps / "00005.maps").open("r+b") as file:
        file.seek(RECORDS_START)
        file.write(np.full(40 * 2048, 0.5, dtype=np.float16).tobytes())


def cut_behind_a_record(maps: Path) -> None:
    os.truncate(maps / "00006.maps", RECORDS_START + 4096)


def replace(maps: Path) -> None:
    path = maps / "00007.maps"
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def cut(maps: Path) -> None:
    os.truncate(maps / "00008.maps", 0)


def delete(maps: Path) -> None:
    shutil.rmtree(maps.parent)
