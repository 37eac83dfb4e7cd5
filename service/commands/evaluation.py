"""What the commands of `attncache evaluate` share: options, one run, and the table of its result.

A run compares methods with the full engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from attncache_core.calibration.trial import full_outputs
from attncache_core.checkpoints.checkpoint import Dtype
from attncache_core.corpus.reading import read_texts
from attncache_core.evaluation.comparison import MethodReport, compare
from attncache_core.evaluation.methods import METHODS, Methods, parse_methods
from attncache_core.evaluation.tasks import (
    AgreementTask,
    Sequences,
    SimilarityTask,
    Task,
    recordable_sequences,
)
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.text.labels import LabelTokens
from service.commands.database import overlap
from service.commands.options import (
    Number,
    drop_options,
    json_option,
    max_tokens_option,
    use_options,
    whole_model_options,
    with_options,
)
from service.commands.progress import shown_progress
from service.commands.report import (
    machine_and_model,
    require_writable_reports,
    show_machine,
    show_table,
    write_json,
    write_report,
)

# Most tokens of a text that an evaluation records, because a record grows with the square of the length.
_LONGEST_RECORDED = 128


def evaluation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an evaluation and the options for how the model is used."""
    return fixed_evaluation_options(use_options(command))


def fixed_evaluation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an evaluation that itself determines how the model is used."""
    return with_options(
        command,
        whole_model_options,
        drop_options,
        max_tokens_option,
        click.option(
            "--database",
            type=click.Path(path_type=Path),
            help="Folder of the database. Default: no database.",
        ),
        click.option(
            "--corpus",
            multiple=True,
            metavar="FILE",
            help="Texts that the database is built from: FILE or FILE:column,column. May be repeated. "
            "Default: none.",
        ),
        click.option(
            "--methods",
            default=",".join(METHODS),
            show_default=True,
            callback=lambda _context, _option, names: parse_methods(names),
            help=f"Methods to compare, separated by commas: {', '.join(METHODS)}.",
        ),
        click.option(
            "--heads",
            help="Heads to reuse: all, layers:0-3, or a number. Default: the reuse mask of the database.",
        ),
        click.option(
            "--threshold",
            type=Number(max=1),
            help="Least similarity θ of a hit, for all lengths; with 1, only recorded texts hit. Default: "
            "the thresholds of the database.",
        ),
        click.option(
            "--batch-size",
            type=click.IntRange(min=1),
            default=64,
            show_default=True,
            help="Most texts in a batch.",
        ),
        click.option(
            "--rounds",
            type=click.IntRange(min=1),
            default=3,
            show_default=True,
            help="Number of timing repetitions; the methods alternate.",
        ),
        json_option,
        click.option(
            "--markdown",
            type=click.Path(path_type=Path),
            help="File to write the table to as Markdown. Default: the table is only printed.",
        ),
    )


@dataclass(frozen=True)
class Request:
    """The options of every evaluation."""

    checkpoint: Checkpoint
    dtype: Dtype
    threads: int | None
    max_tokens: int | None
    database: Path | None
    corpus: tuple[str, ...]
    methods: list[str]
    heads: str | None
    threshold: float | None
    batch_size: int
    rounds: int
    json_file: Path | None
    markdown: Path | None
    # Most tokens of a recorded text; None: the longest text that the model accepts.
    longest: int | None = _LONGEST_RECORDED


class Evaluation:
    """Owns the full engine of one run, makes the methods and compares them."""

    def __init__(self, request: Request, classifier: Path | None = None) -> None:
        """classifier: folder of a classifier fitted for the model; then its decisions are compared too.

        The context of the command may hold what makes the methods, instead of Methods.
        """
        require_writable_reports()
        self.request = request
        self._make_methods: Callable[..., Methods] = click.get_current_context().obj or Methods
        self.full = PrefillEngine.load(
            request.checkpoint,
            dtype=request.dtype,
            threads=request.threads,
            max_tokens=request.max_tokens,
            classifier=LinearClassifier.load(classifier) if classifier else None,
        )
        self.checkpoint = self.full.checkpoint  # of the files that were read

    def tokenize(self, texts: Sequence[str], labels: LabelTokens | None = None) -> Sequences:
        """Return the token ids of each text or, with labels of several tokens, of each of its sequences."""
        return self.full.tokenize(texts, prompt=labels.prompt if labels else None)

    def fit(self, texts: Sequence[str], labels: Sequence[str]) -> Sequences:
        """Fit a linear classifier on the full engine's embeddings, and let the engine use the classifier.

        Returns the token ids of the texts.
        """
        sequences = self.tokenize(texts)
        outputs = full_outputs(self.full, sequences)
        classifier = fit_classifier(outputs, labels, fingerprint="", model=self.checkpoint.name)
        self.full = replace(self.full, classifier=classifier)
        return sequences

    def run_agreement(self, name: str, sequences: Sequences) -> None:
        """Evaluate how well the methods agree with the full model."""
        comparator = self.full.decisions.comparator(
            Measure.AGREEMENT if self.full.decisions.labels else Measure.COSINE
        )
        outputs = full_outputs(self.full, sequences, self.request.batch_size)
        self.run(AgreementTask(name, comparator, sequences, outputs))

    def run(
        self, task: Task, corpus: Sequence[str] | None = None, database: Path | None = None
    ) -> list[MethodReport]:
        """Make the methods, compare them and show the table.

        corpus, database: texts and folder of the database; None: those that the request names.
        """
        request = self.request
        texts = [text for source in request.corpus for text in read_texts(source)]
        recorded, opened = self._recorded(
            task, texts if corpus is None else corpus, database or request.database
        )
        methods = self._make_methods(
            self.full, self.checkpoint, opened, recorded, dtype=request.dtype, labels=task.labels
        )
        made = {name: methods.make(name) for name in request.methods}
        with shown_progress() as progress:
            reports = compare(
                made,
                task,
                *self._comparators(task),
                changing_all=methods.changing_all,
                batch_size=request.batch_size,
                rounds=request.rounds,
                on_step=lambda done, total: progress("measuring", done, total),
            )
        facts = {
            **machine_and_model(self.full),
            "texts": len(recordable_sequences(task)),
            "reused_heads": f"{opened.mask.total} of {opened.mask.heads}" if opened else None,
        }
        _show_comparison(task.metric, facts, reports, request.json_file, request.markdown)
        for name in methods.engines:
            report = next(report for report in reports if report.method == name)
            click.echo(f"{name}: {1 - 1 / report.speedup:+.3f} of the time saved over all texts")
        return reports

    def _comparators(self, task: Task) -> tuple[OutputComparator, OutputComparator | None]:
        """Return what compares the task's outputs by cosine and, if there are decisions, by agreement."""
        if task.labels:
            # The task's outputs are the labels' logits.
            return OutputComparator(Measure.COSINE, np.asarray), OutputComparator(
                Measure.AGREEMENT, np.asarray
            )
        agreement = self.full.decisions.comparator(Measure.AGREEMENT) if self.full.decisions.labels else None
        return self.full.decisions.comparator(Measure.COSINE), agreement

    def _recorded(
        self, task: Task, texts: Sequence[str], folder: Path | None
    ) -> tuple[Sequences, AttentionDatabase | None]:
        """Return the corpus and the database without the evaluated texts, and print their numbers."""
        request = self.request
        evaluated = set(map(tuple, recordable_sequences(task)))
        tokenized = self.tokenize(texts)
        kept = [index for index, ids in enumerate(tokenized) if tuple(ids) not in evaluated]
        if texts:
            click.echo(f"{len(texts) - len(kept)} of {len(texts)} corpus texts excluded: evaluated texts")
        corpus = [tokenized[index] for index in kept]
        if folder is None:
            return corpus, None
        if not folder.exists():
            if not texts:
                raise InvalidInput(
                    f"there is no database in {folder}; give --corpus to build it",
                    field="database",
                )
            self._build(folder, [texts[index] for index in kept])
        opened = AttentionDatabase.open(folder, heads=request.heads, threshold=request.threshold)
        opened.require_classifier(self.full.classifier)
        embeds = self.full.decisions.labels is None or isinstance(task, SimilarityTask)
        if embeds and opened.manifest.policy.budget.measure is Measure.AGREEMENT:
            raise InvalidInput(
                f"database {folder} keeps a budget of decisions, so a server computes embeddings in full; "
                "evaluate decisions of its classifier or labels, or calibrate it anew",
                field="database",
            )
        database, excluded = opened.without(evaluated)
        for sentence in overlap(opened, evaluated, excluded):
            click.echo(sentence)
        return corpus, database

    def _build(self, folder: Path, texts: Sequence[str]) -> None:
        request = self.request
        longest = min(self.full.tokenizer.max_tokens, request.longest or self.full.tokenizer.max_tokens)
        options = BuildOptions(max_length=longest, heads=request.heads)
        sentences = [CorpusSentence(text, text) for text in texts]
        # An engine without the fitted classifier, because the database is for embeddings.
        engine = PrefillEngine.load(
            self.checkpoint, dtype=request.dtype, threads=request.threads, max_tokens=request.max_tokens
        )
        with shown_progress() as progress:
            build_database(engine, sentences, folder, options, progress)


