"""`benchmarks blend` measures prompts of chunks in any order, and compares them with recomputing."""

import json

import pytest
from click.testing import CliRunner
from command_line import assert_one_line, succeeded

from benchmarks.__main__ import main
from benchmarks.measuring.blend import DISK, FIRST_VISIT, MEMORY
from benchmarks.papers.blending import PREFIX_CACHING, RECOMPUTED

KEYS = [
    (RECOMPUTED, None),
    ("ratio 0.5", FIRST_VISIT),
    *((name, source) for source in (MEMORY, DISK) for name in (PREFIX_CACHING, "ratio 0", "ratio 1")),
]


def run(*arguments: object):
    shared = ["blend", "--threads", "1", "--dtype", "float32", "--rounds", "1"]
    return CliRunner().invoke(main, [*shared, *map(str, arguments)], env={"COLUMNS": "200"})


def test_command_reports_every_method(tiny_llama, tmp_path, monkeypatch):
    # Whatever the machine's speed, what is stored on disk is loaded.
    monkeypatch.setattr("benchmarks.commands.blend.measured_prefill_speed", lambda _: 0.0)
    file = tmp_path / "report.json"
    options = ("--chunks", 3, "--chunk-tokens", 20, "--query-tokens", 4, "--ratios", "0,1")
    stored = ("--first-visit-ratio", 0.5, "--memory-bytes", 1 << 22, "--folder", tmp_path, "--json", file)
    shown = succeeded(run("--model", tiny_llama, *options, *stored))
    report = json.loads(file.read_text("utf-8"))
    assert report["machine"]["threads"] == 1
    assert (report["rounds"], report["query_tokens"]) == (1, 4)
    assert report["disk_read_bytes_per_second"] > 0
    (table,) = report["tables"]
    assert (table["chunks"], table["chunk_tokens"]) == (3, 20)
    rows = {(row["method"], row["source"]): row for row in table["rows"]}
    assert list(rows) == KEYS
    for (name, source), row in rows.items():
        assert 0 < row["time_ratio"] <= row["most_time_ratio"]
        assert row["seconds"] > 0
        if name in (RECOMPUTED, PREFIX_CACHING, "ratio 1"):
            assert row["cosine"] == pytest.approx(1, abs=1e-5), source
    computed = {key: row["computed_tokens"] for key, row in rows.items()}
    assert computed[RECOMPUTED, None] == 1 + 3 * 20 + 4
    assert computed["ratio 0.5", FIRST_VISIT] > 3 * 20 + 4
    for source in (MEMORY, DISK):
        assert computed["ratio 0", source] == 4
        assert computed[PREFIX_CACHING, source] == computed["ratio 1", source] == 2 * 20 + 4
    assert rows["ratio 0", MEMORY]["cosine"] < 0.9999
    assert "prompts of 3 chunks of 20 tokens and a query of 4" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_too_long_prompts_and_other_models_are_refused(tiny_llama, tiny_checkpoint):
    assert_one_line(run("--model", tiny_llama, "--chunks", 8), "2081 tokens", "fewer --chunks")
    assert_one_line(run("--model", tiny_llama, "--ratios", "1.5"), "ratios must be numbers from 0 to 1")
    options = ("--chunks", 2, "--chunk-tokens", 5, "--query-tokens", 3)
    assert_one_line(run("--model", tiny_checkpoint.folder, *options), "bidirectional", "decoder")
