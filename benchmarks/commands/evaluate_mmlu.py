"""`evaluate mmlu`: accuracy and speed of a decoder on multiple-choice questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from attncache_core import InputTooLong, InvalidInput, PrefillEngine
from attncache_core.corpus.reading import spread
from attncache_core.evaluation.tasks import ClassificationTask
from attncache_core.models.variant import is_count
from benchmarks.papers.mmlu import LETTERS, Prompts, Question, read_questions
from service.commands.evaluation import Evaluation, Request, fixed_evaluation_options
from service.commands.report import show_table


@click.command("mmlu")
@fixed_evaluation_options
@click.option("--data", required=True, help="Table of questions: subject, question, A, B, C, D, answer.")
@click.option(
    "--examples", required=True, help="Table of the solved questions that come before each question."
)
@click.option(
    "--shots",
    default="0..5",
    show_default=True,
    help="Number of examples before a question: a number like 5, or a range like 0..5.",
)
@click.option(
    "--subjects", help="Subjects to measure, separated by commas. Default: all subjects of the data."
)
@click.option(
    "--questions",
    type=click.IntRange(min=1),
    help="Most questions to measure, taken evenly from all questions. Default: all questions.",
)
@click.option(
    "--recorded",
    help="Table of further questions to build a database from their prompts. Default: none.",
)
def mmlu(
    data: str,
    examples: str,
    shots: str,
    subjects: str | None,
    questions: int | None,
    recorded: str | None,
    **options: Any,
) -> None:
    """Measure accuracy and speed of a decoder on MMLU, by the number of examples before each question.

    The length of a prompt depends on the number of examples, so each number N has its own database, in the
    folder shots-N of --database. A database that does not exist is built from --recorded.
    """
    request = Request(**options)
    checkpoint = request.checkpoint.adapted(label_logits=True, labels=LETTERS)
    measured = _chosen(read_questions(data), subjects, questions)
    others = _chosen(read_questions(recorded), subjects, None) if recorded else []
    prompts, rows = Prompts(read_questions(examples)), []
    # Without the usual limit on recorded texts, because all prompts with several examples exceed the limit.
    evaluation = Evaluation(replace(request, checkpoint=checkpoint, longest=None))
    if evaluation.full.decisions.labels is None:
        raise InvalidInput(
            f"model {checkpoint.name} does not write each of {', '.join(LETTERS)} as one token after a "
            "question; choose another model",
            field="model",
        )
    most = evaluation.full.tokenizer.max_tokens
    for number in _range(shots):
        # Long prompts are omitted, because a cut prompt would lose its question.
        texts = {q: prompts.of(q, number) for q in (*measured, *others)}
        fitting = {q: text for q, text in texts.items() if _fits(evaluation.full, text)}
        kept = [q for q in measured if q in fitting]
        if not kept:
            raise InvalidInput(
                f"every prompt of {number} shots has more than {most} tokens, which is the limit; use fewer "
                "shots",
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
        f"MMLU, prompts of at most {most} tokens; speed-up of attention and in total",
        ["shots", "method", "questions", "tokens", "accuracy", "hits", "attention", "total"],
        rows,
    )


def _chosen(questions: Sequence[Question], subjects: str | None, count: int | None) -> list[Question]:
    """Return the questions of these subjects, separated by commas (None: all subjects).

    count: take this number of questions, evenly (None: all). Raises InvalidInput for an unknown subject.
    """
    names = {name.strip() for name in subjects.split(",")} if subjects else None
    unknown = sorted((names or set()) - {question.subject for question in questions})
    if unknown:
        raise InvalidInput(f"the data has no subject {unknown[0]}", field="subjects")
    kept = [question for question in questions if names is None or question.subject in names]
    if not kept:
        raise InvalidInput("the data has no questions", field="data")
    return spread(kept, count) if count else kept


def _fits(engine: PrefillEngine, text: str) -> bool:
    """Return whether a text fits into the model without being cut."""
    try:
        engine.tokenize([text], truncate=False)
    except InputTooLong:
        return False
    return True


def _range(shots: str) -> range:
    """Return the numbers of a text like 5 or 0..5. Raises InvalidInput for another form."""
    first, dots, last = shots.partition("..")
    last = last if dots else first
    if not (is_count(first) and is_count(last)) or int(last) < int(first):
        raise InvalidInput("shots must be a number like 5 or a range like 0..5", field="shots")
    return range(int(first), int(last) + 1)
