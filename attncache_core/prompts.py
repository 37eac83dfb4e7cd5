"""What stands round a text, and what is read from the sequences that come of it.

    "Review: {}\\nSentiment:" -> Template -> TextTokenizer.prompt -> Prompt -> sequences, one for each Reading

sentence-transformers' prompts are templates too: those with nothing behind the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attncache_core.errors import InvalidInput

_TEXT = "{}"


@dataclass(frozen=True, slots=True)
class Template:
    """What stands before and after every text; with nothing, the text alone."""

    prefix: str = ""
    suffix: str = ""

    @classmethod
    def parse(cls, written: str) -> Template:
        """The template written with {} where the text goes. Raises InvalidInput unless it is there once."""
        if written.count(_TEXT) != 1:
            raise InvalidInput(
                f"template must hold {_TEXT}, where the text goes, exactly once", field="template"
            )
        return cls(*written.split(_TEXT))

    @classmethod
    def read(cls, path: Path) -> Template:
        """The template in a file of UTF-8; the line break that ends the file is no part of it.

        Raises InvalidInput if it cannot be read, and as `parse` does.
        """
        try:
            written = path.read_bytes().decode()
        except OSError as error:
            raise InvalidInput(
                f"template {path} cannot be read ({error.strerror})", field="template"
            ) from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"template {path} cannot be read as UTF-8", field="template") from error
        return cls.parse(written.removesuffix("\n").removesuffix("\r"))

    def around(self, text: str) -> str:
        """The text in its template."""
        return self.prefix + text + self.suffix

    def __str__(self) -> str:
        return self.around(_TEXT)


class Target(NamedTuple):
    """A token whose probability is asked for."""

    back: int  # the position that predicts it: so many tokens before the last one of its sequence
    token: int


@dataclass(frozen=True, slots=True)
class Reading:
    """How one sequence of a text is made and what is read from it beside its output."""

    prompt_tokens: int  # tokens at its front that are the template's, special ones included
    continuation: tuple[int, ...] = ()  # tokens behind the text in its template
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A template made ready for one tokenizer: TextTokenizer.prompt makes it."""

    template: Template
    readings: tuple[Reading, ...]  # a text becomes a sequence for each of them

    def reading_of(self, place: int) -> Reading:
        """The reading of the sequence that stands at this place among those of all texts."""
        return self.readings[place % len(self.readings)]
