"""A prompt of segments and a query, whose segments stand in any order and keep their tokens.

    segments, query -> tokens of each one by itself
        -> special tokens | segment | separator | segment | separator | template around the query

The tokens of a segment do not depend on what stands beside it, so its keys and values can be stored by its
own tokens (reuse/blend/chunks.py).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
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


def split_at(ids: Sequence[int], frame: Frame, written: Sequence[str], separator: str) -> Segmented:
    """Return a text in a template as the segments between its separators, and a rest.

    ids: token ids. written: each token as text; a token that holds a part of a separator belongs to no
    segment. The rest, behind the last separator in the text, is what a query is. Separators in the template
    do not count.
    """
    place, end = len(frame.before), len(ids) - len(frame.after)
    text = "".join(written[place:end])
    token_ends = list(accumulate(map(len, written[place:end])))  # in characters
    spans, before = [], place
    for found in re.finditer(re.escape(separator), text):
        first = before + bisect_right(token_ends, found.start())
        behind = before + bisect_left(token_ends, found.end()) + 1
        if behind >= end:
            break
        if first > place:
            spans.append((place, first))
        place = behind
    return Segmented(list(ids), spans, list(ids[: frame.opening]))
