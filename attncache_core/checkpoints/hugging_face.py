"""Load Hugging Face objects one at a time, with the logging of transformers suppressed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

from attncache_core.errors import UnsupportedModel, readable

# transformers changes the default dtype of the whole process while it loads, and `loading` changes its
# log level, so two loads at the same time would mix up their settings.
_LOADING = threading.Lock()


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Hold the lock for loading, and suppress the progress bars and warnings of transformers.

    Any exception becomes UnsupportedModel, with the message "`what` cannot be read". transformers warns about
    models that are correct: about unused weights (for example a decoder's language head, if texts are
    embedded), about a rotary scaling factor that differs from its guess, and about a tokenizer's class name.
    """
    with _LOADING:
        verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            with readable(what):
                yield
        finally:
            logging.set_verbosity(verbosity)
            if has_bars:
                logging.enable_progress_bar()


def declared(config: Any, name: str) -> Any:
    """Return the value of a key of config.json, or None if the model family does not declare the key.

    config: the transformers configuration of a model. transformers keeps every key of config.json, including
    keys that the family's model never reads.
    """
    return getattr(config, name, None) if hasattr(type(config), name) else None


def declared_cap(config: Any, name: str) -> float | None:
    """Return a cap of scores or logits that the configuration's class declares; None if it has none.

    Raises UnsupportedModel if the cap is not positive.
    """
    cap: float | None = declared(config, name)
    if cap is not None and not cap > 0:
        raise UnsupportedModel(f"{name} in config.json is {cap}, and must be positive", field="model")
    return cap
