"""Token sequences whose keys and values an operator computes early, pins or looks up.

    texts       -> each text's sequence in the server's template
    a template  -> the tokens that all texts in the template begin with
    segments    -> each segment by itself, as prompts of chunks use it

POST /cache/warm computes them between the requests of clients, and `--warm FILE` before the server is ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from attncache_core import InputTooLong, InvalidInput, PrefillEngine
from attncache_core.checkpoints.template import Template
from attncache_core.engine.request import PrefillRequest
from attncache_core.reuse.kv.memory import Wanted
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.text.prompts import Prompt, SequencePlan
from service.batching.sources import Tokenized
from service.errors import InvalidSettings, NoKeyValues
from service.schemas import Text
from service.settings import Settings
from service.web.keys import namespace_of

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
_ACCEPTED = (
    'a line is an object with one of "text", "template" and "segment" and, optionally, "salt", "key" '
    'and "pin"'
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Token sequences of one salt. A source of the batcher (service/batching/sources)."""

    prompt: Prompt
    sequences: list[list[int]]
    salt: bytes
    whole: bool = False  # whether all tokens of the sequences may be given: they are chunks

    @classmethod
    def texts(
        cls, engine: PrefillEngine, texts: Sequence[str], salt: bytes, *, truncate: bool, most_tokens: int
    ) -> Chosen:
        """Return the sequences of texts in the server's template. Raises InputTooLong."""
        prompt = engine.default_prompt
        return cls(prompt, engine.tokenize(texts, truncate, prompt, most_tokens), salt)

    @classmethod
    def template(cls, engine: PrefillEngine, written: str, salt: bytes) -> Chosen:
        """Return the sequence that all texts in a template begin with. Raises InvalidInput."""
        prompt, front = engine.front(Template.parse(written))
        return cls(prompt, [front], salt)

    @classmethod
    def segments(cls, engine: PrefillEngine, segments: Sequence[str], salt: bytes) -> Chosen:
        """Return the sequences as which segments are stored.

        Raises InvalidInput if the model's keys and values can be used in no other order, and InputTooLong.
        """
        if reason := engine.blending.refusal:
            raise InvalidInput(f"segments cannot be used in any order: {reason}", field="segments")
        frame = engine.tokenizer.frame(engine.default_prompt)
        own = engine.tokenizer.turns(segments, "segments")
        if max(map(len, own)) > frame.room:
            raise InputTooLong(
                f"a segment has more than {frame.room} tokens; make it shorter", field="segments"
            )
        opening = frame.before[: frame.opening]
        return cls(
            Prompt(Template(), (SequencePlan(0),)), [[*opening, *ids] for ids in own], salt, whole=True
        )

    @property
    def count(self) -> int:
        """The number of sequences."""
        return len(self.sequences)

    @property
    def characters(self) -> int:
        """About the number of characters of all sequences."""
        return 4 * self.tokens

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(map(len, self.sequences))

    def tokenize(
        self,
        engine: PrefillEngine,  # noqa: ARG002
        prompt: Prompt,  # noqa: ARG002
        salt: bytes | None,
        most_tokens: int,  # noqa: ARG002
    ) -> Iterator[Tokenized]:
        """Yield the sequences, which are tokenised already; see Source."""
        yield Tokenized(self.sequences, salt)

    def requests(self, engine: PrefillEngine) -> list[PrefillRequest]:
        """Return the engine's requests for the sequences."""
        return engine.requests(self.sequences, self.prompt, salt=self.salt)

    def wanted(self, engine: PrefillEngine) -> list[Wanted]:
        """Return how the store is asked for the sequences. Raises NoKeyValues if there is no store."""
        if self.whole and engine.key_values:
            return [engine.key_values.whole(ids, self.salt) for ids in self.sequences]
        found = [request.wanted for request in self.requests(engine)]
        return [own for own in found if own is not None]


def store_of(engine: PrefillEngine) -> KeyValueStore:
    """Return the engine's store of keys and values. Raises NoKeyValues if it has none."""
    if engine.key_values is None:
        raise NoKeyValues(f"the server stores no keys and values: {engine.key_values_off}")
    return engine.key_values.store


class WarmLine(BaseModel):
    """One line of a .jsonl file of --warm."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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
        (number, read(line.removesuffix("\r"), f"{path}, line {number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
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
    done = 0
    for batch in _batches(chosen, settings.max_batch_tokens):
        engine.run([request for own in batch for request in own.requests(engine)])
        for own, (_, line) in zip(batch, lines[done:], strict=False):
            for wanted in own.wanted(engine) if line.pin else ():
                store.pin(wanted)
        done += len(batch)
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            logger.info("computed %d of %d lines of %s", done, len(chosen), settings.warm)
    stored = sum(sum(store.lookup(wanted)) for own in chosen for wanted in own.wanted(engine))
    tokens, seconds = sum(own.tokens for own in chosen), time.monotonic() - started
    logger.info("%d of %d tokens of %s are stored, %.1f s", stored, tokens, settings.warm, seconds)


def _text_line(line: str, where: str) -> WarmLine:
    if "\0" in line:
        raise _refused(f"{where}: must not hold null bytes")
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


def _chosen(engine: PrefillEngine, line: WarmLine, settings: Settings, where: str) -> Chosen:
    has_keys = settings.api_keys is not None or settings.api_key is not None
    if has_keys != (line.key is not None):
        raise _refused(
            f'{where}: "key", the name of an API key, is required if there are API keys, and only then'
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
            most_tokens=settings.max_request_tokens,
        )
    except InvalidInput as error:
        raise _refused(f"{where}: {error}") from error


def _batches(chosen: Sequence[Chosen], most_tokens: int) -> Iterator[list[Chosen]]:
    """Yield neighbours of at most `most_tokens` tokens together; more than that stands alone."""
    batch: list[Chosen] = []
    for own in chosen:
        if batch and sum(each.tokens for each in batch) + own.tokens > most_tokens:
            yield batch
            batch = []
        batch.append(own)
    if batch:
        yield batch


def _refused(sentence: str) -> InvalidSettings:
    return InvalidSettings(f"--warm {sentence}", field="warm")