def _show_comparison(
    metric: str,
    facts: Mapping[str, Any],
    reports: Sequence[MethodReport],
    json_file: Path | None,
    markdown: Path | None,
) -> None:
    """Write a table with a column for each method to the given files, and print it also if that fails."""
    columns = ["", *(report.method for report in reports)]
    rows = _rows(metric, reports)
    methods = [without_nan(asdict(report)) for report in reports]
    try:
        if markdown:
            write_markdown(markdown, columns, rows)
        write_json(json_file, {"machine": facts, "metric": metric, "methods": methods})
    finally:
        show_machine(facts)
        show_table(f"{facts['texts']} texts", columns, rows)


def write_markdown(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table as Markdown. The first column is text; the other columns are figures."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    write_report(path, table)


def _rows(metric: str, reports: Sequence[MethodReport]) -> list[list[str]]:
    """Return a row for each figure, with its value for each method. Rows without any value are omitted."""
    rows = [
        [f"{metric} {name}", *(f"{report.scores[name]:.4f}" for report in reports)]
        for name in reports[0].scores
    ]
    if len(rows) > 1:
        rows.append([f"{metric}, mean", *(f"{report.score:.4f}" for report in reports)])
    figures: dict[str, Callable[[MethodReport], str]] = {
        "difference to the full model, from": lambda report: _end(report, 0),
        "to (95 %, paired)": lambda report: _end(report, 1),
        "hits": lambda report: f"{report.hit_rate:.3f}",
        "hits by prototypes": lambda report: f"{report.prototype_hit_rate:.3f}",
        "recorded texts": lambda report: str(report.recorded),
        "cosine of the hits": lambda report: _number(report.cosine),
        "5th percentile": lambda report: _number(report.cosine_5th_percentile),
        "agreement of the hits": lambda report: _number(report.agreement),
        "seconds": lambda report: f"{report.seconds:.2f}",
        "in attention and search": lambda report: f"{report.attention_seconds:.2f}",
        "in search": lambda report: f"{report.search_seconds:.2f}",
        "speed-up": lambda report: f"{report.speedup:.3f}",
        "speed-up of attention": lambda report: f"{report.attention_speedup:.3f}",
        "γ": lambda report: "" if report.gamma is None else f"{report.gamma:.3f}",
    }
    rows += [[name, *map(figure, reports)] for name, figure in figures.items()]
    return [row for row in rows if any(row[1:])]


def _end(report: MethodReport, end: int) -> str:
    return f"{report.difference_interval[end]:+.4f}" if report.difference_interval else ""


def _number(value: float) -> str:
    return "" if value != value else f"{value:.4f}"


def without_nan(value: Any) -> Any:
    """Replace NaN by None, because JSON has no NaN. NaN stands for a value that could not be measured."""
    if isinstance(value, dict):
        return {name: without_nan(of_name) for name, of_name in value.items()}
    if isinstance(value, tuple):
        return [without_nan(each) for each in value]
    return None if value != value else value
