"""Define Template, the fixed text before and after every input, and read it from strings and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attncache_core.errors import InvalidInput

_PLACEHOLDER = "{}"


@dataclass(frozen=True, slots=True)
class Template:
    """The text before and after every input; both are empty by default."""

    prefix: str = ""
    suffix: str = ""

    @classmethod
    def parse(cls, written: str) -> Template:
        """Parse a template in which {} stands for the text.

        Raises InvalidInput unless `written` contains {} exactly once.
        """
        if written.count(_PLACEHOLDER) != 1:
            raise InvalidInput(
                f"template must hold {_PLACEHOLDER}, where the text goes, exactly once", field="template"
            )
        return cls(*written.split(_PLACEHOLDER))

    @classmethod
    def read(cls, path: Path) -> Template:
        """Read a template from a UTF-8 file. One line break at the end of the file is ignored.

        Raises InvalidInput if the file cannot be read, or does not contain {} exactly once.
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
        """Return `text` with the template's prefix and suffix."""
        return self.prefix + text + self.suffix

    def __str__(self) -> str:
        return self.around(_PLACEHOLDER)
