"""What the routes for inference share: how they are answered and documented, the computation, the response.

Front -> InferenceRoute -> the function of the route -> computed -> answer -> Front
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import orjson
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attncache_core import InvalidInput, NoClassifier, NotFinite, PrefillResult, class_scores
from attncache_core.heads.comparator import Measure
from attncache_core.heads.vectors import require_finite
from attncache_core.text.labels import LabelTokens
from attncache_core.text.prompts import Prompt
from service.batching.sources import Source
from service.conversations.conversation import Conversation
from service.errors import TooManyInputs, rename
from service.observability.finished import Timing
from service.schemas import ErrorBody
from service.state import Serving
from service.web.call import (
    CALL,
    MODEL_HEADER,
    REQUIRE_MODEL_HEADER,
    REUSE_HEADER,
    TIMEOUT_HEADER,
    Answer,
    Call,
)

HITS_HEADER = "X-AttnCache-Hits"
PROTOTYPE_HITS_HEADER = "X-AttnCache-Prototype-Hits"
CACHED_TOKENS_HEADER = "X-AttnCache-Cached-Tokens"
REPEATED_HEADER = "X-AttnCache-Repeated"
HISTORY_TOKENS_HEADER = "X-AttnCache-History-Tokens"
SESSION_HEADER = "X-AttnCache-Session"
APPROXIMATE_HEADER = "X-AttnCache-Approximate"
SEGMENTS_HEADER = "X-AttnCache-Segments"
_TEXT = re.compile(r"inputs\[(\d+)\]")
# So many rows of a list are written as JSON at a time, and other requests wait meanwhile.
_PART_ROWS = 64
_MAX_SEGMENTS = 64  # in the header: many clients refuse headers of more than 8 KiB

_WHAT_HAPPENED = {
    400: "The body, a field or a header is not accepted.",
    401: "The server needs an API key, and the request has none, or one that is not known.",
    404: "The session is unknown or has expired.",
    409: "The request requires a model that this server does not serve.",
    413: "The body has too many bytes.",
    422: "There are too many inputs, or an input is too long and must not be truncated.",
    429: "The queue is full, or a quota of the API key is used up; `Retry-After` says when to retry.",
    500: "The server failed on this request.",
    503: "The model is still loading; `Retry-After` says when to retry.",
    504: "The request was not answered in time.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _WHAT_HAPPENED.items()
}
ANSWER_HEADERS = {
    HITS_HEADER: {
        "description": "Number of sequences that took attention maps from the database, of all sequences of "
        "the request. Absent with --no-reuse-headers.",
        "schema": {"type": "string", "examples": ["3/4"]},
    },
    PROTOTYPE_HITS_HEADER: {
        "description": "Number of sequences that took attention maps from a prototype, of all sequences of "
        "the request. Absent with --no-reuse-headers.",
        "schema": {"type": "string", "examples": ["1/4"]},
    },
    CACHED_TOKENS_HEADER: {
        "description": "Number of tokens whose keys and values were stored and not computed again, of all "
        "tokens of the request. Absent with --no-reuse-headers, and if the model's keys and values cannot be "
        "reused; /info says why.",
        "schema": {"type": "string", "examples": ["480/560"]},
    },
    REPEATED_HEADER: {
        "description": "Number of sequences whose results were kept, or were computed for another request at "
        "the same time, of all sequences of the request. Absent with --no-reuse-headers.",
        "schema": {"type": "string", "examples": ["2/4"]},
    },
    HISTORY_TOKENS_HEADER: {
        "description": "Number of tokens of the session's conversation that the answer is about, of all its "
        "tokens. Only if the conversation did not fit into the model's window and was cut.",
        "schema": {"type": "string", "examples": ["250/612"]},
    },
    SESSION_HEADER: {
        "description": "dropped, if the session's history could not be kept. Then the client sends the next "
        "turn with the whole conversation, as transcript, because an append might be answered about an older "
        "history.",
        "schema": {"type": "string", "enum": ["dropped"]},
    },
    APPROXIMATE_HEADER: {
        "description": "Why the answer may differ from the full model's, one or several of: truncated (the "
        "session's history was cut, and keys and values that depend on the tokens that were cut were used; "
        "only with --session-overflow truncate or keep-sinks), blended (keys and values of chunks were used "
        "out of their context; only with --blend), int8 (keys and values were saved in 8 bits).",
        "schema": {"type": "string", "examples": ["truncated", "blended"]},
    },
    SEGMENTS_HEADER: {
        "description": "For each chunk of a prompt whose chunks were blended: its tokens, how many of them "
        "had stored keys and values, and how many of them were computed again; for the first 64 chunks. "
        "Absent with --no-reuse-headers.",
        "schema": {
            "type": "string",
            "examples": ["257;cached=257;recomputed=0, 256;cached=256;recomputed=33"],
        },
    },
    MODEL_HEADER: {
        "description": "Fingerprint of the model that answers, as in /info. Error responses have the header "
        "too.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
}

Handler = Callable[[Call], Awaitable[Answer]]


class Api(NamedTuple):
    """The routes that clients of one kind use, in the documentation."""

    tag: str
    errors: dict[int | str, dict[str, Any]]  # responses by status


OURS = Api("AttnCache", ERRORS)


class InferenceRoute(APIRoute):
    """A route of the app that computes: POST to `path`.

    FastAPI documents the route like its other ones, and the front finds it. The request reaches the function
    without FastAPI's dependency injection, which takes several times as long as all else that happens to a
    request of one text beside its computation.
    """

    def __init__(
        self,
        path: str,
        handle: Handler,
        body: type[BaseModel],
        response: Any,
        says: str,
        api: Api = OURS,
        *,
        reuses: bool = True,
    ) -> None:
        """handle: its name and docstring are the title and the description in the documentation.

        response: the type of the JSON of a response with status 200. says: what such a response holds.
        reuses: whether `handle` reads X-AttnCache-Reuse, and answers with ANSWER_HEADERS.
        """
        super().__init__(
            path,
            handle,
            methods=["POST"],
            name=handle.__name__,
            summary=handle.__name__.replace("_", " ").capitalize(),
            description=handle.__doc__,
            tags=[api.tag],
            response_model=response,
            responses={200: {"headers": ANSWER_HEADERS if reuses else {}, "description": says}, **api.errors},
            openapi_extra={
                **documented_body(body),
                "parameters": _PARAMETERS if reuses else _PARAMETERS[1:],
            },
        )
        self.body = body
        self._handle = handle
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer one request, as ASGI application. Raises what the front makes a response of."""
        call: Call = scope[CALL]
        if call.holder is not None:
            await call.count_in_quota(call.holder)
        answer = await self._handle(call)
        call.count_answer(len(answer.content))
        await answer.send(send)


