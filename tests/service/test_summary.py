"""The summary that a server logs once it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_decoders import write_llama

from attncache_core import AttentionDatabase, Checkpoint, KeyValueOptions, PrefillEngine, require_gain
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.reuse.maps.gain import Gain, MeasuredGain
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
    assert lines["reuse"].startswith("reusing attention maps whether it saves time here or not")


FASTER = Gain(one_text=-0.27, one_text_bound=-0.3, full_batch=0.08, full_batch_bound=0.061)


@pytest.mark.parametrize(
    ("paying", "least_tokens", "begins"),
    [
        ((), 0, "serving exactly: reuse of attention maps would make full batches 8% faster"),
        (
            (0,),
            896,
            "reusing attention maps in batches of at least 896 tokens: it makes full batches 8% faster",
        ),
        ((0,), 0, "reusing attention maps: it makes full batches 8% faster"),
    ],
    ids=["none", "large", "all"],
)
def test_summary_says_what_reuse_saves_and_which_bound_was_compared_with_which_limit(
    tiny_checkpoint: Checkpoint, tiny_database: Path, paying: tuple[int, ...], least_tokens: int, begins: str
) -> None:
    database = AttentionDatabase.open(tiny_database)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    assert engine.map_reuse
    engine.map_reuse.reuse_in(paying, MeasuredGain({}, 0.05, {0: FASTER}, paying, FASTER, 0.05, least_tokens))
    line = lines_of(engine)["reuse"]
    assert line.startswith(begins)
    assert "full batches 8% faster and single texts 27% slower here" in line
    assert "full batches at least +6.1% with 95 % confidence; --min-gain asks for +5.0%" in line


def test_summary_says_that_no_gain_is_known_yet(tiny_checkpoint: Checkpoint, tiny_database: Path) -> None:
    database = AttentionDatabase.open(tiny_database)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    require_gain(engine, 0.05, measure=False)
    assert lines_of(engine)["reuse"] == (
        "serving exactly until it is measured whether reuse of attention maps saves time here"
    )


@pytest.mark.parametrize("on_disk", [False, True])
def test_summary_says_how_many_keys_and_values_are_stored(tmp_path: Path, on_disk: bool) -> None:
    folder = tmp_path / "kv" if on_disk else None
    checkpoint = read_checkpoint(write_llama(tmp_path / "llama"))
    engine = PrefillEngine.load(checkpoint, dtype="float32", key_values=KeyValueOptions(2**22, folder=folder))
    lines = lines_of(engine)
    assert lines["reuse"].startswith("storing keys and values in up to 4 MiB of memory")
    assert ("on disk" in lines["reuse"]) is on_disk
    engine.close()
