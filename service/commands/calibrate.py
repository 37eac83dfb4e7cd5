"""`attncache calibrate`: mask and thresholds of a database for an operator's own texts and budget."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from attncache_core import (
    AttentionDatabase,
    Checkpoint,
    InvalidInput,
    LinearClassifier,
    PrefillEngine,
    calibrate_database,
    normalize,
)
from attncache_core.attention_maps.builder import MIN_AGREEMENT, MIN_COSINE, default_budget
from attncache_core.corpus.reading import read_texts
from attncache_core.engine import Device, Dtype
from service.commands.build import show_database
from service.commands.options import device_option, max_tokens_option, model_options
from service.commands.progress import shown_progress
from service.commands.texts import places_without
from service.routes.classify import SIMILARITY_TEMPERATURE


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
@click.option("--labels", help="Keep the decisions among these labels, with commas between.")
@click.option("--min-cosine", type=click.FloatRange(0, 1), default=MIN_COSINE, show_default=True)
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
    labels: str | None,
    min_cosine: float,
    min_agreement: float,
) -> None:
    """Choose a database's mask and thresholds anew: the most time saved inside a quality budget.

    Measured on the given texts that are not in the database. The budget is a mean over hits of each group of
    lengths, kept with 95 % confidence: the cosine to the full model's embedding or, with classes (of the
    model, a classifier or labels), the share of decisions that stay. A running server must be restarted.
    """
    if classifier and labels:
        raise InvalidInput("give a classifier or labels, not both", field="labels")
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
    if labels:
        engine.classifier = nearest_label(engine, labels)
    kept = places_without(engine, asked, without)
    if without:
        click.echo(f"{len(asked) - len(kept)} of {len(asked)} texts left out", err=True)
    asked = [asked[place] for place in kept]
    budget = default_budget(engine, min_cosine, min_agreement)
    with shown_progress() as progress:
        calibrate_database(engine, opened, engine.tokenize(asked), budget, progress)
    show_database(AttentionDatabase.open(database))


def nearest_label(engine: PrefillEngine, labels: str) -> LinearClassifier:
    """Decides for the label with the nearest embedding, as surely as /classify. Raises InvalidInput."""
    names = [name.strip() for name in labels.split(",")]
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        raise InvalidInput("labels must be two or more different names with commas between", field="labels")
    return LinearClassifier(
        labels=tuple(names),
        weight=normalize(engine.embed(names, reuse=False)) / SIMILARITY_TEMPERATURE,
        bias=np.zeros(len(names), dtype=np.float32),
        fingerprint=engine.checkpoint.embedding_fingerprint(),
        model=engine.checkpoint.name,
        fitted={},
    )
