"""Compute what a request asks for, and let errors name the request's own fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attncache_core import InvalidInput, NotFinite
from attncache_core.text.labels import LabelTokens
from attncache_core.text.prompts import Prompt
from service.batching.pending_request import RequestResult
from service.batching.sources import Source
from service.errors import TooManyInputs, rename
from service.state import Serving
from service.web.call import Call

_TEXT = re.compile(r"inputs\[(\d+)\]")


async def computed(
    call: Call,
    serving: Serving,
    source: Source,
    *,
    reuse: bool,
    prompt: Prompt | None = None,
    labels: LabelTokens | None = None,
    salt: bytes = b"",
    counted: bool = True,
    repeats: bool = True,
) -> RequestResult:
    """Compute the texts of a source and return their results. Arguments and errors: see Batcher.submit.

    Raises TooManyInputs if the sequences of the texts would never fit into the queue.
    """
    plans = len((prompt or serving.engine.default_prompt).sequence_plans)
    most = call.state.settings.max_queue_sequences
    if source.count * plans > most:
        raise TooManyInputs(
            f"inputs make {source.count * plans} sequences, and at most {most} may wait; send fewer of them",
            field="inputs",
        )
    return await call.wait(
        serving.batcher.submit(
            source,
            flow=call.client.flow,
            reuse=reuse,
            prompt=prompt,
            labels=labels,
            salt=salt,
            counted=counted,
            repeats=repeats,
        )
    )


@contextmanager
def named(field: str, of_text: Callable[[int], str] | None = None) -> Iterator[None]:
    """Let errors about texts name the field of the request that holds the texts.

    of_text: returns the name of text `index`; by default `field[index]`.
    """
    try:
        yield
    except (InvalidInput, NotFinite) as error:
        if error.field == "inputs":
            rename(error, field)
        elif (index := text_index(error)) is not None:
            rename(error, of_text(index) if of_text else f"{field}[{index}]")
        raise


def text_index(error: InvalidInput | NotFinite) -> int | None:
    """Return the index of the text that an error is about; None if it is about no single text."""
    found = _TEXT.fullmatch(error.field or "")
    return int(found[1]) if found else None
