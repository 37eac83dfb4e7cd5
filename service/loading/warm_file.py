"""The file of `--warm`: texts whose keys and values are computed before the server is ready."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from attncache_core import InvalidInput, PrefillEngine
from attncache_core.corpus.reading import neighbours
from service.access.keys import key_ring, namespace_of
from service.batching.chosen import Chosen, store_of
from service.errors import InvalidSettings, NoKeyValues
from service.schemas import Body, Text
from service.settings import Settings

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
_ACCEPTED = (
    'a line is an object with one of "text", "template" and "segment" and, optionally, "salt", "key" '
    'and "pin"'
)


class WarmLine(Body):
    """One line of a .jsonl file of --warm."""

    text: Text | None = None
    template: Text | None = None
    segment: Text | None = None
    salt: Text | None = None
    key: Text | None = None  # the name of an API key
    pin: bool = False


def read_warm_file(path: Path) -> list[tuple[int, WarmLine]]:
    """Return the lines of a file of --warm that are not blank, with their numbers.

    Raises InvalidSettings, which names file and line.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise _refused(f"{path} must end in .txt or .jsonl")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise _refused(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refused(f"{path} is not UTF-8 (at byte {error.start})") from error
    read = _json_line if path.suffix == ".jsonl" else _text_line
    return [
        (number, read(line, f"{path}, line {number}")) for number, line in enumerate(lines, 1) if line.strip()
    ]


def warm(engine: PrefillEngine, lines: Sequence[tuple[int, WarmLine]], settings: Settings) -> None:
    """Compute and store the keys and values of the lines of --warm, and pin those that are to be pinned.

    Raises InvalidSettings, which names file and line.
    """
    try:
        store = store_of(engine)
    except NoKeyValues as error:
        raise _refused(f"has no effect: {error}") from error
    started = logged = time.monotonic()
    chosen = [_chosen(engine, line, settings, f"{settings.warm}, line {number}") for number, line in lines]
    _warn_of_unknown_keys(lines, settings)
    done = 0
    for batch in neighbours(chosen, lambda each: each.tokens, settings.max_batch_tokens):
        engine.run([request for prompt in batch for request in prompt.requests(engine)])
        for prompt, (_, line) in zip(batch, lines[done:], strict=False):
            for prefix_key in prompt.prefix_key(engine) if line.pin else ():
                store.pin(prefix_key)
        done += len(batch)
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            logger.info("computed %d of %d lines of %s", done, len(chosen), settings.warm)
    stored = sum(
        sum(store.lookup(prefix_key)) for prompt in chosen for prefix_key in prompt.prefix_key(engine)
    )
    tokens, seconds = sum(prompt.tokens for prompt in chosen), time.monotonic() - started
    logger.info("%d of %d tokens of %s are stored, %.1f s", stored, tokens, settings.warm, seconds)


def _text_line(line: str, where: str) -> WarmLine:
    if "\0" in line:
        raise _refused(f"{where}: a text must not hold null bytes")
    return WarmLine(text=line)


def _json_line(line: str, where: str) -> WarmLine:
    try:
        read = WarmLine.model_validate_json(line)
    except ValidationError:
        # Not chained, because pydantic's message quotes the line.
        raise _refused(f"{where}: {_ACCEPTED}") from None
    if [read.text, read.template, read.segment].count(None) != 2:
        raise _refused(f"{where}: {_ACCEPTED}")
    return read


def _warn_of_unknown_keys(lines: Sequence[tuple[int, WarmLine]], settings: Settings) -> None:
    try:
        keys = key_ring(settings)
    except InvalidSettings:  # a file of keys that is just being replaced must not end the start
        return
    names = {line.key: number for number, line in reversed(lines) if line.key is not None}
    for name in sorted(names.keys() - set(keys.names if keys else ())):
        logger.warning(
            'line %d of %s is warmed for the "key" %r, and no API key has this name now',
            names[name],
            settings.warm,
            name,
        )


def _chosen(engine: PrefillEngine, line: WarmLine, settings: Settings, where: str) -> Chosen:
    has_keys = settings.api_keys is not None or settings.api_key is not None
    if has_keys != (line.key is not None):
        remedy = "give" if has_keys else "leave out"
        raise _refused(
            f'{where}: {remedy} "key", the name of an API key, because the server has '
            f"{'' if has_keys else 'no '}API keys"
        )
    salt = (namespace_of(line.key) if line.key is not None else b"") + (line.salt or "").encode()
    try:
        if line.template is not None:
            return Chosen.template(engine, line.template, salt)
        if line.segment is not None:
            return Chosen.segments(engine, [line.segment], salt)
        return Chosen.texts(
            engine,
            [line.text or ""],
            salt,
            truncate=settings.truncate,
            max_total_tokens=settings.max_request_tokens,
        )
    except InvalidInput as error:
        raise _refused(f"{where}: {error}") from error


def _refused(sentence: str) -> InvalidSettings:
    return InvalidSettings(f"--warm {sentence}", field="warm")
