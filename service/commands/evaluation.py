"""One run of `attncache evaluate`: compare methods with the full engine, and show a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    Checkpoint,
    CorpusSentence,
    InputTooLong,
    InvalidInput,
    LinearClassifier,
    PrefillEngine,
    build_database,
    fit_classifier,
)
from attncache_core.corpus.reading import read_texts
from attncache_core.evaluation.comparison import MethodReport, compare
from attncache_core.evaluation.methods import Methods
from attncache_core.evaluation.tasks import AgreementTask, Sequences, Task, full_outputs, recordable_sequences
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.runtime.devices import Dtype
from attncache_core.text.labels import LabelTokens
from service.commands.evaluation_report import show_comparison
from service.commands.progress import shown_progress
from service.commands.report import machine

# Most tokens of a text that an evaluation records, because a record grows with the square of the length.
_LONGEST_RECORDED = 128


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
        self.request = request
        self._make_methods: Callable[..., Methods] = click.get_current_context().obj or Methods
        self.checkpoint = request.checkpoint
        self.full = PrefillEngine.load(
            self.checkpoint,
            dtype=request.dtype,
            threads=request.threads,
            max_tokens=request.max_tokens,
            classifier=LinearClassifier.load(classifier) if classifier else None,
        )

    def tokenize(self, texts: Sequence[str], labels: LabelTokens | None = None) -> Sequences:
        """Return the token ids of each text or, with labels of several tokens, of each of its sequences."""
        return self.full.tokenize(texts, prompt=labels.prompt if labels else None)

    def fits(self, text: str) -> bool:
        """Return whether the text fits into the model without being cut."""
        try:
            self.full.tokenize([text], truncate=False)
        except InputTooLong:
            return False
        return True

    def fit(self, texts: Sequence[str], labels: Sequence[str]) -> None:
        """Fit a linear classifier on the full engine's embeddings, and let the engine use the classifier."""
        outputs = full_outputs(self.full, self.tokenize(texts))
        classifier = fit_classifier(outputs, labels, fingerprint="", model=self.checkpoint.name)
        self.full = replace(self.full, classifier=classifier)

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
            **machine(self.full.threads),
            "model": self.checkpoint.name,
            **self.checkpoint.variant,
            "dtype": str(self.full.dtype).removeprefix("torch."),
            "texts": len(recordable_sequences(task)),
            "reused_heads": f"{opened.mask.total} of {opened.mask.heads}" if opened else None,
        }
        show_comparison(task.metric, facts, reports, request.json_file, request.markdown)
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
        database, gone = opened.without(evaluated)
        click.echo(f"{gone} of {opened.info().records} records excluded: records of evaluated texts")
        known = opened.calibrated_on(evaluated)
        if known:
            click.echo(
                f"{known} evaluated texts are among the texts that the database was calibrated on; calibrate "
                "with --exclude for an honest figure"
            )
        if gone:
            click.echo(
                "prototypes and thresholds were made with these records; to exclude the texts there too, "
                "build with --exclude"
            )
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
