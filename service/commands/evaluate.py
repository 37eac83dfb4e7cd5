"""`attncache evaluate`: what reuse costs in quality and saves in time, beside the papers' baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    Checkpoint,
    CorpusSentence,
    InvalidInput,
    LinearClassifier,
    PrefillEngine,
    build_database,
    fit_classifier,
)
from attncache_core.attention_maps.database import calibrated_on
from attncache_core.corpus.reading import read_labelled, read_rated, read_texts
from attncache_core.engine import Dtype
from attncache_core.evaluation.comparison import MethodReport, compare
from attncache_core.evaluation.methods import METHODS, Methods, parse_methods
from attncache_core.evaluation.tasks import (
    AgreementTask,
    ClassificationTask,
    RatedPairs,
    Sequences,
    SimilarityTask,
    Task,
    full_outputs,
)
from attncache_core.outputs import Measure
from service.bench.report import machine
from service.commands.evaluation_curves import plot_curves
from service.commands.evaluation_report import show_comparison
from service.commands.options import max_tokens_option, model_options
from service.commands.progress import shown_progress


@dataclass(frozen=True)
class Request:
    """What every evaluation is told."""

    checkpoint: Checkpoint
    dtype: Dtype
    threads: int | None
    max_tokens: int | None
    database: Path | None
    corpus: tuple[str, ...]
    methods: str
    heads: str | None
    threshold: float | None
    san_threshold: float | None
    batch_size: int
    rounds: int
    json_file: Path | None
    markdown: Path | None


@click.group("evaluate")
def evaluate() -> None:
    """Measure what reuse costs in quality and saves in time.

    Every evaluated text is first taken out of the database, and how many that were is printed. With --corpus
    a database that does not exist yet is built and calibrated from those texts, without the evaluated ones.
    """


def evaluation_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every evaluation."""
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
    return model_options(command)


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
    evaluation = _Evaluation(Request(**options))
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
    evaluation = _Evaluation(Request(**options), classifier)
    if train and not classifier:
        evaluation.fit(*read_labelled(train, text_column, label_column))
    if evaluation.full.labels is None:
        raise InvalidInput("the model has no classes: give --train or --classifier", field="train")
    names = _label_names(labels, evaluation.full.labels)
    evaluation.run(ClassificationTask(Path(data).stem, evaluation.full, evaluation.tokenize(texts), names))


@evaluate.command("agreement")
@evaluation_options
@click.option("--data", required=True, multiple=True, help="Texts: FILE or FILE:column,column.")
@click.option("--classifier", type=click.Path(path_type=Path), help="Compare this classifier's decisions.")
def agreement(data: tuple[str, ...], classifier: Path | None, **options: Any) -> None:
    """Likeness to the full model on texts without labels: decisions or, without classes, cosine."""
    texts = [text for source in data for text in read_texts(source)]
    if not texts:
        raise InvalidInput("the data has no texts", field="data")
    evaluation = _Evaluation(Request(**options), classifier)
    evaluation.run_agreement(Path(data[0].partition(":")[0]).stem, evaluation.tokenize(texts))


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


