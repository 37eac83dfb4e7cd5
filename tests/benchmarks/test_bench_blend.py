"""`benchmarks blend` measures prompts of chunks in any order, and compares them with recomputing."""

import json

import pytest
from click.testing import CliRunner
from command_line import assert_one_line, succeeded

from attncache_core import PrefillEngine, find_checkpoint
from benchmarks.__main__ import main
from benchmarks.measuring.blend import DISK, FIRST_VISIT, MEMORY, methods, random_cases
from benchmarks.papers.blending import PREFIX_CACHING, RECOMPUTED

KEYS = [
    (RECOMPUTED, None),
    ("ratio 0.5", FIRST_VISIT),
    *((name, source) for source in (MEMORY, DISK) for name in (PREFIX_CACHING, "ratio 0", "ratio 1")),
]


@pytest.fixture(scope="module")
def engine(tiny_llama):
    checkpoint = find_checkpoint(str(tiny_llama)).adapted(pooling="lasttoken")
    return PrefillEngine.load(checkpoint, dtype="float32", threads=1)


def run(*arguments: object):
    shared = ["blend", "--threads", "1", "--dtype", "float32", "--rounds", "2"]
    return CliRunner().invoke(main, [*shared, *map(str, arguments)], env={"COLUMNS": "200"})


def test_prompts_are_chunks_of_a_pool_in_another_order(engine):
    cases = random_cases(engine, 6, 3, 8, 5)
    assert [case.sequence for case in cases] == [case.sequence for case in random_cases(engine, 6, 3, 8, 5)]
    pool = {tuple(chunk) for case in cases for chunk in case.chunks}
    assert 3 < len(pool) <= 5
    assert len({tuple(case.sequence.ids[:-5]) for case in cases}) > 1
    assert len({tuple(case.end) for case in cases}) == 6
    for case in cases:
        assert case.sequence.ids[0] == 0
        assert len(case.sequence.ids) == 1 + 3 * 8 + 5
        assert case.sequence.spans == [(1, 9), (9, 17), (17, 25)]


def test_methods_compute_what_their_names_say(engine, tmp_path):
    cases = random_cases(engine, 3, 3, 32, 5)
    chosen = methods(engine, cases, (0.0, 1.0), 0.5, 1 << 22, tmp_path / "kv", 1 << 24)
    assert list(chosen) == KEYS
    for case in cases:
        tokens = {}
        for key, method in chosen.items():
            method.prepare(case)
            tokens[key] = method.run(case).tokens
        for source in (MEMORY, DISK):
            assert tokens[PREFIX_CACHING, source] == 2 * 32 + 5
            assert tokens["ratio 0", source] == 5
            assert tokens["ratio 1", source] == 2 * 32 + 5
        assert tokens[RECOMPUTED, None] == 1 + 3 * 32 + 5
        assert tokens["ratio 0.5", FIRST_VISIT] > 3 * 32 + 5
    for method in chosen.values():
        method.key_values.store.close()


def test_command_reports_every_method(tiny_llama, tmp_path):
    file = tmp_path / "report.json"
    options = ("--chunks", 2, "--chunks", 3, "--chunk-tokens", 20, "--query-tokens", 4, "--ratios", "0,1")
    stored = ("--first-visit-ratio", 0.5, "--memory-bytes", 1 << 22, "--folder", tmp_path, "--json", file)
    shown = succeeded(run("--model", tiny_llama, *options, *stored))
    report = json.loads(file.read_text("utf-8"))
    assert report["machine"]["threads"] == 1
    assert (report["rounds"], report["query_tokens"]) == (2, 4)
    assert report["disk_read_bytes_per_second"] > 0
    assert [(table["chunks"], table["chunk_tokens"]) for table in report["tables"]] == [(2, 20), (3, 20)]
    for table in report["tables"]:
        rows = {(row["method"], row["source"]): row for row in table["rows"]}
        assert list(rows) == KEYS
        for (name, source), row in rows.items():
            assert 0 < row["time_ratio"] <= row["most_time_ratio"]
            assert row["seconds"] > 0
            assert row["computed_tokens"] >= 4
            if name in (RECOMPUTED, PREFIX_CACHING, "ratio 1"):
                assert row["cosine"] == pytest.approx(1, abs=1e-5), source
        assert rows[RECOMPUTED, None]["computed_tokens"] == 1 + 20 * table["chunks"] + 4
        assert rows["ratio 0", MEMORY]["computed_tokens"] == 4
        assert rows["ratio 0", MEMORY]["cosine"] < 0.9999
    assert "prompts of 3 chunks of 20 tokens and a query of 4" in shown
    assert "The disk was read at" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_too_long_prompts_and_other_models_are_refused(tiny_llama, tiny_checkpoint):
    assert_one_line(run("--model", tiny_llama, "--chunks", 8), "2081 tokens", "fewer --chunks")
    assert_one_line(run("--model", tiny_llama, "--ratios", "1.5"), "ratios must be numbers from 0 to 1")
    options = ("--chunks", 2, "--chunk-tokens", 5, "--query-tokens", 3)
    assert_one_line(run("--model", tiny_checkpoint.folder, *options), "bidirectional", "decoder")
