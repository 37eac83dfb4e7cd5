"""`engine`: compare the engine with other engines, and show where its time goes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from attncache_core import InvalidInput, Quantization, find_variant
from attncache_core.checkpoints.checkpoint import Device
from attncache_core.runtime.devices import resolve_device
from attncache_core.runtime.threads import available_processors
from benchmarks.measuring import engine as bench
from benchmarks.measuring.breakdown import Breakdown, break_down
from benchmarks.measuring.peers import GPU_PEERS, PEERS
from service.commands.options import (
    device_option,
    drop_options,
    json_option,
    model_option,
    quantize_options,
    revision_option,
)
from service.commands.progress import shown_progress
from service.commands.report import machine, show_machine, show_table, write_json
from service.loading.checkpoints import quantization_texts

_DEFAULT_PEERS = tuple(name for name in PEERS if not name.startswith("hits, "))


@click.command("engine")
@model_option
@revision_option
@quantize_options
@drop_options
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of every engine. Default: as many as the processor quota allows.",
)
@click.option(
    "--peer",
    "peers",
    type=click.Choice([*PEERS, *GPU_PEERS]),
    multiple=True,
    help='Engine to measure. May be repeated. Default: all engines of the device except "hits, ...".',
)
@device_option
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of timing repetitions; the engines alternate.",
)
@click.option(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with at least 32 texts, or 1,024 for a GPU, one per line, to measure on too. Default: none.",
)
@click.option(
    "--breakdown",
    is_flag=True,
    help="Measure only the stages of one layer and of one request of this engine.",
)
@json_option
def engine(
    model: str,
    revision: str | None,
    quantize: Quantization | None,
    quantize_texts: str | None,
    drop_attention: str,
    drop_block: str,
    threads: int | None,
    peers: tuple[str, ...],
    device: Device,
    rounds: int,
    texts: Path | None,
    breakdown: bool,
    json_file: Path | None,
) -> None:
    """Measure the speed of engines on batches of one length, on one short sentence and on given texts.

    Each engine runs in its own process. With --breakdown, show where AttnCache spends its time, in full and
    on a hit.
    """
    threads, on_gpu = threads or available_processors(), resolve_device(device).type == "cuda"
    try:
        lines = [line for line in texts.read_text("utf-8").splitlines() if line.strip()] if texts else []
    except UnicodeDecodeError as error:
        raise InvalidInput(f"texts: {texts} is not UTF-8; convert it", field="texts") from error
    if on_gpu and breakdown:
        raise InvalidInput("--breakdown measures the compiled code, which runs on cpu", field="device")
    known = tuple(GPU_PEERS) if on_gpu else tuple(PEERS)
    if other := [peer for peer in peers if peer not in known]:
        raise InvalidInput(f"{other[0]} is not measured on {device}; change --device", field="peer")
    shapes, batch = (bench.GPU_SHAPES, bench.GPU_TEXTS) if on_gpu else (bench.SHAPES, bench.TEXTS)
    if texts and len(lines) < batch:
        raise InvalidInput(f"texts needs at least {batch:,} lines, which are one batch", field="texts")
    variant: dict[str, Any] = {
        "model": model,
        "revision": revision,
        "quantization": quantize,
        "quantization_texts": quantization_texts(quantize_texts),
        "drop_attention": drop_attention,
        "drop_block": drop_block,
    }
    checkpoint = find_variant(**variant)
    gpu = {"gpu": torch.cuda.get_device_name()} if on_gpu else {}
    facts = {**machine(threads), **gpu, "model": checkpoint.name, **checkpoint.variant}
    show_machine(facts)
    if breakdown:
        with tempfile.TemporaryDirectory(prefix="attncache-bench-") as folder:
            parts = break_down(checkpoint, bench.SHAPES[:-1], threads, Path(folder) / "db")
        _show_breakdown(parts)
        report = [{"shape": part.shape, "layer": part.layer, "request": part.request} for part in parts]
        write_json(json_file, {"machine": facts, "breakdown": report})
        return
    chosen = peers or (known if on_gpu else _DEFAULT_PEERS)
    with (
        bench.started(chosen, variant, threads, shapes, report_absent) as workers,
        shown_progress() as progress,
    ):
        rows = bench.measure(
            workers, shapes, lines, rounds, lambda done, total: progress("rounds", done, total), batch
        )
    if not rows:
        raise InvalidInput("none of these engines can run here", field="peer")
    _show(rows, shapes, len(lines) // batch * batch)
    write_json(json_file, {"machine": facts, "rounds": rounds, "rows": [asdict(row) for row in rows]})


def _show_breakdown(parts: list[Breakdown]) -> None:
    for part in parts:
        for title, stages in (("one layer", part.layer), ("a request", part.request)):
            show_table(
                f"{bench.name_of(part.shape)}: microseconds of {title}",
                ["stage", "full", "hit"],
                [[stage.name, _figure(stage.full, 0), _figure(stage.hit, 0)] for stage in stages],
            )
        searches = part.search_in_every_layer
        click.echo(
            f"AttnCache-f would search in every layer, for about {searches:.0f} microseconds per request.\n"
        )


def report_absent(peer: str, reason: str) -> None:
    """Say why an engine is not measured."""
    click.echo(f"{peer} is left out: {reason}", err=True)


def _show(rows: list[bench.Row], shapes: Sequence[tuple[int, int]], texts: int) -> None:
    names = [bench.name_of(shape) for shape in shapes if shape[0] > 1]
    single = bench.name_of(shapes[-1])
    show_table(
        "thousand tokens per second (sequences x tokens); one sentence in milliseconds",
        ["engine", *names, f"{single}, ms", "texts/s", "cosine to fp32"],
        [
            [
                row.peer,
                *(_thousands(row.milliseconds.get(name), name) for name in names),
                _figure(row.milliseconds.get(single), 2),
                _figure(texts / row.milliseconds["texts"] * 1e3 if "texts" in row.milliseconds else None, 0),
                _figure(row.cosine, 5),
            ]
            for row in rows
        ],
    )


def _thousands(milliseconds: float | None, name: str) -> str:
    sequences, length = map(int, name.split("x"))
    return _figure(sequences * length / milliseconds if milliseconds else None, 1)


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
