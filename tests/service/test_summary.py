"""The summary that a server logs once it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_decoders import write_llama

from attncache_core import AttentionDatabase, Checkpoint, KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from service.commands.summary import summary
from service.settings import read_settings


def lines_of(engine: PrefillEngine, **settings: object) -> dict[str, str]:
    """Return the lines of the summary by their first word."""
    lines = summary(engine, read_settings(settings), ["http://127.0.0.1:1", "unix:/run/a"])
    return {word: rest.strip() for word, _, rest in (line.partition(" ") for line in lines)}


def test_summary_names_model_processor_limits_and_address(tiny_engine: PrefillEngine) -> None:
    lines = lines_of(tiny_engine, max_batch_tokens=2048, max_body_bytes=2**19)
    assert lines["model"].startswith(f"tiny-bert (fingerprint {tiny_engine.fingerprint[:12]}): task embed")
    assert f"up to {tiny_engine.max_tokens} tokens" in lines["model"]
    assert lines["computes"].startswith(f"in float32 on cpu, {tiny_engine.threads} threads, by ")
    assert lines["database"] == "none"
    assert lines["reuse"] == "serving exactly: there is no database"
    assert "batch 2,048 tokens" in lines["limits"]
    assert "0.5 MiB" in lines["limits"]
    assert lines["serves"] == "http://127.0.0.1:1, unix:/run/a"


def test_summary_names_the_database_and_what_reuse_does(
    tiny_checkpoint: Checkpoint, tiny_database: Path
) -> None:
    database = AttentionDatabase.open(tiny_database)
    lines = lines_of(PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32"))
    assert lines["database"] == f"{tiny_database} (240 records)"
    assert lines["reuse"].startswith("reusing attention whether it saves time here or not")


@pytest.mark.parametrize("on_disk", [False, True])
def test_summary_says_how_many_keys_and_values_are_stored(tmp_path: Path, on_disk: bool) -> None:
    folder = tmp_path / "kv" if on_disk else None
    checkpoint = read_checkpoint(write_llama(tmp_path / "llama"))
    engine = PrefillEngine.load(checkpoint, dtype="float32", key_values=KeyValueOptions(2**22, folder=folder))
    lines = lines_of(engine)
    assert lines["reuse"].startswith("storing keys and values in up to 4 MiB of memory")
    assert ("on disk" in lines["reuse"]) is on_disk
    engine.close()
