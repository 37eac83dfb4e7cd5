"""`benchmarks sessions` draws conversations, and runs or replays them with every eviction policy."""

import json
from dataclasses import replace

import numpy as np
import pytest
from command_line import run as run_command
from command_line import succeeded

from attncache_core import PrefillEngine, find_checkpoint
from benchmarks.__main__ import main
from benchmarks.measuring.conversations import (
    Conversations,
    Turn,
    arrived_until,
    draw_turns,
    max_at_once,
    simulate,
    waiting,
)
from benchmarks.measuring.prefix import RECOMPUTED
from benchmarks.measuring.sessions import measure, runners, store_bytes

DRAWN = Conversations(
    sessions=300, rate=1.0, turns=5.75, turn_tokens=100, think_seconds=10.0, context=2048, seed=4
)
STORES = [
    RECOMPUTED,
    *(f"{policy}, memory{disk}" for policy in ("lru", "fifo", "look-ahead") for disk in ("", " + disk")),
]


@pytest.fixture
def engine(tiny_llama):
    """The tiny Llama in float32, for one test."""
    return PrefillEngine.load(find_checkpoint(str(tiny_llama)), dtype="float32", threads=1)


def run(*arguments: object):
    return run_command("sessions", "--threads", 1, *arguments, program=main)


def test_command_measures_every_policy_with_and_without_disk(tiny_llama, tmp_path):
    file = tmp_path / "report.json"
    options = ("--sessions", 3, "--turn-tokens", 20, "--rate", 1, "--rate", 100, "--folder", tmp_path)
    succeeded(run("--model", tiny_llama, "--dtype", "float32", *options, "--json", file))
    report = json.loads(file.read_text("utf-8"))
    assert report["machine"]["dtype"] == "float32"
    assert report["conversations"]["context"] == 512  # the model's
    assert [table["rate"] for table in report["rates"]] == [1, 100]
    assert report["rates"][0]["turns"] == report["rates"][1]["turns"]
    for table in report["rates"]:
        assert [row["store"] for row in table["rows"]] == STORES
        assert 0 < table["memory_bytes"] < table["disk_bytes"]
        asked = {row["computed_tokens"] for row in table["rows"] if row["store"] == RECOMPUTED}
        for row in table["rows"]:
            assert 0 < row["p50_seconds"] <= row["p95_seconds"]
            assert row["difference"] < 1e-5
            assert row["cosine"] > 0.99999
            assert row["memory_hit_rate"] + row["disk_hit_rate"] <= 1
            assert row["computed_tokens"] <= max(asked)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_simulation_is_reproducible_and_needs_no_model(tmp_path):
    reports = []
    for seed in (1, 1, 2):
        file = tmp_path / "report.json"
        succeeded(run("--simulate", "--sessions", 200, "--seed", seed, "--rate", 2, "--json", file))
        reports.append(json.loads(file.read_text("utf-8"))["rates"])
    assert reports[0] == reports[1] != reports[2]
    (table,) = reports[0]
    assert [(row["policy"], row["disk"]) for row in table["rows"]] == [
        (policy, disk) for policy in ("lru", "fifo", "look-ahead") for disk in (False, True)
    ]
    for memory_only, both in zip(table["rows"][::2], table["rows"][1::2], strict=True):
        assert memory_only["disk_hit_rate"] == 0
        assert both["memory_hit_rate"] + both["disk_hit_rate"] >= memory_only["memory_hit_rate"]


def test_turns_are_drawn_as_asked():
    turns = draw_turns(DRAWN)
    assert turns == draw_turns(DRAWN)
    assert turns != draw_turns(replace(DRAWN, seed=5))
    assert [turn.arrival for turn in turns] == sorted(turn.arrival for turn in turns)
    assert len(turns) / DRAWN.sessions == pytest.approx(5.75, rel=0.15)
    assert np.mean([turn.new for turn in turns]) == pytest.approx(100, rel=0.15)
    assert max(turn.tokens for turn in turns) <= 2048
    starts = [turn.arrival for turn in turns if not turn.history]
    assert len(starts) == DRAWN.sessions
    assert max(starts) == pytest.approx(DRAWN.sessions / DRAWN.rate, rel=0.2)
    ends: dict[int, int] = {}
    for turn in turns:
        assert turn.history == ends.get(turn.session, 0)
        ends[turn.session] = turn.tokens
    # Another rate draws the same conversations.
    others = draw_turns(replace(DRAWN, rate=7.0))
    first, second = (
        sorted((turn.session, turn.history, turn.new) for turn in drawn) for drawn in (turns, others)
    )
    assert first == second


