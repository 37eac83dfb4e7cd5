"""What a request asks the batcher to compute: a source of token sequences.

A source is made on the event loop, and makes its sequences in a tokenize thread. The texts of `inputs` are a
source, and so is a conversation (service/conversations/conversation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from attncache_core import PrefillEngine
from attncache_core.text.prompts import Prompt


class Tokenized(NamedTuple):
    """The token sequences of a request, and how their keys and values are stored."""

    sequences: list[list[int]]  # text by text, one per sequence plan
    # Sequences of one salt share stored keys and values; None: nothing is given, and nothing is stored.
    salt: bytes | None
    passing: int = 0  # tokens before a plan's continuation whose keys and values are not worth keeping


class Source(Protocol):
    """One or several texts that become token sequences."""

    @property
    def count(self) -> int:
        """The number of texts."""

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, most_tokens: int
    ) -> Tokenized:
        """Return the sequences of the texts: for each text, one per sequence plan of the prompt.

        salt: of the request; see Tokenized. Raises InputTooLong if a text is too long, or if all sequences
        have more than `most_tokens` tokens together.
        """


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts that do not depend on each other. truncate: cut a text that is too long."""

    texts: list[str]
    truncate: bool

    @property
    def count(self) -> int:
        """The number of texts."""
        return len(self.texts)

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, most_tokens: int
    ) -> Tokenized:
        """Return the sequences of the texts in the prompt's template; see Source."""
        return Tokenized(engine.tokenize(self.texts, self.truncate, prompt, most_tokens), salt)
