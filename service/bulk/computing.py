"""Compute chunks on all threads of the engine.

chunk -> texts that are new -> sequences -> batches of like lengths -> engine threads -> one row per text
      -> texts of chunks before -----------------------------------> the output -------->

While a chunk is computed, the next one is read and tokenised.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from attncache_core import (
    AttnCacheError,
    InvalidInput,
    NoClassifier,
    NotFinite,
    PrefillEngine,
    PrefillResult,
)
from attncache_core.text.labels import LabelTokens
from attncache_core.text.pairs import truncated_sequences
from attncache_core.text.prefix_tree import added_tokens
from attncache_core.text.prompts import Prompt
from service.bulk.formats import Classes
from service.bulk.rows import Chunk
from service.errors import rename


@dataclass(frozen=True, slots=True)
class Task:
    """How texts become sequences, and their results become numbers."""

    prompt: Prompt
    width: int  # numbers per text
    numbers: Callable[[PrefillResult], np.ndarray]  # the result of texts -> float32 [texts, width]
    label_tokens: LabelTokens | None = None  # if labels are scored by their tokens
    classes: Classes | None = None  # of the columns, if the numbers are logits


def embedding(engine: PrefillEngine, prompt_name: str | None, dimensions: int | None) -> Task:
    """Return the task of embedding texts. Raises InvalidInput as PrefillEngine.embed does."""
    if engine.dimensions is None:
        raise InvalidInput("the model is a classifier and gives no embeddings", field="model")
    engine.require_dimensions(dimensions)
    return Task(
        engine.tokenizer.named_prompt(prompt_name),
        dimensions or engine.dimensions,
        lambda result: engine.embeddings(result.outputs, dimensions=dimensions),
    )


def classes(engine: PrefillEngine) -> Task:
    """Return the task of scoring the labels of the model, of the classifier or of --labels.

    Raises NoClassifier if there are no labels.
    """
    if engine.checkpoint.task == "label-logits":
        tokens = engine.decisions.labels_in()

        def of_tokens(result: PrefillResult) -> np.ndarray:
            return engine.decisions.label_logits(tokens, result.outputs, result.log_probabilities)

        return Task(tokens.prompt, len(tokens.labels), of_tokens, tokens, Classes(tokens.labels))
    if engine.decisions.labels is None:
        raise NoClassifier("the model has no classes; give --labels or --classifier", field="labels")
    return Task(
        engine.tokenizer.default_prompt,
        len(engine.decisions.labels),
        lambda result: engine.decisions.class_logits(result.outputs),
        classes=Classes(engine.decisions.labels, engine.decisions.multi_label),
    )


Sequences = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Batch:
    texts: list[int]  # indices of the new texts
    numbers: Future[np.ndarray]  # float32 [texts, width]


class Computing:
    """Computes chunks; a context manager, which ends its threads."""

    def __init__(self, engine: PrefillEngine, task: Task, batch_tokens: int) -> None:
        """batch_tokens: most tokens in one batch; a longer text is a batch of its own."""
        self._engine, self._task, self._batch_tokens = engine, task, batch_tokens
        self.truncated_rows = 0  # rows until now whose texts were too long and were cut
        self._pool = ThreadPoolExecutor(engine.parallel_runs, thread_name_prefix="engine")

    def __enter__(self) -> Computing:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def computed(
        self, chunks: Iterable[Chunk], yielded: Callable[[list[int]], np.ndarray]
    ) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Yield each chunk with its numbers, float32 [texts, width], in order.

        yielded: returns the numbers of rows of chunks before, in this run or in the one that it continues.

        At most one chunk is read ahead. If reading or tokenising fails, what was read before is computed and
        yielded first. Raises NotFinite if the model computes NaN or infinity for a text, and InputTooLong or
        InvalidInput if a text is not accepted; all of them name the row.
        """
        pending: deque[tuple[Chunk, list[str], list[_Batch]]] = deque()
        reading, failure = iter(chunks), None
        while True:
            try:
                chunk = None if failure else next(reading, None)
                if chunk is not None:
                    pending.append(self._start(chunk))
            except AttnCacheError as error:
                chunk, failure = None, error
            if chunk is None or len(pending) > 1:
                if not pending:
                    break
                yield self._finish(*pending.popleft(), yielded)
        if failure:
            raise failure

    def _start(self, chunk: Chunk) -> tuple[Chunk, list[str], list[_Batch]]:
        # Also texts that an earlier run has computed: nobody has counted whether they are cut.
        unread = [text for text, known in chunk.distinct.items() if known.is_cut is None]
        with _naming_rows(chunk, unread):
            made = self._engine.tokenize(unread, prompt=self._task.prompt)
        plans = len(self._task.prompt.sequence_plans)
        sequences = {text: made[index * plans : (index + 1) * plans] for index, text in enumerate(unread)}
        for text, of_text in sequences.items():
            chunk.distinct[text].is_cut = truncated_sequences(of_text) > 0
        texts = chunk.new
        of_texts = [sequences[text] for text in texts]
        self.truncated_rows += sum(bool(chunk.distinct[text].is_cut) for text in chunk.texts)
        batches = [
            _Batch(indices, self._pool.submit(self._run, [of_texts[index] for index in indices]))
            for indices in self._batches(of_texts)
        ]
        return chunk, texts, batches

    def _finish(
        self,
        chunk: Chunk,
        texts: list[str],
        batches: list[_Batch],
        yielded: Callable[[list[int]], np.ndarray],
    ) -> tuple[Chunk, np.ndarray]:
        numbers = np.empty((len(chunk.distinct), self._task.width), dtype=np.float32)
        for batch in batches:
            with _naming_rows(chunk, [texts[index] for index in batch.texts]):
                numbers[batch.texts] = batch.numbers.result()
        row_of = {text: row for row, text in enumerate(texts)}
        before = [text for text in chunk.distinct if text not in row_of]
        if before:
            numbers[len(texts) :] = yielded([chunk.distinct[text].row for text in before])
            row_of |= {text: row for row, text in enumerate(before, len(texts))}
        return chunk, numbers[[row_of[text] for text in chunk.texts]]

    def _batches(self, of_texts: Sequence[Sequences]) -> Iterator[list[int]]:
        """Yield batches of texts, as indices. Longest texts first, so that no thread is left with them.

        of_texts: the sequences of each text. If the engine shares prefixes, texts that begin alike are
        neighbours, and a shared prefix counts once.
        """
        shares = self._engine.shares_prefixes(reuse=False)
        if shares:
            order = sorted(range(len(of_texts)), key=lambda index: list(map(list, of_texts[index])))
            flat = [ids for index in order for ids in of_texts[index]]
            added = iter(added_tokens(flat))
            costs = [sum(next(added) for _ in of_texts[index]) for index in order]
        else:
            order = sorted(range(len(of_texts)), key=lambda index: -_tokens(of_texts[index]))
            costs = [_tokens(of_texts[index]) for index in order]
        batch: list[int] = []
        taken = 0
        for index, cost in zip(order, costs, strict=True):
            if batch and taken + cost > self._batch_tokens:
                yield batch
                batch, taken = [], 0
            # The first text of a batch shares nothing with the text before it.
            taken += cost if batch else _tokens(of_texts[index])
            batch.append(index)
        if batch:
            yield batch

    def _run(self, of_texts: Sequence[Sequences]) -> np.ndarray:
        """Return the numbers of texts. Raises NotFinite with the index of a text."""
        engine, task = self._engine, self._task
        sequences = [ids for of_text in of_texts for ids in of_text]
        result = engine.run(engine.requests(sequences, task.prompt, task.label_tokens, reuse=False))
        finite = result.finite.reshape(len(of_texts), -1).all(axis=1)
        numbers = task.numbers(result)
        finite &= np.isfinite(numbers).all(axis=1)
        if not finite.all():
            raise NotFinite.of(int(finite.argmin()))
        return numbers


@contextmanager
def _naming_rows(chunk: Chunk, texts: Sequence[str]) -> Iterator[None]:
    """Let an error about one of these texts of a chunk name its row."""
    try:
        yield
    except AttnCacheError as error:
        if found := re.fullmatch(r"inputs\[(\d+)\]", error.field or ""):
            rename(error, chunk.place_of(texts[int(found[1])]))
            error.field = "input"
        raise


def _tokens(sequences: Sequences) -> int:
    return sum(map(len, sequences))
