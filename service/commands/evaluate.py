"""`attncache evaluate`: measure what reuse costs in quality and saves in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attncache_core import InvalidInput
from attncache_core.corpus.reading import path_and_columns, read_labelled, read_rated, read_texts
from attncache_core.evaluation.tasks import (
    ClassificationTask,
    RatedPairs,
    SimilarityTask,
    label_names,
    multi_token_labels,
)
from service.commands.evaluation import Evaluation, Request, evaluation_options
from service.commands.options import classifier_option


@click.group("evaluate")
def evaluate() -> None:
    """Measure what reuse costs in quality and saves in time.

    Evaluated texts are first excluded from the database, and their number is printed. With --corpus, a
    database that does not exist yet is built and calibrated from the corpus without the evaluated texts.
    """


@evaluate.command("sts")
@evaluation_options
@click.option(
    "--data",
    required=True,
    multiple=True,
    help="Table with pairs of texts and their scores. May be repeated.",
)
@click.option("--score-column", default="score", show_default=True, help="Column with the score of a pair.")
@click.option(
    "--columns",
    default="sentence1,sentence2",
    show_default=True,
    help="Columns with the two texts of a pair, separated by a comma.",
)
def sts(data: tuple[str, ...], score_column: str, columns: str, **options: Any) -> None:
    """Measure semantic textual similarity: Spearman's correlation over all pairs of each file."""
    if columns.count(",") != 1:
        raise InvalidInput("--columns must be two names, separated by a comma", field="columns")
    first, second = columns.split(",")
    if len({Path(path).resolve() for path in data}) < len(data):
        raise InvalidInput("--data names a file twice; give each file once", field="data")
    rated = {}
    for path in data:
        # Files with the same name in different folders are different sets.
        name = path if Path(path).stem in rated else Path(path).stem
        rated[name] = read_rated(path, first, second, score_column)
    evaluation = Evaluation(Request(**options))
    sets = {
        name: RatedPairs(evaluation.tokenize(left), evaluation.tokenize(right), ratings)
        for name, (left, right, ratings) in rated.items()
    }
    evaluation.run(SimilarityTask(sets))


@evaluate.command("classification")
@evaluation_options
@click.option("--data", required=True, help="Table with labelled texts to measure on.")
@click.option(
    "--train",
    help="Table with labelled texts to fit a linear classifier on, for a model without classes. Default: "
    "none.",
)
@classifier_option
@click.option("--text-column", default="text", show_default=True, help="Column with the texts.")
@click.option("--label-column", default="label", show_default=True, help="Column with the labels.")
def classification(
    data: str,
    train: str | None,
    classifier: Path | None,
    text_column: str,
    label_column: str,
    **options: Any,
) -> None:
    """Measure the accuracy of the model's classes, or of a linear classifier on the model's embeddings."""
    if train and classifier:
        raise InvalidInput("give --train or --classifier, not both", field="train")
    texts, labels = read_labelled(data, text_column, label_column)
    evaluation = Evaluation(Request(**options), classifier)
    fitted_on: set[tuple[int, ...]] = set()
    if train:
        if evaluation.full.decisions.labels or evaluation.full.decisions.label_tokens:
            raise InvalidInput(
                "--train fits a classifier on embeddings, and the model has classes or labels of its own; "
                "leave out --train",
                field="train",
            )
        fitted_on = set(map(tuple, evaluation.fit(*read_labelled(train, text_column, label_column))))
    read = multi_token_labels(evaluation.full)
    known = read.labels if read else evaluation.full.decisions.labels
    if known is None:
        raise InvalidInput(
            "the model has no classes: give --train, --classifier, or --labels with --task", field="train"
        )
    sequences, names = evaluation.tokenize(texts, read), label_names(labels, known)
    if seen := sum(tuple(ids) in fitted_on for ids in sequences):
        click.echo(
            f"{seen} of {len(texts)} evaluated texts are among the texts of --train; leave them out for an "
            "honest figure"
        )
    evaluation.run(ClassificationTask(Path(data).stem, evaluation.full, sequences, names))


@evaluate.command("agreement")
@evaluation_options
@click.option(
    "--data",
    required=True,
    multiple=True,
    metavar="FILE",
    help="Texts to measure on: FILE or FILE:column,column. May be repeated.",
)
@classifier_option
def agreement(data: tuple[str, ...], classifier: Path | None, **options: Any) -> None:
    """Compare with the full model on texts without labels: by decisions or, without classes, by cosine."""
    texts = [text for source in data for text in read_texts(source)]
    if not texts:
        raise InvalidInput("the data has no texts", field="data")
    evaluation = Evaluation(Request(**options), classifier)
    # A file may be given several times, with other columns, which the names leave out.
    names = dict.fromkeys(Path(path_and_columns(source, "")[0]).stem for source in data)
    evaluation.run_agreement(", ".join(names), evaluation.tokenize(texts))
