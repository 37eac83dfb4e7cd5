"""Rows in chunks, and the proof that a file still begins with the rows that are done.

A chunk is what is computed and saved at once. Where chunks end depends on the rows alone, so a run that was
continued computes the same chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from service.bulk.rows import Rows

CHUNK_ROWS = 4096
# Long texts take seconds per chunk, so this is what a killed run loses. Larger chunks are not faster.
CHUNK_CHARACTERS = 2**18


@dataclass(frozen=True, slots=True)
class Done:
    """The rows that were read from the beginning of a file."""

    rows: int
    digest: str  # of their texts, in hexadecimal


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring rows."""

    texts: list[str]
    numbers: list[int]  # of the rows, as Rows.place takes them
    done: Done  # with this chunk
    share: float | None  # of the file that is read with this chunk, as Rows.share
    rows: Rows

    def place_of(self, text: str) -> str:
        """Return where the first row with this text is, for errors."""
        return self.rows.place(self.numbers[self.texts.index(text)])


NOTHING = Done(0, hashlib.blake2b(digest_size=16).hexdigest())


class ChunkReader:
    """Reads rows in chunks."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._numbered = rows, iter(rows)
        self._digest, self._count = hashlib.blake2b(digest_size=16), 0

    def skip(self, done: Done) -> bool:
        """Skip the rows that are done. Returns whether the file begins with these rows.

        Called before any chunk is read. Raises InvalidInput as iterating the rows does.
        """
        for _, text in islice(self._numbered, done.rows):
            self._add(text)
        return self._done == done

    def chunks(self) -> Iterator[Chunk]:
        """Yield the next chunks. Raises InvalidInput as iterating the rows does."""
        texts: list[str] = []
        numbers: list[int] = []
        characters = 0
        for number, text in self._numbered:
            self._add(text)
            texts.append(text)
            numbers.append(number)
            characters += len(text)
            if len(texts) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                yield Chunk(texts, numbers, self._done, self._rows.share, self._rows)
                texts, numbers, characters = [], [], 0
        if texts:
            yield Chunk(texts, numbers, self._done, self._rows.share, self._rows)

    @property
    def _done(self) -> Done:
        return Done(self._count, self._digest.hexdigest())

    def _add(self, text: str) -> None:
        content = text.encode()
        # The length keeps "ab", "c" and "a", "bc" apart.
        self._digest.update(b"%d:" % len(content))
        self._digest.update(content)
        self._count += 1