def check_count(texts: Sequence[Any], field: str, limit: int) -> None:
    """Raise TooManyInputs if a request has more texts than allowed. field: the field with the texts."""
    if len(texts) > limit:
        kind = "labels" if field == "labels" else "texts"
        raise TooManyInputs(
            f"{field} must have at most {limit} {kind} per request; send fewer {kind} per request, or raise "
            "--max-request-inputs",
            field=field,
        )


async def computed(
    call: Call,
    serving: Serving,
    source: Source,
    *,
    reuse: bool,
    prompt: Prompt | None = None,
    labels: LabelTokens | None = None,
    reads: Measure | None = Measure.COSINE,
    salt: bytes = b"",
    counted: bool = True,
    repeats: bool = True,
) -> PrefillResult:
    """Compute the texts of a source and return their results. Arguments and errors: see Batcher.submit.

    Raises TooManyInputs if the sequences of the texts would never fit into the queue.
    """
    plans = len((prompt or serving.engine.tokenizer.default_prompt).sequence_plans)
    maximum = call.state.settings.max_queue_sequences
    if source.count * plans > maximum:
        raise TooManyInputs(
            f"inputs make {source.count * plans} sequences, and at most {maximum} may wait; send fewer of "
            "them",
            field="inputs",
        )
    timing = Timing()
    sampling = None if isinstance(source, Conversation) or not counted else call.state.sampling
    pending = serving.batcher.submit(
        source,
        flow=call.client.flow,
        reuse=reuse,
        prompt=prompt,
        labels=labels,
        reads=reads,
        salt=salt,
        counted=counted,
        repeats=repeats,
        timing=timing,
        answered=partial(sampling.offer, call.client.key) if sampling else None,
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


async def json_list(rows: Iterable[Any]) -> orjson.Fragment:
    """Return rows, made one after the other, as a JSON list. Other requests are served between its parts."""
    remaining = iter(rows)
    parts: list[bytes] = []
    while part := list(islice(remaining, _PART_ROWS)):
        if parts:
            await asyncio.sleep(0)
        parts.append(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")


def answer(content: Any, result: PrefillResult, call: Call, source: Source | None = None) -> Answer:
    """Return a response with the content as JSON and, if enabled, what was reused in headers.

    source: what was computed, if it may be a conversation; headers say what was cut from the conversation.
    """
    headers = _of_conversation(source) if isinstance(source, Conversation) else {}
    key_values = call.state.serving().engine.key_values
    is_exact = all(report.is_exact for report in result.blended)
    kinds = [headers.get(APPROXIMATE_HEADER), None if is_exact else "blended"]
    if key_values and result.all_cached_tokens:
        kinds.append(key_values.approximation)
    if any(kinds):
        headers[APPROXIMATE_HEADER] = ", ".join(filter(None, kinds))
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


class Classified(NamedTuple):
    """The logits of the server's labels for some texts."""

    labels: tuple[str, ...]
    logits: np.ndarray  # float32 [texts, labels]
    multi_label: bool  # whether each label is decided by itself
    result: PrefillResult

    def scores(self, multi_label: bool | None = None) -> np.ndarray:
        """Return the scores, float32 [texts, labels]. multi_label: None: as the model says."""
        return class_scores(self.logits, multi_label=self.multi_label if multi_label is None else multi_label)


async def label_logits(
    call: Call, serving: Serving, source: Source, labels: LabelTokens, *, reuse: bool, salt: bytes
) -> tuple[np.ndarray, PrefillResult]:
    """Compute texts in the prompt of labels, and return the labels' logits, float32 [texts, labels].

    Raises NotFinite for the field "labels", and as `computed`.
    """
    result = await computed(
        call, serving, source, reuse=reuse, prompt=labels.prompt, labels=labels, salt=salt
    )
    # In a thread, because many labels have many log-probabilities to add.
    logits = await asyncio.to_thread(
        serving.engine.decisions.label_logits, labels, result.outputs, result.log_probabilities
    )
    # The outputs are finite, so a NaN here comes from a label's row of the language head.
    require_finite(np.isfinite(logits).T, "labels")
    return logits, result


async def classified(
    call: Call, serving: Serving, source: Source, *, reuse: bool, salt: bytes = b""
) -> Classified:
    """Compute texts, or pairs, and return the logits of the server's labels.

    Raises NoClassifier if the server has no labels, and as Batcher.submit.
    """
    engine = serving.engine
    if engine.checkpoint.task == "label-logits":
        labels = engine.decisions.labels_in()
        logits, result = await label_logits(call, serving, source, labels, reuse=reuse, salt=salt)
        return Classified(labels.labels, logits, False, result)
    if engine.decisions.labels is None:
        raise NoClassifier("the server has no labels of its own; use /classify, and give labels")
    result = await computed(call, serving, source, reuse=reuse, reads=Measure.AGREEMENT, salt=salt)
    return Classified(
        engine.decisions.labels,
        engine.decisions.class_logits(result.outputs),
        engine.decisions.multi_label,
        result,
    )


def json_response(content: Any) -> Response:
    """Return a response of a route that does not compute, with the content as JSON."""
    return Response(orjson.dumps(content), media_type="application/json")


def documented_body(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that a route reads by `Call.read`."""
    described = schema.model_json_schema()
    content = {"application/json": {"schema": _inlined(described, described.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(part: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a JSON schema with its definitions in place of references to them."""
    if isinstance(part, list):
        return [_inlined(each, definitions) for each in part]
    if not isinstance(part, dict):
        return part
    fields = {name: _inlined(each, definitions) for name, each in part.items() if name != "$ref"}
    if "$ref" not in part:
        return fields
    return {**_inlined(definitions[part["$ref"].rsplit("/", 1)[1]], definitions), **fields}


def documented_parameter(
    name: str, description: str, schema: dict[str, Any], place: str = "header"
) -> dict[str, Any]:
    """Return the OpenAPI description of an optional header, or of a parameter of the query."""
    return {"name": name, "in": place, "required": False, "description": description, "schema": schema}


# The first one is documented for routes that reuse something only.
_PARAMETERS = [
    documented_parameter(
        REUSE_HEADER,
        "off computes every text of the request in full, without reuse. Default: on.",
        {"type": "string", "enum": ["on", "off"], "default": "on"},
    ),
    documented_parameter(
        REQUIRE_MODEL_HEADER,
        "Fingerprint of the model that must answer, or at least its first 8 characters. Status 409 if the "
        "server serves another model.",
        {"type": "string", "pattern": "^[0-9a-fA-F]{8,64}$"},
    ),
    documented_parameter(
        TIMEOUT_HEADER,
        "Seconds that the request may take, at most --request-seconds. Status 504 after that; what was not "
        "computed yet is dropped.",
        {"type": "number", "exclusiveMinimum": 0},
    ),
]
