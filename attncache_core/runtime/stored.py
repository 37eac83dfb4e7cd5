"""The data of JSON files that this library writes, and reads again."""

from typing import ClassVar

from pydantic import ConfigDict


class Stored:
    """The base of dataclasses that pydantic reads from a file, and refuses if they have further fields."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
