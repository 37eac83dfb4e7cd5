"""MMLU: multiple-choice questions, put as prompts that end where the answer's letter follows.

    The following are multiple choice questions (with answers) about high school mathematics.

    QUESTION            examples of the same subject, as many as there are shots
    A. ...
    D. ...
    Answer: B

    QUESTION            the one that is asked
    ...
    Answer:

As Hendrycks et al. 2021 ask; a decoder answers by the most probable of the four letters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from attncache_core.corpus.reading import read_rows
from attncache_core.errors import InvalidInput

LETTERS = ("A", "B", "C", "D")
_COLUMNS = ("subject", "question", *LETTERS, "answer")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with four choices."""

    subject: str  # as the data names it, words joined by _
    question: str
    choices: tuple[str, ...]  # four
    answer: str  # one of LETTERS

    def asked(self) -> str:
        """Question and choices, up to where the answer follows."""
        choices = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return "\n".join([self.question, *choices, "Answer:"])


def read_questions(path: str) -> list[Question]:
    """The questions of a table with subject, question, A, B, C, D and answer. Raises InvalidInput."""
    questions = []
    for number, (subject, question, *choices, answer) in enumerate(read_rows(path, _COLUMNS), 1):
        if answer not in LETTERS:
            raise InvalidInput(f"{path}: the answer of row {number} is none of A, B, C and D", field="data")
        questions.append(Question(subject, question, tuple(choices), answer))
    return questions


class Prompts:
    """Prompts of any number of shots, from examples."""

    def __init__(self, examples: Sequence[Question]) -> None:
        self._examples: dict[str, list[Question]] = defaultdict(list)
        for example in examples:
            self._examples[example.subject].append(example)

    def of(self, question: Question, shots: int) -> str:
        """The prompt of a question behind the first `shots` examples of its subject.

        Raises InvalidInput if there are fewer.
        """
        examples = self._examples[question.subject][:shots]
        if len(examples) < shots:
            raise InvalidInput(
                f"there are {len(examples)} examples of {question.subject}, fewer than {shots} shots",
                field="shots",
            )
        subject = question.subject.replace("_", " ")
        title = f"The following are multiple choice questions (with answers) about {subject}."
        answered = [f"{example.asked()} {example.answer}" for example in examples]
        return "\n\n".join([title, *answered, question.asked()])
