"""`attncache calibrate`: mask and thresholds of a database for an operator's own texts and budget."""

from __future__ import annotations

from pathlib import Path

import click

from attncache_core import (
    AttentionDatabase,
    Checkpoint,
    LinearClassifier,
    PrefillEngine,
    calibrate_database,
)
from attncache_core.attention_maps.builder import MIN_AGREEMENT, MIN_COSINE, default_budget
from attncache_core.corpus import unfamiliar_texts
from attncache_core.corpus.reading import read_texts
from attncache_core.devices import Device, Dtype
from service.commands.build import min_text_cosine_option, show_database
from service.commands.options import device_option, max_tokens_option, model_options
from service.commands.progress import shown_progress
from service.commands.texts import places_without


@click.command("calibrate")
@model_options
@max_tokens_option
@device_option
@click.option("--database", type=click.Path(path_type=Path), required=True, help="Folder of the database.")
@click.option(
    "--texts",
    required=True,
    multiple=True,
    help="Texts as they will be asked: a .txt, .tsv, .csv or .jsonl file, FILE or FILE:column,column.",
)
@click.option(
    "--without", multiple=True, help="Leave out the texts of this file, FILE or FILE:column,column."
)
@click.option("--classifier", type=click.Path(path_type=Path), help="Keep the decisions of this classifier.")
@click.option("--min-cosine", type=click.FloatRange(0, 1), default=MIN_COSINE, show_default=True)
@min_text_cosine_option
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    default=MIN_AGREEMENT,
    show_default=True,
    help="The budget where there are classes: share of the hits' decisions that stay what they were.",
)
def calibrate(
    checkpoint: Checkpoint,
    dtype: Dtype,
    device: Device,
    threads: int | None,
    max_tokens: int | None,
    database: Path,
    texts: tuple[str, ...],
    without: tuple[str, ...],
    classifier: Path | None,
    min_cosine: float,
    min_text_cosine: float,
    min_agreement: float,
) -> None:
    """Choose a database's mask and thresholds anew: the most time saved inside a quality budget.

    Measured on the given texts that are not in the database. The budget is a mean over hits of each group of
    lengths, kept with 95 % confidence: the cosine to the full model's embedding or, with classes (of the
    model, a classifier or labels), the share of decisions that stay. Beside it, 99 of 100 hits keep
    --min-text-cosine, and texts that do not resemble the given ones are computed in full. A running server
    must be restarted.
    """
    asked = [text for source in texts for text in read_texts(source)]
    opened = AttentionDatabase.open(database)
    engine = PrefillEngine.load(
        checkpoint,
        dtype=dtype,
        device=device,
        threads=threads,
        max_tokens=max_tokens,
        classifier=LinearClassifier.load(classifier) if classifier else None,
    )
    kept = places_without(engine, asked, without)
    if without:
        click.echo(f"{len(asked) - len(kept)} of {len(asked)} texts left out", err=True)
    asked = [asked[place] for place in kept]
    budget = default_budget(engine, min_cosine, min_text_cosine, min_agreement)
    with shown_progress() as progress:
        calibrate_database(engine, opened, engine.tokenize(asked), unfamiliar_texts(asked), budget, progress)
    show_database(AttentionDatabase.open(database))
