"""Prompts of chunks in the routes: what they are made of, and what the response says of them."""

from __future__ import annotations

from collections.abc import Sequence

from attncache_core import InvalidInput
from service.batching.segments import DividedTexts, Segments
from service.batching.sources import Source, Texts
from service.routes.common import check_count
from service.web.call import Call


def segments_of(
    call: Call, segments: Sequence[str], query: str, headings: Sequence[str] | None = None
) -> Segments:
    """Return the source of segments and a query. headings: what stands in front of each segment.

    Raises TooManyInputs, and InvalidInput if keys and values of the model's chunks cannot be used in any
    order.
    """
    settings, engine = call.state.settings, call.serving().engine
    check_count(segments, "segments", settings.max_request_inputs)
    if reason := engine.blending.refusal:
        raise InvalidInput(
            f"segments are not accepted by this server: {reason}; send one text as inputs", field="segments"
        )
    return Segments(segments, query, settings.segment_separator, headings=headings)


def divided(call: Call, source: Source) -> Source:
    """Return a source whose texts are divided into chunks, if the operator wants that."""
    settings, engine = call.state.settings, call.serving().engine
    if settings.segment_tokens is None and not settings.divide_texts:
        return source
    if engine.blending.gate is None or not isinstance(source, Texts):
        return source
    return DividedTexts(
        source, settings.segment_separator if settings.divide_texts else None, settings.segment_tokens
    )
