"""What all groups of settings share: the names of a setting, and how a value is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

ENVIRONMENT_PREFIX = "ATTNCACHE_"
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
# 31 years, because timers of threads, and expiry in a shared store, fail beyond a few hundred years.
MAX_SECONDS = 1e9


class Group(BaseModel):
    """Settings that belong together. The help and the documentation list them under `title`."""

    # Infinity, where a setting allows it, is not JSON's null for the process that builds.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    title: ClassVar[str]

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_a_truth_value(cls, value: object, info: ValidationInfo) -> object:
        # To pydantic, true is 1.
        if isinstance(value, bool) and {int, float} & cls._types(info):
            raise refused("it must be a number")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _path_has_a_name(cls, value: object, info: ValidationInfo) -> object:
        """Replace ~ by the home folder, as a shell does where it sees a path at the beginning of a word."""
        if not isinstance(value, str | Path) or Path not in cls._types(info):
            return value
        if value == "":
            # Path("") would be the current folder.
            raise refused("give the name of a file or folder")
        return Path(os.path.expanduser(value))

    @classmethod
    def _types(cls, info: ValidationInfo) -> set[object]:
        annotation = cls.model_fields[str(info.field_name)].annotation
        return {annotation, *get_args(annotation)}


def option_name(field: str) -> str:
    """Return the option of a field: max_batch_tokens -> --max-batch-tokens."""
    return "--" + field.replace("_", "-")


def environment_name(field: str) -> str:
    """Return the environment variable of a field: max_batch_tokens -> ATTNCACHE_MAX_BATCH_TOKENS."""
    return ENVIRONMENT_PREFIX + field.upper()


def all_names(field: str) -> str:
    """Return all names of a field, for errors: --port (ATTNCACHE_PORT, or port in the file)."""
    return f"{option_name(field)} ({environment_name(field)}, or {field} in the file)"


def refused(sentence: str) -> PydanticCustomError:
    """Return the error that a validator raises. sentence: what to give, or what to leave out."""
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})