def test_uniform_conversations_are_all_alike_and_end_at_the_context():
    uniform = replace(DRAWN, turns=6, turn_tokens=50, uniform=True, sessions=4)
    turns = draw_turns(uniform)
    assert len(turns) == 24
    assert sorted({turn.history for turn in turns}) == [0, 50, 100, 150, 200, 250]
    assert {turn.new for turn in turns} == {50}
    turns = draw_turns(replace(uniform, sessions=1, context=120))
    assert [turn.tokens for turn in turns] == [50, 100]
    (cut,) = draw_turns(replace(uniform, sessions=1, context=30))
    assert cut.tokens == 30


def test_queue_counts_the_turns_that_arrived_before_a_turn_starts():
    turns = [Turn(0, 0.0, 0, 10), Turn(1, 0.5, 0, 10), Turn(2, 0.9, 0, 10), Turn(3, 5.0, 0, 10)]
    # Each turn takes a second: turn 1 starts at 1.0, when turn 2 waits.
    assert waiting(turns, tokens_per_second=10) == [0, 1, 0, 0]
    assert waiting(turns, tokens_per_second=2) == [0, 2, 1, 0]
    assert [arrived_until(turns, time) for time in (-1, 0.5, 4, 9)] == [0, 2, 3, 4]


def test_most_at_once_is_of_sessions_between_their_first_and_last_turns():
    turns = [Turn(0, 0, 0, 10), Turn(1, 1, 0, 7), Turn(0, 2, 10, 5), Turn(2, 3, 0, 20)]
    assert max_at_once(turns, lambda _: 1) == 2
    assert max_at_once(turns, lambda tokens: tokens) == 15 + 7
    assert max_at_once([*turns, Turn(2, 4, 20, 1)], lambda tokens: tokens) == 15 + 7


def test_look_ahead_hits_most_when_many_turns_wait():
    turns = draw_turns(replace(DRAWN, rate=5.0))
    queue = waiting(turns, 1000.0)
    assert max(queue) > 100
    rates = {}
    for policy in ("lru", "fifo", "look-ahead"):
        found = simulate(turns, queue, 10, 40, policy)
        rates[policy] = found.memory_hit_rate + found.disk_hit_rate
        assert found.misses >= DRAWN.sessions
    assert rates["look-ahead"] > max(rates["lru"], rates["fifo"])


def test_stores_with_enough_memory_compute_only_what_is_new(engine, tmp_path):
    turns = draw_turns(replace(DRAWN, sessions=3, turn_tokens=20, context=512))
    most = 4 * store_bytes(engine, turns)
    chosen = runners(engine, ["lru"], most, most, tmp_path)
    rows = {row.store: row for row in measure(chosen, turns, 400, lambda *_: None)}
    assert rows[RECOMPUTED].computed_tokens == sum(turn.tokens for turn in turns)
    for store in ("lru, memory", "lru, memory + disk"):
        row = rows[store]
        assert row.computed_tokens == sum(turn.new for turn in turns)
        assert (row.memory_hit_rate, row.disk_hit_rate, row.whole_rate) == (1, 0, 1)
        assert row.evicted_blocks == 0


def test_disk_gives_what_memory_has_lost(engine, tmp_path):
    turns = draw_turns(replace(DRAWN, sessions=4, turn_tokens=30, context=512))
    whole = store_bytes(engine, turns)
    chosen = runners(engine, ["lru"], whole // 3, 4 * whole, tmp_path)
    rows = {row.store: row for row in measure(chosen, turns, 400, lambda *_: None)}
    memory, both = rows["lru, memory"], rows["lru, memory + disk"]
    assert memory.evicted_blocks > 0
    assert memory.disk_hit_rate == 0
    assert both.disk_hit_rate > 0
    assert memory.memory_hit_rate < both.memory_hit_rate + both.disk_hit_rate <= 1


def test_queue_of_a_store_grows_with_its_rate(engine, tmp_path):
    slow, fast = (
        measure(
            runners(engine, ["look-ahead"], 1 << 20, 1 << 20, tmp_path / str(rate)),
            draw_turns(replace(DRAWN, sessions=3, turn_tokens=20, rate=rate, think_seconds=1 / rate)),
            400,
            lambda *_: None,
        )
        for rate in (1e-3, 1e6)
    )
    assert all(row.most_waiting == 0 for row in slow)
    assert all(row.most_waiting > 0 for row in fast)
