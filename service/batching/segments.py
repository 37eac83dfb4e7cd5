"""Prompts whose parts are chunks: segments and a query, or texts that are divided as the operator says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attncache_core import InputTooLong, PrefillEngine
from attncache_core.text.prompts import Frame, Prompt
from attncache_core.text.segments import Segmented, segmented, split, split_at
from attncache_core.text.tokenizer import continued
from service.batching.sources import Texts, Tokenized
from service.errors import rename


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments in front of a query, which stands in the prompt's template; one text.

    separator: between segments. headings: what stands in front of each segment and does not belong to it.
    """

    segments: Sequence[str]
    query: str
    separator: str
    headings: Sequence[str] | None = None
    count = 1

    @property
    def characters(self) -> int:
        """The number of characters of segments and query."""
        return sum(map(len, self.segments)) + len(self.query)

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, max_total_tokens: int
    ) -> Iterator[Tokenized]:
        """Yield the sequence; see Source. Raises InputTooLong, which names segments or query."""
        segments = engine.tokenizer.turns(self.segments, "segments")
        (query,) = engine.tokenizer.turns([self.query], "query")
        (separator,) = engine.tokenizer.turns([self.separator])
        headings = None if self.headings is None else engine.tokenizer.turns(self.headings)
        found = segmented(engine.tokenizer.frame(prompt), segments, query, separator, headings)
        try:
            sequences = continued([found.ids], prompt.sequence_plans, max_total_tokens)
        except InputTooLong as error:
            rename(error, "segments")
            raise
        yield Tokenized(sequences, salt, chunked=[found])


@dataclass(frozen=True, slots=True)
class DividedTexts:
    """Texts that are divided into chunks: at a separator, or into as many tokens each.

    A text keeps its tokens. The end of a text, behind its last chunk, is what a query is. A text with fewer
    than two chunks has none.
    """

    texts: Texts
    separator: str | None
    tokens: int | None  # of a chunk, for texts without the separator; None: they are not divided

    @property
    def count(self) -> int:
        """The number of texts."""
        return self.texts.count

    @property
    def characters(self) -> int:
        """The number of characters of all texts."""
        return self.texts.characters

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, max_total_tokens: int
    ) -> Iterator[Tokenized]:
        """Yield the sequences of the texts; see Source."""
        frame = engine.tokenizer.frame(prompt)
        plans = prompt.sequence_plans
        for part in self.texts.tokenize(engine, prompt, salt, max_total_tokens):
            texts = [ids[: len(ids) - len(plans[0].continuation)] for ids in part.sequences[:: len(plans)]]
            yield part._replace(chunked=[self._divided(engine, ids, frame) for ids in texts])

    def _divided(self, engine: PrefillEngine, ids: Sequence[int], frame: Frame) -> Segmented:
        found = Segmented(list(ids), [], list(ids[: frame.opening]))
        if self.separator:
            found = split_at(ids, frame, engine.tokenizer.written_behind(ids), self.separator)
        if len(found.spans) < 2 and self.tokens:
            found = split(ids, frame.opening, self.tokens)
        return found if len(found.spans) > 1 else found._replace(spans=[])
