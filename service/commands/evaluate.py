"""`attncache evaluate`: what reuse costs in quality and saves in time, beside the papers' baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from attncache_core import (
    AttentionDatabase,
    Checkpoint,
    InvalidInput,
    LinearClassifier,
    PrefillEngine,
)
from attncache_core.attention_maps.mask import is_count
from attncache_core.corpus.reading import read_labelled, read_rated, read_texts, spread
from attncache_core.devices import Dtype
from attncache_core.evaluation.methods import METHODS
from attncache_core.evaluation.mmlu import LETTERS, Prompts, Question, read_questions
from attncache_core.evaluation.tasks import (
    ClassificationTask,
    RatedPairs,
    SimilarityTask,
    labels_read,
)
from service.bench.report import show_table
from service.commands.evaluation import Evaluation, Request
from service.commands.evaluation_curves import plot_curves
from service.commands.options import (
    drop_options,
    max_tokens_option,
    model_options,
    use_options,
    whole_model_options,
)
from service.commands.progress import shown_progress


@click.group("evaluate")
def evaluate() -> None:
    """Measure what reuse costs in quality and saves in time.

    Every evaluated text is first taken out of the database, and how many that were is printed. With --corpus
    a database that does not exist yet is built and calibrated from those texts, without the evaluated ones.
    """


def evaluation_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of an evaluation, and of how the model is used in it."""
    return fixed_evaluation_options(use_options(command))


def fixed_evaluation_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of an evaluation that says itself how the model is used."""
    options = (
        max_tokens_option,
        click.option("--database", type=click.Path(path_type=Path), help="Folder of the database."),
        click.option(
            "--corpus",
            multiple=True,
            help="Texts the database is, or is to be, built from: FILE or FILE:column,column.",
        ),
        click.option(
            "--methods",
            default="full,attncache",
            show_default=True,
            help=f"With commas between: {', '.join(METHODS)}.",
        ),
        click.option("--heads", help="Override the database's reuse mask."),
        click.option("--threshold", type=float, help="Override the database's thresholds by one θ."),
        click.option(
            "--san-threshold",
            type=float,
            help="Divergence under which SAN's layers share. Default: half of the layers do.",
        ),
        click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True),
        click.option(
            "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Timed, in turn."
        ),
        click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write a report."),
        click.option("--markdown", type=click.Path(path_type=Path), help="Also write the table here."),
    )
    for option in reversed(options):
        command = option(command)
    return whole_model_options(drop_options(command))


@evaluate.command("sts")
@evaluation_options
@click.option("--data", required=True, multiple=True, help="A table with score, sentence1 and sentence2.")
@click.option("--score-column", default="score", show_default=True)
@click.option("--columns", default="sentence1,sentence2", show_default=True, help="The two texts' columns.")
def sts(data: tuple[str, ...], score_column: str, columns: str, **options: Any) -> None:
    """Semantic textual similarity: Spearman's correlation over all pairs of each file."""
    first, _, second = columns.partition(",")
    rated = {}
    for path in data:
        # Files of one name in different folders are different sets.
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
@click.option("--data", required=True, help="Labelled texts to measure on.")
@click.option("--train", help="Labelled texts to fit a linear classifier on, for a model without classes.")
@click.option(
    "--classifier", type=click.Path(path_type=Path), help="A fitted classifier, instead of --train."
)
@click.option("--text-column", default="text", show_default=True)
@click.option("--label-column", default="label", show_default=True)
def classification(
    data: str,
    train: str | None,
    classifier: Path | None,
    text_column: str,
    label_column: str,
    **options: Any,
) -> None:
    """Accuracy of the model's classes, or of a linear classifier on its embeddings."""
    texts, labels = read_labelled(data, text_column, label_column)
    evaluation = Evaluation(Request(**options), classifier)
    if train and not classifier:
        evaluation.fit(*read_labelled(train, text_column, label_column))
    read = labels_read(evaluation.full)
    known = read.labels if read else evaluation.full.labels
    if known is None:
        raise InvalidInput(
            "the model has no classes: give --train, --classifier, or --labels with --task", field="train"
        )
    sequences, names = evaluation.tokenize(texts, read), _label_names(labels, known)
    evaluation.run(ClassificationTask(Path(data).stem, evaluation.full, sequences, names))


@evaluate.command("agreement")
@evaluation_options
@click.option("--data", required=True, multiple=True, help="Texts: FILE or FILE:column,column.")
@click.option("--classifier", type=click.Path(path_type=Path), help="Compare this classifier's decisions.")
def agreement(data: tuple[str, ...], classifier: Path | None, **options: Any) -> None:
    """Likeness to the full model on texts without labels: decisions or, without classes, cosine."""
    texts = [text for source in data for text in read_texts(source)]
    if not texts:
        raise InvalidInput("the data has no texts", field="data")
    evaluation = Evaluation(Request(**options), classifier)
    evaluation.run_agreement(Path(data[0].partition(":")[0]).stem, evaluation.tokenize(texts))


