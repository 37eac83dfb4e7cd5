"""`attncache prune`: which attention modules and blocks a model needs least."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from attncache_core import Checkpoint, InvalidInput, PrefillEngine, default_corpus
from attncache_core.corpus.reading import read_texts, spread
from attncache_core.devices import Dtype
from attncache_core.evaluation.importance import measure_importance
from service.bench.report import machine, show_machine, show_table, write_json
from service.commands.options import template_option, whole_model_options
from service.commands.progress import shown_progress


@click.command("prune")
@whole_model_options
@template_option
@click.option("--importance", is_flag=True, help="Measure how much each layer changes hidden states.")
@click.option(
    "--texts",
    help="A .txt, .tsv, .csv or .jsonl file, FILE or FILE:column,column. Default: the shipped corpus.",
)
@click.option(
    "--sample", type=click.IntRange(min=1), default=500, show_default=True, help="Texts to measure, at most."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the report here.")
def prune(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    importance: bool,
    texts: str | None,
    sample: int,
    json_file: Path | None,
) -> None:
    """Find out which layers a model can do without.

    The importance of a layer is 1 - cosine of the hidden states before and after it, the mean over the tokens
    of a sample: of its attention alone, and of the whole block. Serve without the least important by
    --drop-attention and --drop-block, and measure what that costs by `attncache evaluate`.
    """
    if not importance:
        raise click.UsageError("say what to find out: --importance")
    given = read_texts(texts) if texts else [sentence.text for sentence in default_corpus()]
    if not given:
        raise InvalidInput("the file has no texts", field="texts")
    chosen = spread(given, sample)
    engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
    with shown_progress() as progress:
        found = measure_importance(
            engine.model,
            engine.tokenize(chosen),
            lambda done, total: progress("measuring importance", done, total),
        )
    facts = {
        **machine(engine.threads),
        "model": checkpoint.name,
        **checkpoint.variant,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "texts": len(chosen),
    }
    show_machine(facts)
    _show(found.attention, found.blocks)
    click.echo(
        f"least important: --drop-attention {found.attention.argmin()}, --drop-block {found.blocks.argmin()}"
    )
    write_json(
        json_file,
        {"machine": facts, **_report("attention", found.attention), **_report("blocks", found.blocks)},
    )


def _report(name: str, importance: np.ndarray) -> dict[str, Any]:
    return {name: importance.tolist(), f"{name}_least_important_first": np.argsort(importance).tolist()}


def _show(attention: np.ndarray, blocks: np.ndarray) -> None:
    """A row for each layer; beside each importance its place, 1 being the least important."""
    columns = []
    for importance in (attention, blocks):
        places = np.argsort(np.argsort(importance)) + 1
        columns += [[f"{value:.4f}" for value in importance], [_marked(place) for place in places]]
    show_table(
        "importance (1 - cosine); place 1: the least",
        ["layer", "attention", "place", "block", "place"],
        [[number, *row] for number, row in enumerate(zip(*columns, strict=True))],
    )


def _marked(place: int) -> str:
    return f"[bold]{place}[/bold]" if place == 1 else str(place)
