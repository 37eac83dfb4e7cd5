"""MMLU prompts have examples of the question's subject, then the question, and end with "Answer:"."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.errors import InvalidInput
from benchmarks.papers.mmlu import Prompts, Question, read_questions

HEADER = "subject\tquestion\tA\tB\tC\tD\tanswer\n"
SUM = Question("elementary_mathematics", "2 + 2?", ("3", "4", "5", "6"), "B")
ROME = Question("world_history", "Who built Rome?", ("a", "b", "c", "d"), "D")


def numbered(count, subject):
    return [Question(subject, f"{subject} {number}?", ("w", "x", "y", "z"), "C") for number in range(count)]


def test_prompt_of_two_shots_has_the_format_of_hendrycks_et_al():
    example = Question("elementary_mathematics", "1 + 1?", ("1", "2", "3", "4"), "B")
    assert Prompts([ROME, example]).of(SUM, 1) == (
        "The following are multiple choice questions (with answers) about elementary mathematics.\n\n"
        "1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n"
        "2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer:"
    )


@given(st.integers(0, 5), st.integers(0, 5))
def test_shots_are_the_first_examples_of_the_subject_and_the_question_is_last(shots, others):
    prompts = Prompts(numbered(others, "other") + numbered(5, "world_history"))
    prompt = prompts.of(ROME, shots)
    assert [f"world_history {number}?" in prompt for number in range(5)] == [n < shots for n in range(5)]
    assert "other" not in prompt
    assert prompt.endswith(ROME.as_prompt())
    assert prompt.count("Answer: C") == shots


def test_answer_that_is_no_letter_is_refused_by_its_row(tmp_path):
    path = tmp_path / "questions.tsv"
    path.write_text(HEADER + "s\tq\ta\tb\tc\td\tA\ns\tq\ta\tb\tc\td\t2\n")
    with pytest.raises(InvalidInput, match="row 2"):
        read_questions(str(path))
