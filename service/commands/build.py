"""`attncache build`: build a database of attention maps from texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    CorpusSentence,
    InvalidInput,
    PrefillEngine,
    build_database,
)
from attncache_core.build.options import MAX_SEED
from attncache_core.corpus.reading import path_and_columns, read_texts
from attncache_core.corpus.tables import FORMATS, read_rows
from service.commands.database import show_database
from service.commands.options import (
    Command,
    Number,
    engine_options,
    exclude_option,
    kept_indices,
)
from service.commands.progress import shown_progress
from service.commands.settings_options import removed_option

_defaults = BuildOptions()


def _bound(name: str, text: str) -> Callable[[Command], Command]:
    """Return what adds an option of BuildOptions that is a bound between 0 and 1."""
    default = getattr(_defaults, name)
    option = f"--{name.replace('_', '-')}"
    return click.option(option, type=Number(0, 1), default=default, show_default=True, help=text)


def min_text_cosine_option(of: str, model: str) -> Callable[[Command], Command]:
    """Return what adds --min-text-cosine. of, model: see budget_options."""
    return _bound(
        "min_text_cosine",
        f"Quality budget of single texts: 99 of 100 {of} have at least this cosine to the output of the "
        f"{model}. 0 sets no such budget: then a few {of} may lose much.",
    )


_REMOVED = removed_option(
    "--maps", "a causal model's maps are always stored as lower triangles, other maps as squares"
)


def budget_options(of: str, model: str) -> Callable[[Command], Command]:
    """Return what adds --min-cosine, --min-text-cosine and --min-agreement.

    of: what the budget is about, such as hits. model: whose answers it compares with.
    """
    mean = _bound(
        "min_cosine",
        f"Quality budget if there are no classes: least mean cosine of the {of}' embeddings to those of "
        f"the {model}.",
    )
    decisions = _bound(
        "min_agreement",
        f"Quality budget if there are classes: least share of the {of} that keep the decision of "
        f"the {model}.",
    )
    floor = min_text_cosine_option(of, model)
    return lambda command: mean(floor(decisions(command)))


@click.command("build", params=[_REMOVED])
@engine_options
@click.option(
    "--corpus",
    "corpora",
    required=True,
    multiple=True,
    metavar="FILE",
    help="Texts to record: a .txt, .tsv, .csv or .jsonl file, FILE or FILE:column,column, or - for standard "
    "input. May be repeated.",
)
@exclude_option
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="Format of the corpus. Default: the ending of the file's name.",
)
@click.option(
    "--column", default="text", show_default=True, help="Column or field that holds the texts of the corpus."
)
@click.option(
    "--source-column",
    help="Column with the source of each text. Texts of one source are held out together. Default: every "
    "text is a source of its own.",
)
@click.option(
    "--database", type=click.Path(path_type=Path), required=True, help="Folder to create for the database."
)
@budget_options("hits", "full model")
@click.option(
    "--prototypes",
    type=click.IntRange(min=0),
    default=_defaults.prototypes,
    show_default=True,
    help="Most synthetic records of each length; 0 makes none.",
)
@click.option(
    "--synthetic-only",
    is_flag=True,
    help="Store no maps of single texts, only means of at least eight texts. No text of the corpus is then "
    "served, or revealed, by a record of its own.",
)
@click.option(
    "--start-from",
    type=click.Path(path_type=Path),
    metavar="DATABASE",
    help="Database of the same model, from whose projector the training goes on, with a quarter of the "
    "steps. Default: a new projector is trained.",
)
@click.option(
    "--refit",
    is_flag=True,
    help="Fit weights that only hits take, so that more heads are reused. For traffic like the corpus.",
)
@click.option(
    "--heads",
    help="Heads to reuse: all, layers:0-3, or a number. Default: calibration chooses the heads.",
)
@click.option(
    "--threshold",
    type=Number(max=1),
    help="Least similarity θ of a hit; with 1, only recorded texts hit. Default: calibration chooses the "
    "thresholds.",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=2),
    default=_defaults.max_length,
    show_default=True,
    help="Most tokens of a recorded text. The size of a record grows with the square of the text's length.",
)
@click.option(
    "--dimensions",
    type=click.IntRange(min=2),
    default=_defaults.dimensions,
    show_default=True,
    help="Dimensions of the feature vectors that are searched.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    default=_defaults.seed,
    show_default=True,
    help="Seed of all random choices.",
)
def build(
    load: Callable[[], PrefillEngine],
    corpora: tuple[str, ...],
    exclude: tuple[str, ...],
    file_format: str | None,
    column: str,
    source_column: str | None,
    database: Path,
    start_from: Path | None,
    **options: Any,
) -> None:
    """Build a database of attention maps from a corpus.

    A build that was stopped continues if the same command is run again.
    """
    sentences = [
        sentence
        for corpus in corpora
        for sentence in _read_corpus(corpus, column, source_column, file_format)
    ]
    engine = load()
    kept = kept_indices(engine, [sentence.text for sentence in sentences], exclude)
    sentences = [sentences[index] for index in kept]
    with shown_progress() as progress:
        build_database(
            engine,
            sentences,
            database,
            BuildOptions(**options),
            progress,
            start_from=AttentionDatabase.open(start_from) if start_from else None,
        )
    show_database(AttentionDatabase.open(database))


def _read_corpus(
    corpus: str, column: str, source_column: str | None, file_format: str | None
) -> list[CorpusSentence]:
    if source_column:
        path, columns = path_and_columns(corpus, column)
        if len(columns) > 1:
            raise InvalidInput(
                f"{path}: name one column for the texts, because their sources are read too", field="corpus"
            )
        rows = read_rows(path, (columns[0], source_column), file_format)
        return [CorpusSentence(text, source) for text, source in rows]
    # Without a source column, every text is a source of its own.
    return [CorpusSentence(text, text) for text in read_texts(corpus, column, file_format)]
