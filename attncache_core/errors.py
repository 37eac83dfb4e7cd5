"""Every error a caller of AttnCache can meet.

    a request     InvalidInput - InputTooLong, NoClassifier      the caller mends the request
    an answer     NotFinite                                      the caller leaves the text out
    a start       ModelNotFound, UnsupportedModel                the operator mends the model
                  DatabaseRefused - CorruptDatabase              the operator mends or rebuilds the database
                  BuildFailed                                    the operator mends the corpus

An error has a stable `code`, a plain integer `status` in HTTP's sense, and a message written for the
person who can mend it. A message never holds a user's text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Self


class AttnCacheError(Exception):
    """The root: something a caller can act on."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidInput(AttnCacheError):
    """A value is not what the call accepts; `field` names it."""

    code = "invalid_input"
    status = 400


class InputTooLong(InvalidInput):
    """A text has more tokens than the model takes and truncation was declined, or all have too many."""

    code = "input_too_long"
    status = 422


class NoClassifier(InvalidInput):
    """Classes were asked for, but the model has none, none was fitted and no labels were given."""

    code = "no_classifier"


class NotFinite(AttnCacheError):
    """What the model computes for a text holds NaN or infinity; other texts are not affected.

    The model's weights are damaged, or numbers grow too large for its dtype.
    """

    code = "not_finite"
    index = 0  # of the text among those given

    @classmethod
    def of(cls, index: int, texts: str = "inputs") -> Self:
        """The error of one text; texts: the field that holds them."""
        field = f"{texts}[{index}]"
        error = cls(
            f"the model computes NaN or infinity for {field}; leave this text out, or have the model's "
            "weights and dtype checked",
            field=field,
        )
        error.index = index
        return error


class ModelNotFound(AttnCacheError):
    """No folder, installed package, cache or hub holds the model; the message lists what was tried."""

    code = "model_not_found"


class UnsupportedModel(AttnCacheError):
    """The checkpoint was found, but it is of a kind that is not served."""

    code = "unsupported_model"


class DatabaseRefused(AttnCacheError):
    """The database cannot serve this model: it is absent, of another fingerprint, format or dtype."""

    code = "database_refused"


class CorruptDatabase(DatabaseRefused):
    """A file of the database is missing, cut short or changed since it was built."""

    code = "corrupt_database"


class BuildFailed(AttnCacheError):
    """A database or a classifier cannot be made from this corpus."""

    code = "build_failed"


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Whatever is raised inside, but an error of ours, becomes UnsupportedModel: `what` cannot be read.

    For the files of a model, in which anything may stand. What safetensors, tokenizers, transformers and our
    own reading raise then shares no base class.
    """
    try:
        yield
    except AttnCacheError:
        raise
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise UnsupportedModel(f"{what} cannot be read ({reason})", field="model") from error
