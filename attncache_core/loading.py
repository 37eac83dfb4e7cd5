"""How transformers is asked for what lies in a folder, in turn and without remarks; what its models read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

from attncache_core.errors import readable

# transformers sets the process' default dtype while it loads, and how much it says is the process' too: two
# models at once would mix theirs.
_LOADING = threading.Lock()


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Inside, transformers draws no bars and tells only of errors, which become UnsupportedModel for `what`.

    It remarks on what is as it should be: weights without a use (a decoder's head is one, where texts are
    embedded), angles scaled by another factor than it would have guessed, a tokenizer's class in name.
    """
    with _LOADING:
        verbosity = logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            with readable(what):
                yield
        finally:
            logging.set_verbosity(verbosity)


def declared(config: Any, name: str) -> Any:
    """What config.json says under a name that the model's configuration declares; None under any other.

    transformers keeps every key of config.json, and a model reads its own.
    """
    return getattr(config, name, None) if hasattr(type(config), name) else None
