"""What the body of an inference request asks for: inputs, chunks with a query, or a turn of a session."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from attncache_core import InputTooLong, InvalidInput, NotFinite
from service.batching.segments import DividedTexts, Segments
from service.batching.sources import Source, Texts, source_of
from service.conversations.conversation import Conversation, History
from service.conversations.sessions import Kept, Session, Sessions
from service.errors import SharedUnavailable, StoreUnavailable, UnknownSession, rename
from service.routes.common import check_count
from service.routes.inference_route import SESSION_HEADER
from service.schemas import InferenceRequest
from service.web.call import Answer, Call

# While a request of the session is computed in another process.
_LOCKED_SECONDS = 0.005
_HISTORY_DROPPED = SESSION_HEADER.encode(), b"dropped"
_Field = Literal["append", "transcript"]


async def answered(
    call: Call, body: InferenceRequest, compute: Callable[[Source], Awaitable[Answer]]
) -> Answer:
    """Return the answer to what the body asks for. compute: computes a source, and makes an answer of it.

    For a session, wait until no earlier request of the session runs. With the answer, the session's history
    has become what the conversation says. If another machine has changed the history meanwhile, the answer is
    computed again. After an error the history is as before. Raises InvalidInput, TooManyInputs,
    UnknownSession, QueueFull, ClientGone, StoreUnavailable, and as `compute`.
    """
    if body.segments is not None or body.query is not None:
        return await compute(segments_of(call, *_segments(body)))
    truncate = call.truncates(body.truncate)
    if body.session_id is None:
        inputs = _inputs(body)
        check_count(call, inputs, "inputs")
        source = source_of(inputs, truncate, body.truncation_direction or "right")
        return await compute(divided(call, source))
    arrived = time.time()
    field, turns = _turns(body)
    check_count(call, turns, field)
    # Token ids of one model say nothing to another one.
    session = call.engine.fingerprint.encode() + call.salt(body.cache_salt), body.session_id
    # As the client has sent it, also if it is not fit for the log.
    request_id = call.headers.get(b"x-request-id") or call.request_id.encode()
    request = hashlib.blake2b(request_id, digest_size=8).hexdigest()

    def conversation(stored: bytes | None) -> Conversation:
        return Conversation(
            _history(stored, field, call.engine.vocabulary),
            turns,
            field,
            truncate=truncate,
            overflow=call.state.settings.session_overflow,
            request=request,
            arrived=arrived,
        )

    return await _turn_answered(call, session, field, conversation, compute)


async def _turn_answered(
    call: Call,
    session: Session,
    field: _Field,
    conversation: Callable[[bytes | None], Conversation],
    compute: Callable[[Source], Awaitable[Answer]],
) -> Answer:
    """Return the answer to a turn of a session. conversation: makes it, behind what is stored."""
    sessions = call.state.sessions
    turn = sessions.begin(session)
    is_locked = False
    try:
        await call.wait(turn)
        while not (is_locked := await sessions.lock(session)):
            await call.pause(_LOCKED_SECONDS)
        while True:
            stored = await _stored(sessions, session, field)
            source = conversation(stored)
            with _names(field):
                answer = await compute(source)
            # Before the turn is kept, because the answer may be refused, or have no reader.
            call.count_answer(len(answer.content))
            await call.require_client()
            kept = await _kept(sessions, session, stored, source)
            if kept == "dropped":
                return answer._replace(headers=(*answer.headers, _HISTORY_DROPPED))
            if kept == "kept":
                return answer
    finally:
        try:
            # A client that has left while it waited must not unlock the request before it.
            if is_locked:
                await sessions.unlock(session)
        finally:
            sessions.end(session, turn)


async def _stored(sessions: Sessions, session: Session, field: _Field) -> bytes | None:
    """Return the stored history; None without one. A transcript needs none. Raises StoreUnavailable."""
    try:
        return await sessions.history(session)
    except SharedUnavailable:
        if field == "append":
            raise
        return None


async def _kept(
    sessions: Sessions, session: Session, stored: bytes | None, conversation: Conversation
) -> Kept:
    """Keep what the history has become, if `stored` is still there.

    If the shared store cannot be used, a transcript is answered all the same, and what the store has of the
    session is outdated. Raises StoreUnavailable.
    """
    try:
        return await sessions.keep(session, stored, conversation.following)
    except StoreUnavailable as error:
        is_shared = isinstance(error, SharedUnavailable)
        if stored is not None and (conversation.field == "append" or not is_shared):
            raise
        if is_shared:
            sessions.outdate(session, conversation.arrived)
        return "dropped"


def segments_of(
    call: Call, segments: Sequence[str], query: str, headings: Sequence[str] | None = None
) -> Segments:
    """Return the source of segments and a query. headings: what stands in front of each segment.

    Raises TooManyInputs, and InvalidInput if keys and values of the model's chunks cannot be used in any
    order.
    """
    check_count(call, segments, "segments")
    if reason := call.engine.blending.refusal:
        raise InvalidInput(
            f"segments are not accepted by this server: {reason}; send one text as inputs", field="segments"
        )
    return Segments(segments, query, call.state.settings.segment_separator, headings=headings)


def divided(call: Call, source: Source) -> Source:
    """Return a source whose texts are divided into chunks, if the operator wants that."""
    settings = call.state.settings
    if settings.segment_tokens is None and not settings.divide_texts:
        return source
    if call.engine.blending.gate is None or not isinstance(source, Texts):
        return source
    return DividedTexts(
        source, settings.segment_separator if settings.divide_texts else None, settings.segment_tokens
    )


def _inputs(body: InferenceRequest) -> list[str] | list[list[int]]:
    """Return the inputs of a request without a session. Raises InvalidInput."""
    for field in ("append", "transcript"):
        if getattr(body, field) is not None:
            raise InvalidInput(
                f"{field} is accepted only with session_id; give session_id, or send inputs", field=field
            )
    if body.inputs is None:
        raise InvalidInput("inputs is required, unless session_id or segments is given", field="inputs")
    return body.inputs


def _segments(body: InferenceRequest) -> tuple[list[str], str]:
    """Return the segments and the query of a request. Raises InvalidInput."""
    if body.segments is None:
        raise InvalidInput("query is accepted only with segments; send the text as inputs", field="query")
    for field in ("inputs", "session_id", "append", "transcript", "truncate", "truncation_direction"):
        if getattr(body, field) not in (None, False):
            raise InvalidInput(f"{field} is not accepted with segments; leave it out", field=field)
    if body.query is None:
        raise InvalidInput(
            "query is required with segments; send what stands behind the last segment", field="query"
        )
    return body.segments, body.query


def _turns(body: InferenceRequest) -> tuple[_Field, list[str]]:
    """Return the field with the turns of a session's request, and the turns. Raises InvalidInput."""
    if body.inputs is not None:
        raise InvalidInput(
            "inputs is not accepted with session_id; send the new turn as append, or the whole conversation "
            "as transcript",
            field="inputs",
        )
    if body.truncation_direction is not None:
        raise InvalidInput(
            "truncation_direction is not accepted with session_id; a conversation that is too long is cut as "
            "--session-overflow says",
            field="truncation_direction",
        )
    if body.append is not None and body.transcript is not None:
        raise InvalidInput(
            "transcript is not accepted with append; send the whole conversation, or only the new turn",
            field="transcript",
        )
    if body.append is not None:
        return "append", [body.append]
    if body.transcript is not None:
        return "transcript", body.transcript
    raise InvalidInput(
        "append is required with session_id, or the whole conversation as transcript", field="append"
    )


