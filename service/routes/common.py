"""What the functions of the routes for inference share: the computation and the response.

Front -> InferenceRoute -> the function of the route -> computed -> answer -> Front
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import orjson
from starlette.responses import Response

from attncache_core import InvalidInput, NotFinite, PrefillResult
from attncache_core.heads.comparator import Measure
from attncache_core.text.labels import LabelTokens
from attncache_core.text.prompts import Prompt
from service.batching.sources import Source
from service.conversations.conversation import Conversation
from service.errors import TooManyInputs, rename
from service.observability.finished import Timing
from service.routes.inference_route import (
    APPROXIMATE_HEADER,
    CACHED_TOKENS_HEADER,
    HISTORY_TOKENS_HEADER,
    HITS_HEADER,
    PROTOTYPE_HITS_HEADER,
    REPEATED_HEADER,
    SEGMENTS_HEADER,
    TRUNCATED_HEADER,
)
from service.web.call import Answer, Call

_TEXT = re.compile(r"inputs\[(\d+)\]")
# So many rows of a list are written as JSON at a time, and other requests wait meanwhile.
_PART_ROWS = 64
_MAX_SEGMENTS = 64  # in the header: many clients refuse headers of more than 8 KiB


def check_count(call: Call, texts: Sequence[Any], field: str) -> None:
    """Raise TooManyInputs if a request has more texts than allowed. field: the field with the texts."""
    limit = call.state.settings.max_request_inputs
    if len(texts) > limit:
        kind = "labels" if field == "labels" else "texts"
        raise TooManyInputs(
            f"{field} must have at most {limit} {kind} per request; send fewer {kind} per request, or raise "
            "--max-request-inputs",
            field=field,
        )


async def computed(
    call: Call,
    source: Source,
    *,
    reuse: bool = True,
    prompt: Prompt | None = None,
    labels: LabelTokens | None = None,
    reads: Measure | None = Measure.COSINE,
    salt: bytes = b"",
    counted: bool = True,
    repeats: bool = True,
) -> PrefillResult:
    """Compute the texts of a source and return their results. Arguments and errors: see Batcher.submit.

    reuse: False reuses nothing, whatever the request says. Raises TooManyInputs if the sequences of the texts
    would never fit into the queue.
    """
    serving = call.serving()
    plans = len((prompt or serving.engine.tokenizer.default_prompt).sequence_plans)
    maximum = call.state.settings.max_queue_sequences
    if source.count * plans > maximum:
        raise TooManyInputs(
            f"inputs make {source.count * plans} sequences, and at most {maximum} may wait; send fewer "
            + ("of them" if plans <= maximum else "labels"),
            field="inputs" if plans <= maximum else "labels",
        )
    if call.holder is not None:
        await call.count_in_quota(call.holder, serving.batcher.guess_tokens(source))
    timing = Timing()
    sampling = None if isinstance(source, Conversation) or not counted else call.state.sampling
    pending = serving.batcher.submit(
        source,
        flow=call.flow,
        reuse=reuse and call.reuse,
        prompt=prompt,
        labels=labels,
        reads=reads,
        salt=salt,
        counted=counted,
        repeats=repeats,
        timing=timing,
        answered=partial(sampling.offer, call.key) if sampling else None,
        seconds=call.seconds_left,
    )
    call.timings.append(timing)
    return await call.wait(pending)


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


async def json_list(rows: Iterable[Any], call: Call) -> orjson.Fragment:
    """Return rows, made one after the other, as a JSON list. Other requests are served between its parts.

    call: whose answer is the list, and whose parts take turns with the parts of other answers. Raises as
    Call.turn_to_write.
    """
    return orjson.Fragment(await _written(rows, call))


async def json_lists(lists: Iterable[Iterable[Any]], call: Call) -> orjson.Fragment:
    """Return lists of rows as a JSON list of lists, as `json_list`."""
    written: list[bytes] = []
    made = 0
    for rows in lists:
        written.append(await _written(rows, call, made))
        made += len(written[-1])
    return orjson.Fragment(b"[" + b",".join(written) + b"]")


async def _written(rows: Iterable[Any], call: Call, made: int = 0) -> bytes:
    """Return rows as a JSON list. Only the first part of an answer waits for no turn.

    made: bytes of the answer before the list.
    """
    remaining = iter(rows)
    parts = [] if made else [_part(islice(remaining, _PART_ROWS))]
    made += sum(map(len, parts))
    for row in remaining:
        await asyncio.sleep(0)
        async with call.turn_to_write(made):
            parts.append(_part((row, *islice(remaining, _PART_ROWS - 1))))
        made += len(parts[-1])
    return b"[" + b",".join(parts) + b"]"


def _part(rows: Iterable[Any]) -> bytes:
    """Return rows as a part of a JSON list."""
    return orjson.dumps(list(rows), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def answer(content: Any, result: PrefillResult, call: Call, source: Source | None = None) -> Answer:
    """Return a response with the content as JSON and, if enabled, what was reused in headers.

    source: what was computed, if it may be a conversation; headers say what was cut from the conversation.
    """
    headers = _of_conversation(source) if isinstance(source, Conversation) else {}
    key_values = call.engine.key_values
    is_exact = all(report.is_exact for report in result.blended)
    kinds = [headers.get(APPROXIMATE_HEADER), None if is_exact else "blended"]
    if key_values and result.all_cached_tokens:
        kinds.append(key_values.approximation)
    if any(kinds):
        headers[APPROXIMATE_HEADER] = ", ".join(filter(None, kinds))
    if result.truncated:
        headers[TRUNCATED_HEADER] = f"{result.truncated}/{len(result)}"
    if call.state.settings.reuse_headers:
        sequences = len(result)
        headers[HITS_HEADER] = f"{result.hits}/{sequences}"
        headers[PROTOTYPE_HITS_HEADER] = f"{result.prototype_hits}/{sequences}"
        headers[REPEATED_HEADER] = f"{result.repeated}/{sequences}"
        if key_values:
            headers[CACHED_TOKENS_HEADER] = f"{result.all_cached_tokens}/{result.all_asked_tokens}"
        if result.blended:
            headers[SEGMENTS_HEADER] = _of_segments(result)
    dumped = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(dumped, tuple([(name.encode(), value.encode()) for name, value in headers.items()]))


def _of_segments(result: PrefillResult) -> str:
    """Return what was done with the first chunks, as a list of structured fields (RFC 8941)."""
    chunks = [chunk for report in result.blended for chunk in report.chunks]
    return ", ".join(
        f"{chunk.tokens};cached={chunk.cached};recomputed={chunk.recomputed}"
        for chunk in chunks[:_MAX_SEGMENTS]
    )


def _of_conversation(conversation: Conversation) -> dict[str, str]:
    """Return the headers that say how the answer differs from an answer about the whole conversation."""
    headers = {}
    if conversation.answered.dropped:
        headers[HISTORY_TOKENS_HEADER] = f"{conversation.kept_tokens}/{conversation.answered.tokens}"
    if conversation.approximate:
        headers[APPROXIMATE_HEADER] = "truncated"
    return headers


def json_response(content: Any) -> Response:
    """Return a response of a route that does not compute, with the content as JSON."""
    return Response(orjson.dumps(content), media_type="application/json")
