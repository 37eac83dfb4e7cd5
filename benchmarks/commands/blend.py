"""`blend`: measure prompts of chunks in any order."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from attncache_core import Checkpoint, InvalidInput, PrefillEngine
from attncache_core.checkpoints.checkpoint import Dtype
from benchmarks.commands.evaluate_blend import ratios_of
from benchmarks.measuring import blend as bench
from benchmarks.measuring.stores import layout_of, measured_prefill_speed, read_bytes_per_second
from service.commands.options import json_option, whole_model_options
from service.commands.progress import shown_progress
from service.commands.report import machine_and_model, show_machine, show_table, write_json

DISK_BYTES = 16 << 30
memory_bytes_option = click.option(
    "--memory-bytes",
    type=click.IntRange(min=1),
    help="Most bytes of keys and values in memory. Default: a quarter of the memory that is available.",
)
folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Folder on the disk to measure; what is written there is removed. Default: the folder for temporary "
    "files.",
)


@click.command("blend")
@whole_model_options
@click.option(
    "--chunks",
    type=click.IntRange(min=2),
    multiple=True,
    default=(4,),
    show_default=True,
    help="Chunks of a prompt. May be repeated, for one table each.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    multiple=True,
    default=(256,),
    show_default=True,
    help="Tokens of a chunk. May be repeated, for one table each.",
)
@click.option(
    "--query-tokens",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Tokens behind the last chunk, which are always computed.",
)
@click.option(
    "--ratios",
    default="0,0.15,0.3",
    show_default=True,
    callback=ratios_of,
    help="Shares of the reused tokens to compute again, separated by commas.",
)
@click.option(
    "--first-visit-ratio",
    type=click.FloatRange(min=0, max=1),
    default=0.15,
    show_default=True,
    help="Share of the tokens to compute again where nothing is stored yet.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=7,
    show_default=True,
    help="Number of timing repetitions, each with a prompt of its own; the methods alternate.",
)
@memory_bytes_option
@folder_option
@json_option
def bench_blend(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    chunks: tuple[int, ...],
    chunk_tokens: tuple[int, ...],
    query_tokens: int,
    ratios: tuple[float, ...],
    first_visit_ratio: float,
    rounds: int,
    memory_bytes: int | None,
    folder: Path | None,
    json_file: Path | None,
) -> None:
    """Measure the time to answer prompts of chunks in any order, whose keys and values are stored.

    Prompts have random tokens, and outputs read the last token. "recomputed" reuses nothing. "prefix caching"
    is given the first chunk. "ratio r" is given all chunks, and computes a share r of their tokens again. For
    "memory" the chunks are in memory, and for "disk" on disk outside the page cache. "first visit" finds
    nothing stored, so it computes every chunk by itself first. From disk, more tokens than asked are computed
    again if that takes no longer than loading.
    """
    if checkpoint.task == "embed":
        checkpoint = checkpoint.adapted(pooling="lasttoken")
    longest = max(chunks) * max(chunk_tokens) + query_tokens
    engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
    layout_of(engine)
    limit = checkpoint.position_limit  # the tokens are no text, so the tokenizer's limit does not matter
    opening = engine.tokenizer.frame(engine.tokenizer.default_prompt).opening
    if limit and opening + longest > limit:
        raise InvalidInput(
            f"prompts have {opening + longest} tokens and the model accepts {limit}; use fewer --chunks or "
            "--chunk-tokens",
            field="chunk_tokens",
        )
    facts = machine_and_model(engine)
    show_machine(facts)
    tables = []
    with (
        tempfile.TemporaryDirectory(prefix="attncache-bench-", dir=folder) as temporary,
        shown_progress() as progress,
    ):
        read_speed = read_bytes_per_second(Path(temporary))
        speed = measured_prefill_speed(engine)
        for count in chunks:
            for tokens in chunk_tokens:
                cases = bench.random_cases(engine, rounds + 1, count, tokens, query_tokens)
                chosen = bench.methods(
                    engine,
                    cases,
                    ratios,
                    first_visit_ratio,
                    memory_bytes,
                    Path(temporary) / "kv",
                    DISK_BYTES,
                    speed,
                )
                rows = bench.measure(chosen, cases, progress)
                for method in chosen.values():
                    method.key_values.store.close()
                _show(count, tokens, query_tokens, rows)
                tables.append(
                    {"chunks": count, "chunk_tokens": tokens, "rows": [asdict(row) for row in rows]}
                )
    click.echo(f"The disk was read at {read_speed / 1e6:,.0f} MB/s.")
    write_json(
        json_file,
        {
            "machine": facts,
            "rounds": rounds,
            "query_tokens": query_tokens,
            "disk_read_bytes_per_second": read_speed,
            "tables": tables,
        },
    )


def _show(chunks: int, chunk_tokens: int, query_tokens: int, rows: Sequence[bench.Row]) -> None:
    show_table(
        f"prompts of {chunks} chunks of {chunk_tokens} tokens and a query of {query_tokens}",
        ["method", "chunks in", "seconds", "time ratio", "most", "tokens computed", "cosine"],
        [
            [
                row.method,
                row.source or "",
                f"{row.seconds:.3f}",
                f"{row.time_ratio:.3f}",
                f"{row.most_time_ratio:.3f}",
                f"{row.computed_tokens:.0f}",
                f"{row.cosine:.4f}",
            ]
            for row in rows
        ],
    )
