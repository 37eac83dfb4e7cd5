"""`prefix`: measure few-shot prompts with stored keys and values."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from attncache_core import Checkpoint, InvalidInput, PrefillEngine
from attncache_core.checkpoints.checkpoint import Dtype
from attncache_core.corpus.reading import read_texts
from benchmarks.commands.blend import DISK_BYTES, folder_option, memory_bytes_option
from benchmarks.commands.engine import report_absent
from benchmarks.measuring import prefix as bench
from benchmarks.measuring.engine import started
from benchmarks.measuring.few_shot import mmlu_prompts, shared_prefixes, synthetic_prompts
from benchmarks.measuring.prefix_peers import LIBRARIES, short_name
from benchmarks.measuring.stores import layout_of, measured_prefill_speed, read_bytes_per_second
from benchmarks.papers.mmlu import read_questions
from service.commands.options import json_option, whole_model_options
from service.commands.progress import shown_progress
from service.commands.report import machine_and_model, show_machine, show_table, write_json
from service.settings.cluster import SharedAddress


@click.command("prefix")
@whole_model_options
@click.option(
    "--prompts",
    metavar="FILE",
    help="Prompts to measure, FILE or FILE:column. Default: random tokens, see --prefix-tokens.",
)
@click.option("--mmlu-dev", metavar="FILE", help="Table of the examples of MMLU prompts. Default: none.")
@click.option("--mmlu-test", metavar="FILE", help="Table of the questions of MMLU prompts. Default: none.")
@click.option(
    "--shots", type=click.IntRange(min=0), default=5, show_default=True, help="Examples of an MMLU prompt."
)
@click.option(
    "--prefixes",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of distinct prefixes: of random tokens, or MMLU's first subjects.",
)
@click.option(
    "--prefix-tokens",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    help="Tokens of a random prefix.",
)
@click.option(
    "--text-tokens",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Tokens of a random text behind its prefix.",
)
@click.option(
    "--texts", "count", type=click.IntRange(min=2), default=8, show_default=True, help="Texts of a round."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Texts in a batch; each text is measured alone too.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of timing repetitions, each with texts of its own; the methods alternate.",
)
@memory_bytes_option
@folder_option
@click.option(
    "--shared",
    metavar="URL",
    help="Valkey server to measure as the shared store of several machines, valkey://HOST:PORT/0; its blocks "
    "are removed. Default: none.",
)
@click.option(
    "--peer",
    "peers",
    type=click.Choice(LIBRARIES),
    multiple=True,
    help="Other engine to measure, with its own cache of the prefixes. May be repeated. Default: none.",
)
@json_option
def bench_prefix(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    prompts: str | None,
    mmlu_dev: str | None,
    mmlu_test: str | None,
    shots: int,
    prefixes: int,
    prefix_tokens: int,
    text_tokens: int,
    count: int,
    batch: int,
    rounds: int,
    memory_bytes: int | None,
    folder: Path | None,
    shared: str | None,
    peers: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Measure few-shot prompts: how many texts per second, with and without stored keys and values.

    Every method runs each text alone and in batches. "recomputed" reuses nothing. "shared in the batch"
    computes a prefix once per batch and stores nothing. For "from memory" the prefixes are in memory, and for
    "from disk" on disk outside the page cache; they are loaded only if that is faster. "from the shared
    store" is a server that is new to the prefixes, which another one has saved. "known texts" were seen as a
    whole.
    """
    engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
    layout_of(engine)
    needed = count * rounds
    if prompts:
        sequences = _tokenized(engine, read_texts(prompts))
    elif mmlu_dev and mmlu_test:
        found = mmlu_prompts(read_questions(mmlu_dev), read_questions(mmlu_test), prefixes, shots)
        sequences = _tokenized(engine, found)
    elif mmlu_dev or mmlu_test:
        raise InvalidInput("give --mmlu-dev and --mmlu-test together", field="mmlu_dev")
    else:
        sequences = synthetic_prompts(needed, prefixes, prefix_tokens, text_tokens, _vocabulary(checkpoint))
    _require(sequences, needed, checkpoint.position_limit)
    parts = [sequences[first : first + count] for first in range(0, needed, count)]
    sizes = [1, batch] if batch > 1 else [1]
    facts = machine_and_model(engine)
    show_machine(facts)
    with ExitStack() as stack:
        temporary = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="attncache-bench-", dir=folder))
        )
        read_speed = read_bytes_per_second(temporary)
        prefixes_found = shared_prefixes(sequences[:needed])
        chosen = bench.methods(
            engine,
            prefixes_found,
            memory_bytes,
            temporary / "kv",
            DISK_BYTES,
            measured_prefill_speed(engine),
            SharedAddress.parse(shared) if shared else None,
        )
        workers = stack.enter_context(
            started(
                [f"{peer} cache {short_name(engine.dtype)}" for peer in peers],
                {"model": str(checkpoint.folder), "quantization": None},
                engine.threads,
                [],
                report_absent,
            )
        )
        for method in chosen.values():
            if method.key_values:  # behind the measurement, but before its folder is removed
                stack.callback(method.key_values.store.close)
        chosen |= {worker.peer: bench.Peer(engine, worker, prefixes_found) for worker in workers}
        progress = stack.enter_context(shown_progress())
        rows = bench.measure(chosen, parts, sizes, progress)
        shared_speed = bench.shared_bytes_per_second(chosen)
        overheads = bench.measure_overhead(
            engine, parts, sizes, _vocabulary(checkpoint), memory_bytes, progress
        )
    tokens = sum(map(len, sequences[:needed])) / needed
    _show(rows, overheads, tokens, read_speed)
    if shared_speed:
        size = layout_of(engine).block_bytes
        click.echo(
            f"The shared store was read at {shared_speed / 1e6:,.0f} MB/s: "
            f"a block of {size / 1e3:,.0f} KB in {size / shared_speed * 1e3:.2f} ms."
        )
    write_json(
        json_file,
        {
            "machine": facts,
            "rounds": rounds,
            "texts": count,
            "tokens": tokens,
            "disk_read_bytes_per_second": read_speed,
            "shared_read_bytes_per_second": shared_speed,
            "rows": [asdict(row) for row in rows],
            "overhead": [asdict(overhead) for overhead in overheads],
        },
    )


