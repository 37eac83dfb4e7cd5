"""`attncache calibrate`: choose a database's mask and thresholds for an operator's texts and budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from attncache_core import (
    AttentionDatabase,
    InvalidInput,
    LinearClassifier,
    PrefillEngine,
    calibrate_database,
)
from attncache_core.build.options import default_budget
from attncache_core.corpus import unfamiliar_texts
from attncache_core.corpus.reading import read_texts
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget
from service.commands.blending import calibrate_segments
from service.commands.build import budget_options
from service.commands.database import show_database
from service.commands.options import classifier_option, engine_options, exclude_option, kept_indices
from service.commands.progress import shown_progress


@click.command("calibrate")
@engine_options
@click.option(
    "--database", type=click.Path(path_type=Path), help="Folder of the database to change, with --texts."
)
@click.option(
    "--texts",
    multiple=True,
    metavar="FILE",
    help="Texts like those that clients will send: a .txt, .tsv, .csv or .jsonl file, FILE or "
    "FILE:column,column. May be repeated.",
)
@click.option(
    "--segments",
    type=click.Path(path_type=Path),
    help="Prompts like those that clients will send, to measure how their chunks may be blended: a .jsonl "
    "file, one "
    '{"segments": [...], "query": "..."} per line. Needs --output.',
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="File to write for `serve --blend`, with --segments."
)
@click.option("--separator", default="\n", show_default=r"\n", help="Text between segments, with --segments.")
@click.option(
    "--listwise",
    is_flag=True,
    help="The segments are the documents of listwise reranking, with --segments and --task label-logits.",
)
@exclude_option
@classifier_option
@budget_options("hits", "full model")
def calibrate(
    load: Callable[..., PrefillEngine],
    database: Path | None,
    texts: tuple[str, ...],
    segments: Path | None,
    output: Path | None,
    separator: str,
    listwise: bool,
    exclude: tuple[str, ...],
    classifier: Path | None,
    min_cosine: float,
    min_text_cosine: float,
    min_agreement: float,
) -> None:
    """Choose what may be reused within a quality budget: of a database (--texts), or of chunks (--segments).

    With --texts: the mask and the thresholds of a database are chosen again. The choice saves the most time
    within the budget, measured on the given texts that are not in the database. The budget is a mean over the
    hits of each group of lengths, kept with 95 % confidence. Without classes, the mean is the cosine to the
    full model's embedding. With classes (of the model, a classifier or labels), the mean is the share of hits
    that keep the full model's decision. In addition, 99 of 100 hits keep --min-text-cosine, and texts that do
    not resemble the given texts are computed in full. Restart running servers afterwards.

    With --segments: the share of reused tokens is chosen that must be computed again, so that answers keep
    the budget. A calibration that was stopped continues.
    """
    load = partial(load, classifier=LinearClassifier.load(classifier) if classifier else None)
    chosen_budget = partial(
        default_budget,
        min_cosine=min_cosine,
        min_text_cosine=min_text_cosine,
        min_agreement=min_agreement,
    )
    if segments is not None:
        if database is not None or texts:
            raise InvalidInput("give --segments, or --database with --texts, not both", field="segments")
        if output is None:
            raise InvalidInput("--segments needs --output, the file to write", field="output")
        # Of a list, clients read which document is the best one.
        own_budget = (lambda _: Budget(Measure.AGREEMENT, min_agreement)) if listwise else chosen_budget
        calibrate_segments(load, own_budget, segments, output, separator, listwise)
        return
    if database is None or not texts:
        raise InvalidInput("give --database with --texts, or --segments with --output", field="texts")
    chosen = [text for source in texts for text in read_texts(source)]
    opened = AttentionDatabase.open(database)
    engine = load()
    chosen = [chosen[index] for index in kept_indices(engine, chosen, exclude)]
    budget = chosen_budget(engine)
    with shown_progress() as progress:
        calibrate_database(
            engine, opened, engine.tokenize(chosen), unfamiliar_texts(chosen), budget, progress
        )
    show_database(AttentionDatabase.open(database))
