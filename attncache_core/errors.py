"""Define every error that AttnCache raises for its callers.

    a request     InvalidInput - InputTooLong, NoClassifier      the caller fixes the request
    an answer     NotFinite                                      the caller leaves the text out
    a start       ModelNotFound, UnsupportedModel                the operator fixes the model
                  DatabaseRefused - CorruptDatabase              the operator fixes or rebuilds the database
                  BuildFailed                                    the operator fixes the corpus
    a measurement MachineBusy                                    the caller measures again later

Each error has a stable `code`, an integer `status` (an HTTP status code), and a message for the person who
can fix the problem. A message never contains a user's text.
"""

from __future__ import annotations

import errno
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Self


class AttnCacheError(Exception):
    """The base class of all errors that a caller can act on."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidInput(AttnCacheError):
    """The call does not accept a value; `field` names the parameter that has the value."""

    code = "invalid_input"
    status = 400


class InputTooLong(InvalidInput):
    """One text has more tokens than the model accepts, or a whole request has too many tokens.

    One text that is too long raises this error only if the caller declined truncation.
    """

    code = "input_too_long"
    status = 422


class NoClassifier(InvalidInput):
    """A request asks for classes, but there is no classification model, no fitted classifier and no label."""

    code = "no_classifier"


class NotFinite(AttnCacheError):
    """The model computes NaN or infinity for a text. Other texts of the batch are not affected.

    Either the model's weights are damaged, or numbers become too large for the compute dtype.
    """

    code = "not_finite"
    index = 0  # index of the text in the texts of the call

    @classmethod
    def of(cls, index: int, texts: str = "inputs") -> Self:
        """Create the error for text `index` of the request field `texts`."""
        field = f"{texts}[{index}]"
        error = cls(
            f"the model computes NaN or infinity for {field}; leave this text out, or have the model's "
            "weights and dtype checked",
            field=field,
        )
        error.index = index
        return error


class ModelNotFound(AttnCacheError):
    """No folder, installed package, cache or hub has the model; the message lists where it was searched."""

    code = "model_not_found"


class UnsupportedModel(AttnCacheError):
    """The model folder was found, but AttnCache cannot read it or does not support such a model."""

    code = "unsupported_model"


class DatabaseRefused(AttnCacheError):
    """The database, or the fitted classifier, cannot be used with this model.

    It is missing, was made for a model with another fingerprint, or has another format or dtype.
    """

    code = "database_refused"


class CorruptDatabase(DatabaseRefused):
    """A file of the database is missing, was cut short or was changed after the build."""

    code = "corrupt_database"


class BuildFailed(AttnCacheError):
    """No database or classifier can be built from this corpus."""

    code = "build_failed"


class MachineBusy(AttnCacheError):
    """Times were to be measured, and other programs used the processors all the time."""

    code = "machine_busy"
    status = 503


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn any exception of the `with` block into UnsupportedModel, with the message "`what` cannot be read".

    An AttnCacheError passes unchanged. Use this context manager where files of a model are read. Such files
    may have any content, and the exceptions of safetensors, tokenizers, transformers and this library for
    wrong content have no common base class.
    """
    try:
        yield
    except AttnCacheError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise UnsupportedModel(
                f"memory ran out while {what} was read; leave more memory to the process, or choose a "
                "smaller model",
                field="model",
            ) from error
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise UnsupportedModel(f"{what} cannot be read ({reason})", field="model") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no memory left: Python's, the system's or torch's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "allocate memory" in str(error)
