"""Find the attention modules and blocks that a model needs least."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from attncache_core import Checkpoint, InvalidInput, PrefillEngine, default_corpus
from attncache_core.checkpoints.checkpoint import Dtype
from attncache_core.corpus.reading import read_texts, spread
from attncache_core.evaluation.importance import measure_importance
from service.commands.options import json_option, template_option, whole_model_options
from service.commands.progress import shown_progress
from service.commands.report import (
    machine_and_model,
    require_writable_reports,
    show_machine,
    show_table,
    write_json,
)


@click.command("importance")
@whole_model_options
@template_option
@click.option(
    "--texts",
    metavar="FILE",
    help="Texts to measure on: a .txt, .tsv, .csv or .jsonl file, FILE or FILE:column,column. Default: the "
    "corpus of this package.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    help="Most texts to measure on, taken evenly from all texts.",
)
@json_option
def importance(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    texts: str | None,
    sample: int,
    json_file: Path | None,
) -> None:
    """Measure how much each layer of a model matters.

    The importance of a layer is 1 - cosine of the hidden states before and after the layer, as the mean over
    the tokens of a sample. The layer's attention alone and the whole block are measured. To serve without the
    least important layers, use --drop-attention and --drop-block. To measure the cost in quality, use
    `attncache evaluate`.
    """
    require_writable_reports()
    calibration = read_texts(texts) if texts else [sentence.text for sentence in default_corpus()]
    if not calibration:
        raise InvalidInput("the file has no texts", field="texts")
    chosen = spread(calibration, sample)
    engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
    with shown_progress() as progress:
        found = measure_importance(
            engine.model,
            engine.tokenize(chosen),
            lambda done, total: progress("measuring importance", done, total),
        )
    facts = {
        **machine_and_model(engine),
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
    """Print a row for each layer: importance and rank of its attention and of its block."""
    columns = []
    for importance in (attention, blocks):
        ranks = np.argsort(np.argsort(importance)) + 1
        columns += [[f"{value:.4f}" for value in importance], [str(rank) for rank in ranks]]
    show_table(
        "importance (1 - cosine); rank 1 is the least important",
        ["layer", "attention", "rank", "block", "rank"],
        [[layer, *row] for layer, row in enumerate(zip(*columns, strict=True))],
    )
