"""Read prompts of segments and a query: {"segments": [...], "query": "..."} on each line of a .jsonl file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import orjson

from attncache_core.errors import InvalidInput


class SegmentedText(NamedTuple):
    """A prompt of segments and a query."""

    segments: tuple[str, ...]
    query: str
    place: str = "a prompt"  # for errors: where it was read


def read_segmented(path: Path) -> list[SegmentedText]:
    """Return the prompts of a file. Blank lines are skipped.

    Raises InvalidInput, which names the line but no text, if the file cannot be read or a line is no prompt.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidInput(f"{path} cannot be read: {reason}", field="segments") from error
    prompts = [_prompt(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidInput(f"{path} holds no prompts", field="segments")
    return prompts


def _prompt(line: bytes, path: Path, number: int) -> SegmentedText:
    try:
        found = orjson.loads(line)
        segments, query = found["segments"], found["query"]
    except (ValueError, KeyError, TypeError):
        segments, query = None, None
    place = f"{path}, line {number}"
    is_prompt = isinstance(segments, list) and all(own and isinstance(own, str) for own in [*segments, query])
    if not (is_prompt and segments):
        raise InvalidInput(
            f"{place} is no prompt; write "
            '{"segments": ["...", "..."], "query": "..."} on each line, without empty texts',
            field="segments",
        )
    return SegmentedText(tuple(segments), query, place)
