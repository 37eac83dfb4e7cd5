"""Prompts of chunks and a query, made from tables, to measure how chunks are blended.

    question | paragraphs         -> the paragraphs as chunks, the question as query
    labelled examples | texts     -> a few examples in any order as chunks, a text as query

A query stands in the model's template and is tokenised with the template, so a query has the same tokens as a
text alone. A labelled example is its text in the template, a space, and its label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import orjson

from attncache_core.checkpoints.template import Template
from attncache_core.corpus.reading import spread
from attncache_core.corpus.tables import read_rows
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.evaluation.tasks import label_names
from attncache_core.text.segments import Segmented, segmented


class Case(NamedTuple):
    """One prompt, and its true label."""

    sequence: Segmented
    label: str | None = None

    @property
    def end(self) -> list[int]:
        """The token ids behind the last chunk: separator, query and what ends a text."""
        return self.sequence.ids[self.sequence.spans[-1][1] :]

    @property
    def chunks(self) -> list[list[int]]:
        """The token ids of each chunk by itself, behind the tokens that open every text."""
        opening, ids = self.sequence.opening, self.sequence.ids
        return [[*opening, *ids[first:end]] for first, end in self.sequence.spans]


class Question(NamedTuple):
    """A question with paragraphs, some of which may answer it."""

    question: str
    paragraphs: tuple[str, ...]


class Labelled(NamedTuple):
    """A text and its label."""

    text: str
    label: str


def read_questions(path: str) -> list[Question]:
    """Read questions from a table with columns `question` and `paragraphs_json`.

    paragraphs_json: a JSON list of objects with a title and a text, as in MuSiQue, HotpotQA and
    2WikiMultihopQA. A paragraph is its title, a line break and its text. Raises InvalidInput, which names
    the row but no text, if the table cannot be read or a row has no such list.
    """
    rows = read_rows(path, ("question", "paragraphs_json"))
    return [
        Question(question, _paragraphs(written, path, number))
        for number, (question, written) in enumerate(rows, 1)
    ]


def _paragraphs(written: str, path: str, number: int) -> tuple[str, ...]:
    try:
        found = orjson.loads(written)
        if not isinstance(found, list):
            raise TypeError
        texts = [(document["title"], document["text"]) for document in found]
    except (ValueError, KeyError, TypeError):
        texts = []
    if len(texts) < 2 or not all(isinstance(part, str) for document in texts for part in document):
        raise InvalidInput(
            f'{path}: paragraphs_json of row {number} is no list of two or more {{"title": "...", "text": '
            '"..."}',
            field="data",
        )
    return tuple(f"{title}\n{text}" for title, text in texts)


class Prompts:
    """Makes cases for one engine and separator."""

    def __init__(self, engine: PrefillEngine, separator: str = "\n") -> None:
        """separator: text between chunks, and between the last chunk and the query."""
        self._tokenizer = engine.tokenizer
        self._template = engine.checkpoint.template
        if self._template.is_for_pairs:
            raise InvalidInput("chunks stand in front of one text; give a template with {}", field="template")
        # The query brings its template along.
        self._frame = engine.tokenizer.frame(engine.tokenizer.prompt(Template()))
        (self._separator,) = engine.tokenizer.turns([separator], "separator")

    def of_question(
        self, question: Question, chunks: int | None = None, chunk_tokens: int | None = None
    ) -> Case | None:
        """Return a question behind as many of its paragraphs as fit, evenly chosen, in their order.

        chunks: take at most this number of paragraphs. chunk_tokens: cut each paragraph to this number of
        tokens. None: no limit. Returns None if fewer than two paragraphs fit.
        """
        *paragraphs, query = self._tokenizer.turns(
            [*question.paragraphs, self._template.around(question.question)], "data"
        )
        cut = [ids[:chunk_tokens] for ids in paragraphs if ids]
        for count in range(min(chunks or len(cut), len(cut)), 1, -1):
            chosen = spread(cut, count)
            if self._fits(chosen, query):
                return Case(segmented(self._frame, chosen, query, self._separator))
        return None

    def of_examples(self, examples: Sequence[Labelled], text: str, label: str | None = None) -> Case | None:
        """Return a text behind examples, in their order. Returns None if they do not fit."""
        shown = [f"{self._template.around(example.text)} {example.label}" for example in examples]
        *chunks, query = self._tokenizer.turns([*shown, self._template.around(text)], "data")
        if not self._fits(chunks, query):
            return None
        return Case(segmented(self._frame, chunks, query, self._separator), label)

    def _fits(self, chunks: Sequence[Sequence[int]], query: Sequence[int]) -> bool:
        tokens = sum(len(chunk) + len(self._separator) for chunk in chunks) + len(query)
        return tokens <= self._frame.room


def question_cases(
    engine: PrefillEngine,
    questions: Sequence[Question],
    *,
    separator: str = "\n",
    chunks: int | None = None,
    chunk_tokens: int | None = None,
) -> list[Case]:
    """Return the cases of the questions that fit; see Prompts.of_question.

    Raises InvalidInput if no question fits.
    """
    prompts = Prompts(engine, separator)
    found = [prompts.of_question(question, chunks, chunk_tokens) for question in questions]
    cases = [case for case in found if case]
    if not cases:
        raise InvalidInput(
            f"two paragraphs and a question never fit into {engine.tokenizer.max_tokens} tokens; use fewer "
            "--chunk-tokens",
            field="chunk_tokens",
        )
    return cases


def example_cases(
    engine: PrefillEngine,
    examples: Sequence[Labelled],
    texts: Sequence[Labelled],
    *,
    separator: str = "\n",
    shots: int = 6,
    pool: int = 64,
    seed: int = 0,
) -> list[Case]:
    """Return each text behind `shots` examples, drawn in any order from a pool; texts that fit only.

    pool: the number of examples to draw from, evenly chosen. Examples show the model's names of labels where
    the data has numbers. The same seed draws the same examples. Raises
    InvalidInput if there are fewer examples than shots, or if no text fits.
    """
    if len(examples) < shots:
        raise InvalidInput(f"there are {len(examples)} examples, fewer than {shots} shots", field="examples")
    if pool < shots:
        raise InvalidInput(f"a pool of {pool} examples is less than {shots} shots", field="pool")
    prompts, random = Prompts(engine, separator), np.random.default_rng(seed)
    drawn_from = _named(spread(examples, pool), engine.decisions.labels)
    found = []
    for text, label in texts:
        order = random.permutation(len(drawn_from))[:shots].tolist()
        found.append(prompts.of_examples([drawn_from[index] for index in order], text, label))
    cases = [case for case in found if case]
    if not cases:
        raise InvalidInput(
            f"every prompt of {shots} shots has more than {engine.tokenizer.max_tokens} tokens; "
            "use fewer shots",
            field="shots",
        )
    return cases


def _named(examples: Sequence[Labelled], labels: Sequence[str] | None) -> list[Labelled]:
    if labels is None:
        return list(examples)
    names = label_names([example.label for example in examples], labels)
    return [Labelled(example.text, name) for example, name in zip(examples, names, strict=True)]
