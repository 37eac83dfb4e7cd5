"""A prompt of segments and a query, whose segments stand in any order and keep their tokens.

    segments, query -> tokens of each one by itself
        -> special tokens | segment | separator | segment | separator | template around the query

The tokens of a segment do not depend on what stands beside it, so its keys and values can be stored by its
own tokens (reuse/blend/chunks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attncache_core.errors import InputTooLong
from attncache_core.text.prompts import Frame


class Segmented(NamedTuple):
    """A sequence with the places of its segments."""

    ids: list[int]  # token ids, without a plan's continuation
    spans: list[tuple[int, int]]  # first position and end of each segment that has tokens
    opening: list[int]  # the token ids that open every text


def segmented(
    frame: Frame,
    segments: Sequence[Sequence[int]],
    query: Sequence[int],
    separator: Sequence[int],
    headings: Sequence[Sequence[int]] | None = None,
) -> Segmented:
    """Put segments in front of a query in its template. Arguments are token ids.

    frame: of the template. headings: what stands in front of each segment and does not belong to it.
    Raises InputTooLong if the sequence does not fit into the model's window; it names the query if the query
    alone does not fit.
    """
    opening = frame.before[: frame.opening]
    ids, spans = list(opening), []
    for index, segment in enumerate(segments):
        if segment:
            ids += headings[index] if headings else []
            spans.append((len(ids), len(ids) + len(segment)))
            ids += [*segment, *separator]
    tokens = len(ids) - len(opening) + len(query)
    if tokens > frame.room:
        raise InputTooLong(
            f"segments have {tokens - len(query)} tokens, the query has {len(query)}, and {frame.room} fit "
            "together; shorten the longer part",
            field="segments" if len(query) <= frame.room else "query",
        )
    return Segmented([*ids, *frame.before[frame.opening :], *query, *frame.after], spans, opening)


def split(ids: Sequence[int], opening: int, size: int) -> Segmented:
    """Return a sequence as segments of `size` tokens behind the first `opening` tokens, and a rest.

    The rest, at least one token, is what a query is: it is always computed.
    """
    ends = range(opening + size, len(ids), size)
    return Segmented(list(ids), [(end - size, end) for end in ends], list(ids[:opening]))


def split_at(ids: Sequence[int], frame: Frame, separator: Sequence[int]) -> Segmented:
    """Return a text in a template as the segments between its separators, and a rest.

    ids: token ids. separator: its token ids. The rest, behind the last separator in the text, is what a query
    is. Separators in the template do not count.
    """
    own, spans, first = list(separator), [], len(frame.before)
    place, end = first, len(ids) - len(frame.after)
    while own and place + len(own) < end:
        if list(ids[place : place + len(own)]) != own:
            place += 1
            continue
        if place > first:
            spans.append((first, place))
        first = place = place + len(own)
    return Segmented(list(ids), spans, list(ids[: frame.opening]))