class _Evaluation:
    """One run: an engine that computes in full, methods beside it, one table."""

    def __init__(self, request: Request, classifier: Path | None = None) -> None:
        """classifier: folder of a fitted one, which must be of the model; its decisions are then compared."""
        self.request = request
        self.names = parse_methods(request.methods)
        self.checkpoint = request.checkpoint
        self.full = PrefillEngine.load(
            self.checkpoint,
            dtype=request.dtype,
            threads=request.threads,
            max_tokens=request.max_tokens,
            classifier=LinearClassifier.load(classifier) if classifier else None,
        )

    def tokenize(self, texts: Sequence[str]) -> Sequences:
        """Token ids of each text."""
        return self.full.tokenize(texts)

    def fit(self, texts: Sequence[str], labels: Sequence[str]) -> None:
        """Give the full engine a linear classifier on its embeddings."""
        outputs = full_outputs(self.full, self.tokenize(texts))
        self.full.classifier = fit_classifier(outputs, labels, fingerprint="", model=self.checkpoint.name)

    def run_agreement(self, name: str, sequences: Sequences) -> None:
        """Evaluate likeness to the full model."""
        judge = self.full.judge(Measure.AGREEMENT if self.full.labels else Measure.COSINE)
        outputs = full_outputs(self.full, sequences, self.request.batch_size)
        self.run(AgreementTask(name, judge, sequences, outputs))

    def run(self, task: Task) -> None:
        """Make the methods, compare them and show the table."""
        request = self.request
        corpus, database = self._corpus_and_database(task)
        methods = Methods(
            self.full,
            self.checkpoint,
            database,
            corpus,
            dtype=request.dtype,
            san_threshold=request.san_threshold,
        )
        made = {name: methods.make(name) for name in self.names}
        with shown_progress() as progress:
            reports = compare(
                made,
                task,
                self.full.judge(Measure.COSINE),
                self.full.judge(Measure.AGREEMENT) if self.full.labels else None,
                batch_size=request.batch_size,
                rounds=request.rounds,
                on_step=lambda done, total: progress("measuring", done, total),
            )
        facts = {
            **machine(self.full.threads),
            "model": self.checkpoint.name,
            **self.checkpoint.variant,
            "dtype": str(self.full.dtype).removeprefix("torch."),
            "texts": len(task.sequences),
            "reused_heads": f"{database.mask.total} of {database.mask.heads}" if database else None,
        }
        show_comparison(task.metric, facts, reports, request.json_file, request.markdown)
        for name, engine in methods.engines.items():
            report = next(report for report in reports if report.method == name)
            click.echo(f"{name}: {_time_saved(report, reports[0], engine)}")

    def _corpus_and_database(self, task: Task) -> tuple[Sequences, AttentionDatabase | None]:
        """The corpus and the database without the evaluated texts; says how many those were."""
        request = self.request
        evaluated = set(map(tuple, task.sequences))
        texts = [text for source in request.corpus for text in read_texts(source)]
        tokenized = self.tokenize(texts)
        kept = [place for place, ids in enumerate(tokenized) if tuple(ids) not in evaluated]
        if texts:
            click.echo(
                f"{len(texts) - len(kept)} of {len(texts)} texts of the corpus are evaluated and left out"
            )
        corpus = [tokenized[place] for place in kept]
        if request.database is None:
            return corpus, None
        if not request.database.exists():
            if not texts:
                raise InvalidInput(
                    f"there is no database in {request.database}; give --corpus to build it",
                    field="database",
                )
            self._build(request.database, [texts[place] for place in kept])
        opened = AttentionDatabase.open(request.database, heads=request.heads, threshold=request.threshold)
        database, gone = opened.without(evaluated)
        click.echo(f"{gone} of {opened.info()['records']} records are of evaluated texts and left out")
        known = calibrated_on(request.database, evaluated)
        if known:
            click.echo(
                f"{known} evaluated texts are among those the database was calibrated on; calibrate with "
                "--without for an honest figure"
            )
        if gone:
            click.echo(
                "prototypes and thresholds were made with them; to keep them out of these too, build with "
                "--without"
            )
        return corpus, database

    def _build(self, folder: Path, texts: Sequence[str]) -> None:
        request = self.request
        options = BuildOptions(max_length=min(self.full.max_tokens, 128), heads=request.heads)
        sentences = [CorpusSentence(text, text) for text in texts]
        # Without the fitted classifier: the database is one of embeddings.
        engine = PrefillEngine.load(
            self.checkpoint, dtype=request.dtype, threads=request.threads, max_tokens=request.max_tokens
        )
        with shown_progress() as progress:
            build_database(engine, sentences, folder, options, progress)


def _time_saved(report: MethodReport, full: MethodReport, engine: PrefillEngine) -> str:
    """How much of the time was saved, beside what hits save at best: by the cost model, nothing searched."""
    assert engine.costs is not None
    lengths, hits = (
        np.array(list(part)) for part in (report.hit_lengths.keys(), report.hit_lengths.values())
    )
    at_best = float(engine.costs.saved(lengths) @ hits) / 1e6 / full.seconds
    return (
        f"{1 - 1 / report.speedup:+.3f} of the time saved; Q, K and softmax of the hits' reused heads are "
        f"{at_best:.3f} of it"
    )


def _label_names(labels: Sequence[str], known: Sequence[str]) -> list[str]:
    """The labels as the model calls them: data may have numbers where the model has names."""
    if set(labels) <= set(known) or not all(label.isdigit() and int(label) < len(known) for label in labels):
        return list(labels)
    return [known[int(label)] for label in labels]
