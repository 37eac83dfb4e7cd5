"""`sessions`: measure conversations that grow by a turn."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from attncache_core import Checkpoint, PrefillEngine
from attncache_core.checkpoints.checkpoint import Dtype
from attncache_core.runtime.threads import available_processors
from benchmarks.commands.blend import folder_option
from benchmarks.measuring import sessions as bench
from benchmarks.measuring.conversations import (
    Conversations,
    Simulated,
    Turn,
    draw_turns,
    max_at_once,
    simulate,
    waiting,
)
from benchmarks.measuring.stores import layout_of, measured_prefill_speed, read_bytes_per_second
from benchmarks.papers.eviction import EVICTION
from service.commands.options import json_option, whole_model_options
from service.commands.progress import shown_progress
from service.commands.report import machine, machine_and_model, show_machine, show_table, write_json


@click.command("sessions")
@whole_model_options
@click.option(
    "--sessions",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of conversations.",
)
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    default=(0.5,),
    show_default=True,
    help="Conversations λ that begin per second. May be repeated, for one table each.",
)
@click.option(
    "--turns",
    type=click.FloatRange(min=1),
    default=5.75,
    show_default=True,
    help="Turns of a conversation, on average.",
)
@click.option(
    "--turn-tokens",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Tokens of a turn, on average.",
)
@click.option(
    "--uniform",
    is_flag=True,
    help="Give every conversation the average number of turns, rounded, and every turn the average length.",
)
@click.option(
    "--think-seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Seconds between two turns of a conversation, on average.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Tokens of the longest prompt; a conversation ends before. At most what the model accepts.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the conversations.")
@click.option(
    "--policy",
    "policies",
    type=click.Choice(list(EVICTION)),
    multiple=True,
    help="Eviction policy to measure. May be repeated. Default: all policies.",
)
@click.option(
    "--memory-share",
    type=click.FloatRange(min=0, min_open=True),
    default=0.25,
    show_default=True,
    help="Size of the memory tier, as a share of the most that the conversations need at one time.",
)
@click.option(
    "--disk-share",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Size of the disk tier, as a share of the same.",
)
@folder_option
@click.option(
    "--simulate",
    "simulated",
    is_flag=True,
    help="Replay the trace with stores of whole conversations of equal size, without a model.",
)
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    default=1000.0,
    show_default=True,
    help="Speed that decides how many turns wait with --simulate.",
)
@json_option
def bench_sessions(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    sessions: int,
    rates: tuple[float, ...],
    turns: float,
    turn_tokens: int,
    uniform: bool,
    think_seconds: float,
    context: int,
    seed: int,
    policies: tuple[str, ...],
    memory_share: float,
    disk_share: float,
    folder: Path | None,
    simulated: bool,
    tokens_per_second: float,
    json_file: Path | None,
) -> None:
    """Measure conversations: time to answer, throughput and hit rate of every eviction policy.

    Conversations begin as a Poisson process; a turn's prompt is the whole conversation so far. All stores run
    the same turns, with memory only and with a disk tier. The queue of waiting turns is known to a store,
    which look-ahead eviction uses. Times of arrival are simulated, times of computing are measured.
    """
    drawn = Conversations(
        sessions, rates[0], turns, turn_tokens, think_seconds, context, uniform=uniform, seed=seed
    )
    policies = policies or tuple(EVICTION)
    if simulated:
        facts: dict[str, Any] = dict(machine(threads or available_processors()))
        show_machine(facts)
        tables = [
            _simulate(replace(drawn, rate=rate), policies, memory_share, disk_share, tokens_per_second)
            for rate in rates
        ]
    else:
        engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
        layout_of(engine)
        if checkpoint.position_limit:
            drawn = replace(drawn, context=min(context, checkpoint.position_limit))
        facts = machine_and_model(engine)
        show_machine(facts)
        tables = [
            _measure(engine, replace(drawn, rate=rate), policies, memory_share, disk_share, folder)
            for rate in rates
        ]
    write_json(json_file, {"machine": facts, "conversations": asdict(drawn), "rates": tables})


def _simulate(
    drawn: Conversations,
    policies: Sequence[str],
    memory_share: float,
    disk_share: float,
    tokens_per_second: float,
) -> dict[str, Any]:
    """Replay a trace with every policy, print the table and return the report."""
    turns = draw_turns(drawn)
    queue = waiting(turns, tokens_per_second)
    most = max_at_once(turns, lambda _tokens: 1)
    memory, disk = (max(1, round(share * most)) for share in (memory_share, disk_share))
    rows = [simulate(turns, queue, memory, size, policy) for policy in policies for size in (0, disk)]
    show_table(
        f"{_described(drawn, turns)}; {memory} conversations in memory, {disk} on disk; at most {max(queue)} "
        "turns wait",
        ["store", "hits in memory", "on disk", "all", "fetched", "demoted", "dropped"],
        [_simulated_cells(row) for row in rows],
    )
    return {
        "rate": drawn.rate,
        "turns": len(turns),
        "memory_sessions": memory,
        "disk_sessions": disk,
        "most_waiting": max(queue),
        "rows": [asdict(row) for row in rows],
    }


def _measure(
    engine: PrefillEngine,
    drawn: Conversations,
    policies: Sequence[str],
    memory_share: float,
    disk_share: float,
    folder: Path | None,
) -> dict[str, Any]:
    """Run a trace on every store, print the table and return the report."""
    turns = draw_turns(drawn)
    whole = bench.store_bytes(engine, turns)
    memory, disk = int(memory_share * whole), int(disk_share * whole)
    with (
        tempfile.TemporaryDirectory(prefix="attncache-bench-", dir=folder) as temporary,
        shown_progress() as progress,
    ):
        read_speed = read_bytes_per_second(Path(temporary))
        speed = measured_prefill_speed(engine)
        chosen = bench.runners(engine, policies, memory, disk, Path(temporary), speed)
        rows = bench.measure(chosen, turns, int(engine.checkpoint.config["vocab_size"]), progress)
    tiers = f"{memory / 1e6:,.0f} MB of memory, {disk / 1e6:,.0f} MB of disk"
    show_table(
        f"{_described(drawn, turns)}; {tiers}",
        [
            "store",
            "hits in memory",
            "on disk",
            "whole",
            "p50, s",
            "p95, s",
            "tokens/s",
            "speed-up",
            "waiting",
            "difference",
            "cosine",
        ],
        [_measured_cells(row) for row in rows],
    )
    click.echo(f"The disk was read at {read_speed / 1e6:,.0f} MB/s.")
    return {
        "rate": drawn.rate,
        "turns": len(turns),
        "memory_bytes": memory,
        "disk_bytes": disk,
        "disk_read_bytes_per_second": read_speed,
        "rows": [asdict(row) for row in rows],
    }


def _described(drawn: Conversations, turns: Sequence[Turn]) -> str:
    later = [turn for turn in turns if turn.history]
    history = sum(turn.history for turn in later) / max(1, len(later))
    return (
        f"{drawn.sessions} conversations of {len(turns) / drawn.sessions:.2f} turns, {drawn.rate:g} begin "
        f"per second, histories of {history:.0f} tokens"
    )


def _simulated_cells(row: Simulated) -> list[str]:
    rates = (row.memory_hit_rate, row.disk_hit_rate, row.memory_hit_rate + row.disk_hit_rate)
    name = f"{row.policy}, memory{' + disk' if row.disk else ''}"
    return [name, *(f"{rate:.3f}" for rate in rates), *map(str, (row.fetches, row.demotions, row.drops))]


def _measured_cells(row: bench.Row) -> list[str]:
    return [
        row.store,
        f"{row.memory_hit_rate:.3f}",
        f"{row.disk_hit_rate:.3f}",
        f"{row.whole_rate:.3f}",
        f"{row.p50_seconds:.3f}",
        f"{row.p95_seconds:.3f}",
        f"{row.tokens_per_second:.0f}",
        f"{row.speed_up:.2f}",
        str(row.most_waiting),
        f"{row.difference:.1e}",
        f"{row.cosine:.6f}",
    ]
