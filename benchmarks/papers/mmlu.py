"""Turn MMLU multiple-choice questions into prompts, which end where the answer's letter follows.

    The following are multiple choice questions (with answers) about high school mathematics.

    QUESTION            examples of the same subject, as many as there are shots
    A. ...
    D. ...
    Answer: B

    QUESTION            the question to answer
    ...
    Answer:

This is the format of Hendrycks et al. 2021. The answer of a decoder is the most probable of the four letters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from attncache_core.corpus.tables import read_rows
from attncache_core.errors import InvalidInput

LETTERS = ("A", "B", "C", "D")
_COLUMNS = ("subject", "question", *LETTERS, "answer")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with four choices."""

    subject: str  # as in the data, words joined by _
    question: str
    choices: tuple[str, ...]  # four choices
    answer: str  # one of LETTERS

    def as_prompt(self) -> str:
        """Return question and choices as text, which ends where the answer follows."""
        choices = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return "\n".join([self.question, *choices, "Answer:"])


def read_questions(path: str) -> list[Question]:
    """Read questions from a table with columns subject, question, A, B, C, D and answer.

    Raises InvalidInput if the table cannot be read, or if an answer is not one of the four letters.
    """
    questions = []
    for number, (subject, question, *choices, answer) in enumerate(read_rows(path, _COLUMNS), 1):
        if answer not in LETTERS:
            raise InvalidInput(f"{path}: the answer of row {number} is none of A, B, C and D", field="data")
        questions.append(Question(subject, question, tuple(choices), answer))
    return questions


class Prompts:
    """Makes prompts with any number of shots from example questions."""

    def __init__(self, examples: Sequence[Question]) -> None:
        self._examples: dict[str, list[Question]] = defaultdict(list)
        for example in examples:
            self._examples[example.subject].append(example)

    def of(self, question: Question, shots: int) -> str:
        """Return the prompt of a question, after the first `shots` examples of its subject.

        Raises InvalidInput if there are fewer examples.
        """
        examples = self._examples[question.subject][:shots]
        if len(examples) < shots:
            raise InvalidInput(
                f"there are {len(examples)} examples of {question.subject}, fewer than {shots} shots",
                field="shots",
            )
        subject = question.subject.replace("_", " ")
        title = f"The following are multiple choice questions (with answers) about {subject}."
        answered = [f"{example.as_prompt()} {example.answer}" for example in examples]
        return "\n\n".join([title, *answered, question.as_prompt()])
