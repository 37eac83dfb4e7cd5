"""Define Template, the fixed text around every input, and read it from strings and files.

    "Review: {}\\nSentiment:"                                     around one text
    "{instruction:Find answers}\\nQ: {query}\\nD: {document}"      around a query and a document

Templates of published rerankers come with this package, by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from attncache_core.errors import InvalidInput

# One text, or a pair of texts.
Text = str | tuple[str, str]

_PLACEHOLDER = "{}"
_QUERY, _DOCUMENT = "{query}", "{document}"
_INSTRUCTION = re.compile(r"\{instruction:([^{}]*)\}")
_SHIPPED = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Template:
    """The text before and after every input; both are empty by default.

    If `middle` is set, an input is a pair: a query, and a document behind `middle`.
    """

    prefix: str = ""
    suffix: str = ""
    middle: str | None = None  # between query and document; None: the template is around one text
    # Where the part of the prefix begins and ends that `instructed` replaces; None: there is none.
    instruction: tuple[int, int] | None = None

    @classmethod
    def parse(cls, written: str, field: str = "template", *, pairs: bool = True) -> Self:
        """Parse a template in which {} stands for the text, or {query} and {document} for a pair.

        {instruction:TEXT} in front of {query} stands for TEXT, which `instructed` replaces. field: the name
        of the template in error messages. pairs: accept templates of pairs. Raises InvalidInput unless
        `written` contains either {} exactly once, or {query} and behind it {document} exactly once, and if an
        instruction stands elsewhere.
        """
        names_pair = _QUERY in written or _DOCUMENT in written
        if written.count(_PLACEHOLDER) == 1 and not names_pair:
            prefix, suffix = written.split(_PLACEHOLDER)
            _require_no_instruction(prefix, suffix, field)
            return cls(prefix, suffix)
        if not pairs:
            raise InvalidInput(
                f"{field} must hold {_PLACEHOLDER} exactly once, and neither {_QUERY} nor {_DOCUMENT}",
                field=field,
            )
        if _PLACEHOLDER not in written and written.count(_QUERY) == written.count(_DOCUMENT) == 1:
            prefix, rest = written.split(_QUERY)
            if _DOCUMENT not in rest:
                raise InvalidInput(f"{field} must hold {_QUERY} in front of {_DOCUMENT}", field=field)
            middle, suffix = rest.split(_DOCUMENT)
            _require_no_instruction(middle, suffix, field)
            return cls._with_instruction(prefix, middle, suffix, field)
        raise InvalidInput(
            f"{field} must hold {_PLACEHOLDER}, where the text goes, exactly once, or instead {_QUERY} and "
            f"{_DOCUMENT}, where the texts of a pair go, exactly once",
            field=field,
        )

    @classmethod
    def _with_instruction(cls, prefix: str, middle: str, suffix: str, field: str) -> Self:
        opening, *rest = _INSTRUCTION.split(prefix)
        if not rest:
            return cls(prefix, suffix, middle)
        if len(rest) > 2:
            raise InvalidInput(f"{field} must hold {{instruction:...}} at most once", field=field)
        text, closing = rest
        at = (len(opening), len(opening) + len(text))
        return cls(opening + text + closing, suffix, middle, at)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a template from a UTF-8 file, or a template of this package by its name.

        One line break at the end of the file is ignored. Raises InvalidInput if the file cannot be read, or
        as `parse` does.
        """
        if not path.exists() and str(path) in shipped_templates():
            return cls.named(str(path))
        try:
            written = path.read_bytes().decode()
        except OSError as error:
            raise InvalidInput(
                f"template {path} cannot be read ({error.strerror}), and it is none of the templates of this "
                f"package: {', '.join(shipped_templates())}",
                field="template",
            ) from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"template {path} cannot be read as UTF-8", field="template") from error
        return cls.parse(written.removesuffix("\n").removesuffix("\r"))

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the template of this package with this name. Raises InvalidInput if there is none."""
        if name not in shipped_templates():
            known = ", ".join(shipped_templates())
            raise InvalidInput(f"this package has no template of this name; it has {known}", field="template")
        written = (_SHIPPED / f"{name}.txt").read_bytes().decode()
        return cls.parse(written.removesuffix("\n"))

    @property
    def is_for_pairs(self) -> bool:
        """Whether an input is a pair of query and document."""
        return self.middle is not None

    @property
    def characters(self) -> int:
        """The number of characters around an input."""
        return len(self.prefix) + len(self.middle or "") + len(self.suffix)

    def instructed(self, instruction: str) -> Template:
        """Return the template with another instruction. Raises InvalidInput if it has none."""
        if self.instruction is None:
            raise InvalidInput(
                "instruction is accepted only by a template that holds {instruction:...}", field="instruction"
            )
        first, end = self.instruction
        prefix = self.prefix[:first] + instruction + self.prefix[end:]
        return replace(self, prefix=prefix, instruction=(first, first + len(instruction)))

    def parts(self, text: Text) -> tuple[str, str, str]:
        """Return what stands in front of the text that may be cut, this text, and what stands behind it.

        Only the document of a pair may be cut. Raises ValueError if a pair is needed and `text` is none, or
        the other way round.
        """
        if self.is_for_pairs != isinstance(text, tuple):
            raise ValueError("the template is for pairs and the text is none, or the other way round")
        if isinstance(text, str):
            return self.prefix, text, self.suffix
        query, document = text
        return f"{self.prefix}{query}{self.middle}", document, self.suffix

    def around(self, text: Text) -> str:
        """Return the text, or the pair of texts, in the template."""
        before, middle, after = self.parts(text)
        return before + middle + after  # without a copy, if the template is empty

    def sample(self, text: str) -> Text:
        """Return `text`, or a pair of it, as the template needs."""
        return (text, text) if self.is_for_pairs else text

    def __str__(self) -> str:
        if self.middle is None:
            return self.around(_PLACEHOLDER)
        prefix = self.prefix
        if self.instruction is not None:
            first, end = self.instruction
            prefix = f"{prefix[:first]}{{instruction:{prefix[first:end]}}}{prefix[end:]}"
        return prefix + _QUERY + self.middle + _DOCUMENT + self.suffix


def _require_no_instruction(first: str, second: str, field: str) -> None:
    """Raise InvalidInput if one of two parts of a template has an instruction, which the model would read."""
    if _INSTRUCTION.search(first) or _INSTRUCTION.search(second):
        raise InvalidInput(
            f"{field} must hold {{instruction:...}} only in front of {_QUERY}; move it there, or write its "
            "text without the braces",
            field=field,
        )


def shipped_templates() -> list[str]:
    """Return the names of the templates that come with this package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.txt"))


def characters_of(text: Text) -> int:
    """Return the number of characters of a text, or of both texts of a pair."""
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