def _vocabulary(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config["vocab_size"])


def _tokenized(engine: PrefillEngine, texts: Sequence[str]) -> list[list[int]]:
    """Return the token sequences of the prompts that the model accepts in full."""
    sequences = engine.tokenize([text for text in texts if text.strip()])
    return [ids for ids in sequences if len(ids) < engine.tokenizer.max_tokens]


def _require(sequences: Sequence[Sequence[int]], needed: int, limit: int | None) -> None:
    """Raise InvalidInput if there are too few sequences, or sequences that are too long."""
    if len(sequences) < needed:
        raise InvalidInput(
            f"{len(sequences)} prompts fit into the model, and the rounds need {needed}; use fewer --texts "
            "or --rounds",
            field="texts",
        )
    longest = max(map(len, sequences))
    if limit and longest > limit:
        raise InvalidInput(
            f"prompts have {longest} tokens and the model accepts {limit}; use fewer --prefix-tokens",
            field="prefix_tokens",
        )


def _show(
    rows: Sequence[bench.Row], overheads: Sequence[bench.Overhead], tokens: float, read_speed: float
) -> None:
    for size in dict.fromkeys(row.batch for row in rows):
        show_table(
            f"prompts of {tokens:.0f} tokens, {f'in batches of {size}' if size > 1 else 'each alone'}",
            ["method", "texts/s", "speed-up", "least", "tokens computed", "given", "difference", "cosine"],
            [
                [
                    row.method,
                    f"{row.texts_per_second:.2f}",
                    f"{row.speed_up:.2f}",
                    f"{row.least_speed_up:.2f}",
                    _figure(row.computed_tokens, ".0f"),
                    _figure(row.cached_tokens, ".0f"),
                    _figure(row.difference, ".1e"),
                    _figure(row.cosine, ".6f"),
                ]
                for row in rows
                if row.batch == size
            ],
        )
    click.echo(f"The disk was read at {read_speed / 1e6:,.0f} MB/s.")
    for overhead in overheads:
        texts = f"batches of {overhead.batch}" if overhead.batch > 1 else "single texts"
        click.echo(
            f"Storing {texts} that share nothing took {overhead.ratio - 1:+.1%} of the time "
            f"(median of {overhead.pairs} pairs; quartiles {overhead.lower_quartile - 1:+.1%} and "
            f"{overhead.upper_quartile - 1:+.1%})."
        )


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
