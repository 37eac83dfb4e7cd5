"""Prompts whose parts are chunks: segments and a query, or texts that are divided as the operator says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attncache_core import InputTooLong, PrefillEngine
from attncache_core.text.prompts import Prompt
from attncache_core.text.segments import Segmented, segmented, split
from attncache_core.text.tokenizer import continued
from service.batching.sources import Texts, Tokenized
from service.errors import rename


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments in front of a query, which stands in the prompt's template; one text.

    separator: between segments. field: of the request, that holds the segments. headings: what stands in
    front of each segment and does not belong to it.
    """

    segments: Sequence[str]
    query: str
    separator: str
    field: str = "segments"
    headings: Sequence[str] | None = None
    count = 1

    @property
    def characters(self) -> int:
        """The number of characters of segments and query."""
        return sum(map(len, self.segments)) + len(self.query)

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, most_tokens: int
    ) -> Iterator[Tokenized]:
        """Yield the sequence; see Source. Raises InputTooLong, which names `field`, if it does not fit."""
        segments = engine.tokenizer.turns(self.segments, self.field)
        (query,) = engine.tokenizer.turns([self.query], "query")
        (separator,) = engine.tokenizer.turns([self.separator])
        headings = None if self.headings is None else engine.tokenizer.turns(self.headings)
        try:
            found = segmented(engine.tokenizer.frame(prompt), segments, query, separator, headings)
            sequences = continued([found.ids], prompt.sequence_plans, most_tokens)
        except InputTooLong as error:
            rename(error, self.field)
            raise
        yield Tokenized(sequences, salt, chunked=[found])


@dataclass(frozen=True, slots=True)
class DividedTexts:
    """Texts that are divided into chunks: at a separator, or into as many tokens each.

    The end of a text, behind its last chunk, is what a query is. A text with fewer than two chunks has none.
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
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, most_tokens: int
    ) -> Iterator[Tokenized]:
        """Yield the sequences of the texts; see Source. A text at a time, where texts hold the separator."""
        opening = engine.tokenizer.frame(prompt).opening
        for text in self.texts.texts:
            own = Texts([text], self.texts.truncate, self.texts.cut)
            if isinstance(text, str) and self.separator and text.count(self.separator) > 1:
                *segments, query = text.split(self.separator)
                source: Segments | Texts = Segments(segments, query, self.separator, "inputs")
            else:
                source = own
            for part in source.tokenize(engine, prompt, salt, most_tokens):
                most_tokens -= sum(map(len, part.sequences))
                yield part if part.chunked else self._divided(part, prompt, opening)

    def _divided(self, part: Tokenized, prompt: Prompt, opening: int) -> Tokenized:
        if not self.tokens:
            return part
        plans = prompt.sequence_plans
        chunked = []
        for index in range(0, len(part.sequences), len(plans)):
            ids = part.sequences[index]
            found = split(ids[: len(ids) - len(plans[0].continuation)], opening, self.tokens)
            chunked.append(found if len(found.spans) > 1 else Segmented(found.ids, [], found.opening))
        return part._replace(chunked=chunked)