@evaluate.command("mmlu")
@fixed_evaluation_options
@click.option("--data", required=True, help="Questions: a table with subject, question, A, B, C, D, answer.")
@click.option("--examples", required=True, help="The same, solved before each question.")
@click.option("--shots", default="0..5", show_default=True, help="Examples before a question: 5, or 0..5.")
@click.option("--subjects", help="With commas between; default: all of the data.")
@click.option("--questions", type=click.IntRange(min=1), help="So many, evenly taken; default: all.")
@click.option("--recorded", help="More questions, whose prompts a database is to be built from.")
def mmlu(
    data: str,
    examples: str,
    shots: str,
    subjects: str | None,
    questions: int | None,
    recorded: str | None,
    **options: Any,
) -> None:
    """MMLU: accuracy and speed of a decoder by the number of examples before each question.

    Prompts of another number of shots have other lengths: each number has a database of its own, in the
    folder shots-N of --database, built from --recorded where it is not there.
    """
    request = Request(**options)
    checkpoint = request.checkpoint.adapted(label_logits=True, labels=LETTERS)
    asked = _chosen(read_questions(data), subjects, questions)
    others = _chosen(read_questions(recorded), subjects, None) if recorded else []
    prompts, rows = Prompts(read_questions(examples)), []
    # Prompts of several shots are long, all of them: there would be nothing to record.
    evaluation = Evaluation(replace(request, checkpoint=checkpoint, longest=None))
    if evaluation.full.labels is None:
        raise InvalidInput(
            f"model {checkpoint.name} does not write each of {', '.join(LETTERS)} as one token behind a "
            "question; choose another model",
            field="model",
        )
    for number in _range(shots):
        # A prompt that is cut would lose its question.
        texts = {q: prompts.of(q, number) for q in (*asked, *others)}
        fitting = {q: text for q, text in texts.items() if evaluation.fits(text)}
        kept = [q for q in asked if q in fitting]
        if not kept:
            raise InvalidInput(
                f"every prompt of {number} shots has more than the {evaluation.full.max_tokens} tokens that "
                "are taken; ask for fewer shots",
                field="shots",
            )
        task = ClassificationTask(
            f"{number} shots",
            evaluation.full,
            evaluation.tokenize([fitting[q] for q in kept]),
            [q.answer for q in kept],
        )
        reports = evaluation.run(
            task,
            [fitting[q] for q in others if q in fitting],
            request.database and request.database / f"shots-{number}",
        )
        tokens = sum(map(len, task.sequences)) / len(kept)
        rows += [
            [
                str(number),
                report.method,
                str(len(kept)),
                f"{tokens:.0f}",
                f"{report.score:.4f}",
                f"{report.hit_rate:.3f}",
                f"{report.attention_speedup:.2f}",
                f"{report.speedup:.2f}",
            ]
            for report in reports
        ]
    show_table(
        f"MMLU, prompts of at most {evaluation.full.max_tokens} tokens; how many times as fast as in full",
        ["shots", "method", "asked", "tokens", "accuracy", "hits", "attention", "in all"],
        rows,
    )


def _chosen(questions: Sequence[Question], subjects: str | None, count: int | None) -> list[Question]:
    """The questions of these subjects (None: of all), `count` of them evenly taken (None: all)."""
    names = {name.strip() for name in subjects.split(",")} if subjects else None
    unknown = sorted((names or set()) - {question.subject for question in questions})
    if unknown:
        raise InvalidInput(f"the data has no subject {unknown[0]}", field="subjects")
    kept = [question for question in questions if names is None or question.subject in names]
    if not kept:
        raise InvalidInput("the data has no questions", field="data")
    return spread(kept, count) if count else kept


def _range(shots: str) -> range:
    """5 or 0..5. Raises InvalidInput."""
    first, dots, last = shots.partition("..")
    last = last if dots else first
    if not (is_count(first) and is_count(last)) or int(last) < int(first):
        raise InvalidInput("shots are a number like 5, or a range like 0..5", field="shots")
    return range(int(first), int(last) + 1)


@evaluate.command("curves")
@model_options
@max_tokens_option
@click.option("--database", type=click.Path(path_type=Path), required=True)
@click.option("--data", required=True, multiple=True, help="Texts: FILE or FILE:column,column.")
@click.option("--classifier", type=click.Path(path_type=Path), help="Keep this classifier's decisions.")
@click.option("--most", type=click.IntRange(min=20), default=600, show_default=True, help="Texts at most.")
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Folder for plots (PNG) and data (CSV)."
)
def curves(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    max_tokens: int | None,
    database: Path,
    data: tuple[str, ...],
    classifier: Path | None,
    most: int,
    output: Path,
) -> None:
    """Plot quality against time for many masks and ways to choose a record, and against θ."""
    texts = [text for source in data for text in read_texts(source)]
    full = PrefillEngine.load(
        checkpoint,
        dtype=dtype,
        threads=threads,
        max_tokens=max_tokens,
        classifier=LinearClassifier.load(classifier) if classifier else None,
    )
    opened = AttentionDatabase.open(database)
    with shown_progress() as progress:
        plot_curves(full, opened, full.tokenize(texts), most, output, progress)
    click.echo(f"{output}: " + ", ".join(sorted(path.name for path in output.iterdir())))


def _label_names(labels: Sequence[str], known: Sequence[str]) -> list[str]:
    """The labels as the model calls them: data may have numbers where the model has names."""
    if set(labels) <= set(known) or not all(label.isdigit() and int(label) < len(known) for label in labels):
        return list(labels)
    return [known[int(label)] for label in labels]