def _history(stored: bytes | None, field: _Field, vocabulary: int) -> History:
    """Return the stored history of a session. Raises UnknownSession if there is none to append to.

    What cannot be read, such as the history of another version, is no history. The next one replaces it.
    """
    history: History | None = None
    if stored is not None:
        with suppress(ValueError):
            history = History.read(stored, vocabulary)
    if history is None and field == "append":
        raise UnknownSession(
            "the server has no history of this session, or the history has expired; send the whole "
            "conversation as transcript",
            field="session_id",
        )
    return History() if history is None else history


@contextmanager
def _names(field: _Field) -> Iterator[None]:
    """Let errors about the text of a request name the field of the conversation."""
    try:
        yield
    except NotFinite as error:
        if error.field != "inputs[0]":
            raise
        raise NotFinite(
            "the model computes NaN or infinity for the conversation, and the session is as before; send "
            f"another {field}, or have the model's weights and dtype checked",
            field=field,
        ) from error
    except InputTooLong as error:
        if error.field != "inputs":
            raise
        raise InputTooLong(
            "the conversation has more tokens than a request may have (--max-request-tokens); begin a new "
            "session, or send a shorter transcript",
            field=field,
        ) from error
    except InvalidInput as error:
        if error.field == "inputs[0]":
            rename(error, field)
        raise
